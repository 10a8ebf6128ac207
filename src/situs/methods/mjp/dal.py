"""MJP's dense absolute localisation (DAL): regress (row, column) from the position vectors themselves.

L_DAL = E ‖(i, j) - g(E_pos^{i,j})‖₁ over the places that kept their vector. g is the same for every sample and its
input is the table, so it runs once over the N rows, whatever the batch: a sample only chooses which errors count.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.errors import SitusError

DalKind = Literal["none", "pca", "linear", "nonlinear"]

COMPONENTS = 2
"""Principal components that the regression by them has."""

_ROUNDS = 16
"""Power iterations of the principal components; the published code takes 5 from a random start."""


class Regressor(NamedTuple):
    """How places are regressed. depth: linear layers of a nonlinear g, ReLU between them. fit: whether principal
    components are brought to the grid by least squares. mean_axes: the mean over row and column, not their sum."""

    depth: int = 3
    fit: bool = True
    mean_axes: bool = False


def dal_loss(guesses: Tensor, targets: Tensor, mask: Tensor | None, *, mean_axes: bool = False) -> Tensor:
    """The L1 error of the unmasked places: a mean over each sample's, then over the batch.

    guesses: [N, 2], or [B, N, 2] where each sample has its own; targets: [N, 2]. mask: bool [B, N], True where a place
    lost its vector; None where none did.
    mean_axes: the mean over both axes instead of their sum ‖·‖₁. A sample with every place masked adds 0.
    """
    errors = (guesses - targets.to(guesses.dtype)).abs()
    errors = errors.mean(dim=-1) if mean_axes else errors.sum(dim=-1)
    if mask is None:
        return errors.mean()
    known = (~mask).to(errors.dtype)
    return ((known * errors).sum(dim=-1) / known.sum(dim=-1).clamp(min=1.0)).mean()


@torch.no_grad()
def principal_axes(table: Tensor, count: int, rounds: int = _ROUNDS, mask: Tensor | None = None) -> Tensor:
    """The first principal directions of a table [N, D], [D, count], orthonormal, the greatest first.

    By power iteration with orthogonalisation, so that no solver makes the host wait; it starts from the directions
    of the largest rows, and a direction's largest entry is positive. mask: [B, N], the rows each sample leaves out;
    then [B, D, count].
    """
    # The rows each sample has are never copied out: what is linear in them is reckoned on the whole table and masked.
    known = table.new_ones(table.shape[0]) if mask is None else (~mask).to(table.dtype)
    table = table - table.mean(dim=0)
    mean = (known @ table / known.sum(dim=-1, keepdim=True).clamp(min=1.0)).unsqueeze(-2)
    sizes = (table.square().sum(dim=-1) - 2.0 * (mean @ table.T).squeeze(-2) + mean.square().sum(dim=-1)) * known
    start = table[sizes.topk(count, dim=-1).indices] - mean
    # Two rows may point the same way: a little of the identity keeps the start from losing a dimension.
    little = 1e-3 * start.norm(dim=(-2, -1), keepdim=True)
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
        done.append(column / column.norm(dim=-1, keepdim=True).clamp(min=1e-30))
    return torch.stack(done, dim=-1)


def principal_guesses(
    table: Tensor, targets: Tensor, count: int, *, fit: bool = True, mask: Tensor | None = None
) -> Tensor:
    """The non-parametric g: places from the table's principal components, [N, 2].

    fit: principal component regression: the scores on the first `count` components are brought to the grid by the
    affine map of least squares, found anew from the whole table. Without it the first two scores stand for row and
    column as they are, on components of the rows that are not masked (mask: [B, N]; then [B, N, 2]), which is what the
    published code compares. Components and map are constants to the gradient: the derivative of a decomposition
    explodes where two of its values meet, and on a grid rows and columns do.
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
        # `solve` would make the host wait to learn whether the matrix was singular; the ridge keeps it from being so.
        fitted = axes @ torch.linalg.solve_ex(gram + ridge, scores.T @ (targets - centre))[0]
    return (table - mean) @ fitted + centre


class Dal(nn.Module):
    """g over the backbone's table. kind: pca (no weights), linear or nonlinear."""

    def __init__(self, backbone: Backbone, kind: DalKind, regressor: Regressor) -> None:
        super().__init__()
        require_table(backbone)
        self.kind, self.fit = kind, regressor.fit
        widths = [backbone.token_dim] * (1 if kind == "linear" else regressor.depth) + [len(backbone.grid)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths) if kind != "pca" else ():
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, table: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """table [N, D], targets [N, 2] -> guesses [N, 2], or [B, N, 2] where they depend on the mask [B, N].

        Never in half precision, which cannot tell 12 from 12.03.
        """
        with torch.autocast(table.device.type, enabled=False):
            if self.kind == "pca":
                table = table if table.dtype == torch.float64 else table.float()
                return principal_guesses(table, targets, COMPONENTS, fit=self.fit, mask=mask)
            first = next(self.layers.parameters())
            return self.layers(table.to(first.dtype))


def require_table(backbone: Backbone) -> None:
    """Refuses a backbone without a learned table of positions, with the reason."""
    with torch.enable_grad():
        places = backbone.positions()
    if places.table is None:
        reason = {
            "rotary": "its places are rotations of queries and keys, so no vector of a place can be trained",
            "bias": "its places are biases between pairs of tokens, so no place has a vector",
        }.get("".join(places.kinds), "it has no position table")
    elif not places.table.requires_grad:
        reason = "its position table is fixed, so a loss on it teaches nothing"
    else:
        return
    raise SitusError(f"{backbone.name} refuses DAL: {reason}; choose dal='none'", field="dal")
