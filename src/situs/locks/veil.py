"""How an owner hides features from blocks that run elsewhere.

`Veil` describes it: rows in a secret order, channels permuted by a key; noise, a low pass or an exchange of the patch
tokens. `Cut` is a veil before the blocks of one backbone; its `enter` gives the hidden features and the function that
restores the blocks' output. `set_entrance` installs it where every stream enters a backbone's blocks.

Tokens are z [B, p + N, D]; noise, low pass and exchange change only the N patch rows, the secret order moves all p + N.
All of it is a pure function of the tokens and of random words [count] int64: the same secret and step give the same
features (`secret_words`), and an attack can be measured with other words (`situs.core.random.bits`). None of it is a
cryptographic claim: an audit measures what can still be recovered.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from situs.backbones.base import Backbone, Stream, Taps
from situs.backbones.halves import enter
from situs.config import Checked
from situs.core.permutation import invert
from situs.core.tokens import Grid, take
from situs.errors import SitusError
from situs.locks.equivariance.sample import row_leak, row_refusal
from situs.locks.key import SEED_BYTES, Key, keystream
from situs.models.model import Model

Words = Callable[[str, int], Tensor]
"""(purpose, count) -> that many independent uniform 64-bit words, [count] int64; another purpose gives other words."""

Back = Callable[[Tensor], Tensor]
"""Restores the order of rows and channels in the blocks' output."""

Run = Callable[[Tensor, Tensor | None, Taps], Tensor]
"""(z, mask, taps) -> the blocks' output."""

Kind = Literal["none", "noise", "lowpass", "batch-shuffle"]
STRENGTHS = {
    "noise": "noise=σ, a multiple of the patch tokens' standard deviation, > 0",
    "lowpass": "lowpass=r, the fraction of frequencies that remain, in (0, 1]",
    "batch-shuffle": "batch-shuffle or batch-shuffle=B, the number of samples that exchange their tokens, >= 2",
}
PERMUTED = ("rows", "columns")


@dataclass(frozen=True)
class Veil(Checked):
    """What is done to the tokens. strength: σ, the share r, or the number of samples that exchange tokens (0: all).

    rows: whether the rows of each sample are in a secret order. columns: whether channels are permuted by a key.
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
        """The same without permutations: only what changes the patch tokens."""
        return replace(self, rows=False, columns=False)

    def exchanging(self, batch: int) -> int:
        """The number of samples of a batch that exchange tokens; 0: none."""
        return (int(self.strength) or batch) if self.kind == "batch-shuffle" else 0

    def draw(self, words: Words, shape: tuple[int, int, int], prefix: int, grid: Grid) -> dict[str, Tensor]:
        """The random draws and tables for tokens of `shape` [B, p + N, D].

        "defence": noise [B, N, D], filter [N, N] or order [B * N]; "rows": [B, p + N]. Keys without use are left out.
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
        """The hidden z [B, p + N, D] and mask [B, p + N], and the function that restores the blocks' output.

        drawn: by `draw`, on the device of z, so a compiled step can contain this. scale: `token_scale` over public
        images. channels: gathers [D] before and behind the blocks. Gradients pass through.
        """
        undo: list[Back] = []
        defence, order = drawn.get("defence"), drawn.get("rows")
        if defence is not None:
            if mask is not None and self.kind != "noise":
                raise SitusError(f"defence={self.defence}: does not support batches with padding", field="defence")
            patches = z[:, prefix:]
            if self.kind == "noise":
                z = _behind(z, prefix, patches + (self.strength * scale) * defence.to(z))
            elif self.kind == "lowpass":
                z = _behind(z, prefix, filtered(patches, defence))
            else:
                z, inverse = _behind(z, prefix, exchange(patches, defence)), invert(defence)
                undo.append(lambda out: _behind(out, prefix, exchange(out[:, prefix:], inverse)))
        if order is not None:
            z, mask, row_inverse = take(z, order), None if mask is None else take(mask, order), invert(order)
            undo.append(lambda out: take(out, row_inverse))
        if channels is not None:
            before, behind = (key.to(z.device) for key in channels)
            z = z.index_select(-1, before)
            undo.append(lambda out: out.index_select(-1, behind))
        return z, mask, lambda out: functools.reduce(lambda value, step: step(value), reversed(undo), out)


def parse_veil(defence: str, permute: Collection[str] = ()) -> Veil:
    """A veil from text. defence: none, noise=σ, lowpass=r, batch-shuffle or batch-shuffle=B; permute: of `PERMUTED`."""
    for name in permute:
        if name not in PERMUTED:
            raise SitusError(field="permute", value=name, allowed=" or ".join(PERMUTED))
    kind, _, strength = defence.partition("=")
    if kind not in ("none", *STRENGTHS):
        raise SitusError(field="defence", value=defence, allowed=f"none, {', '.join(STRENGTHS.values())}")
    try:
        return Veil(cast(Kind, kind), float(strength or 0), *(name in permute for name in PERMUTED))
    except ValueError:
        raise SitusError(field="defence", value=defence, allowed=STRENGTHS.get(kind, "none alone")) from None


