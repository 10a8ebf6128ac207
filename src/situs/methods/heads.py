"""What methods add to a backbone: position classifiers, small decoders, feature maps for dense tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features, Level, join
from situs.backbones.block import Attention, Block, Mlp, Stream, run_blocks
from situs.data.batch import VOID
from situs.errors import SitusError


def position_loss(logits: Tensor, places: Tensor, real: Tensor | None = None) -> Tensor:
    """Cross entropy of the tokens' positions, mean over the real tokens; 0 if there are none.

    logits: [B, K, N], classes on the LAST axis (K = N in MP3: swapped axes would run, and be wrong). places: [B, K].
    real: [B, K] bool, False for padding; None: all are real.
    """
    if real is not None:
        places = places.masked_fill(~real, VOID)
        total = F.cross_entropy(logits.flatten(0, 1).float(), places.flatten(), ignore_index=VOID, reduction="sum")
        return total / real.sum().clamp(min=1)
    return F.cross_entropy(logits.flatten(0, 1).float(), places.flatten())


def query_weights(weights: Tensor | None, start: int, queries: Tensor | None, *, per_sample: bool) -> Tensor | None:
    """Weights [B, K] of the tokens from `start` on, 0 where `queries` [B, K] is False; None: equal weights.

    weights: [B, V], or None. per_sample: normalise the sum of each sample's weights to 1.
    """
    if weights is not None:
        weights = weights[:, start:]
    if queries is not None:
        weights = queries.float() if weights is None else weights * queries
    if weights is None:
        return None
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12) if per_sample else weights


@torch.no_grad()
def position_accuracy(logits: Tensor, places: Tensor, real: Tensor | None = None) -> Tensor:
    """Share of (real) tokens whose position is guessed right, 0 of none. logits: [B, K, N]; places, real: [B, K]."""
    right = (logits.argmax(dim=-1) == places).float()
    return right.mean() if real is None else (right * real).sum() / real.sum().clamp(min=1)


@torch.no_grad()
def place_ranks(logits: Tensor, places: Tensor) -> Tensor:
    """Rank of each token's true position, [B, K]: 0 if it is the guess. logits: [B, K, N].

    Equal logits rank in the order of positions: an untrained head is right in its top 5 by chance only.
    """
    true = logits.gather(-1, places.unsqueeze(-1))
    earlier = torch.arange(logits.shape[-1], device=logits.device) < places.unsqueeze(-1)
    return ((logits > true) | ((logits == true) & earlier)).sum(dim=-1)


def init_classifier(head: nn.Linear) -> nn.Linear:
    """Initialises a head so that all classes are nearly equally likely."""
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


def check_decoder(width: int, heads: int) -> None:
    """Refuses a decoder whose width is no multiple of its heads; for a method's config."""
    if width % heads:
        fields = ("decoder_width", "decoder_heads")
        raise SitusError(field=fields, value=width, allowed=f"a multiple of decoder_heads={heads}")


class Decoder(nn.Module):
    """A light transformer on top of an encoder: Linear(D -> width), blocks, LayerNorm, Linear(width -> outputs)."""

    def __init__(self, dim: int, width: int, depth: int, heads: int, outputs: int) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, width)
        self.layers = nn.ModuleList([DecoderBlock(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.leave = nn.Linear(width, outputs)
        self.apply(init_linear)

    def decode(self, x: Tensor, start: int = 0, mask: Tensor | None = None) -> Tensor:
        """Blocks, norm and output layer: [B, S, width] -> [B, S - start, outputs], for the tokens from `start` on.

        mask: [B, S] bool, False for padding, which no token attends to.
        """
        x = run_blocks(self.layers, DecoderBlock.read, Stream(x, 0, mask=mask), None)
        return self.leave(self.norm(x[:, start:]))

    def forward(self, features: Features, start: int = 0) -> Tensor:
        """Outputs of the patches from `start` on: [B, N - start, outputs]."""
        return self.decode(self.enter(join(features)), features.prefix.shape[1] + start, features.real)


class DecoderBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def read(self) -> Block:
        """The block's parts."""
        up, act, down = self.mlp
        attention = Attention((self.qkv,), self.proj, self.heads)
        return Block(self, "pre", self.norm1, attention, self.norm2, Mlp((up,), act, down, self.mlp))


def init_linear(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, as MAE's decoders are initialised."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


def level_maps(backbone: Backbone, inputs: Tensor, levels: Sequence[Level], norms: nn.ModuleList) -> list[Tensor]:
    """The maps of inputs [B, C, H, W] at some levels of a backbone, [B, D_i, h_i, w_i].

    norms: for the first levels, which the model's own final norm does not fit; the others go through the final norm.
    """
    tokens, positions, grid = backbone.embed_sized(inputs)
    stream = backbone.assemble(tokens, positions)
    outputs: dict[int, Tensor] = {}
    blocks = {level.block for level in levels}

    def tap(block: int, z: Tensor) -> None:
        if block in blocks:
            outputs[block] = z

    backbone.run_layers(stream, None, (tap,))
    maps = []
    for number, level in enumerate(levels):
        z = outputs[level.block]
        patches = norms[number](z) if number < len(norms) else backbone.finish(replace(stream, z=z)).patches
        sides = [-(-side // 2**level.halved) for side in grid]
        # Contiguous: else a convolution's result has strides that the compiler does not foresee.
        maps.append(patches.transpose(1, 2).unflatten(2, sides).contiguous())
    return maps


def own_norms(levels: Sequence[Level]) -> nn.ModuleList:
    """Norms for the levels that a hierarchical model's final norm does not fit; none for a plain one."""
    return nn.ModuleList([nn.LayerNorm(level.dim) for level in levels[:-1] if levels[-1].halved])
