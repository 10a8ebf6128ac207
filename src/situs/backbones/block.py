"""The parts of a transformer block: one description for running, locks, attacks and fused kernels.

Each library has a reader for each known class of blocks (`timm.blocks`, `hf.blocks`); a new family is one reader.

    pre        z + f(norm(z))         ViT, EVA, Llama
    post       norm(z + f(z))         BERT
    res-post   z + norm(f(z))         Swin V2
    parallel   z + f(norm1(z)) + g(norm2(z))         GPT-NeoX; run by its own library

f is the attention, and after it the MLP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from situs.core.attention import attend
from situs.core.kernels import (
    Layer,
    Norm,
    Parts,
    attend_packed,
    has_hooks,
    norm_fits,
    run_joined,
    takes_kernels,
)
from situs.core.position import PairBias, Positions
from situs.core.tokens import take

# Compiling `_of_first` makes torch warn about in-place operations in it; there are none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())

Form = Literal["pre", "post", "res-post", "parallel"]


class HeadTable(NamedTuple):
    """A tensor with one entry per head along `axis`: a table of biases, learned frequencies. at: (axis, index) of this
    layer's slice, where all layers share the tensor."""

    tensor: Tensor
    axis: int
    at: tuple[int, int] | None = None


class Attention(NamedTuple):
    """A block's attention: out(gate(x) * norm(softmax(q kᵀ * scale) v)).

    qkv: one layer whose outputs are all queries, then all keys, then all values; or one layer for each.
    heads: of the queries. shared: how many of them use the same keys and values. dropout: present rate for the weights.
    """

    qkv: tuple[Any, ...]
    out: Any
    heads: int
    shared: int = 1
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    """Of queries, keys and values, if one layer without a bias computes all three."""

    scale: float | None = None
    """Factor of the logits; None: 1/√d."""

    dropout: float = 0.0
    drop: Callable[[Tensor], Tensor] | None = None
    """Dropout after `out`."""

    head_norms: tuple[nn.Module, ...] = ()
    """Of queries and keys, over the channels of a head, the same for all heads."""

    norm: nn.Module | None = None
    """Over all heads' outputs."""

    gate: nn.Module | None = None
    """A layer whose sigmoid multiplies the heads' outputs."""

    rotate: Callable[[Tensor, Tensor], Tensor] | None = None
    """(queries or keys [B, H, N, d], rotation) -> the same rotated by the positions of their tokens."""

    rotary: bool = False
    """Whether the model rotates queries and keys in pairs of channels; these channels cannot be permuted."""

    by_head: bool = False
    """Whether the layer's outputs are ordered by head: queries, keys and values of one head, then of the next."""

    tables: tuple[HeadTable, ...] = ()
    one_order: bool = False
    """Whether all layers share a table; their heads must then be permuted in the same way."""

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the one layer of queries, keys and values."""
        return self.qkv[0].weight, self.qkv[0].bias if self.biases is None else torch.cat(self.biases)


class Mlp(NamedTuple):
    """down(norm(act(up(x)))). up: one layer, or gate and value; packed: how many are concatenated in one layer.

    run: the whole MLP; None: computed from its parts.
    """

    up: tuple[Any, ...]
    act: Callable[[Tensor], Tensor]
    down: Any
    run: Callable[[Tensor], Tensor] | None = None
    norm: nn.Module | None = None
    packed: int = 1

    def output(self, x: Tensor) -> Tensor:
        """The whole MLP."""
        return self.down(self.act(self.up[0](x))) if self.run is None else self.run(x)


def unknown_mlp(module: Any) -> Mlp:
    """An MLP that can be run, but whose parts are not known."""
    return Mlp((), nn.Identity(), None, module)


def undropped(y: Tensor) -> Tensor:
    """y: no drop path."""
    return y


class Block(NamedTuple):
    """One block. gammas: scales of the attention's and the MLP's output, [D], or a module instead. drops: drop path of
    both."""

    module: nn.Module
    form: Form
    norm1: Any
    attention: Attention
    norm2: Any
    mlp: Mlp
    gammas: tuple[Tensor | nn.Module | None, Tensor | nn.Module | None] = (None, None)
    drops: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = (undropped, undropped)

    def attending(self, **changes: Any) -> Block:
        """The same with changes to its attention."""
        return self._replace(attention=self.attention._replace(**changes))


Read = Callable[[Any], Block]
"""A library's block -> its parts. Called whenever a block is run, since the parts may change."""