def parse_veils(defences: Sequence[str], permute: Collection[str], curve: Sequence[str]) -> tuple[Veil, ...]:
    """Each of an audit's `defences` alone, with each permutation of `permute`, and with both if it names both.

    curve: what the name curve stands for."""
    if not defences:
        raise SitusError(field="defences", value=(), allowed="one or more names (the name none means: no defence)")
    named = [text for defence in defences for text in (curve if defence == "curve" else (defence,))]
    try:
        parsed = dict.fromkeys(parse_veil(text, permute) for text in named)
    except SitusError as error:
        if error.field == "permute":
            raise
        raise SitusError(field="defences", value=error.value, allowed=error.allowed) from None
    rows, columns = ((False, True) if name in permute else (False,) for name in PERMUTED)
    return tuple(replace(veil, rows=r, columns=c) for veil in parsed for r in rows for c in columns)


def check_veil(veil: Veil, backbone: Backbone) -> None:
    """Refuses a veil that this backbone does not support, with the reason."""
    if veil.rows and (why := row_refusal(backbone) or row_leak(backbone)) is not None:
        raise SitusError(f"permute=rows: {backbone.name} does not support this permutation: {why}", field="permute")
    if veil.kind in ("lowpass", "batch-shuffle") and "take" in backbone.refusals:
        why = backbone.refusals["take"]
        raise SitusError(
            f"defence={veil.defence}: {backbone.name} does not support this defence: {why}", field="defence"
        )
    if veil.kind in ("lowpass", "batch-shuffle") and backbone.input.words:
        why = "sentences have different lengths; use noise=σ"
        raise SitusError(
            f"defence={veil.defence}: {backbone.name} does not support this defence: {why}", field="defence"
        )


# --- where blocks begin ---------------------------------------------------------------------------------------


