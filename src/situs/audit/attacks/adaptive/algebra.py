"""What algebra alone gives from the gradients of an MJP step with one image: all but a few directions of each patch.

The tokens of shown patches got their own row of the table, so their gradients G_u are in the upload. Hidden patches
share E_unk, so only the sum of their gradients is there. With ∂W = G_u^T X_u + G_h^T X_h:

- Outside the span of G_u only hidden patches are left, so the row space of that part of ∂W is the span of the m hidden
  patches, and the same part of ∂E_unk gives the affine hull in it that all m lie on: a + span(Z), m - 1 wide.
- Across Z every patch is then known exactly: the hidden ones are a, the shown ones solve G_u^T X_u = ∂W - ∂E_unk a^T.

N × (m - 1) numbers stay open: how far each patch goes along Z. With one hidden patch there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.patchembed.equations import solve_pixels, svd
from situs.core.tokens import patchify, unpatchify


class Partly(NamedTuple):
    """patches = base + θ Z for some θ [N, r]: base [N, K], across Z; Z [r, K], orthonormal; hidden [N] bool."""

    base: Tensor
    z: Tensor
    hidden: Tensor

    def patches(self, theta: Tensor) -> Tensor:
        """The patches [N, K] for θ [N, r]."""
        return self.base + theta @ self.z


def separate(
    rows: Tensor,
    weight: Tensor,
    unknown: Tensor | None,
    hidden: Tensor,
    sent: torch.dtype = torch.float32,
    sigma: float = 0.0,
) -> Partly:
    """The part of each patch that is known exactly, and the open directions Z. All in float64.

    rows: ∂l/∂E_pos on the patch rows without the gradient of a loss on the table itself, [N, D]. weight: ∂l/∂W, [D, K].
    unknown: ∂l/∂E_unk, [D], or None where it is not sent (Z is then one direction wider). hidden: [N] bool. sent and
    sigma: as in `solve_pixels`.
    """
    rows, weight = rows.double(), weight.double()
    shown = rows[~hidden]
    count = int(hidden.sum())
    spread = _deviation(shown, weight, sent, sigma)
    # Each equation (channel) divided by its error's deviation: what then exceeds 1 is no noise.
    basis = svd(shown / spread)[2]
    rest = _outside(weight / spread.unsqueeze(-1), basis)
    _, values, directions = svd(rest)
    free = max(rest.shape[0] - basis.shape[0], 1)
    noise = max(4 * (free**0.5 + rest.shape[1] ** 0.5), 1e-13 * float(values.max()))
    rank = int((values[:count] > noise).sum())
    span = directions[:rank]
    anchor, z = weight.new_zeros(weight.shape[1]), span
    if unknown is not None and rank:
        total = unknown.double()
        inside = _outside((total / spread).unsqueeze(-1), basis)
        normal = torch.linalg.pinv(rest @ span.T) @ inside
        # With more hidden patches than pixels in a patch no hyperplane goes through all of them.
        if float((rest @ span.T @ normal - inside).norm()) < 1e-2 * float(inside.norm()):
            normal = normal[:, 0]
            anchor = normal @ span / (normal @ normal)
            z = svd(normal.unsqueeze(0), full=True)[2][1:] @ span  # across it
            weight = weight - torch.outer(total, anchor)
    across = weight - (weight @ z.T) @ z
    base = anchor.expand(len(rows), -1).clone()
    if len(shown):
        base[~hidden] = solve_pixels(across.unsqueeze(0), shown.unsqueeze(0), sent, sigma).patches[0]
        base[~hidden] -= (base[~hidden] @ z.T) @ z
    return Partly(base, z, hidden)


def _deviation(shown: Tensor, weight: Tensor, sent: torch.dtype, sigma: float) -> Tensor:
    """The deviation of equation d's error, [D]: rounding in proportion to each number, and noise that was added."""
    relative = weight.square().mean(dim=-1) + shown.square().sum(dim=-2)
    variance = (torch.finfo(sent).eps / 2) ** 2 * relative + (1 + len(shown)) * sigma**2
    least = 1e-12 * variance.max() + torch.finfo(torch.float64).tiny
    return variance.clamp(min=float(least)).sqrt()