@dataclass(frozen=True)
class Stream:
    """The input of the blocks: z [B, p + N, D] and what the attention needs beside it.

    rotary: [L, B, H, N, 2d] for the patch tokens. bias: `PairBias`. mask: [B, p + N] bool, False for padding.
    """

    z: Tensor
    prefix: int
    rotary: Tensor | None = None
    bias: PairBias | None = None
    mask: Tensor | None = None

    def take(self, index: Tensor) -> Stream:
        """The stream of a subset or permutation of its patch tokens ([K] or [B, K]); prefix tokens stay in front."""
        p = self.prefix
        places = Positions(rotary=self.rotary, bias=self.bias).take(index)
        z = torch.cat([self.z[:, :p], take(self.z[:, p:], index)], dim=1)
        mask = None if self.mask is None else torch.cat([self.mask[:, :p], take(self.mask[:, p:], index)], dim=1)
        return Stream(z, p, places.rotary, places.bias, mask)

    @property
    def plain(self) -> bool:
        """Whether there is nothing beside z."""
        return self.rotary is None and self.bias is None and self.mask is None

    def logit_bias(self, depth: int, keys: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the logits of the first `keys` keys: relative bias, -inf on padding; False on padding where
        there is no bias; None if there is neither, so that flash kernels apply."""
        bias = None if self.bias is None else self.bias.layer(depth)[..., :keys].to(dtype)
        if self.mask is None:
            return bias
        visible = self.mask[:, None, None, :keys]
        return visible if bias is None else bias.masked_fill(~visible, float("-inf"))


Taps = Sequence[Callable[[int, Tensor], None]]
"""Functions that are called with (number of the block, from 1; z [B, S, D] after it)."""


def run_blocks(layers: Iterable[Any], read: Read, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
    """All blocks over stream.z: [B, S, D]; with `keys`, only the first `keys` tokens are keys and values."""
    if not taps and takes_kernels(stream.z) and (parts := fused_parts([*map(read, layers)], stream)):
        return run_joined(parts, stream.z, keys)
    z = stream.z
    for depth, layer in enumerate(layers):
        z = called(layer, lambda z, layer=layer, depth=depth: run_block(read(layer), z, stream, depth, keys), z)
        for tap in taps:
            tap(depth + 1, z)
    return z


def run_block(block: Block, z: Tensor, stream: Stream, depth: int, keys: int | None) -> Tensor:
    """One transformer block: z [B, S, D] -> [B, S, D]."""

    def add(z: Tensor, norm: nn.Module, inner: Callable[[Tensor], Tensor], part: int) -> Tensor:
        gamma, drop = block.gammas[part], block.drops[part]
        if block.form == "post":
            return norm(z + drop(inner(z)))
        y = inner(norm(z)) if block.form == "pre" else norm(inner(z))
        return z + drop(y if gamma is None else gamma(y) if isinstance(gamma, nn.Module) else y * gamma)

    z = add(z, block.norm1, lambda x: attend_block(block.attention, x, stream, depth, keys), 0)
    return add(z, block.norm2, lambda x: block.mlp.output(x), 1)  # noqa: PLW0108  (torch 2.9's compiler needs it)


def attend_block(a: Attention, x: Tensor, stream: Stream, depth: int, keys: int | None) -> Tensor:
    """One attention layer: x [B, S, D] -> [B, S, D]. Queries are all tokens; keys the first `keys` (None: all)."""
    mixed = _mix(a, x, stream, depth, keys)
    if a.norm is not None:
        mixed = a.norm(mixed)
    if a.gate is not None:
        mixed = mixed * a.gate(x).sigmoid()
    return a.out(mixed) if a.drop is None else a.drop(a.out(mixed))


def _mix(a: Attention, x: Tensor, stream: Stream, depth: int, keys: int | None) -> Tensor:
    """Attention before its last layer: [B, S, H * d]."""
    if len(a.qkv) == 1 and _unchanged(a) and stream.plain and not a.dropout:
        weight, bias = a.joined()
        parts = (F.linear(x, weight, bias), None) if keys is None else _queries_and_context(weight, bias, x, keys)
        return attend_packed(*parts, a.heads)
    q, k, v = _project(a, x, keys)
    q, k, v = _heads(q, a.heads), _heads(k, a.heads // a.shared), _heads(v, a.heads // a.shared)
    if a.head_norms:
        q, k = a.head_norms[0](q), a.head_norms[1](k)
    if stream.rotary is not None and a.rotate is not None:
        angles, p = stream.rotary[depth if stream.rotary.shape[0] > 1 else 0], stream.prefix  # prefix tokens stay
        q, k = (
            torch.cat([y[:, :, :p], a.rotate(y[:, :, p:], angles[..., : y.shape[2] - p, :])], dim=2).type_as(v)
            for y in (q, k)
        )
    if a.shared > 1:
        k, v = k.repeat_interleave(a.shared, dim=1), v.repeat_interleave(a.shared, dim=1)
    return attend(q, k, v, stream.logit_bias(depth, k.shape[2], q.dtype), a.dropout, a.scale)


def _unchanged(a: Attention) -> bool:
    """Whether queries, keys and values are used as their products give them."""
    return a.shared == 1 and a.scale is None and all(isinstance(norm, nn.Identity) for norm in a.head_norms)


def _heads(x: Tensor, count: int) -> Tensor:
    """[B, S, H * d] -> [B, H, S, d]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _project(a: Attention, x: Tensor, keys: int | None) -> Sequence[Tensor]:
    """Queries of all tokens, keys and values of the first `keys`, [B, S, H * d] each."""
    if len(a.qkv) > 1:
        first = x if keys is None else x[:, :keys]
        return [layer(y) for layer, y in zip(a.qkv, (x, first, first), strict=True)]
    weight, bias = a.joined()
    if keys is None:
        return F.linear(x, weight, bias).chunk(3, dim=-1)
    q, kv = _queries_and_context(weight, bias, x, keys)
    return q, *kv.chunk(2, dim=-1)


def _queries_and_context(weight: Tensor, bias: Tensor | None, x: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Queries of all tokens [B, S, D], and keys and values of the first `keys`, [B, keys, 2 D]."""
    if torch.compiler.is_compiling() and torch.is_autocast_enabled(x.device.type):
        # Once for both products: else x would be kept in float32 and in half precision.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    width = weight.shape[0] // 3
    q = F.linear(x, weight[:width], None if bias is None else bias[:width])
    return q, _of_first(x, keys, weight[width:], None if bias is None else bias[width:])


def _of_first(x: Tensor, keys: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of the first `keys` tokens. The product needs them side by side, and its backward needs them again.

    Compiled, that copy would be kept beside x in every layer; here it is made again from x, which is kept anyway.
    """
    if not torch.compiler.is_compiling():
        return F.linear(x[:, :keys], weight, bias)
    contexts = partial(create_selective_checkpoint_contexts, _products_alone)
    first = lambda x, weight, bias: F.linear(x[:, :keys], weight, bias)  # noqa: E731  (the compiler traces it)
    return checkpoint(first, x, weight, bias, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _products_alone(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keeps the outputs of products and recomputes all else."""
    product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def called(module: nn.Module, run: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """run(z), as a call of the module whose weights it uses, so that the module's hooks run.

    FSDP gathers a block's weights when the block is called, and we run blocks without calling them.
    """
    if not module._forward_pre_hooks:
        return run(z)
    module.forward = run
    try:
        return module(z)
    finally:
        del module.forward


# --- fused kernels ---------------------------------------------------------------------------------------------------


def fused_parts(blocks: Sequence[Block], stream: Stream) -> list[Parts] | None:
    """The tensors of all blocks for `run_joined`; None if one is not plain or has hooks."""
    if not norm_fits(stream.z.shape[-1]) or not stream.plain or not all(map(_fuses, blocks)):
        return None
    return [_parts(block, stream.z) for block in blocks]


def _fuses(block: Block) -> bool:
    a, mlp = block.attention, block.mlp
    absent = (*a.head_norms, a.norm, mlp.norm, *block.gammas)
    if block.form != "pre" or len(a.qkv) != 1 or a.dropout or a.gate is not None or (len(mlp.up), mlp.packed) != (1, 1):
        return False
    if not _unchanged(a) or any(part is not None and not _is(part, nn.Identity) for part in absent):
        return False
    layers, norms = (a.qkv[0], a.out, mlp.up[0], mlp.down), (block.norm1, block.norm2)
    return (
        all(_is(layer, nn.Linear) for layer in layers)
        and mlp.up[0].bias is not None
        and all(type(norm).__name__ == "LayerNorm" for norm in norms)
        and all(norm.weight is not None and norm.bias is not None for norm in norms)
        and isinstance(mlp.act, nn.GELU)
        and mlp.act.approximate == "none"
        and not any(has_hooks(module) or _drops(module) for module in block.module.modules())
    )


def _is(module: Any, kind: type[nn.Module]) -> bool:
    return type(module) is kind


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.training and module.p > 0


def _parts(block: Block, z: Tensor) -> Parts:
    a, mlp = block.attention, block.mlp
    norm1, norm2 = (Norm(norm.weight, norm.bias, norm.eps) for norm in (block.norm1, block.norm2))
    out, up, down = (Layer(layer.weight, layer.bias) for layer in (a.out, mlp.up[0], mlp.down))
    scales = [_scale(drop, z) for drop in block.drops]
    return Parts(norm1, Layer(*a.joined()), a.heads, out, norm2, up, down, *scales)


def _scale(drop_path: Any, z: Tensor) -> Tensor | None:
    """Drop path's factor for each sample, drawn as for the branch itself."""
    if drop_path is undropped or isinstance(drop_path, nn.Identity) or not drop_path.training:
        return None
    if not drop_path.drop_prob:
        return None
    return drop_path(torch.ones(z.shape[0], 1, 1, device=z.device)).view(-1)
