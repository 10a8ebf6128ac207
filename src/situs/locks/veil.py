"""What an owner does to features before somebody else's blocks compute on them: one description, one way in and back.

`Veil` names it: rows in a secret order, channels by a key, noise, blur or exchange of the patch tokens. `Cut` is a veil
before the blocks of one backbone; its `enter` gives what the blocks are given and what brings their output back.
`stand_before` is the one place that puts something where every stream enters a backbone's blocks.

Tokens are z [B, p + N, D]; noise, blur and exchange touch the N patch rows alone, the secret order takes all p + N.
All of it is a pure function of the tokens and of random words [count] int64, so that the same secret and step give the
same features (`secret_words`), and so that an attack can be measured with words of its own (`situs.core.random.bits`).
None of it is a cryptographic claim: what is left of a picture behind a veil is for an audit to say.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from situs.backbones.base import Backbone, Stream, Taps
from situs.config import Checked
from situs.core.permutation import invert
from situs.core.tokens import Grid, take
from situs.errors import SitusError
from situs.locks.equivariance.sample import row_leak, row_refusal
from situs.locks.key import SEED_BYTES, Key, keystream

Words = Callable[[str, int], Tensor]
"""(purpose, count) -> that many independent uniform 64-bit words, [count] int64; another purpose, other words."""

Back = Callable[[Tensor], Tensor]
"""What undoes, on the features that come back, where rows and channels went."""

Run = Callable[[Tensor, Tensor | None, Taps], Tensor]
"""(z, mask, taps) -> what leaves the blocks."""

Kind = Literal["none", "noise", "lowpass", "batch-shuffle"]
STRENGTHS = {
    "noise": "noise=σ, a multiple of the patch tokens' standard deviation, > 0",
    "lowpass": "lowpass=r, the share of the frequencies that stays, in (0, 1]",
    "batch-shuffle": "batch-shuffle or batch-shuffle=B, samples that exchange their tokens, >= 2",
}
PERMUTED = ("rows", "columns")


@dataclass(frozen=True)
class Veil(Checked):
    """What is done to the tokens. strength: σ, the share r, or how many samples exchange (0: all).

    rows: whether all rows of a sample stand in an order of its own. columns: whether channels are permuted by a key.
    """

    kind: Kind = "none"
    strength: float = 0.0
    rows: bool = False
    columns: bool = False

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
        parts = [] if self.kind == "none" else [f"{self.kind}={self.strength:g}" if self.strength else self.kind]
        return " + ".join(parts + [name for name in PERMUTED if getattr(self, name)]) or "none"

    @property
    def defence(self) -> Veil:
        """The same with nothing permuted: what it does to the patch tokens."""
        return replace(self, rows=False, columns=False)

    def exchanging(self, batch: int) -> int:
        """How many samples of a batch exchange their tokens; 0: none do."""
        return (int(self.strength) or batch) if self.kind == "batch-shuffle" else 0

    def draw(self, words: Words, shape: tuple[int, int, int], prefix: int, grid: Grid) -> dict[str, Tensor]:
        """What it needs beside tokens of `shape` [B, p + N, D].

        defence: noise [B, N, D], filter [N, N] or order [B * N]. rows: [B, p + N]. Each where there is something.
        """
        batch, rows, width = shape
        drawn, count = {}, rows - prefix
        if self.kind == "noise":
            drawn["defence"] = normal_from(words("noise", 2 * batch * count * width)).view(batch, count, width)
        elif self.kind == "lowpass":
            drawn["defence"] = low_pass_filter(grid, self.strength)
        elif self.kind == "batch-shuffle":
            drawn["defence"] = exchange_order(words, batch, count, self.exchanging(batch))
        if self.rows:
            drawn["rows"] = row_orders(words, batch, rows)
        return drawn

    def apply(
        self, z: Tensor, mask: Tensor | None, drawn: Mapping[str, Tensor], *, prefix: int, scale: float = 1.0,
        channels: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Back]:  # fmt: skip
        """What the blocks are given for z [B, p + N, D] and mask [B, p + N], and what brings their output back.

        drawn: by `draw`, on the device of z: pure, so that a step may be compiled with it inside. scale: `token_scale`
        over public images. channels: gathers [D] before and behind the blocks. Gradients pass through.
        """
        ways: list[Back] = []
        given, order = drawn.get("defence"), drawn.get("rows")
        if given is not None:
            if mask is not None:
                raise SitusError(f"defence={self.defence}: takes no batches with padding", field="defence")
            patches = z[:, prefix:]
            if self.kind == "noise":
                z = _behind(z, prefix, patches + (self.strength * scale) * given.to(z))
            elif self.kind == "lowpass":
                z = _behind(z, prefix, filtered(patches, given))
            else:
                z, undone = _behind(z, prefix, exchange(patches, given)), invert(given)
                ways.append(lambda out: _behind(out, prefix, exchange(out[:, prefix:], undone)))
        if order is not None:
            z, mask, sorted_again = take(z, order), None if mask is None else take(mask, order), invert(order)
            ways.append(lambda out: take(out, sorted_again))
        if channels is not None:
            before, behind = (key.to(z.device) for key in channels)
            z = z.index_select(-1, before)
            ways.append(lambda out: out.index_select(-1, behind))
        return z, mask, lambda out: _undone(out, ways)


def parse_veil(defence: str, permute: Collection[str] = ()) -> Veil:
    """defence: none, noise=σ, lowpass=r, batch-shuffle or batch-shuffle=B. permute: of `PERMUTED`."""
    for name in permute:
        if name not in PERMUTED:
            raise SitusError(field="permute", value=name, allowed=f"of {', '.join(PERMUTED)}")
    kind, _, strength = defence.partition("=")
    if kind not in ("none", *STRENGTHS):
        raise SitusError(field="defence", value=defence, allowed=f"none, {', '.join(STRENGTHS.values())}")
    try:
        return Veil(cast(Kind, kind), float(strength or 0), *(name in permute for name in PERMUTED))
    except ValueError:
        raise SitusError(field="defence", value=defence, allowed=STRENGTHS.get(kind, "none alone")) from None


def check_veil(veil: Veil, backbone: Backbone) -> None:
    """Refuses what this backbone cannot do, with the reason."""
    if veil.rows and (why := row_refusal(backbone) or row_leak(backbone)) is not None:
        raise SitusError(f"permute=rows: {backbone.name} refuses it: {why}", field="permute")
    if veil.kind in ("lowpass", "batch-shuffle") and "take" in backbone.refusals:
        why = backbone.refusals["take"]
        raise SitusError(f"defence={veil.defence}: {backbone.name} refuses it: {why}", field="defence")


# --- where blocks begin ---------------------------------------------------------------------------------------


class Entrance:
    """What stands where every stream goes into a backbone's blocks; this one lets all pass."""

    def embed(self, embed: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What the backbone's own `embed` gives for inputs."""
        return embed(x)

    def through(
        self, backbone: Backbone, run: Run, z: Tensor, mask: Tensor | None, taps: Taps, *, whole: bool
    ) -> Tensor:
        """What leaves the blocks for z. whole: whether all tokens enter, and each may look at all others."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cut(Entrance):
    """A veil before the blocks of one backbone. prefix, grid: of its tokens. scale: what a σ is a multiple of.

    channels: gathers [D] before and behind the blocks, where columns are permuted. secret: what orders and noise follow
    from; None: they are drawn anew. at: the moment, as `enter` is told it, of a stream that goes through.
    """

    veil: Veil
    prefix: int = 0
    grid: Grid = ()
    scale: float = 1.0
    channels: tuple[Tensor, Tensor] | None = None
    secret: Key | None = None
    at: Callable[[], tuple[str, ...] | None] = lambda: None

    def enter(self, z: Tensor, mask: Tensor | None, at: tuple[str, ...] | None) -> tuple[Tensor, Tensor | None, Back]:
        """What the blocks are given for z [B, p + N, D] and mask [B, p + N]; what brings their output back.

        at: the run, step and part, which with the features themselves make orders and noise that no other message has:
        a step that comes again is shown as it was, and never other features with the same noise. None: drawn anew.
        """
        drawn: dict[str, Tensor] = {}
        if self.veil.kind != "none" or self.veil.rows:
            batch, rows, width = z.shape
            drawn = self.veil.draw(self._words(z, at), (batch, rows, width), self.prefix, self.grid)
        drawn = {name: value.to(z.device) for name, value in drawn.items()}
        return self.veil.apply(z, mask, drawn, prefix=self.prefix, scale=self.scale, channels=self.channels)

    def _words(self, z: Tensor, at: tuple[str, ...] | None) -> Words:
        if self.secret is None or at is None:
            return secret_words(Key(secrets.token_bytes(SEED_BYTES)))
        return secret_words(self.secret, *at, hashlib.sha256(bytes_of(z.cpu())).hexdigest())

    def through(
        self, backbone: Backbone, run: Run, z: Tensor, mask: Tensor | None, taps: Taps, *, whole: bool  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        if taps and backbone.entry == "run_grid":  # the keys of stages differ, so each depth has one of its own
            raise SitusError(f"{backbone.name}: with its key only its last layer can be shown")
        z, mask, back = self.enter(z, mask, self.at())
        return back(run(z, mask, [lambda number, out, tap=tap: tap(number, back(out)) for tap in taps]))


def stand_before(backbone: Backbone, entrance: Entrance) -> Backbone:
    """Puts `entrance` where every stream goes into the blocks of `backbone` (`Backbone.entry`), in place."""
    backbone.__class__ = _entered_class(type(backbone))
    # Not as a buffer: it belongs to the owner, not to the model, and is in no state dict.
    object.__setattr__(backbone, "entrance", entrance)
    return backbone


ENTERED = "Entered"
"""How the class of a backbone with an entrance begins."""


@functools.cache
def _entered_class(kind: type[Backbone]) -> type[Backbone]:
    def embed(self: Any, x: Tensor) -> Tensor:
        return self.entrance.embed(functools.partial(kind.embed, self), x)

    def run_layers(self: Any, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        def run(z: Tensor, mask: Tensor | None, seen: Taps) -> Tensor:
            return kind.run_layers(self, replace(stream, z=z, mask=mask), keys, seen)

        return self.entrance.through(self, run, stream.z, stream.mask, taps, whole=keys is None)

    def run_grid(self: Any, z: Tensor, grid: Grid, taps: Taps = ()) -> Tensor:
        def run(z: Tensor, _: Tensor | None, seen: Taps) -> Tensor:
            return cast(Any, kind).run_grid(self, z, grid, seen)

        return self.entrance.through(self, run, z, None, taps, whole=grid == self.grid)

    way = {"run_layers": run_layers, "run_grid": run_grid}[kind.entry]
    return cast("type[Backbone]", type(f"{ENTERED}{kind.__name__}", (kind,), {kind.entry: way, "embed": embed}))


# --- the arithmetic -------------------------------------------------------------------------------------------


def secret_words(key: Key, *parts: str) -> Words:
    """Words from ChaCha20 under a key that follows from `key` and `parts`: say, the run, the step, the micro-batch."""

    def words(purpose: str, count: int) -> Tensor:
        return torch.from_numpy(keystream(key, "features", purpose, *parts)(count).view(np.int64))

    return words


def row_orders(words: Words, batch: int, rows: int) -> Tensor:
    """A uniform order of all rows for each sample, [B, rows] int64 (gather: y[i] = z[p[i]])."""
    return words("rows", batch * rows).view(batch, rows).argsort(dim=-1, stable=True)


def token_scale(patches: Tensor) -> float:
    """The standard deviation of all entries of patch tokens [..., N, D], in whose units σ is given."""
    return float(patches.detach().double().std())


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, uncopied where it is contiguous."""
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat) if len(flat) else memoryview(b"")


def _undone(out: Tensor, ways: list[Back]) -> Tensor:
    for back in reversed(ways):
        out = back(out)
    return out


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
