"""Labels from the gradient that comes back to the features which the server itself computed."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor

from situs.backbones.base import Backbone, Stream

PIECE = 400_000
"""The most numbers of the blocks' output at a time; each class takes as many again."""


def labels_with_head(backbone: Backbone, out: Tensor, gradient: Tensor) -> Tensor:
    """[n]: the class whose gradient is the one that came back, for a server that knows the final norm and the head.

    out: [n, R, D], what the blocks gave. gradient: [n, R, D], of the mean cross entropy. The gradient is linear in the
    label, so that one vector-Jacobian product a class gives every candidate.
    """
    out = out.detach().requires_grad_()
    logits = _logits(backbone, out)
    share = logits.softmax(dim=-1).detach()
    came, alike = gradient.flatten(1).double(), []
    for label in range(logits.shape[1]):
        wanted = share.clone()
        wanted[:, label] -= 1
        [candidate] = torch.autograd.grad(logits, out, wanted, retain_graph=True)
        alike.append(torch.cosine_similarity(candidate.flatten(1).double(), came))
    return torch.stack(alike).argmax(dim=0)


def several_with_head(backbone: Backbone, out: Tensor, gradient: Tensor) -> Tensor:
    """[n, K], 1 or 0: which classes each sample has, where it has any number, for a server as above.

    The gradient is that of the mean binary cross entropy over all n · K labels. It is a sum over the classes of what
    each one's output sends back, weighted by (answer - label) / (n · K): least squares gives the weights, and the
    server's own answers then give the labels. K must be less than D - 1: a norm sends nothing back in two directions.
    """
    count, rows, width = out.shape
    answers = []
    for some, came in zip(*(part.split(max(1, PIECE // (rows * width))) for part in (out, gradient)), strict=True):
        some = some.detach().requires_grad_()
        logits = _logits(backbone, some)
        units = torch.eye(logits.shape[1]).to(logits)
        back = [torch.autograd.grad(logits, some, unit.expand_as(logits), retain_graph=True)[0] for unit in units]
        sent = torch.stack(back, dim=-1).double().flatten(1, 2).cpu()  # [b, R · D, K]
        weights = torch.linalg.lstsq(sent, came.double().flatten(1).cpu()[..., None], driver="gelsd").solution[..., 0]
        answers.append(logits.detach().double().sigmoid().cpu() - weights * count * logits.shape[1] > 0.5)
    return torch.cat(answers).long()


def labels_without_head(gradient: Tensor, classes: int, seed: int = 0) -> Tensor:
    """[n]: a class's number without its name: spherical k-means of the gradient [n, R, D] summed over its rows."""
    summed = torch.nn.functional.normalize(gradient.detach().double().sum(dim=1), dim=-1)
    means = KMeans(classes, n_init=10, random_state=seed)  # pyright: ignore[reportArgumentType]  # its stubs say str
    clusters = means.fit_predict(summed.cpu().numpy())
    return torch.from_numpy(clusters).long()


def read_rows(backbone: Backbone, rows: int, width: int) -> Tensor:
    """[R] bool: the rows that the head reads, which alone have a gradient; for whoever has the head."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(1, rows, width, generator=generator).to(next(backbone.parameters())).requires_grad_()
    logits = _logits(backbone, out)
    direction = torch.linspace(-1, 1, logits.shape[1]).to(logits)
    [gradient] = torch.autograd.grad(logits, out, direction.expand_as(logits))
    return (gradient[0] != 0).any(dim=-1).cpu()


def place_rows(gradient: Tensor, read: Tensor) -> Tensor:
    """[n, R], an index to gather rows by: those with the largest gradients go where the head reads.

    Which of them stands where does not matter to a head that reads one row or pools them.
    """
    by_size = gradient.norm(dim=-1).argsort(dim=1, stable=True)
    places = torch.cat([(~read).nonzero()[:, 0], read.nonzero()[:, 0]])
    return torch.empty_like(by_size).scatter_(1, places.to(by_size.device).expand_as(by_size), by_size)


def regroup(gradient: Tensor, read: Tensor, size: int) -> Tensor:
    """[n, R], an index of all n · R rows: the rows of one sample together, where batches of `size` exchanged theirs.

    A head that pools its rows sends each of them the same gradient, up to what the norm before it takes away: rows of
    one sample point one way.
    """
    count, rows, _ = gradient.shape
    index = torch.arange(count * rows).view(count, rows).gather(1, place_rows(gradient, read).cpu())
    unit = torch.nn.functional.normalize(gradient.detach().double().cpu().flatten(0, 1), dim=-1)
    for batch in index.split(size):
        chosen = batch[:, read].flatten()
        means = KMeans(len(batch), n_init=10, random_state=0)  # pyright: ignore[reportArgumentType]
        means.fit(unit[chosen].numpy())
        fit = unit[chosen] @ torch.nn.functional.normalize(torch.from_numpy(means.cluster_centers_), dim=-1).T
        _, column = linear_sum_assignment(fit.repeat_interleave(int(read.sum()), dim=1).numpy(), maximize=True)
        batch[:, read] = chosen[torch.from_numpy(column).argsort()].view(len(batch), -1)
    return index


def share_up_to_names(guess: Tensor, truth: Tensor) -> float:
    """The share that is right under the best naming of the clusters."""
    size = int(max(guess.max(), truth.max())) + 1
    table = torch.zeros(size, size).index_put_((guess, truth), torch.ones(len(guess)), accumulate=True)
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table[torch.from_numpy(rows), torch.from_numpy(columns)].sum() / len(guess))


def _logits(backbone: Backbone, out: Tensor) -> Tensor:
    return backbone.head(backbone.finish(Stream(out, backbone.num_prefix)))
