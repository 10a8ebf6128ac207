"""What a client's task keeps of its features under a defence, in a model that was not trained under it.

All of it is of the frozen features, each with every other as its bank: no image is judged by itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, one_hot

NEAREST = 5


@dataclass(frozen=True)
class Kept:
    """cosine: mean similarity with the undefended features. neighbours: the share of the nearest five that are still
    among them. knn, probe: leave-one-out accuracy, of labelled images. accuracy: the model's own classifier. None:
    could not be measured."""

    cosine: float
    neighbours: float | None = None
    knn: float | None = None
    probe: float | None = None
    accuracy: float | None = None

    def numbers(self) -> dict[str, float | None]:
        """As JSON holds them."""
        found = asdict(self)
        return {"feature_cosine": found.pop("cosine"), **found}


def cosine(features: Tensor, plain: Tensor) -> float:
    """The mean similarity of features [n, D] with the undefended ones."""
    return float(cosine_similarity(features, plain).mean())


def neighbours(features: Tensor, plain: Tensor) -> float | None:
    """The share of each sample's nearest five of the undefended features [n, D] that are among its nearest here."""
    if len(features) <= 2 * NEAREST:
        return None
    here, there = (_nearest(each) for each in (features, plain))
    return float((here[:, :, None] == there[:, None]).any(dim=2).double().mean())


def leave_one_out_knn(features: Tensor, labels: Tensor) -> float:
    """The share of samples whose class most of the nearest five others have; of classes that tie, the nearest's."""
    near = labels[_nearest(features)]  # [n, k]
    votes = (near[:, :, None] == near[:, None]).double().sum(dim=2)
    first = (votes - torch.arange(near.shape[1]) / near.shape[1]).argmax(dim=1)  # an earlier one wins a tie
    return float((near.gather(1, first[:, None])[:, 0] == labels).double().mean())


def leave_one_out_probe(features: Tensor, labels: Tensor) -> float:
    """The accuracy of a ridge regression onto the classes, each sample judged by one fitted to the others."""
    x = features.double()
    x = (x - x.mean(dim=0)) / x.std(dim=0).clamp(min=1e-12)
    x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    hat = x @ torch.linalg.solve(x.T @ x + len(x) * 0.1 * eye, x.T)
    wanted, own = one_hot(labels).double(), hat.diagonal()[:, None]
    answer = (hat @ wanted - own * wanted) / (1 - own)  # as if the sample had not been fitted to
    return float((answer.argmax(dim=1) == labels).double().mean())


def _nearest(features: Tensor) -> Tensor:
    """[n, k]: the others with the highest cosine, the nearest first."""
    unit = normalize(features.double(), dim=-1)
    alike = (unit @ unit.T).fill_diagonal_(-torch.inf)
    return alike.topk(min(NEAREST, len(unit) - 1), dim=1).indices
