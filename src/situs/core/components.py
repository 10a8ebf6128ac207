"""Positions from the principal components of a table of vectors, without a host sync."""

# pyright: basic
# (`torch.linalg` has no types)

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 16
"""Power iterations for the principal components; the published code does 5 from a random start."""


@torch.no_grad()
def principal_axes(table: Tensor, count: int, rounds: int = _ROUNDS, mask: Tensor | None = None) -> Tensor:
    """The first principal directions of a table [N, D], [D, count], orthonormal, the greatest first.

    By power iteration with orthogonalisation, since a solver would sync with the host; it starts from the directions
    of the largest rows, and a direction's largest entry is positive. mask: [B, N], the rows each sample leaves out;
    then [B, D, count].
    """
    # Each sample's rows are never copied out: what is linear in them is computed on the whole table and masked.
    known = table.new_ones(table.shape[0]) if mask is None else (~mask).to(table.dtype)
    table = table - table.mean(dim=0)
    mean = (known @ table / known.sum(dim=-1, keepdim=True).clamp(min=1.0)).unsqueeze(-2)
    sizes = (table.square().sum(dim=-1) - 2.0 * (mean @ table.T).squeeze(-2) + mean.square().sum(dim=-1)) * known
    start = table[sizes.topk(count, dim=-1).indices] - mean
    # Two rows may point the same way: a little of the identity keeps the start from losing a dimension.
    little = 1e-3 * start.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    axes = start.mT + little * torch.eye(table.shape[1], count, device=table.device, dtype=table.dtype)
    for _ in range(rounds):
        scores = (table @ axes - mean @ axes) * known.unsqueeze(-1)
        axes = _orthonormal(table.T @ scores - mean.mT * scores.sum(dim=-2, keepdim=True))
    peak = axes.gather(-2, axes.abs().argmax(dim=-2, keepdim=True))
    return axes * peak.sign()


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram–Schmidt on the columns of [..., D, k], k small."""
    done: list[Tensor] = []
    for column in columns.unbind(dim=-1):
        for other in done:
            column = column - (other * column).sum(dim=-1, keepdim=True) * other
        done.append(column / column.square().sum(dim=-1, keepdim=True).sqrt().clamp(min=1e-30))
    return torch.stack(done, dim=-1)


def principal_guesses(
    table: Tensor, targets: Tensor, count: int, *, fit: bool = True, mask: Tensor | None = None
) -> Tensor:
    """The non-parametric g: places from the table's principal components, [N, 2].

    fit: principal component regression: an affine least-squares map of the scores on the first `count` components to
    the grid, from the whole table. Without it the first two scores are taken as row and column, on components of the
    rows that are not masked (mask: [B, N]; then [B, N, 2]), as in the published code. Components and map are constants
    to the gradient: the derivative of a decomposition explodes where two of its values are equal, as those of rows and
    columns are on a grid.
    """
    if not fit:
        return table @ principal_axes(table.detach(), targets.shape[1], mask=mask)
    axes = principal_axes(table.detach(), count)
    targets = targets.to(table.dtype)
    with torch.no_grad():
        mean, centre = table.mean(dim=0), targets.mean(dim=0)
        scores = (table - mean) @ axes
        gram = scores.T @ scores
        ridge = torch.eye(count, device=table.device, dtype=table.dtype) * (1e-12 * gram.trace() + 1e-30)
        # `solve` would sync to check for a singular matrix; the ridge rules one out.
        fitted = axes @ torch.linalg.solve_ex(gram + ridge, scores.T @ (targets - centre))[0]
    return (table - mean) @ fitted + centre
