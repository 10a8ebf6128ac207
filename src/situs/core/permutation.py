"""Permutations as index tensors.

A permutation p is an int64 tensor, [N] when the batch shares it or [B, N] when each sample has its own. Applying
it *gathers*: y[i] = x[p[i]]. With the permutation matrix P this is y = P x, but no matrix is ever built: a dense
product costs N² D and rounds, an index costs N D and is exact.

The content of an index is not checked here (that would sync with the device): `is_permutation` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from situs.core.tokens import take
from situs.errors import SitusError


def identity(n: int, device: torch.device | str | None = None) -> Tensor:
    """The permutation [N] that moves nothing."""
    return torch.arange(n, device=device)


def is_permutation(p: Tensor) -> Tensor:
    """Whether each row of p: [..., N] has every position once -> bool [...] (a scalar for a shared [N])."""
    if p.dtype != torch.int64:
        return torch.zeros(p.shape[:-1], dtype=torch.bool, device=p.device)
    return (p.sort(dim=-1).values == identity(p.shape[-1], p.device)).all(dim=-1)


def random_permutation(noise: Tensor) -> Tensor:
    """A uniform random permutation for each row of noise: [..., N] -> [..., N]; equal numbers keep their order."""
    return noise.argsort(dim=-1, stable=True)


def compose(first: Tensor, then: Tensor) -> Tensor:
    """The one permutation that does `first` and afterwards `then`: apply(x, compose(f, t)) = apply(apply(x, f), t).

    Either may be shared [N] or per sample [B, N]; the result is [N] only when both are shared.
    """
    _check(first, "first")
    _check(then, "then")
    if first.shape[-1] != then.shape[-1]:
        raise SitusError(
            f"compose(first, then): both must have the same length, not {first.shape[-1]} and {then.shape[-1]}"
        )
    if first.dim() == then.dim() == 2 and first.shape[0] != then.shape[0]:
        raise SitusError(
            f"compose(first, then): both must have the same number of samples, not {first.shape[0]} and {then.shape[0]}"
        )
    if then.dim() == 1:
        return first.index_select(-1, then)
    return first.expand_as(then).gather(-1, then)


def invert(p: Tensor) -> Tensor:
    """The permutation that undoes p: [N] or [B, N]."""
    _check(p, "p")
    return torch.empty_like(p).scatter_(-1, p, identity(p.shape[-1], p.device).expand_as(p))


def permute_rows(x: Tensor, p: Tensor) -> Tensor:
    """P_R x, tokens moved: x: [B, N, ...], p: [N] or [B, N] -> [B, N, ...]."""
    _check(p, "p")
    if x.dim() < 2:
        raise SitusError(f"permute_rows: x has shape {tuple(x.shape)}; it must be [B, N, ...]")
    _check_length(x, 1, p)
    _check_batch(x, p)
    return take(x, p)


def permute_columns(x: Tensor, p: Tensor) -> Tensor:
    """x P_C, features moved: x: [..., D] with p: [D], or x: [B, ..., D] with p: [B, D]."""
    _check(p, "p")
    _check_length(x, -1, p)
    if p.dim() == 1:
        return x.index_select(-1, p)
    if x.dim() < 2:
        raise SitusError(
            f"permute_columns: x has shape {tuple(x.shape)}; with one permutation per sample it must be [B, ..., D]"
        )
    _check_batch(x, p)
    full = p.view(p.shape[0], *(1 for _ in x.shape[1:-1]), p.shape[1])
    return x.gather(-1, full.expand_as(x))


def _check(p: Tensor, name: str) -> None:
    if p.dtype != torch.int64 or p.dim() not in (1, 2):
        raise SitusError(
            f"{name} is {p.dtype} of shape {tuple(p.shape)}: a permutation must be torch.int64 of shape [N] or [B, N]"
        )


def _check_length(x: Tensor, axis: int, p: Tensor) -> None:
    if x.shape[axis] != p.shape[-1]:
        raise SitusError(
            f"a permutation of {p.shape[-1]} entries does not fit axis {axis} of x, which has shape {tuple(x.shape)}"
        )


def _check_batch(x: Tensor, p: Tensor) -> None:
    if p.dim() == 2 and p.shape[0] != x.shape[0]:
        raise SitusError(
            f"{p.shape[0]} permutations do not fit {x.shape[0]} samples; give one permutation per sample, or one "
            "permutation of shape [N] for all samples"
        )
