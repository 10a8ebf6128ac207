"""Tokens that linear equations leave open: Levenberg-Marquardt on what the MLP's activation tells apart.

A token's a = late(m) must lie in the row space of the gradient of the MLP's last layer. Sums of tokens pass every
linear test and not this one. Places whose tokens are told apart by nothing but their content share their equations:
their tokens are several roots of one system, and those that are found are kept out by functionals that vanish on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vmap

from situs.audit.attacks.patchembed.equations import svd
from situs.audit.attacks.spans import SOLVED, TELLING, Span
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import Family, Spans, Tokens, misfit

ABREAST = 2**24
"""Numbers of a Jacobian that are held at a time."""

OUTSIDE = 1e-3
"""The weight of pixels beyond what bytes can be, beside the share of a token that sticks out."""

SHARP = 3e-2
"""A token proves nothing if noise alone moves its pixels by more than this, in units of normalised pixels."""


@dataclass(frozen=True)
class Effort:
    """How long it tries: rounds of starts, starts of each place in a round, steps of a search."""

    rounds: int = 12
    starts: int = 1
    steps: int = 30
    loose: int = 0
    """Weak directions that are searched beside those that are open."""


class Range(NamedTuple):
    """What a pixel can be, [K] each."""

    low: Tensor
    high: Tensor

    @property
    def width(self) -> float:
        """From the least to the most, the mean."""
        return float((self.high - self.low).mean())


class Found(NamedTuple):
    """φ [Q, f] and fit [Q]: how many times more of a token sticks out than noise explains."""

    phi: Tensor
    fit: Tensor


class Search:
    """What stays the same while one upload is searched."""

    def __init__(
        self,
        block: Block,
        spans: Spans,
        late: Span,
        family: Family,
        pixels: Range,
        effort: Effort | None = None,
        stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.block, self.spans, self.span, self.family, self.pixels = block, spans, late, family, pixels
        self.effort, self.stop, self.say = effort or Effort(), stop, say
        self.chance = torch.Generator().manual_seed(0)
        weight, bias = block.entry()
        norm = block.norm2
        self._still = norm.form(family.fixed.m) @ weight.T  # [N, H']
        self._moved = norm.form(family.along.m) @ weight.T  # [f, H']
        self._added = bias if norm.bias is None else bias + norm.bias @ weight.T
        self._centre = [
            m - m.mean(dim=-1, keepdim=True) if norm.centred else m for m in (family.fixed.m, family.along.m)
        ]
        self._across = torch.cat([family.along.x, 1e-3 * family.along.o], dim=1)
        self._inverse = torch.linalg.pinv(self._across, rtol=1e-12)

    def start(self, places: Tensor, x: Tensor) -> Tensor:
        """φ of tokens whose patches are near x [Q, K], with as little attention as can be."""
        fixed = self.family.fixed.at(places)
        return torch.cat([x - fixed.x, -1e-3 * fixed.o], dim=1) @ self._inverse

    def late(self, places: Tensor, phi: Tensor) -> Tensor:
        """a of tokens, [Q, H]."""
        return self.block.tail(self._entered(places, phi)[0])

    def _entered(self, places: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the MLP's first layers give [Q, H'], its part without biases, and s [Q, 1] and ds [Q, f]."""
        still, moved = self._centre
        centred = still[places] + phi @ moved
        size = (centred.square().mean(dim=1, keepdim=True) + self.block.norm2.eps).sqrt()
        bare = (self._still[places] + phi @ self._moved) / size
        turn = centred @ moved.T / (centred.shape[1] * size)
        return bare + self._added, bare, size, turn

    def residuals(self, places: Tensor, phi: Tensor, functionals: Tensor | None) -> tuple[Tensor, Tensor]:
        """What sticks out over the token's size, [Q, H], and its derivative by φ, [Q, f, H]."""
        entered, bare, size, turn = self._entered(places, phi)
        pushed = (self._moved - bare.unsqueeze(1) * turn.unsqueeze(-1)) / size.unsqueeze(-1)  # [Q, f, H']

        def along(direction: Tensor) -> Tensor:
            return jvp(self.block.tail, (entered,), (direction,))[1]

        span = self.span
        a = self.block.tail(entered) * span.column
        da = vmap(along, in_dims=1, out_dims=1)(pushed) * span.column
        inside, d_inside = a @ span.inside.T, da @ span.inside.T
        out, d_out = a - inside @ span.inside, da - d_inside @ span.inside
        if functionals is not None:
            inside, d_inside = inside @ functionals.T, d_inside @ functionals.T
        scale = inside.norm(dim=1, keepdim=True).clamp(min=1e-300)
        d_scale = (d_inside * (inside / scale).unsqueeze(1)).sum(dim=-1, keepdim=True)
        out = out / scale
        return out, (d_out - d_scale * out.unsqueeze(1)) / scale.unsqueeze(1)

    def _normal(self, places: Tensor, phi: Tensor, functionals: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cost [Q], slope [Q, f] and normal matrix [Q, f, f], pixels that no byte has included."""
        out, jacobian = self.residuals(places, phi, functionals)
        x = self.family.fixed.x[places] + phi @ self.family.along.x
        over = (x - self.pixels.high).clamp(min=0) + (x - self.pixels.low).clamp(max=0)
        count = x.shape[1]
        cost = out.square().sum(dim=1) + OUTSIDE**2 * over.square().sum(dim=1) / count
        slope = (jacobian @ out.unsqueeze(-1)).squeeze(-1) + OUTSIDE**2 / count * over @ self.family.along.x.T
        active = (over != 0).to(x)
        bound = torch.einsum("fk,qk,gk->qfg", self.family.along.x, active, self.family.along.x)
        return cost, slope, jacobian @ jacobian.mT + OUTSIDE**2 / count * bound

    def run(self, places: Tensor, phi: Tensor, functionals: Tensor | None = None) -> Found:
        """Levenberg-Marquardt for many tokens at once, each with its own f unknowns.

        functionals: [k, r]; residuals are divided by their size at the token, so that no token comes to rest where they
        vanish. Without them, by the token's own size.
        """
        side = max(1, ABREAST // (phi.shape[1] * self.span.column.shape[0]))
        with warnings.catch_warnings():
            # torch scripts some of its forward derivatives, and warns of its own scripts.
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
            pairs = zip(places.split(side), phi.split(side), strict=True)
            parts = [self._run(p, f, functionals) for p, f in pairs]
        return Found(torch.cat([part.phi for part in parts]), torch.cat([part.fit for part in parts]))

    def _run(self, places: Tensor, phi: Tensor, functionals: Tensor | None) -> Found:
        damping = torch.full_like(phi[:, 0], 1e-2)
        cost, slope, normal = self._normal(places, phi, functionals)
        active = torch.arange(len(places), device=phi.device)
        phi, stuck = phi.clone(), torch.zeros_like(places)
        for _ in range(self.effort.steps):
            if self.stop() or not len(active):
                break
            part = normal[active]
            diagonal = part.diagonal(dim1=1, dim2=2)
            bend = damping[active].unsqueeze(-1) * (diagonal + 1e-3 * diagonal.mean(dim=1, keepdim=True))
            least = 1e-14 * diagonal.amax(dim=1, keepdim=True) + 1e-300
            moved = phi[active] - torch.linalg.solve(part + torch.diag_embed(bend + least), slope[active])
            after = self._normal(places[active], moved, functionals)
            better = after[0] < cost[active]
            kept = active[better]
            gain = 1 - after[0][better] / cost[kept].clamp(min=1e-300)
            phi[kept], cost[kept] = moved[better], after[0][better]
            slope[kept], normal[kept] = after[1][better], after[2][better]
            damping[active] = torch.where(better, damping[active] * 0.2, damping[active] * 5).clamp(1e-12, 1e6)
            stuck[active] += 1
            stuck[kept] = torch.where(gain > 1e-3, 0, stuck[kept])
            active = active[stuck[active] < 5]
        return Found(phi, self.fit(places, phi, normal))

    def fit(self, places: Tensor, phi: Tensor, normal: Tensor) -> Tensor:
        """How many times more of tokens sticks out than noise explains, [Q]; infinite where that proves nothing."""
        tokens = self.family.tokens(places, phi)
        a = self.late(places, phi)
        linear = misfit(self.block, self.spans, tokens)
        residual = self.span.residual(a)
        # What the linear spans leave uncertain of a token goes through the MLP as well.
        expected = (self.span.expected(a).square() + linear.second_expected.square()).sqrt()
        fit = (residual / expected).nan_to_num(torch.inf)
        over = torch.maximum(tokens.x - self.pixels.high, self.pixels.low - tokens.x).amax(dim=1)
        span = self.pixels.width
        proves = (residual <= TELLING) & (over <= span / 4) & (self._blur(expected, normal) <= SHARP * span)
        return torch.where(proves, fit, SOLVED * (2 + fit))

    def _blur(self, expected: Tensor, normal: Tensor) -> Tensor:
        """How far noise moves a pixel of a token, [Q]: the deviation of least squares."""
        values, vectors = torch.linalg.eigh(normal.nan_to_num())
        values = values.clamp(min=1e-14 * values.amax(dim=1, keepdim=True)).clamp(min=1e-300)
        spread = (vectors.mT @ self.family.along.x).square().sum(dim=-1)
        outside = self.span.column.shape[0] - self.span.rank
        return expected * ((spread / values).sum(dim=-1) / (outside * self.family.along.x.shape[1])).sqrt()

    def functionals(self, seen: Tensor) -> Tensor | None:
        """A basis of the functionals on the last layer's span that vanish on inputs that were seen [k, H]."""
        if not len(seen):
            return None
        inside = (seen * self.span.column) @ self.span.inside.T
        inside = inside / inside.norm(dim=1, keepdim=True)
        return svd(inside, full=True)[2][min(len(inside), self.span.rank - 1) :]

    def tokens(self, places: Tensor, phi: Tensor) -> Tokens:
        return self.family.tokens(places, phi)
