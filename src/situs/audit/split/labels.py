"""The attacker on what comes back: labels from the gradient of the features that the server itself computed."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor

from situs.backbones.base import Backbone, Stream


def labels_with_head(backbone: Backbone, out: Tensor, gradient: Tensor) -> Tensor:
    """[n]: the class whose gradient is the one that came back, for a server that knows the final norm and the head.

    out: [n, R, D], what the blocks gave. gradient: [n, R, D], of the mean cross entropy. The gradient is linear in the
    label, so that one vector-Jacobian product a class gives every candidate.
    """
    out = out.detach().requires_grad_()
    logits = backbone.head(backbone.finish(Stream(out, backbone.num_prefix)))
    share = logits.softmax(dim=-1).detach()
    candidates = []
    for label in range(logits.shape[1]):
        wanted = share.clone()
        wanted[:, label] -= 1
        [found] = torch.autograd.grad(logits, out, wanted, retain_graph=True)
        candidates.append((found.flatten(1), gradient.flatten(1)))
    alike = torch.stack([torch.cosine_similarity(a.double(), b.double()) for a, b in candidates])
    return alike.argmax(dim=0)


def labels_without_head(gradient: Tensor, classes: int, seed: int = 0) -> Tensor:
    """[n]: a class's number without its name: spherical k-means of the gradient [n, R, D] summed over its rows."""
    summed = torch.nn.functional.normalize(gradient.detach().double().sum(dim=1), dim=-1)
    found = KMeans(classes, n_init=10, random_state=seed).fit_predict(summed.cpu().numpy())
    return torch.from_numpy(found).long()


def share_up_to_names(found: Tensor, truth: Tensor) -> float:
    """The share that is right under the best names for the numbers found."""
    size = int(max(found.max(), truth.max())) + 1
    table = torch.zeros(size, size).index_put_((found, truth), torch.ones(len(found)), accumulate=True)
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table[torch.from_numpy(rows), torch.from_numpy(columns)].sum() / len(found))
