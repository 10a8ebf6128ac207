"""What an owner does to features before somebody else computes on them: rows in a secret order, noise, blur, exchange.

Tokens are z [B, p + N, D]; the defences touch the N patch rows alone, the secret order takes all p + N. Each is a pure
function of the tokens and of random words [count] int64, so that the same secret and step give the same features
(`secret_words`), and so that an attack can be measured with words of its own (`situs.core.random.bits`).
None of them is a cryptographic claim: what is left of a picture behind them is for an audit to say.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from situs.config import Checked
from situs.core.permutation import invert
from situs.core.tokens import Grid
from situs.errors import SitusError
from situs.locks.key import Key, keystream

Words = Callable[[str, int], Tensor]
"""(purpose, count) -> that many independent uniform 64-bit words, [count] int64; another purpose, other words."""

Back = Callable[[Tensor], Tensor]
"""What undoes, on the features that come back, where rows went."""

Kind = Literal["none", "noise", "lowpass", "batch-shuffle"]
STRENGTHS = {
    "noise": "noise=σ, a multiple of the patch tokens' standard deviation, > 0",
    "lowpass": "lowpass=r, the share of the frequencies that stays, in (0, 1]",
    "batch-shuffle": "batch-shuffle or batch-shuffle=B, samples that exchange their tokens, >= 2",
}


def secret_words(key: Key, *parts: str) -> Words:
    """Words from ChaCha20 under a key that follows from `key` and `parts`: say, the run, the step, the micro-batch."""

    def words(purpose: str, count: int) -> Tensor:
        return torch.from_numpy(keystream(key, "features", purpose, *parts)(count).view(np.int64))

    return words


def row_orders(words: Words, batch: int, rows: int) -> Tensor:
    """A uniform order of all rows for each sample, [B, rows] int64 (gather: y[i] = z[p[i]])."""
    return words("rows", batch * rows).view(batch, rows).argsort(dim=-1, stable=True)


@dataclass(frozen=True)
class Defence(Checked):
    """What is done to the patch tokens. strength: σ, the share r, or how many samples exchange (0: all)."""

    kind: Kind = "none"
    strength: float = 0.0

    def check(self) -> None:
        fine = {
            "none": self.strength == 0,
            "noise": 0 < self.strength < math.inf,
            "lowpass": 0 < self.strength <= 1,
            "batch-shuffle": self.strength == 0 or (self.strength >= 2 and self.strength == int(self.strength)),
        }
        if not fine[self.kind]:
            allowed = STRENGTHS.get(self.kind, "none alone")
            raise SitusError(field="defence", value=f"{self.kind}={self.strength:g}", allowed=allowed)

    def __str__(self) -> str:
        return f"{self.kind}={self.strength:g}" if self.strength else self.kind


def parse_defence(text: str) -> Defence:
    """none, noise=σ, lowpass=r, batch-shuffle or batch-shuffle=B."""
    kind, _, strength = text.partition("=")
    if kind not in ("none", *STRENGTHS):
        raise SitusError(field="defence", value=text, allowed=f"none, {', '.join(STRENGTHS.values())}")
    try:
        return Defence(kind, float(strength) if strength else 0.0)  # pyright: ignore[reportArgumentType]
    except ValueError:
        raise SitusError(field="defence", value=text, allowed=STRENGTHS.get(kind, "none alone")) from None


def token_scale(patches: Tensor) -> float:
    """The standard deviation of all entries of patch tokens [..., N, D], in whose units σ is given."""
    return float(patches.detach().double().std())


def defend(
    z: Tensor, defence: Defence, words: Words, *, prefix: int, grid: Grid, scale: float = 1.0
) -> tuple[Tensor, Back]:
    """z [B, p + N, D] with its patch tokens defended, and what brings the blocks' output back to its rows.

    scale: `token_scale` over public images. Gradients pass through.
    """
    given = draw_defence(defence, words, (z.shape[0], z.shape[1] - prefix, z.shape[2]), grid)
    return apply_defence(z, defence, None if given is None else given.to(z.device), prefix=prefix, scale=scale)


def draw_defence(defence: Defence, words: Words, shape: tuple[int, int, int], grid: Grid) -> Tensor | None:
    """What a defence of patch tokens [B, N, D] needs beside them: noise [B, N, D], filter [N, N] or order [B * N]."""
    batch, count, width = shape
    if defence.kind == "noise":
        return normal_from(words("noise", 2 * batch * count * width)).view(shape)
    if defence.kind == "lowpass":
        return low_pass_filter(grid, defence.strength)
    if defence.kind == "batch-shuffle":
        return exchange_order(words, batch, count, int(defence.strength) or batch)
    return None


def apply_defence(
    z: Tensor, defence: Defence, given: Tensor | None, *, prefix: int, scale: float = 1.0
) -> tuple[Tensor, Back]:
    """`defend` with what was drawn for it, on the device of z: pure, so that a step may be compiled with it inside."""
    patches = z[:, prefix:]
    if given is None:
        return z, _as_it_is
    if defence.kind == "noise":
        return _behind(z, prefix, patches + (defence.strength * scale) * given.to(z)), _as_it_is
    if defence.kind == "lowpass":
        return _behind(z, prefix, filtered(patches, given)), _as_it_is
    back = invert(given)
    moved = _behind(z, prefix, exchange(patches, given))
    return moved, lambda out: _behind(out, prefix, exchange(out[:, prefix:], back))


def _as_it_is(z: Tensor) -> Tensor:
    return z


def _behind(z: Tensor, prefix: int, patches: Tensor) -> Tensor:
    return torch.cat([z[:, :prefix], patches], dim=1) if prefix else patches


def normal_from(words: Tensor) -> Tensor:
    """Standard normal numbers from twice as many words, [count] float64 (Box and Muller)."""
    uniform = (words >> 11).bitwise_and((1 << 53) - 1).double() * 2.0**-53
    radius, angle = uniform.chunk(2)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos(2.0 * math.pi * angle)


def low_pass(patches: Tensor, grid: Grid, share: float) -> Tensor:
    """Patch tokens [B, N, D] without their high frequencies over the grid, channel by channel."""
    return filtered(patches, low_pass_filter(grid, share).to(patches.device))


@functools.cache
def low_pass_filter(grid: Grid, share: float) -> Tensor:
    """The low pass as a matrix over the places, [N, N] float64: a symmetric projection; not to be written to."""
    sides = tuple(range(len(grid)))
    waves = torch.fft.fftn(torch.eye(math.prod(grid)).double().unflatten(0, grid), dim=sides)
    kept = waves * low_frequencies(grid, share).unsqueeze(-1)
    return torch.fft.ifftn(kept, dim=sides).real.flatten(0, len(grid) - 1)


def filtered(patches: Tensor, matrix: Tensor) -> Tensor:
    """matrix [N, N] on the places of patch tokens [B, N, D], in float32 at least."""
    numbers = patches if patches.dtype in (torch.float32, torch.float64) else patches.float()
    with torch.autocast(patches.device.type, enabled=False):
        return (matrix.to(numbers.dtype) @ numbers).to(patches.dtype)


def low_frequencies(grid: Grid, share: float) -> Tensor:
    """Which frequencies stay, [*grid] bool: the lowest, at most share · N of them, always the mean.

    Those of one height stay or go together: half of a pair would leave a wave that is not real.
    """
    axes = torch.meshgrid(*(torch.fft.fftfreq(side, 1 / side) for side in grid), indexing="ij")
    height = torch.stack([(axis / side).double() ** 2 for axis, side in zip(axes, grid, strict=True)]).sum(0)
    height = (height * 1e9).round()  # equal heights, whatever the rounding of their sums
    levels, sizes = height.unique(return_counts=True)
    fitting = int((sizes.cumsum(0) <= share * height.numel() + 1e-9).sum())
    return height <= levels[max(0, fitting - 1)]


def exchange_order(words: Words, batch: int, count: int, size: int) -> Tensor:
    """Where each patch token comes from, [B * N]: a uniform order within each `size` samples that follow each other."""
    drawn, whole = words("exchange", batch * count), batch // size * size * count
    orders = drawn[:whole].view(-1, min(size, batch) * count).argsort(dim=1, stable=True)
    starts = torch.arange(0, whole, size * count, device=drawn.device)
    return torch.cat([(orders + starts[:, None]).flatten(), drawn[whole:].argsort(stable=True) + whole])


def exchange(patches: Tensor, index: Tensor) -> Tensor:
    """Patch tokens [B, N, D] of a batch in the order of `index` [B * N] over all of them."""
    return patches.flatten(0, 1).index_select(0, index).view_as(patches)
