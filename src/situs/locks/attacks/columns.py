"""The attacker who sees activations with permuted channels and knows the embedding they come from (SPEC §7).

A server that runs locked blocks sees the stream at their entrance, its channels in the key's order and perhaps its rows
in any. What a channel looks like over many tokens does not depend on the rows' order: its mean, its spread, its
correlations with the other channels. Public inputs through the public embedding show the same for the clear channels.
A prefix token that is the same for every input, such as CLS, shows each channel's own value.
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
from situs.locks.attacks.blind import entering
from situs.locks.attacks.match import assign
from situs.locks.attacks.recovery import KeyRecovery, judged
from situs.locks.groups import entrance_and_exit

ROUNDS = 20
"""Assignments at most from one start; most need two to five."""

MOMENTS = 20.0
"""Weight of a channel's mean and spread beside its correlations."""

QUANTILES = 25
_SAMPLE = 4096
_SMALLEST = 1e-12


@dataclass(frozen=True)
class Columns:
    """q [D]: observed channel i is clear channel q[i]. cost: what is left of the differences, per channel."""

    q: Tensor
    cost: float


@dataclass(frozen=True)
class _Channels:
    """What is said of each channel by many tokens: mean [D], spread [D], correlations [D, D], quantiles [D, Q]."""

    mean: Tensor
    spread: Tensor
    related: Tensor
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
    """Finds the order of the channels.

    seen: [n, R, D], what arrived: rows in any order, channels in the key's. public: [m, R, D], other inputs through the
    public embedding under the same defence, channels clear, the first p rows the prefix tokens. fixed: [p, D], those
    prefix tokens, the same for every input; p may be 0.
    """
    if seen.shape[-1] != public.shape[-1] or fixed.shape[-1] != public.shape[-1]:
        raise SitusError(f"{seen.shape[-1]} channels were seen, and the public embedding has {public.shape[-1]}")
    seen, public, fixed = seen.double().cpu(), public.double().cpu(), fixed.double().cpu()
    prefix, rest = apart(seen, fixed)
    ours, theirs = _Channels.of(rest), _Channels.of(public[:, len(fixed) :].flatten(0, 1))
    single = _moments(ours, theirs) + _prefixes(prefix, fixed)
    starts = [assign(-(torch.cdist(ours.quantiles, theirs.quantiles) / theirs.spread).square())]
    if len(fixed):
        starts.append(torch.empty_like(starts[0]).scatter_(0, prefix.mean(dim=0)[0].argsort(), fixed[0].argsort()))
    return min((_iterate(ours, theirs, single, start) for start in starts), key=lambda found: found.cost)


@torch.no_grad()
def recover_with_activations(
    backbone: Backbone, groups: Sequence[Group], samples: Sequence[Tensor], *, truth: Mapping[str, Tensor] | None
) -> KeyRecovery:
    """What a server that runs the locked blocks reads off the stream that its client sends.

    samples: inputs [1, ...]. Half of them go through the clear embedding and the true key, as the client's do; the
    others are the server's own. Of a hierarchical model the first stage's key is sought.
    """
    if truth is None:
        raise SitusError("attacker=activations: what the server sees is made with the true key", field="key")
    if len(samples) < 2:
        raise SitusError("attacker=activations: needs two samples or more: one to see, one of its own", field="count")
    began = time.perf_counter()
    first, _ = entrance_and_exit(groups)
    streams, prefix = [entering(backbone, each) for each in samples], backbone.num_prefix
    half = len(streams) // 2
    if len({each.shape[1] for each in streams}) > 1:  # texts of several lengths: rows are rows
        prefix, streams = 0, [torch.cat(part, dim=1) for part in (streams[:half], streams[half:])]
        half = 1
    seen, public = torch.cat(streams[:half])[..., truth[first]], torch.cat(streams[half:])
    found = recover_columns(seen, public, public[0, :prefix])
    keys = {group.name: identity(group.size) for group in groups} | {first: found.q}
    own = len(samples) - len(samples) // 2
    seen_of = counted(len(samples) // 2, "samples")
    cost = f"what enters the blocks of {seen_of}, {counted(own, 'others')} and the clear embedding"
    return judged("activations", groups, keys, truth, seconds=time.perf_counter() - began, cost=cost)


def apart(seen: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """(each input's rows that are the fixed ones [n, p, D], all other rows [n(R - p), D]).

    The rows are known by their sorted values, which no order of channels changes.
    """
    if not len(fixed):
        return fixed.expand(len(seen), -1, -1), seen.flatten(0, 1)
    distance = torch.cdist(seen.sort(dim=-1).values, fixed.sort(dim=-1).values)  # [n, R, p]
    chosen = torch.stack([assign(-each.T) for each in distance])  # [n, p]
    found = seen.gather(1, chosen[..., None].expand(-1, -1, seen.shape[-1]))
    others = torch.ones(seen.shape[:2], dtype=torch.bool).scatter_(1, chosen, value=False)
    return found, seen[others]


def _moments(ours: _Channels, theirs: _Channels) -> Tensor:
    """[D, D]: how much observed channel i differs from clear channel j in mean and spread."""
    spread = ours.spread.log()[:, None] - theirs.spread.log()
    mean = (ours.mean / ours.spread)[:, None] - theirs.mean / theirs.spread
    return MOMENTS * (spread.square() + mean.square())


def _prefixes(found: Tensor, fixed: Tensor) -> Tensor:
    """[D, D]: squared differences of the prefix tokens' channels, in units of the noise on their mean.

    Several inputs show the noise; of one, the sorted values do, which need no key. Without noise the values alone tell
    the channels apart.
    """
    total = fixed.new_zeros(fixed.shape[1], fixed.shape[1])
    for rows, clear in zip(found.unbind(1), fixed, strict=True):
        mean = rows.mean(dim=0)
        several = len(rows) > 1
        noise = rows.var(dim=0).mean() / len(rows) if several else (mean.sort().values - clear.sort().values).var()
        total += (mean[:, None] - clear).square() / noise.clamp(min=_SMALLEST)
    return total


def _iterate(ours: _Channels, theirs: _Channels, single: Tensor, q: Tensor) -> Columns:
    """Assigns channels by their correlations with the others, put in the order found so far, until nothing moves."""
    cost = single
    for _ in range(ROUNDS):
        placed = torch.empty_like(ours.related).index_copy_(1, q, ours.related)  # columns in the clear order
        cost = torch.cdist(placed, theirs.related).square() + single
        before, q = q, assign(-cost)
        if torch.equal(before, q):
            break
    return Columns(q, float(cost.gather(1, q[:, None]).mean()))
