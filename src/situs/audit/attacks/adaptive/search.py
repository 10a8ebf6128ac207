"""One token among many starts: Levenberg-Marquardt within the family that everything linear leaves it.

A token's a = late(m) must lie in the row space of the gradient of the MLP's last layer. What sticks out is the
residual; where no more of it is left than noise explains, and noise explains little, the token is proven.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vmap

from situs.audit.attacks.adaptive.algebra import Partly
from situs.audit.attacks.adaptive.block import FirstBlock
from situs.audit.attacks.spans import SOLVED, TELLING
from situs.audit.attacks.tokens.descent import blur, descend
from situs.audit.deadline import Deadline

SHARP = 3e-3
"""A token proves nothing that noise alone moves by more than this share of `Trial.loud`: where the MLP is
nearly linear (a gate that is still shut), every token of the family fits."""

DOUBTFUL = SOLVED * (1 + SOLVED)
"""Up to this fit a token is one that noise explains, though nothing proves it: a guess, but better than smoothness."""

ABREAST = 2**25
"""Numbers of a Jacobian that are held at a time."""


@dataclass(frozen=True)
class Effort:
    """How long the attacker tries: rounds for the shown and for the hidden patches, steps of a search, starts of
    hidden patches in a round and of each shown patch that does not fit yet."""

    rounds: int = 12
    steps: int = 24
    starts: int = 48
    retries: int = 6
    loose: int = 16
    """Weak directions that are searched at most."""


class TokenFit(NamedTuple):
    """What is known of each token, [N, ·]: θ, or φ of its family; and its fit [N]: how many times more of it sticks
    out than noise explains, infinite where nobody tried."""

    at: Tensor
    fit: Tensor

    def solved(self, among: Tensor) -> Tensor:
        """Which of these places fit."""
        return among[self.fit[among] <= SOLVED]


class Family(NamedTuple):
    """The tokens that everything linear allows: m = fixed + φ along, θ = start + φ turn, for φ [f] of each token."""

    fixed: Tensor
    along: Tensor
    start: Tensor
    turn: Tensor

    def theta(self, places: Tensor, phi: Tensor) -> Tensor:
        return self.start[places] + phi @ self.turn

    def phi(self, places: Tensor, theta: Tensor) -> Tensor:
        """The φ whose θ is nearest."""
        return (theta - self.start[places]) @ torch.linalg.pinv(self.turn)

    def streams(self, places: Tensor, phi: Tensor) -> Tensor:
        return self.fixed[places] + phi @ self.along


@dataclass(frozen=True)
class Trial:
    """What stays the same while the tokens of one image are solved for. loud: the size of θ that no picture has."""

    block: FirstBlock
    family: Family
    partly: Partly
    loud: float
    effort: Effort
    deadline: Deadline
    chance: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def hidden(self) -> Tensor:
        """The hidden places, [m]."""
        return self.partly.hidden.nonzero()[:, 0]

    @property
    def shown(self) -> Tensor:
        """The shown places, [N - m]."""
        return (~self.partly.hidden).nonzero()[:, 0]

    @property
    def everywhere(self) -> Tensor:
        return torch.arange(len(self.partly.base), device=self.partly.base.device)


def search(trial: Trial, places: Tensor, phi: Tensor, functionals: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt for many tokens at once, each with its own f unknowns: φ [Q, f], and its fit [Q].

    places: [Q], whose family a token is of. functionals: [k, T]; the residual is divided by their size at the token,
    which lets no token come to rest where they vanish. Without them, by the token's own size.
    """
    side = max(1, ABREAST // (phi.shape[1] * trial.block.fc2.column.shape[0]))
    with warnings.catch_warnings():
        # torch scripts some of its forward derivatives, and warns of its own scripts.
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        parts = [_search(trial, p, f, functionals) for p, f in zip(places.split(side), phi.split(side), strict=True)]
    return torch.cat([at for at, _ in parts]), torch.cat([fit for _, fit in parts])


def _search(trial: Trial, places: Tensor, phi: Tensor, functionals: Tensor | None) -> tuple[Tensor, Tensor]:
    def normal(rows: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, jacobian = _residuals(trial.block, trial.family, places[rows], phi, functionals)
        return out.square().sum(dim=1), (jacobian @ out.unsqueeze(-1)).squeeze(-1), jacobian @ jacobian.mT

    phi = descend(normal, phi, trial.effort.steps, trial.deadline.over)[0]
    return phi, _fit(trial, places, phi)


def _fit(trial: Trial, places: Tensor, phi: Tensor) -> Tensor:
    """How many times more of tokens sticks out than noise explains, [Q]; infinite where that proves nothing."""
    span = trial.block.fc2
    late = trial.block.late(trial.family.streams(places, phi))
    residual, expected = span.residual(late), span.expected(late)
    picture = trial.family.theta(places, phi).norm(dim=1) <= trial.loud
    fit = (residual / expected).nan_to_num(torch.inf)
    # What proves nothing is no fit, but it keeps its rank among the others that are none (`DOUBTFUL`).
    jacobian = _residuals(trial.block, trial.family, places, phi, None)[1]
    moved = expected * blur(jacobian @ jacobian.mT, trial.family.turn, span)
    proves = (residual <= TELLING) & (moved <= SHARP * trial.loud)
    return torch.where(picture, torch.where(proves, fit, SOLVED * (1 + fit)), torch.inf)


def _residuals(
    block: FirstBlock, family: Family, places: Tensor, phi: Tensor, functionals: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What sticks out of the last layer's span over the token's size, [Q, H], and its derivative by φ, [Q, f, H]."""
    span = block.fc2
    m = family.streams(places, phi)

    def along(direction: Tensor) -> Tensor:
        return jvp(block.late, (m,), (direction.expand_as(m),))[1]

    late, turned = block.late(m), vmap(along, out_dims=1)(family.along)
    a, da = late * span.column, turned * span.column
    inside, d_inside = a @ span.inside.T, da @ span.inside.T
    out, d_out = a - inside @ span.inside, da - d_inside @ span.inside
    if functionals is not None:
        inside, d_inside = inside @ functionals.T, d_inside @ functionals.T
    size = inside.norm(dim=1, keepdim=True).clamp(min=1e-300)
    d_size = (d_inside * (inside / size).unsqueeze(1)).sum(dim=-1, keepdim=True)
    out = out / size
    return out, (d_out - d_size * out.unsqueeze(1)) / size.unsqueeze(1)
