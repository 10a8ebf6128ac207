"""The attacker on tokens that were exchanged within a batch: places first, then whose patch fits beside whose.

What a picture shows goes on across the border of two patches. The last lines of one predict the first lines of the next
by a regression on public images; the tokens of one place are given to the samples by how well they fit the neighbours
that are given already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

LINES = 2
_RIDGE = 1e-4


@dataclass(frozen=True)
class Fit:
    """first ≈ centre + last @ weights, with what is left distributed as `inverse`⁻¹; for one direction."""

    weights: Tensor
    centre: Tensor
    inverse: Tensor

    def cost(self, last: Tensor, first: Tensor) -> Tensor:
        """[A, B]: how badly each of `first` [B, F] goes on from each of `last` [A, F]."""
        left = first[None] - (self.centre + last @ self.weights)[:, None]
        return torch.einsum("abf,fg,abg->ab", left, self.inverse, left)


@dataclass(frozen=True)
class Borders:
    """Patches [.., P] as [height, width, channels], and the fits down (0) and to the right (1)."""

    shape: tuple[int, int, int]
    grid: tuple[int, int]
    fits: tuple[Fit, Fit]

    @classmethod
    def of(cls, patches: Tensor, shape: tuple[int, int, int], grid: tuple[int, int]) -> Borders:
        """Fitted on public images, as patches [m, N, P]."""
        placed = patches.double().unflatten(1, grid)
        down = _fit(_edge(placed[:, :-1], shape, 0, False), _edge(placed[:, 1:], shape, 0, True))
        right = _fit(_edge(placed[:, :, :-1], shape, 1, False), _edge(placed[:, :, 1:], shape, 1, True))
        return cls(shape, grid, (down, right))

    def group(self, patches: Tensor, places: Tensor, count: int) -> Tensor:
        """[M]: the sample, 0 to count - 1 and without its name, of M = count · N patches [M, P] at `places` [M]."""
        at = [(places == place).nonzero()[:, 0] for place in range(self.grid[0] * self.grid[1])]
        edges = {(axis, first): _edge(patches, self.shape, axis, first) for axis in (0, 1) for first in (True, False)}
        found = torch.full((len(patches),), -1, dtype=torch.long)
        start = (self.grid[0] // 2) * self.grid[1] + self.grid[1] // 2
        found[at[start]] = torch.arange(len(at[start]))
        done, waiting = {start}, set(self._beside(start))
        while waiting:
            # The place with the most neighbours that are given already, so that as much as can be decides.
            place = max(sorted(waiting), key=lambda each: sum(n in done for n in self._beside(each)))
            cost = torch.zeros(len(at[place]), count, dtype=torch.float64)
            for other, (axis, after) in self._beside(place).items():
                if other not in done:
                    continue
                mine, theirs = edges[axis, not after][at[place]], edges[axis, after][at[other]]
                pair = self.fits[axis].cost(mine, theirs) if after else self.fits[axis].cost(theirs, mine).T
                cost[:, found[at[other]]] += pair
            rows, chosen = linear_sum_assignment(cost.numpy())
            found[at[place][torch.from_numpy(rows)]] = torch.from_numpy(chosen)
            done.add(place)
            waiting = (waiting | set(self._beside(place))) - done
        return found

    def _beside(self, place: int) -> dict[int, tuple[int, bool]]:
        """The places beside one: (axis, whether it comes after)."""
        height, width = self.grid
        row, column = divmod(place, width)
        beside = {}
        for axis, by in ((0, 1), (0, -1), (1, 1), (1, -1)):
            r, c = (row + by, column) if axis == 0 else (row, column + by)
            if 0 <= r < height and 0 <= c < width:
                beside[r * width + c] = (axis, by > 0)
        return beside


def _edge(patches: Tensor, shape: tuple[int, int, int], axis: int, first: bool) -> Tensor:
    """The first or last lines of patches [..., P] along an axis, flat, [..., F]."""
    placed = patches.double().unflatten(-1, shape)
    side = placed.shape[-3 + axis]
    return placed.narrow(-3 + axis, 0 if first else side - LINES, LINES).flatten(-3)


def _fit(last: Tensor, first: Tensor) -> Fit:
    x, y = last.flatten(0, -2), first.flatten(0, -2)
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    mx, my = x.mean(dim=0), y.mean(dim=0)
    weights = torch.linalg.solve((x - mx).T @ (x - mx) / len(x) + _RIDGE * eye, (x - mx).T @ (y - my) / len(x))
    left = y - my - (x - mx) @ weights
    return Fit(weights, my - mx @ weights, torch.linalg.inv(left.T @ left / len(left) + _RIDGE * eye))