class Entrance:
    """What every stream goes through before it enters a backbone's blocks."""

    def embed(self, embed: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The tokens of inputs; embed: the backbone's own `embed`."""
        return embed(x)

    def through(
        self, backbone: Backbone, run: Run, z: Tensor, mask: Tensor | None, taps: Taps, *, whole: bool
    ) -> Tensor:
        """The blocks' output for z. whole: whether all tokens enter and attend to all others."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cut(Entrance):
    """A veil before the blocks of one backbone. prefix, grid: of its tokens. scale: the unit of σ.

    channels: gathers [D] before and behind the blocks, if columns are permuted. secret: determines orders and noise;
    None: they are random. at: gives the `at` of `enter` for a stream.
    """

    veil: Veil = Veil()
    prefix: int = 0
    grid: Grid = ()
    scale: float = 1.0
    channels: tuple[Tensor, Tensor] | None = None
    secret: Key | None = None
    at: Callable[[], tuple[str, ...] | None] = lambda: None

    def enter(self, z: Tensor, mask: Tensor | None, at: tuple[str, ...] | None) -> tuple[Tensor, Tensor | None, Back]:
        """The hidden z [B, p + N, D] and mask [B, p + N], and the function that restores the blocks' output.

        at: run, step and part. With the features themselves they determine orders and noise: a repeated step is hidden
        in the same way, and other features never get the same noise. None: random.
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
        if taps and backbone.entry == "run_grid":  # the stages have different keys
            raise SitusError(
                f"{backbone.name}: each of its stages is locked with its own key, so only the features of the last "
                "layer are available"
            )
        z, mask, back = self.enter(z, mask, self.at())
        return back(run(z, mask, [lambda number, out, tap=tap: tap(number, back(out)) for tap in taps]))


def set_entrance(backbone: Backbone, entrance: Entrance) -> Backbone:
    """Installs `entrance` before the blocks of `backbone` (`Backbone.entry`), in place."""
    backbone.__class__ = _entered_class(type(backbone))
    # Not a buffer: it belongs to the owner, not to the model, and is in no state dict.
    object.__setattr__(backbone, "entrance", entrance)
    return backbone


ENTERED = "Entered"
"""Prefix of the class name of a backbone with an entrance."""


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
    """Words from ChaCha20 under a key derived from `key` and `parts` (the run, the step, the micro-batch)."""

    def words(purpose: str, count: int) -> Tensor:
        return torch.from_numpy(keystream(key, "features", purpose, *parts)(count).view(np.int64))

    return words


def row_orders(words: Words, batch: int, rows: int) -> Tensor:
    """A uniform random order of the rows for each sample, [B, rows] int64 (gather: y[i] = z[p[i]])."""
    return words("rows", batch * rows).view(batch, rows).argsort(dim=-1, stable=True)


def token_scale(patches: Tensor) -> float:
    """The standard deviation of all entries of patch tokens [..., N, D], the unit of σ."""
    return float(patches.detach().double().std())


@torch.no_grad()
def noise_unit(model: Model) -> float:
    """The unit of σ before the blocks of a language model, for whoever generates with it and for its audit.

    For a run that was trained under noise, the unit of its training. Otherwise the standard deviation over all words of
    the vocabulary, at the positions that follow from their ids: it is known without any text.
    """
    if parse_veil(model.facts.get("defence", "none")).kind == "noise":
        return model.facts["defence_scale"]
    backbone = model.backbone
    length = min(backbone.num_tokens, 256)
    words = torch.arange(-(-backbone.input.words // length) * length) % backbone.input.words
    device = next(backbone.parameters()).device
    return deviation(enter(backbone, ids.to(device)).z for ids in words.view(-1, length).split(32))


def deviation(parts: Iterable[Tensor]) -> float:
    """The standard deviation of the entries of all parts together."""
    count = total = squares = 0.0
    for part in parts:
        z = part.double()
        count, total, squares = count + z.numel(), total + float(z.sum()), squares + float(z.square().sum())
    return math.sqrt((squares - total * total / count) / (count - 1))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, without a copy if it is contiguous."""
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat) if len(flat) else memoryview(b"")


def _behind(z: Tensor, prefix: int, patches: Tensor) -> Tensor:
    """The prefix rows of z with `patches` behind them."""
    return torch.cat([z[:, :prefix], patches], dim=1) if prefix else patches


def normal_from(words: Tensor) -> Tensor:
    """Standard normal numbers from twice as many words, [count] float64 (Box–Muller)."""
    uniform = (words >> 11).bitwise_and((1 << 53) - 1).double() * 2.0**-53
    radius, angle = uniform.chunk(2)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos(2.0 * math.pi * angle)


def low_pass(patches: Tensor, grid: Grid, share: float) -> Tensor:
    """Patch tokens [B, N, D] without their high spatial frequencies, channel by channel."""
    return filtered(patches, low_pass_filter(grid, share).to(patches.device))


@functools.cache
def low_pass_filter(grid: Grid, share: float) -> Tensor:
    """The low pass as a matrix over the positions, [N, N] float64: a symmetric projection; do not modify."""
    sides = tuple(range(len(grid)))
    waves = torch.fft.fftn(torch.eye(math.prod(grid)).double().unflatten(0, grid), dim=sides)
    low = waves * low_frequencies(grid, share).unsqueeze(-1)
    return torch.fft.ifftn(low, dim=sides).real.flatten(0, len(grid) - 1)


def filtered(patches: Tensor, matrix: Tensor) -> Tensor:
    """matrix [N, N] applied to the places of patch tokens [B, N, D], in float32 at least."""
    numbers = patches if patches.dtype in (torch.float32, torch.float64) else patches.float()
    with torch.autocast(patches.device.type, enabled=False):
        return (matrix.to(numbers.dtype) @ numbers).to(patches.dtype)


def low_frequencies(grid: Grid, share: float) -> Tensor:
    """The frequencies that the low pass keeps, [*grid] bool: the lowest, at most share · N of them, and the mean.

    Equal frequencies are kept or removed together: half of a conjugate pair would not be real.
    """
    axes = torch.meshgrid(*(torch.fft.fftfreq(side, 1 / side) for side in grid), indexing="ij")
    squared = torch.stack([(axis / side).double() ** 2 for axis, side in zip(axes, grid, strict=True)]).sum(0)
    squared = (squared * 1e9).round()  # equal in spite of rounding
    levels, sizes = squared.unique(return_counts=True)
    fitting = int((sizes.cumsum(0) <= share * squared.numel() + 1e-9).sum())
    return squared <= levels[max(0, fitting - 1)]


def exchange_order(words: Words, batch: int, count: int, size: int) -> Tensor:
    """The source of each patch token, [B * N]: a uniform random order within every `size` consecutive samples."""
    drawn, whole = words("exchange", batch * count), batch // size * size * count
    orders = drawn[:whole].view(-1, min(size, batch) * count).argsort(dim=1, stable=True)
    starts = torch.arange(0, whole, size * count, device=drawn.device)
    return torch.cat([(orders + starts[:, None]).flatten(), drawn[whole:].argsort(stable=True) + whole])


def exchange(patches: Tensor, index: Tensor) -> Tensor:
    """Patch tokens [B, N, D] of a batch in the order of `index` [B * N] over all of them."""
    return patches.flatten(0, 1).index_select(0, index).view_as(patches)
