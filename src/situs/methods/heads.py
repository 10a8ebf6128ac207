"""What methods add to a backbone: position classifiers and small decoders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Features, join
from situs.backbones.block import Attention, Block, Mlp, Stream, run_blocks
from situs.data.batch import VOID
from situs.errors import SitusError


def position_loss(logits: Tensor, places: Tensor, real: Tensor | None = None) -> Tensor:
    """Cross entropy of each token's place, mean over all tokens; over the real ones where some are padding, 0 of none.

    logits: [B, K, N], classes on the LAST axis (K = N in MP3: swapped axes would run, and be wrong). places: [B, K].
    real: [B, K] bool, False for padding.
    """
    if real is not None:
        places = places.masked_fill(~real, VOID)
        total = F.cross_entropy(logits.flatten(0, 1).float(), places.flatten(), ignore_index=VOID, reduction="sum")
        return total / real.sum().clamp(min=1)
    return F.cross_entropy(logits.flatten(0, 1).float(), places.flatten())


def asked_weights(weights: Tensor | None, start: int, asked: Tensor | None, *, each: bool) -> Tensor | None:
    """Weights of the tokens from `start` on, 0 where `asked` [B, K] says no; None: all count alike.

    weights: [B, V], or None. each: every sample's are brought to 1, so that it counts as much as any other.
    """
    if weights is not None:
        weights = weights[:, start:]
    if asked is not None:
        weights = asked.float() if weights is None else weights * asked
    if weights is None:
        return None
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12) if each else weights


@torch.no_grad()
def position_accuracy(logits: Tensor, places: Tensor, real: Tensor | None = None) -> Tensor:
    """Share of (real) tokens whose place is guessed right, 0 of none. logits: [B, K, N]; places, real: [B, K]."""
    right = (logits.argmax(dim=-1) == places).float()
    return right.mean() if real is None else (right * real).sum() / real.sum().clamp(min=1)


@torch.no_grad()
def place_ranks(logits: Tensor, places: Tensor) -> Tensor:
    """How many places a token's true one stands behind, [B, K]: 0 where it is the guess. logits: [B, K, N].

    Of places with equal logits the first stands before: a head that knows nothing is right in its top 5 by chance.
    """
    own = logits.gather(-1, places.unsqueeze(-1))
    earlier = torch.arange(logits.shape[-1], device=logits.device) < places.unsqueeze(-1)
    return ((logits > own) | ((logits == own) & earlier)).sum(dim=-1)


def init_classifier(head: nn.Linear) -> nn.Linear:
    """A fresh head that holds every answer nearly equally likely."""
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


def check_decoder(width: int, heads: int) -> None:
    """Refuses a decoder whose width its heads cannot share; for a method's config."""
    if width % heads:
        fields = ("decoder_width", "decoder_heads")
        raise SitusError(field=fields, value=width, allowed=f"a multiple of decoder_heads={heads}")


class Decoder(nn.Module):
    """A light transformer on top of an encoder: Linear(D -> width), blocks, LayerNorm, Linear(width -> outputs)."""

    def __init__(self, dim: int, width: int, depth: int, heads: int, outputs: int, *, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, width)
        self.layers = nn.ModuleList([DecoderBlock(width, heads, mlp_ratio) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.leave = nn.Linear(width, outputs)
        self.apply(init_linear)

    def decode(self, x: Tensor, start: int = 0, mask: Tensor | None = None) -> Tensor:
        """From the decoder's own width on: [B, S, width] -> [B, S - start, outputs], of the tokens from `start` on.

        mask: [B, S] bool, False for padding, which no token sees.
        """
        x = run_blocks(self.layers, DecoderBlock.read, Stream(x, 0, mask=mask), None)
        return self.leave(self.norm(x[:, start:]))

    def forward(self, features: Features, start: int = 0) -> Tensor:
        """Of the patches from `start` on: [B, N - start, outputs]."""
        return self.decode(self.enter(join(features)), features.prefix.shape[1] + start, features.real)


class DecoderBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        hidden = int(width * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def read(self) -> Block:
        """It by its parts."""
        up, act, down = self.mlp
        attention = Attention((self.qkv,), self.proj, self.heads)
        return Block(self, "pre", self.norm1, attention, self.norm2, Mlp((up,), act, down, self.mlp))


def init_linear(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, as MAE's decoders are initialised."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
