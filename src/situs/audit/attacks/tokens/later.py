"""Pixels through blocks of which nothing is sent: what enters a later block lies in the row spaces of its gradients.

The blocks before it are known functions of the pixels, if not linear ones. So one image is looked for of which nothing
sticks out of any row space of that block: Gauss-Newton steps from grey, each by conjugate gradients, which take the
model's own forward pass and its derivatives and no second ones. Labels and loss do not matter here either. What fits
needs not be the only image that does: no gate is passed by it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from situs.audit.attacks.spans import SOLVED, TELLING, Span, whole_rows
from situs.audit.attacks.tokens.descent import Range
from situs.audit.attacks.tokens.runs import Runs, runs_of
from situs.audit.defences import Gradients
from situs.audit.stem import StemBackbone, flat_weight
from situs.backbones.base import Backbone

STEPS = 30
"""Of Gauss-Newton from one start, at most."""

STARTS = 4
"""Grey, and smooth pictures by chance."""

INNER = (60, 1e-3)
"""Conjugate gradients of one step: iterations at most, and the share of the slope that they leave."""

WHOLE = 2**26
"""Numbers of a Jacobian that is held; a larger one is never made, and its products are passes through the model."""

RESTED = 1e-3
"""A step that takes less than this share off is the last."""


class Later(NamedTuple):
    """The first block whose matrices are all sent. before: blocks that stand before it. names: of its matrices."""

    before: int
    names: tuple[str, ...]


def later_block(backbone: Backbone, sent: Collection[str], tokens: int) -> Later | None:
    """The first block with all its gradients and row spaces of fewer directions than channels, one behind it; else
    None. Behind the last block only what is read of it has a gradient."""
    if isinstance(backbone, StemBackbone) or "tokens" in backbone.refusals:
        return None
    own, roles = dict(backbone.named_parameters()), backbone.roles()
    for depth in range(2, len(backbone.block_modules())):
        names = tuple(
            name
            for name, role in roles.items()
            if role.depth == depth and role.part in ("qkv", "block") and name in own and own[name].dim() == 2
        )
        if names and all(name in sent and min(own[name].shape) > tokens for name in names):
            return Later(depth - 1, names)
    return None


class Picture(NamedTuple):
    """Patches [N, K], and how many times more of the worst token sticks out than rounding and noise explain."""

    patches: Tensor
    residual: float
    fits: bool


class Through:
    """One upload: its row spaces at the later block, and the patches that can be behind them."""

    def __init__(
        self,
        backbone: Backbone,
        later: Later,
        upload: Gradients,
        rank: int,
        pixels: Range,
        blur: tuple[bool, float | None] = (False, None),
    ) -> None:
        """backbone: in float64, in eval mode. rank: of the patches; as many as they have values where nothing of the
        patch embedding is sent. blur: even and forward, as in `Span`."""
        self.run, self.later, self.pixels = runs_of(backbone, later.names), later, pixels
        # What the victim's own forward pass rounds off by that block depends on its weights: they tell it.
        self.plain = runs_of(deepcopy(backbone).float(), later.names) if blur[1] is None else None
        tokens = self.run.places + backbone.num_prefix
        self.grey = (pixels.low + pixels.high) / 2
        # Keys alone do not hold their inputs, for their gradients add up to nothing over the places: all that is fed
        # the same is one row space. What came as zeros is none.
        rows = {number: torch.cat([whole_rows(upload[name]) for name in names]) for number, names in self._fed()}
        self.spans = {at: Span(each, tokens, *blur) for at, each in rows.items() if Span.exists(each, tokens)}
        self.basis = torch.eye(self.run.weight.shape[1]).to(self.run.weight)
        stem = self.run.stem
        patches = flat_weight(upload[stem.weight], stem) if rank < len(self.basis) else None
        if patches is not None and Span.exists(patches, rank):
            span = Span(patches, rank, *blur)
            self.basis = torch.linalg.qr((span.inside / span.column).T)[0].T
            self.grey = self.grey @ self.basis.T @ self.basis
        # Each row space by what rounding lets stick out of it.
        expected = {at: (span.typical**2 + span.forward**2) ** 0.5 for at, span in self.spans.items()}
        self.weights = {at: min(expected.values()) / each for at, each in expected.items()}

    def _fed(self) -> list[tuple[int, list[str]]]:
        """The numbers of products that are fed something of their own, and the names of all that are fed the same."""
        calls = self.run((self.grey @ self.run.weight.T).expand(1, self.run.places, -1))
        found: dict[int, list[str]] = {}
        for number, call in enumerate(calls):
            same = (at for at in found if torch.equal(calls[at].inputs, call.inputs))
            names = found.setdefault(next(same, number), [])
            names += [] if call.name in names else [call.name]
        return list(found.items())

    def _inputs(self, patches: Tensor, run: Runs | None = None) -> list[tuple[int, Tensor]]:
        """What each row space must hold, [tokens, ·], by its number."""
        run = run or self.run
        calls = run((patches.to(run.weight) @ run.weight.T).unsqueeze(0))
        return [(at, calls[at].inputs[0]) for at in self.spans]

    def patches(self, at: Tensor) -> Tensor:
        """[N, K] of coordinates [N, k]."""
        return self.grey + at @ self.basis

    def residual(self, at: Tensor) -> Tensor:
        """What sticks out of every token at every product of the block, [tokens, ·], over the token's own size."""
        out = []
        for number, inputs in self._inputs(self.patches(at)):
            span = self.spans[number]
            scaled = inputs * span.column
            out.append(self.weights[number] * span.outside(scaled) / scaled.norm(dim=-1, keepdim=True))
        return torch.cat(out, dim=1)

    def solve(self, stop: Callable[[], bool] = lambda: False) -> Picture:
        """The best of some starts; the first that fits."""
        best, chance = None, torch.Generator().manual_seed(0)
        if not self.spans:
            return Picture(self.patches(self._start(0, chance)), torch.inf, False)
        with derivable():
            for number in range(STARTS):
                if best is not None and (best.fits or stop()):
                    break
                at = self._start(number, chance)
                found = self._judged(self._descend(at, stop))
                best = found if best is None or found.residual < best.residual else best
        assert best is not None
        return best

    def _start(self, number: int, chance: torch.Generator) -> Tensor:
        """Coordinates [N, k]: grey, then smooth colours."""
        shape = (self.run.places, len(self.basis))
        if not number:
            return self.basis.new_zeros(shape)
        width = (self.pixels.high - self.pixels.low) / 4
        colour = torch.randn(self.run.places, 1, generator=chance, dtype=torch.float64).to(width)
        return (colour * width) @ self.basis.T

    def _descend(self, at: Tensor, stop: Callable[[], bool]) -> Tensor:
        out, damping = self.residual(at), 1e-2
        cost, factor = float(out.square().sum()), self._metric(at, stop)
        for _ in range(STEPS):
            if stop():
                break
            step = self._step(at, out, factor, damping, stop)
            after = self.residual(at - step)
            left = float(after.square().sum())
            if not left < cost:
                damping *= 10
                if damping > 1e4:
                    break
                continue
            gain, at, out, cost, damping = 1 - left / cost, at - step, after, left, max(damping / 10, 1e-10)
            if gain < RESTED:
                break
        return at

    def _metric(self, at: Tensor, stop: Callable[[], bool]) -> Tensor:
        """L [k, k] with L L^T the normal matrix of a place's own coordinates, summed over some: CG goes by that."""
        total, eye = self.basis.new_zeros(len(self.basis), len(self.basis)), torch.eye(len(self.basis)).to(self.basis)
        for place in {0, self.run.places // 2, self.run.places - 1}:
            if stop():
                break

            def along(direction: Tensor, place: int = place) -> Tensor:
                moved = torch.zeros_like(at)
                moved = torch.cat([moved[:place], direction.unsqueeze(0), moved[place + 1 :]])
                return jvp(self.residual, (at,), (moved,))[1].flatten()

            jacobian = vmap(along, chunk_size=32)(eye)
            total = total + jacobian @ jacobian.T
        total = total.nan_to_num()
        least = (1e-12 * total.diagonal().max()).clamp(min=1e-30)
        return torch.linalg.cholesky(total + least * eye)

    def _step(self, at: Tensor, out: Tensor, factor: Tensor, damping: float, stop: Callable[[], bool]) -> Tensor:
        """(J^T J + damping L L^T) step = J^T out, by conjugate gradients in coordinates in which L is 1."""
        push, pull = self._turns(at, out)

        def into(step: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(factor.T, step.T, upper=True).T

        def back(slope: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(factor, slope.T, upper=False).T

        slope = back(pull(out))
        y, rest, direction = torch.zeros_like(slope), slope, slope
        size = whole = float(slope.square().sum())
        for _ in range(INNER[0]):
            if size <= INNER[1] ** 2 * whole or stop():
                break
            turned = back(pull(push(into(direction)))) + damping * direction
            share = size / float((direction * turned).sum())
            y, rest = y + share * direction, rest - share * turned
            before, size = size, float(rest.square().sum())
            direction = rest + size / before * direction
        return into(y)

    def _turns(self, at: Tensor, out: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """v -> J v and u -> J^T u at coordinates where the residual is `out`."""

        def along(v: Tensor) -> Tensor:
            return jvp(self.residual, (at,), (v,))[1]

        if at.numel() * out.numel() > WHOLE:
            back = vjp(self.residual, at)[1]
            return along, lambda u: back(u)[0]
        jacobian = vmap(along, chunk_size=64)(torch.eye(at.numel()).to(at).view(-1, *at.shape)).flatten(1)
        return lambda v: (v.flatten() @ jacobian).view_as(out), lambda u: (jacobian @ u.flatten()).view_as(at)

    @torch.no_grad()
    def _judged(self, at: Tensor) -> Picture:
        patches = self.patches(at)
        fed = self._inputs(patches)
        share = torch.stack([self.spans[at].residual(h) for at, h in fed])
        expected = torch.stack([self.spans[at].expected(h) for at, h in fed])
        if self.plain is not None:
            pairs = zip(fed, self._inputs(patches, self.plain), strict=True)
            rounded = [self.spans[at].stuck(other.double() - h, h) for (at, h), (_, other) in pairs]
            expected = (expected.square() + torch.stack(rounded).square()).sqrt()
        worst = float((share / expected).nan_to_num(torch.inf, torch.inf).max())
        return Picture(patches, worst, worst <= SOLVED and bool((share <= TELLING).all()))


@contextmanager
def derivable() -> Iterator[None]:
    """Attention in a form that has derivatives forwards, and none of torch's words about its own scripts."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        yield
