"""MJP's dense absolute localisation (DAL): regress (row, column) from the position vectors themselves.

L_DAL = E ‖(i, j) - g(E_pos^{i,j})‖₁ over the places that keep their vector. g is the same for every sample and its
input is the table, so it runs once over the N rows for any batch: a sample only chooses which errors count.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.core.components import principal_guesses
from situs.errors import SitusError

DalKind = Literal["none", "pca", "linear", "nonlinear"]

COMPONENTS = 2
"""Number of principal components for the regression by them."""


class Regressor(NamedTuple):
    """Settings of the regression. depth: linear layers of a nonlinear g, ReLU between them. fit: whether principal
    components are mapped to the grid by least squares. mean_axes: the mean over row and column, not their sum."""

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
                nn.init.normal_(layer.weight, std=0.02)
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
            "rotary": "its positions are rotations of queries and keys, so no position vector can be trained",
            "bias": "its positions are biases between pairs of tokens, so no position has a vector",
        }.get("".join(places.kinds), "it has no position table")
    elif not places.table.requires_grad:
        reason = "its position table is fixed, so a loss on it trains nothing"
    else:
        return
    raise SitusError(f"{backbone.name} refuses DAL: {reason}; choose dal='none'", field="dal")
