"""Linear equations G^T X = ∂l/∂W whose numbers were rounded, noisy or lost: solved, and judged.

An entry that overflowed its type is one equation less, not a zero. The attacker can tell whether a solution is right:
the redundant equations must be met as closely as rounding and noise allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from situs.findings import FIT

SUMS = 4.0
"""Sums in float32 over many patches err by up to this many of its roundings (2.6 was measured)."""

OWN = 1e-11
"""The share of the right sides that float64 itself leaves over while solving."""


class Solution(NamedTuple):
    """patches [B, N, K]; rank [B] and condition [B] (infinite below rank N) of G. open [B]: the mean share of a pixel's
    variance that rounding and noise leave uncertain.

    residual [B]: of the whitened right sides, relative; expected [B]: the residual that rounding and noise explain.
    fits [B]: whether the residual is no more than that, and there are redundant equations to tell.
    """

    patches: Tensor
    rank: Tensor
    condition: Tensor
    residual: Tensor
    expected: Tensor
    fits: Tensor
    open: Tensor


class Fit(NamedTuple):
    """residual, expected and fits as in `Solution`, [B] each."""

    residual: Tensor
    expected: Tensor
    fits: Tensor


def solve_pixels(
    weight: Tensor,
    table: Tensor,
    sent: torch.dtype = torch.float32,
    sigma: float = 0.0,
    errs: Tensor | None = None,
) -> Solution:
    """X of ∂l/∂W = G^T X in float64, for a batch of systems, by ridge regression on whitened equations.

    weight: ∂l/∂W, [B, D, K]. table: G, [B, N, D]. Numbers that are not finite make no equation. sent: the type of the
    upload, whose rounding errs in proportion to each number; sigma: deviation of noise that was added to each. errs:
    [B, D], variance of further errors of the right sides.
    The attacker then knows the variance of each equation's error, normalised pixels have a variance near 1, and
    dividing each equation by its deviation makes the ridge 1.
    Directions of G below what noise alone reaches, 1 + √(D/N) after the division, do not count for the rank. Where
    there are more patches than rank, this gives the solution of least norm.
    """
    weight, table = weight.double(), table.double()
    if bool(weight.isfinite().all()):
        return _solve(weight, table, sent, sigma, errs)
    errs = weight.new_zeros(weight.shape[:2]) if errs is None else errs
    solutions = [_by_columns(*system, sent, sigma) for system in zip(weight, table, errs, strict=True)]
    return Solution(*(torch.cat(part) for part in zip(*solutions, strict=True)))


def _by_columns(weight: Tensor, table: Tensor, errs: Tensor, sent: torch.dtype, sigma: float) -> Solution:
    """One system whose columns of ∂l/∂W [D, K] lost different equations: those that lost the same are solved together.

    Rank and condition are those of the worst column.
    """
    patterns, which = weight.isfinite().T.unique(dim=0, return_inverse=True)
    patches = weight.new_zeros(1, len(table), weight.shape[1])
    left = allowed = total = weight.new_zeros(1)
    parts = []
    for number in range(len(patterns)):
        columns = which == number
        system = (weight[None, :, columns], table[None], sent, sigma, errs[None])
        part = _solve(*system)
        patches[..., columns] = part.patches
        square = whiten(*system)[1].square().sum(dim=(1, 2))
        left, allowed = left + part.residual**2 * square, allowed + part.expected**2 * square
        total = total + square
        parts.append(part)
    rank, condition = (torch.stack([getattr(p, name) for p in parts]) for name in ("rank", "condition"))
    fits = torch.stack([part.fits for part in parts]).all(dim=0)
    share = total.clamp(min=1e-300)
    uncertain = torch.stack([part.open for part in parts]).amax(dim=0)
    worst = (rank.amin(0), condition.amax(0))
    return Solution(patches, *worst, (left / share).sqrt(), (allowed / share).sqrt(), fits, uncertain)


def _solve(weight: Tensor, table: Tensor, sent: torch.dtype, sigma: float, errs: Tensor | None) -> Solution:
    white, right = whiten(weight, table, sent, sigma, errs)
    n, d = white.shape[-2:]
    patches, values = _ridge(white, right)
    rank = (values > (1 + (d / n) ** 0.5) ** 2).sum(dim=-1)
    plain = torch.linalg.eigvalsh(_smaller_square(torch.where(white != 0, table, 0.0)))
    condition = torch.where(rank == n, (plain[:, -1] / plain[:, 0].clamp(min=0)).sqrt(), torch.inf)
    known = (values.clamp(min=0) / (1 + values.clamp(min=0))).sum(dim=-1)
    return Solution(patches, rank, condition, *judge(white, right, patches, sent, values), 1 - known / n)


def whiten(
    weight: Tensor,
    table: Tensor,
    sent: torch.dtype = torch.float32,
    sigma: float = 0.0,
    errs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """G [B, N, D] and ∂l/∂W [B, D, K] in float64, each equation divided by its deviation, as in `solve_pixels`.

    An equation with a number that is not finite is all zero.
    """
    weight, table = weight.double(), table.double()
    whole = (weight.isfinite().all(dim=-1) & table.isfinite().all(dim=-2)).unsqueeze(-1)
    weight, table = torch.where(whole, weight, 0.0), torch.where(whole.mT, table, 0.0)
    step = torch.finfo(sent)
    relative = weight.square().mean(dim=-1) + table.square().sum(dim=-2)
    absolute = sigma**2 + (step.smallest_normal * step.eps) ** 2 / 12  # below its normal numbers a type errs evenly
    variance = (step.eps / 2) ** 2 * relative + (1 + table.shape[-2]) * absolute
    variance = variance if errs is None else variance + errs
    scale = torch.where(variance > 0, variance, torch.inf).rsqrt()
    return table * scale.unsqueeze(-2), weight * scale.unsqueeze(-1)


def judge(
    white: Tensor, right: Tensor, patches: Tensor, sent: torch.dtype = torch.float32, values: Tensor | None = None
) -> Fit:
    """How well patches [B, N, K] meet whitened equations white^T X = right, and how well they should.

    With errors of deviation 1 and pixels of variance 1, the expected squared residual of each column's D equations is
    Σ 1 / (1 + λ) over the squared singular values λ of white (`values`, where they are known), 0 for each missing one.
    """
    values = torch.linalg.eigvalsh(_smaller_square(white)) if values is None else values
    values = values.clamp(min=0)
    used = (white != 0).any(dim=-2).sum(dim=-1)
    spare = used - (values / (1 + values)).sum(dim=-1)
    bright = patches.square().mean(dim=(1, 2)).clamp(min=1)
    coarse = torch.finfo(sent).eps / min(torch.finfo(sent).eps, torch.finfo(torch.float32).eps)
    # The share of an equation's deviation that is rounding: with noise its numbers are small after the division.
    rounded = (torch.finfo(sent).eps / 2) ** 2 * (right.square().mean(dim=-1) + white.square().sum(dim=-2))
    uneven = 1 + (SUMS / coarse) ** 2 * rounded.sum(dim=-1) / used.clamp(min=1)
    size = right.flatten(1).norm(dim=1).clamp(min=1e-300)
    expected = (spare.clamp(min=0) * right.shape[-1] * bright * uneven + (OWN * size).square()).sqrt()
    left = (right - white.mT @ patches).flatten(1).norm(dim=1)
    # Behind a layer norm G lacks one direction by construction: that spare equation holds for any pixels.
    return Fit(left / size, expected / size, (spare >= 1.5) & (left <= FIT * expected))


def _smaller_square(table: Tensor) -> Tensor:
    """G G^T or G^T G, whichever is smaller; table: G, [B, N, D]."""
    return table @ table.mT if table.shape[-2] <= table.shape[-1] else table.mT @ table


def _ridge(table: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """X [B, N, K] of G^T X = right with ridge 1, and the squared singular values of G, [B, min(N, D)].

    By eigenvectors of the smaller square: a device computes those of many images at once, but singular vectors one by
    one. Squares lose half of the digits; solving twice more for the residual restores them.
    """
    wide = table.shape[-2] <= table.shape[-1]
    square = _smaller_square(table)
    values, vectors = torch.linalg.eigh(square)
    lost = 4 * torch.finfo(values.dtype).eps * values.shape[-1] * values[:, -1:]
    inverse = vectors @ ((values.clamp(min=0) + lost.clamp(min=1)).reciprocal().unsqueeze(-1) * vectors.mT)
    side = table @ right if wide else right
    solution = inverse @ side
    for _ in range(2):
        solution = solution + inverse @ (side - square @ solution - solution)
    return solution if wide else table @ solution, values


def conjugate(
    matrix: Callable[[Tensor], Tensor],
    right: Tensor,
    steps: int,
    tolerance: float,
    precondition: Callable[[Tensor], Tensor] = lambda residual: residual,
    dims: tuple[int, ...] | None = None,
) -> Tensor:
    """x of matrix(x) = right by conjugate gradients; matrix: positive. Ends at tolerance times the first squared
    residual. dims: over which products are summed, for a batch of systems; None for one system."""

    def dot(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).sum(dim=dims, keepdim=True)

    x, residual = torch.zeros_like(right), right
    scaled = precondition(residual)
    direction, size = scaled, dot(residual, scaled)
    least = tolerance * size
    for _ in range(steps):
        if bool((size <= least).all()):  # one number to the host a round
            break
        product = matrix(direction)
        step = (size / dot(direction, product)).nan_to_num(0.0, 0.0, 0.0)
        x, residual = x + step * direction, residual - step * product
        scaled = precondition(residual)
        before, size = size, dot(residual, scaled)
        direction = scaled + (size / before).nan_to_num(0.0, 0.0, 0.0) * direction
    return x


def svd(matrix: Tensor, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, V^T of one matrix, by NumPy on the host.

    torch's own LAPACK on ARM (NVPL) kills the process on some matrices of rank 1. Where the quicker algorithm does not
    converge, as on some of exactly low rank, the older one does. Infinity and NaN raise LinAlgError.
    """
    array = matrix.detach().cpu().numpy()
    if not np.isfinite(array).all():
        raise np.linalg.LinAlgError("the matrix contains infinity or NaN")
    try:
        parts = np.linalg.svd(array, full_matrices=full)
    except np.linalg.LinAlgError:
        parts = scipy.linalg.svd(array, full_matrices=full, lapack_driver="gesvd")
    u, s, v = (torch.from_numpy(np.ascontiguousarray(part)).to(matrix.device) for part in parts)
    return u, s, v
