"""The attacker with the locked file and unlabelled samples: no base, no labels, and the network is never run (SPEC §6).

The samples go through the clear embedding, which shows the correlations of the channels where the stream enters the
first block. The locked weights of the first blocks show which channels are read and written together. Training makes
the two similar, so the permutation under which they agree is the key. Untrained weights reveal nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.core.permutation import identity
from situs.locks.attacks.grams import ClearSide, LockedSide, clear_side, locked_side
from situs.locks.attacks.graph import (
    Schedule,
    agreement,
    centred_rows,
    correlation_rows,
    correlations,
    graduated_assignment,
    hard_assignment,
    likelihood_ratio,
    long_schedule,
    refined_assignment,
    root_correlations,
    score_distance,
    short_schedule,
    unit_rows,
)
from situs.locks.attacks.recovery import KeyRecovery, judged
from situs.locks.groups import residual_only
from situs.progress import tracked

READS = ("q", "k", "v", "up", "up again")
"""Projections whose tables are compared with the clear one; what a block writes is less informative."""

CORRELATIONS = {"centre": 0.75, "lean": 0.5, "reach": 0.4, "axis": 0.6}
"""The assumed correlation of each clue on single channels with the clear side. Chosen, like every number here and in
`graph`, on ViTs that were trained for it and on no model in the results."""

AXES = 2
"""Main axes of the locked side, each of which, with either sign, may be the clear side's first."""

BLIND = 3
"""Searches from random hints, which show the score of a failed search."""

CLEARLY = 0.1
"""A search with a score this far above every failed one has found the key, and is the last."""


@dataclass(frozen=True)
class SearchResult:
    """The permutation q [D] of a search, and its score J(q), see `graph.agreement`."""

    q: Tensor
    score: float


def recover_with_samples(
    backbone: Backbone,
    groups: Sequence[Group],
    inputs: Iterable[Tensor],
    *,
    description: str,
    truth: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> KeyRecovery:
    """Matches the locked channels with the clear ones, using `inputs` (batches of images or of token ids).

    description: of the inputs, in words. Of a hierarchical model only the first stage's key is attacked.
    """
    began = time.perf_counter()
    residual = residual_only(groups)
    with _quick():
        where = _where(backbone)
        clear, locked = clear_side(backbone, groups, inputs).to(where), locked_side(backbone, groups).to(where)
        q, best, failed = _match(clear, locked, seed)
    keys = {group.name: identity(group.size) for group in groups} | {residual[0].name: q}
    cost = f"the locked file and {description}; J {best:.2f}, from random hints at most {max(failed):.2f}"
    more = {"seconds": time.perf_counter() - began, "cost": cost, "agreement": best, "failed": max(failed)}
    return judged("images", groups, keys, truth, **more)


def _match(clear: ClearSide, locked: LockedSide, seed: int) -> tuple[Tensor, float, list[float]]:
    """The best q, its score J, and the scores of searches from random hints."""
    blocks = [{role: correlation_rows(gram) for role, gram in block.items()} for block in locked.grams]
    every = [table for block in blocks for table in block.values()]
    ours = _mean([table for block in blocks for role, table in block.items() if role in READS])
    theirs = centred_rows(root_correlations(clear.grams["all"]))

    def search(a: Tensor, b: Tensor, hint: Tensor, schedule: Schedule) -> SearchResult:
        q = hard_assignment(ours, theirs, graduated_assignment(a, b, hint, schedule))
        return SearchResult(q, agreement(ours, theirs, q))

    hint = _hint(clear, locked)
    generator = torch.Generator().manual_seed(seed)
    shuffled = (hint[torch.randperm(len(hint), generator=generator)] for _ in range(BLIND))
    failed = [search(ours, theirs, random_hint, long_schedule(0.5)).score for random_hint in shuffled]
    results: list[SearchResult] = []
    for start in tracked(_starts(clear, locked, blocks, hint, ours, theirs), "searching for the key"):
        results.append(search(*start))
        if results[-1].score > max(failed) + CLEARLY:
            break
    best = max(results, key=lambda result: result.score)
    q = refined_assignment(every, [correlation_rows(gram) for gram in clear.grams.values()], hint, best.q)
    best = max(best, SearchResult(q, agreement(ours, theirs, q)), key=lambda result: result.score)
    return best.q, best.score, failed


def _starts(
    clear: ClearSide, locked: LockedSide, blocks: list[dict[str, Tensor]], hint: Tensor, ours: Tensor, theirs: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Schedule]]:
    """Tables, hint and schedule of each search: short ones from the norm's centre, then long ones from all clues."""
    if locked.centre is not None:
        centre = score_distance(locked.centre, clear.mean)
        first = [*blocks[0].values()]
        choices = [[blocks[0]["v"]] if "v" in blocks[0] else first, first, [*first, *blocks[-1].values()]]
        for temperature in (0.1, 0.2, 0.4):
            for chosen in choices:
                yield _mean(chosen), correlation_rows(clear.grams["all"]), centre, short_schedule(temperature)
    for temperature in (0.25, 0.5, 1.0):
        yield ours, theirs, hint, long_schedule(temperature)
    tables = [correlations(gram) for block in locked.grams for gram in block.values()]
    locked_axes = _axes(torch.stack(tables).sum(dim=0), AXES)
    [clear_axis] = _axes(correlations(clear.grams["all"]), 1)
    for axis in locked_axes:
        for turned in (axis, -axis):
            sharper = hint + likelihood_ratio(turned, clear_axis, CORRELATIONS["axis"])
            for temperature in (0.25, 0.5, 1.0):
                yield ours, theirs, sharper, long_schedule(temperature)


def _hint(clear: ClearSide, locked: LockedSide) -> Tensor:
    """[D, D]: log-likelihood that locked channel i is clear channel j, from statistics of single channels."""
    clues = {
        "centre": (locked.centre, clear.mean),
        "lean": (locked.lean, clear.first),
        "reach": (-locked.reach, clear.spread),
    }
    ratios = [likelihood_ratio(a, b, CORRELATIONS[name]) for name, (a, b) in clues.items() if a is not None]
    return torch.stack(ratios).sum(dim=0)


def _axes(table: Tensor, count: int) -> list[Tensor]:
    """The main axes of a symmetric table, the strongest first."""
    vectors = torch.linalg.eigh(table.double()).eigenvectors.float()
    return [vectors[:, -number] for number in range(1, count + 1)]


def _mean(tables: Sequence[Tensor]) -> Tensor:
    return unit_rows(torch.stack(list(tables)).mean(dim=0))


def _where(backbone: Backbone) -> torch.device:
    """Where the search runs: on the model's GPU, else on the CPU, since other devices lack float64."""
    device = next(backbone.model.parameters()).device
    return device if device.type == "cuda" else torch.device("cpu")


@contextmanager
def _quick() -> Iterator[None]:
    """Flushes denormal numbers to zero: Sinkhorn produces many, and they are slow."""
    tiny = torch.tensor([1e-40])
    was = bool((tiny * 1.0 == 0).all())
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was)
