"""The attacker that sees activations with permuted channels and knows the embedding (SPEC §7).

A server that runs locked blocks sees the stream that enters them, its channels permuted by the key and its rows perhaps
in an unknown order. A channel's mean, standard deviation and correlations with other channels over many tokens do not
depend on the rows' order. Public inputs through the public embedding give the same statistics for the clear channels.
A prefix token that is the same for every input, such as CLS, gives each channel's value.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.core.permutation import identity
from situs.errors import SitusError, counted
from situs.locks.attacks.match import assign
from situs.locks.attacks.recovery import KeyRecovery, block_inputs, judged
from situs.locks.groups import entrance_and_exit

ROUNDS = 20
"""Assignments from one start at most; most need two to five."""

MOMENTS = 20.0
"""Weight of a channel's mean and spread relative to its correlations."""

QUANTILES = 25
_SAMPLE = 4096
_SMALLEST = 1e-12


@dataclass(frozen=True)
class Columns:
    """q [D]: observed channel i is clear channel q[i]. cost: remaining difference per channel."""

    q: Tensor
    cost: float


@dataclass(frozen=True)
class _Channels:
    """Statistics of the channels over many tokens: mean [D], spread [D], correlations [D, D], quantiles [D, Q]."""

    mean: Tensor
    spread: Tensor
    correlations: Tensor
    quantiles: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> _Channels:
        mean, spread = rows.mean(dim=0), rows.std(dim=0).clamp(min=_SMALLEST)
        unit = (rows - mean) / spread
        at = torch.linspace(0.02, 0.98, QUANTILES, dtype=rows.dtype)
        some = rows[:: max(1, len(rows) // _SAMPLE)]
        return cls(mean, spread, unit.T @ unit / len(rows), some.quantile(at, dim=0).T)


@torch.no_grad()
def recover_columns(seen: Tensor, public: Tensor, fixed: Tensor) -> Columns:
    """Recovers the order of the channels.

    seen: [n, R, D], the observed stream: rows in any order, channels permuted by the key. public: [m, R, D], other
    inputs through the public embedding under the same defence, clear channels, the first p rows the prefix tokens.
    fixed: [p, D], those prefix tokens, the same for every input; p may be 0.
    """
    if seen.shape[-1] != public.shape[-1] or fixed.shape[-1] != public.shape[-1]:
        raise SitusError(
            f"the observed features have {seen.shape[-1]} channels, but the public embedding has {public.shape[-1]}"
        )
    seen, public, fixed = seen.double().cpu(), public.double().cpu(), fixed.double().cpu()
    prefix, others = split_prefix(seen, fixed)
    ours, theirs = _Channels.of(others), _Channels.of(public[:, len(fixed) :].flatten(0, 1))
    single = _moments(ours, theirs) + _prefixes(prefix, fixed)
    starts = [assign(-(torch.cdist(ours.quantiles, theirs.quantiles) / theirs.spread).square())]
    if len(fixed):
        starts.append(torch.empty_like(starts[0]).scatter_(0, prefix.mean(dim=0)[0].argsort(), fixed[0].argsort()))
    return min((_iterate(ours, theirs, single, start) for start in starts), key=lambda columns: columns.cost)


@torch.no_grad()
def recover_with_activations(
    backbone: Backbone, groups: Sequence[Group], samples: Sequence[Tensor], *, truth: Mapping[str, Tensor] | None
) -> KeyRecovery:
    """The key that a server which runs the locked blocks recovers from the stream that its client sends.

    samples: inputs [1, ...]. Half of them are the client's: they go through the clear embedding and the true key. The
    others are the server's. Of a hierarchical model the first stage's key is attacked.
    """
    if truth is None:
        raise SitusError("attacker=activations: needs the true key, to compute what the server sees", field="key")
    if len(samples) < 2:
        raise SitusError(
            "attacker=activations: needs at least two samples, one for the client and one for the server", field="count"
        )
    began = time.perf_counter()
    first, _ = entrance_and_exit(groups)
    streams, prefix = [block_inputs(backbone, sample) for sample in samples], backbone.num_prefix
    half = len(streams) // 2
    if len({stream.shape[1] for stream in streams}) > 1:  # texts of several lengths: join their rows
        prefix, streams = 0, [torch.cat(part, dim=1) for part in (streams[:half], streams[half:])]
        half = 1
    seen, public = torch.cat(streams[:half])[..., truth[first]], torch.cat(streams[half:])
    columns = recover_columns(seen, public, public[0, :prefix])
    keys = {group.name: identity(group.size) for group in groups} | {first: columns.q}
    client = len(samples) // 2
    others = counted(len(samples) - client, "other samples")
    cost = f"the unlocked embedding, the blocks' inputs for {counted(client, 'samples')}, and {others}"
    return judged("activations", groups, keys, truth, seconds=time.perf_counter() - began, cost=cost)


def split_prefix(seen: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """(the prefix rows of each input [n, p, D], all other rows [n(R - p), D]).

    Prefix rows are recognised by their sorted values, which do not depend on the order of the channels.
    """
    if not len(fixed):
        return fixed.expand(len(seen), -1, -1), seen.flatten(0, 1)
    distance = torch.cdist(seen.sort(dim=-1).values, fixed.sort(dim=-1).values)  # [n, R, p]
    chosen = torch.stack([assign(-costs.T) for costs in distance])  # [n, p]
    prefix = seen.gather(1, chosen[..., None].expand(-1, -1, seen.shape[-1]))
    others = torch.ones(seen.shape[:2], dtype=torch.bool).scatter_(1, chosen, value=False)
    return prefix, seen[others]


def _moments(ours: _Channels, theirs: _Channels) -> Tensor:
    """[D, D]: how much observed channel i differs from clear channel j in mean and spread."""
    spread = ours.spread.log()[:, None] - theirs.spread.log()
    mean = (ours.mean / ours.spread)[:, None] - theirs.mean / theirs.spread
    return MOMENTS * (spread.square() + mean.square())


def _prefixes(prefix: Tensor, fixed: Tensor) -> Tensor:
    """[D, D]: squared differences of the prefix tokens' channels, in units of the noise on their mean.

    The noise is estimated from several inputs, or from the sorted values of one, which needs no key. Without noise the
    values alone distinguish the channels.
    """
    total = fixed.new_zeros(fixed.shape[1], fixed.shape[1])
    for rows, clear in zip(prefix.unbind(1), fixed, strict=True):
        mean = rows.mean(dim=0)
        several = len(rows) > 1
        noise = rows.var(dim=0).mean() / len(rows) if several else (mean.sort().values - clear.sort().values).var()
        total += (mean[:, None] - clear).square() / noise.clamp(min=_SMALLEST)
    return total


def _iterate(ours: _Channels, theirs: _Channels, single: Tensor, q: Tensor) -> Columns:
    """Assigns channels by their correlations with the others in the current order, until nothing moves."""
    cost = single
    for _ in range(ROUNDS):
        placed = torch.empty_like(ours.correlations).index_copy_(1, q, ours.correlations)  # columns in the clear order
        cost = torch.cdist(placed, theirs.correlations).square() + single
        before, q = q, assign(-cost)
        if torch.equal(before, q):
            break
    return Columns(q, float(cost.gather(1, q[:, None]).mean()))
