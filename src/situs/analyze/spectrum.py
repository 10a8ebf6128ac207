"""How many directions a table of positions fills (MJP: Definition 1, Table 6, Figure 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """Shares of a table P [N, D], one for each of its min(N, D) directions, the largest first.

    explained: of the variance, by principal component (σᵢ² of the centred P over their sum), not accumulated. energy:
    of Σσ² that the first n singular values of P as it is hold, accumulated.
    """

    explained: tuple[float, ...]
    energy: tuple[float, ...]

    def explained_by(self, count: int) -> float:
        """The share of the variance that the first `count` components explain (Table 6)."""
        return sum(self.explained[:count])

    def components_for(self, share: float) -> int:
        """How many components explain at least `share` of the variance."""
        total = 0.0
        for count, part in enumerate(self.explained, start=1):
            total += part
            if total >= share - 1e-12:
                return count
        return len(self.explained)


def spectrum(table: Tensor) -> Spectrum:
    """The spectrum of a table [N, D] of patch places; a prefix token's own row belongs to no place and stays out.

    Definition 1 gives Σσ(PV)²/Σσ(P)². Table 6 speaks of PCA, which centres P; Figure 4 of the singular values of P,
    which does not: each is taken as it says.
    """
    explained = _squares(table - table.mean(dim=0))
    energy = _squares(table)
    return Spectrum(tuple(explained.tolist()), tuple(energy.cumsum(0).tolist()))


def _squares(table: Tensor) -> Tensor:
    """The squared singular values, as shares of their sum."""
    values = torch.linalg.svdvals(table.double()).square()
    return values / values.sum()