def _outside(columns: Tensor, basis: Tensor) -> Tensor:
    """The part of columns [D, ·] outside the span of an orthonormal basis [k, D]."""
    return columns - basis.T @ (basis @ columns)


# --- neighbouring pixels are alike: a first guess of θ ------------------------------------------------------------


class Smoothness:
    """The sum of squared differences of neighbouring pixels, as a quadratic form on patches [N, K].

    Pairs between a hidden place and another place do not count: the patch there is not known. size: of a patch.
    """

    def __init__(self, hidden: Tensor, grid: tuple[int, ...], size: tuple[int, int], values: int) -> None:
        self.grid, self.size = grid, size
        owner = torch.arange(len(hidden), device=hidden.device, dtype=torch.float64)
        owner = unpatchify(owner.view(1, -1, 1).expand(-1, -1, values).contiguous(), grid, size)[0].long()
        covered = hidden[owner]
        self.pairs = []
        for dim in (-1, -2):
            n = owner.shape[dim] - 1
            same = owner.narrow(dim, 0, n) == owner.narrow(dim, 1, n)
            self.pairs.append((same | ~(covered.narrow(dim, 0, n) | covered.narrow(dim, 1, n))).double())
        self.count = float(sum(pair.sum() for pair in self.pairs))

    def energy(self, patches: Tensor) -> Tensor:
        """The sum of squared differences."""
        image = self._image(patches)
        parts = [(pair * image.diff(dim=dim).square()).sum() for dim, pair in zip((-1, -2), self.pairs, strict=True)]
        return torch.stack(parts).sum()

    def gradient(self, patches: Tensor) -> Tensor:
        """Half the derivative of `energy`, [N, K]: linear in the patches."""
        image = self._image(patches)
        out = torch.zeros_like(image)
        for dim, pair in zip((-1, -2), self.pairs, strict=True):
            step = pair * image.diff(dim=dim)
            out.narrow(dim, 0, step.shape[dim]).sub_(step)
            out.narrow(dim, 1, step.shape[dim]).add_(step)
        return patchify(out.unsqueeze(0), self.size)[0]

    def _image(self, patches: Tensor) -> Tensor:
        return unpatchify(patches.unsqueeze(0), self.grid, self.size)[0]


def smoothest(partly: Partly, smooth: Smoothness, theta: Tensor | None = None, free: Tensor | None = None) -> Tensor:
    """θ [N, r] of the smoothest image; with `free` [N] bool, only those patches move and the others stay at `theta`."""
    z = partly.z
    theta = z.new_zeros(len(partly.base), len(z)) if theta is None else theta
    move = torch.ones_like(partly.hidden) if free is None else free
    keep = move.unsqueeze(-1).to(z.dtype)

    def apply(step: Tensor) -> Tensor:
        return keep * (smooth.gradient((keep * step) @ z) @ z.T) + 1e-4 * step

    start = keep * (smooth.gradient(partly.patches(theta)) @ z.T)
    return theta + keep * conjugate(apply, -start, 200, 1e-10)


def conjugate(apply: Callable[[Tensor], Tensor], right: Tensor, rounds: int, tolerance: float) -> Tensor:
    """x of A x = right by conjugate gradients; apply: x -> A x, A positive. Ends at tolerance · |right|²."""
    x, rest = torch.zeros_like(right), right
    direction, size = rest, rest.square().sum()
    goal = tolerance * size
    for _ in range(rounds):
        if float(size) <= float(goal):  # one number to the host a round
            break
        image = apply(direction)
        step = size / (direction * image).sum()
        x, rest = x + step * direction, rest - step * image
        size, before = rest.square().sum(), size
        direction = rest + size / before * direction
    return x
