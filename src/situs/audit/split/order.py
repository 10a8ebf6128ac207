"""The attacker that knows the embedding: which place each token came from, and the pixels behind it.

Natural patches have almost no energy in many directions of the token space, and there the position vectors stand
alone. Mahalanobis distance shows these directions: a token's cost at a place is its distance from the mean token there,
in the covariance of public tokens. The order of all tokens is the assignment of least cost. The pixels are then the
regression of patches on tokens, fitted on public images under the same defence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from situs.backbones.base import Backbone
from situs.locks.veil import Veil, low_pass, token_scale

_RIDGE, _PIXEL_RIDGE = 1e-9, 1e-10


@dataclass(frozen=True)
class PublicSide:
    """What public images and the known embedding say under a defence.

    prefix: [p, D]. places: [N, D], the mean token at each place. covariance: [D, D] of tokens about these means,
    without noise. noise: σ², on each entry. cross: [P, D], of pixels and tokens. pixels: [P], the mean patch. scale:
    what σ is a multiple of. tokens: [m, R, D], the public streams themselves, undefended.
    """

    prefix: Tensor
    places: Tensor
    covariance: Tensor
    noise: float
    cross: Tensor
    pixels: Tensor
    scale: float
    tokens: Tensor

    def whitener(self, least: float = _RIDGE) -> Tensor:
        """(S + σ²I)⁻¹, [D, D]."""
        return torch.linalg.inv(self.covariance + max(self.noise, least) * torch.eye(len(self.covariance)).double())


def public_side(backbone: Backbone, z: Tensor, patches: Tensor, defence: Veil) -> PublicSide:
    """Fits on public images: their streams z [m, R, D], undefended, and their pixels `patches` [m, N, P].

    The defence is simulated: a filter is linear, so that places and contents pass it apart; noise adds its variance.
    """
    count = patches.shape[1]
    prefix = z[0, : z.shape[1] - count]
    tokens = z[:, len(prefix) :]
    places = _places(backbone, z.shape[2], count)
    content = tokens - places
    if defence.kind == "lowpass":
        content, places = (low_pass(part, backbone.grid, defence.strength) for part in (content, places[None]))
        places = places[0]
    mean = content.flatten(0, 1).mean(dim=0)
    centred = content.flatten(0, 1) - mean
    pixels = patches.double().flatten(0, 1)
    scale = token_scale(tokens)
    return PublicSide(
        prefix=prefix,
        places=places + mean,
        covariance=centred.T @ centred / len(centred),
        noise=(defence.strength * scale) ** 2 if defence.kind == "noise" else 0.0,
        cross=(pixels - pixels.mean(dim=0)).T @ centred / len(centred),
        pixels=pixels.mean(dim=0),
        scale=scale,
        tokens=z,
    )


@torch.no_grad()
def _places(backbone: Backbone, width: int, count: int) -> Tensor:
    """What each place adds to its token, [N, D]: the stream of tokens that are nought."""
    device = next(backbone.parameters()).device
    none = torch.zeros(1, count, width, device=device, dtype=next(backbone.parameters()).dtype)
    return backbone.assemble(none, backbone.positions()).z[0, -count:].double().cpu()


def assign_places(tokens: Tensor, side: PublicSide, copies: int = 1) -> Tensor:
    """The place of each token, [M], for tokens [M, D] with M = copies · N: each place is taken `copies` times."""
    _, chosen = linear_sum_assignment(place_costs(tokens, side).T.repeat(1, copies).numpy())
    return torch.from_numpy(chosen) % len(side.places)


def place_costs(tokens: Tensor, side: PublicSide) -> Tensor:
    """[..., N, M]: the squared Mahalanobis distance of each place to each of the tokens [..., M, D]."""
    inner = side.whitener()
    means = side.places @ inner
    norms = (tokens @ inner * tokens).sum(dim=-1)
    return norms[..., None, :] - 2 * means @ tokens.mT + (means * side.places).sum(dim=1)[:, None]


def set_apart(rows: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """(which rows [p] of one sample [R, D] are the fixed prefix tokens, the others in their order [R - p])."""
    if not len(fixed):
        return torch.empty(0, dtype=torch.long), torch.arange(len(rows))
    _, chosen = linear_sum_assignment(torch.cdist(fixed, rows).numpy())
    others = torch.ones(len(rows), dtype=torch.bool)
    others[torch.from_numpy(chosen)] = False
    return torch.from_numpy(chosen), others.nonzero()[:, 0]


def order_rows(seen: Tensor, side: PublicSide) -> Tensor:
    """The row of the stream that each row sent is, [n, R], for samples [n, R, D] whose rows may be in any order.

    Each token on its own; `joint` also uses neighbours.
    """
    stream_rows = torch.empty(seen.shape[:2], dtype=torch.long)
    for sample, rows in zip(seen, stream_rows, strict=True):
        fixed, others = set_apart(sample, side.prefix)
        rows[fixed] = torch.arange(len(fixed))
        rows[others] = len(fixed) + assign_places(sample[others], side)
    return stream_rows


def read_pixels(tokens: Tensor, places: Tensor, side: PublicSide) -> Tensor:
    """Patches [M, P] behind tokens [M, D] that stand at `places` [M]."""
    return side.pixels + (tokens - side.places[places]) @ (side.cross @ side.whitener(_PIXEL_RIDGE)).T
