"""The attacker with the locked file and unlabelled samples: no base, no labels, and the network is never run (SPEC §6).

The samples go through the clear embedding, which says how channels go together where the stream enters the first block;
the locked weights of the first blocks say how they are read and written together. Training made the two alike, so the
order in which they agree is the key. Weights that were never trained say nothing.
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
    alike,
    centred,
    correlations,
    graduated,
    hasty,
    likely,
    patient,
    refined,
    root,
    rows,
    settled,
    unit,
)
from situs.locks.attacks.recovery import KeyRecovery, judged
from situs.locks.groups import residual_only
from situs.progress import tracked

READS = ("q", "k", "v", "up", "up again")
"""Projections whose tables are compared with the clear one; what a block writes says less."""

CORRELATIONS = {"centre": 0.75, "lean": 0.5, "reach": 0.4, "axis": 0.6}
"""How well a clue to single channels is taken to agree with the clear side. Chosen, as every number here and in
`graph`, on ViTs that were trained for it and on no model that results are given for."""

AXES = 2
"""Main axes of the locked side, each of which, either way round, may be the clear side's first."""

BLIND = 3
"""Searches from random hints, to see what a failed one looks like."""

CLEARLY = 0.1
"""A search that ends this far above every failed one has found the key, and is the last."""


@dataclass(frozen=True)
class Ending:
    """Where a search came to rest: q [D], and J(q), see `graph.agreement`."""

    q: Tensor
    score: float


def recover_with_samples(
    backbone: Backbone,
    groups: Sequence[Group],
    inputs: Iterable[Tensor],
    *,
    had: str,
    truth: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> KeyRecovery:
    """Matches the locked channels with the clear ones by what `inputs` (batches of images or of token ids) show.

    had: what the attacker had, in words. Only a stream of one width is attacked whole; of a hierarchical model the
    first stage's key is sought.
    """
    began = time.perf_counter()
    residual = residual_only(groups)
    with _quick():
        where = _where(backbone)
        clear, locked = clear_side(backbone, groups, inputs).to(where), locked_side(backbone, groups).to(where)
        q, best, failed = _match(clear, locked, seed)
    keys = {group.name: identity(group.size) for group in groups} | {residual[0].name: q}
    cost = f"the locked file and {had}; J {best:.2f}, from random hints at most {max(failed):.2f}"
    more = {"seconds": time.perf_counter() - began, "cost": cost, "agreement": best, "failed": max(failed)}
    return judged("images", groups, keys, truth, **more)


def _match(clear: ClearSide, locked: LockedSide, seed: int) -> tuple[Tensor, float, list[float]]:
    """The best q, its J, and the Js of searches from random hints."""
    blocks = [{role: rows(gram) for role, gram in block.items()} for block in locked.grams]
    every = [table for block in blocks for table in block.values()]
    ours = _mean([table for block in blocks for role, table in block.items() if role in READS])
    theirs = centred(root(clear.grams["all"]))

    def search(a: Tensor, b: Tensor, hint: Tensor, schedule: Schedule) -> Ending:
        q = settled(ours, theirs, graduated(a, b, hint, schedule))
        return Ending(q, agreement(ours, theirs, q))

    hint = _hint(clear, locked)
    generator = torch.Generator().manual_seed(seed)
    shuffled = (hint[torch.randperm(len(hint), generator=generator)] for _ in range(BLIND))
    failed = [search(ours, theirs, each, patient(0.5)).score for each in shuffled]
    endings: list[Ending] = []
    for start in tracked(_starts(clear, locked, blocks, hint, ours, theirs), "searching for the key"):
        endings.append(search(*start))
        if endings[-1].score > max(failed) + CLEARLY:
            break
    best = max(endings, key=lambda ending: ending.score)
    q = refined(every, [rows(gram) for gram in clear.grams.values()], hint, best.q)
    last = Ending(q, agreement(ours, theirs, q))
    best = max(best, last, key=lambda ending: ending.score)
    return best.q, best.score, failed


def _starts(
    clear: ClearSide, locked: LockedSide, blocks: list[dict[str, Tensor]], hint: Tensor, ours: Tensor, theirs: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Schedule]]:
    """Tables, hint and schedule of each search: hastily from the norm's centre alone, then patiently from all clues."""
    if locked.centre is not None:
        quick = alike(locked.centre, clear.mean)
        first = [*blocks[0].values()]
        tables = [[blocks[0]["v"]] if "v" in blocks[0] else first, first, [*first, *blocks[-1].values()]]
        for warmth in (0.1, 0.2, 0.4):
            for table in tables:
                yield _mean(table), rows(clear.grams["all"]), quick, hasty(warmth)
    for warmth in (0.25, 0.5, 1.0):
        yield ours, theirs, hint, patient(warmth)
    told = [correlations(gram) for block in locked.grams for gram in block.values()]
    locked_axes = _axes(torch.stack(told).sum(dim=0), AXES)
    [clear_axis] = _axes(correlations(clear.grams["all"]), 1)
    for axis in locked_axes:
        for turned in (axis, -axis):
            sharper = hint + likely(turned, clear_axis, CORRELATIONS["axis"])
            for warmth in (0.25, 0.5, 1.0):
                yield ours, theirs, sharper, patient(warmth)


def _hint(clear: ClearSide, locked: LockedSide) -> Tensor:
    """[D, D]: how likely locked channel i is clear channel j by what is said of each alone."""
    clues = {
        "centre": (locked.centre, clear.mean),
        "lean": (locked.lean, clear.first),
        "reach": (-locked.reach, clear.spread),
    }
    told = [likely(a, b, CORRELATIONS[name]) for name, (a, b) in clues.items() if a is not None]
    return torch.stack(told).sum(dim=0)


def _axes(table: Tensor, count: int) -> list[Tensor]:
    """The main axes of a symmetric table, the strongest first."""
    vectors = torch.linalg.eigh(table.double()).eigenvectors.float()
    return [vectors[:, -number] for number in range(1, count + 1)]


def _mean(tables: Sequence[Tensor]) -> Tensor:
    return unit(torch.stack(list(tables)).mean(dim=0))


def _where(backbone: Backbone) -> torch.device:
    """Where the search runs: with the model on a GPU, and on the CPU beside devices that lack float64."""
    own = next(backbone.model.parameters()).device
    return own if own.type == "cuda" else torch.device("cpu")


@contextmanager
def _quick() -> Iterator[None]:
    """Without numbers too small for the processor's fast path, which Sinkhorn's tails are full of."""
    tiny = torch.tensor([1e-40])
    was = bool((tiny * 1.0 == 0).all())
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was)
