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
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.backbones.layout import Group, Member
from situs.core.permutation import identity
from situs.errors import SitusError
from situs.locks.attacks.match import (
    Schedule,
    agreement,
    centred_rows,
    channels,
    correlation_rows,
    correlations,
    graduated_assignment,
    hard_assignment,
    likelihood_ratio,
    long_schedule,
    normal_scores,
    refined_assignment,
    root_correlations,
    score_distance,
    short_schedule,
    unit_rows,
)
from situs.locks.attacks.recovery import KeyRecovery, block_inputs, first_norm, judged
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
        device = next(backbone.model.parameters()).device
        where = device if device.type == "cuda" else torch.device("cpu")  # other devices lack float64
        clear, locked = clear_side(backbone, groups, inputs).to(where), locked_side(backbone, groups).to(where)
        q, best, failed = _match(clear, locked, seed)
    keys = {group.name: identity(group.size) for group in groups} | {residual[0].name: q}
    cost = (
        f"the locked file and {description}; agreement J = {best:.2f} (searches from random starts reach at most "
        f"{max(failed):.2f})"
    )
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


# --- the statistics of both sides -------------------------------------------------------------------------------------
# The clear side is the embedding: samples through it give the stream that enters the first block, and so which
# channels vary together. The locked side is the first blocks: which channels their projections read and write
# together. The two differ by the permutation that the attack looks for; cover (permuted inner groups) does not change
# them.


BLOCKS = 2
"""Blocks that are used, from the first in the file: in later ones the stream has changed."""

RIDGE = 0.03
"""Added to the diagonal of a correlation matrix before it is inverted."""

SHIFTS = 4
"""Shifts of each image, the first being none; each is also mirrored."""

REACH = 2
"""The largest shift, in patches."""

BATCH = 16

ROLES = {"query": "qk", "value": "vo", "heads": "qkvo"}
"""kind of an inner group -> the projections of its members, in order."""


@dataclass(frozen=True)
class ClearSide:
    """grams: name -> [D, D]. For each channel as the first block reads it, [D]: mean, spread, and `first`, its mean at
    the first place (the CLS token)."""

    grams: dict[str, Tensor]
    mean: Tensor
    spread: Tensor
    first: Tensor

    def to(self, device: torch.device) -> ClearSide:
        """The same on another device."""
        single = (values.to(device) for values in (self.mean, self.spread, self.first))
        return ClearSide({name: gram.to(device) for name, gram in self.grams.items()}, *single)


@dataclass(frozen=True)
class LockedSide:
    """grams: for each block, role (q, k, v, o, up, down) -> [D, D]. Of the first block, for each channel, [D]:

    centre: what its norm subtracts; without a first norm, what the bias of its values does. lean: from the biases of
    its MLP's input and its attention's output. reach: how strongly its attention reads the channel, norm included.
    """

    grams: list[dict[str, Tensor]]
    centre: Tensor | None
    lean: Tensor | None
    reach: Tensor

    def to(self, device: torch.device) -> LockedSide:
        """The same on another device."""
        grams = [{role: gram.to(device) for role, gram in block.items()} for block in self.grams]
        centre, lean = (None if clue is None else clue.to(device) for clue in (self.centre, self.lean))
        return LockedSide(grams, centre, lean, self.reach.to(device))


def clear_side(backbone: Backbone, groups: Sequence[Group], inputs: Iterable[Tensor]) -> ClearSide:
    """Statistics of the channels behind the embedding. inputs: batches of images, or of token ids."""
    state = {name: value.detach().cpu() for name, value in backbone.model.state_dict().items()}
    moments = _moments(backbone, state, groups, inputs)
    whole, place = moments.covariances()
    if not bool(whole.any()):
        raise SitusError(
            f"{backbone.name}: its embedding has the same output for all samples, so the samples reveal nothing about "
            "the key"
        )
    correlation = whole / torch.outer(*(whole.diagonal().clamp_min(1e-30).sqrt(),) * 2)
    grams = {"all": whole, "content": whole - place, "place": place}
    locked = {member.tensor for group in groups for member in group.members}
    embedding = _embedding(backbone, {name: value for name, value in state.items() if name not in locked})
    grams["filters"] = _filters(backbone, embedding)
    table = backbone.positions().table
    if table is not None:
        rows = _widened(backbone, embedding, table.detach().cpu().double())
        grams["table"] = rows.T @ rows
    grams["inverse"] = torch.linalg.inv(correlation + RIDGE * torch.eye(backbone.dim, dtype=torch.float64))
    grams = {name: gram.float() for name, gram in grams.items() if bool(gram.any())}
    first = moments.sums[0] / moments.counts[0]
    return ClearSide(grams, moments.mean().float(), whole.diagonal().clamp_min(0).sqrt().float(), first.float())


def at_places(backbone: Backbone, groups: Sequence[Group], inputs: Iterable[Tensor]) -> Tensor:
    """[D, D]: the mean covariance of the stream at one place."""
    whole, place = _moments(backbone, backbone.model.state_dict(), groups, inputs).covariances()
    return whole - place


def _moments(
    backbone: Backbone, state: Mapping[str, Tensor], groups: Sequence[Group], inputs: Iterable[Tensor]
) -> _Moments:
    moments = _Moments(backbone.dim)
    for batch in inputs:
        moments.add(_read(backbone, state, groups, batch))
    return moments


class _Moments:
    """Sums over all tokens and over the tokens of each place."""

    def __init__(self, dim: int) -> None:
        self.square = torch.zeros(dim, dim, dtype=torch.float64)
        self.sums = torch.zeros(0, dim, dtype=torch.float64)
        self.counts = torch.zeros(0, dtype=torch.float64)

    def add(self, tokens: Tensor) -> None:
        """tokens: [B, N, D]; N may differ from call to call."""
        batch, length, dim = tokens.shape
        if (more := length - len(self.counts)) > 0:
            self.sums = torch.cat([self.sums, self.sums.new_zeros(more, dim)])
            self.counts = torch.cat([self.counts, self.counts.new_zeros(more)])
        flat = tokens.reshape(-1, dim)
        self.square += (flat.T @ flat).double()
        self.sums[:length] += tokens.double().sum(dim=0)
        self.counts[:length] += batch

    def mean(self) -> Tensor:
        return self.sums.sum(dim=0) / self.counts.sum()

    def covariances(self) -> tuple[Tensor, Tensor]:
        """Covariance of all tokens, and of the means of the places; their difference is the covariance at a place."""
        if not self.counts.numel():
            raise SitusError(
                "attacker=images: needs samples, but the given images or texts contain none", field=("images", "texts")
            )
        mean, count = self.mean(), self.counts.sum()
        offsets = self.sums / self.counts[:, None] - mean
        return self.square / count - torch.outer(mean, mean), (offsets.T * self.counts) @ offsets / count


def _read(backbone: Backbone, state: Mapping[str, Tensor], groups: Sequence[Group], batch: Tensor) -> Tensor:
    """The stream as the first block's projections read it, without the norm's affine part, [B, N, D]."""
    z = block_inputs(backbone, batch)
    first, bias = first_norm(state, residual_only(groups)[0])
    if first is None:  # post-norm: the stream is already normalised
        return z
    return F.layer_norm(z, z.shape[-1:]) if bias is not None else F.rms_norm(z, z.shape[-1:])


def _embedding(backbone: Backbone, clear: Mapping[str, Tensor]) -> list[Tensor]:
    """The clear tensors of the embedding."""
    parts = {name.removeprefix("model."): role.part for name, role in backbone.roles().items()}
    return [value.detach().double() for name, value in clear.items() if parts.get(name) == "embedding"]


def _widened(backbone: Backbone, embedding: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows [n, E] of words or places in the channels of the stream, [n, D], by the last clear matrix before it."""
    if rows.shape[1] == backbone.dim:
        return rows
    [*_, wider] = (value for value in embedding if value.shape == (backbone.dim, backbone.token_dim))
    return rows @ wider.T


def _filters(backbone: Backbone, embedding: Sequence[Tensor]) -> Tensor:
    """The Gram matrix of the patch convolution, or of the word embeddings."""
    flat = [value.flatten(1) for value in embedding if value.dim() == 4 and value.shape[0] == backbone.dim]
    tables = [value for value in embedding if value.dim() == 2 and value.shape[1] == backbone.token_dim]
    if backbone.input.shape is None and tables:  # the largest; others embed token types
        words = max(tables, key=len)
        flat.append(_widened(backbone, embedding, words - words.mean(dim=0)).T)
    return sum((matrix @ matrix.T for matrix in flat), torch.zeros(backbone.dim, backbone.dim, dtype=torch.float64))


def shifted(images: Tensor, patch: tuple[int, int], seed: int = 0) -> Iterator[Tensor]:
    """Images [B, C, H, W] in batches: as they are and shifted by up to `REACH` patches, each also mirrored.

    Shifted images are padded by reflection.
    """
    height, width = images.shape[-2:]
    reach = [min(REACH * side, whole - 1) for side, whole in zip(patch, (height, width), strict=True)]
    generator = torch.Generator().manual_seed(seed)
    for batch in images.split(BATCH):
        padded = F.pad(batch, (reach[1], reach[1], reach[0], reach[0]), mode="reflect")
        for number in range(SHIFTS):
            top, left = reach
            if number:
                top, left = (int(torch.randint(0, 2 * r + 1, (), generator=generator)) for r in reach)
            cut = padded[..., top : top + height, left : left + width]
            yield cut
            yield cut.flip(-1)


def locked_side(backbone: Backbone, groups: Sequence[Group]) -> LockedSide:
    """Statistics of the channels in the first locked blocks. groups: those whose tensors the file holds."""
    state = {name: value.detach().float().cpu() for name, value in backbone.model.state_dict().items()}
    [group, *_] = residual_only(groups)
    present = set(group.members)
    blocks: dict[str, dict[str, tuple[Tensor, Tensor | None]]] = {}
    for block, role, member, rows in _projections(backbone.groups()):
        if member in present:
            matrix = state[member.tensor]
            cut = matrix if rows is None else matrix.index_select(1 - member.axis, rows)
            values, bias = channels(cut, member, group.size), state.get(f"{member.tensor.removesuffix('weight')}bias")
            if bias is not None and rows is not None and role not in ("o", "down"):
                bias = bias[rows]
            projections = blocks.setdefault(block, {})
            projections[f"{role} again" if role in projections else role] = values, bias  # a gated MLP has two "up"
    if not blocks:
        raise SitusError(
            "no block of the locked file has attention or MLP weights of a known layout, so there is nothing to attack"
        )
    chosen = list(blocks.values())[:BLOCKS]
    grams = [{role: values @ values.T for role, (values, _) in block.items()} for block in chosen]
    return LockedSide(grams, *_clues(chosen[0], *first_norm(state, residual_only(groups)[0])))


def _clues(
    block: Mapping[str, tuple[Tensor, Tensor | None]], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """centre, lean and reach of a block's projections (role -> values [D, n], bias) behind its norm."""

    def against(role: str) -> Tensor | None:
        values, role_bias = block.get(role, (None, None))
        return None if values is None or role_bias is None else values @ role_bias

    centre = None
    if weight is not None and bias is not None:
        centre = -bias / torch.where(weight == 0, 1e-30, weight)
    elif weight is None and (values_bias := against("v")) is not None:
        centre = -values_bias
    leans = [part for part in (against("up"), block["o"][1] if "o" in block else None) if part is not None]
    lean = torch.stack([normal_scores(part).float() for part in leans]).sum(dim=0) if leans else None
    scale = 1.0 if weight is None else weight.abs()
    reach = [normal_scores(block[role][0].norm(dim=1) * scale).float() for role in "qkv" if role in block]
    return centre, lean, torch.stack(reach).sum(dim=0)


def _projections(groups: Sequence[Group]) -> Iterator[tuple[str, str, Member, Tensor | None]]:
    """(block, role, member of the residual group, indices on the other axis or None for all) of every projection of the
    first stream.

    The inner groups determine the roles: a projection has the residual channels on one axis and an inner group on the
    other.
    """
    [first, *_] = residual_only(groups)
    sides = {(member.tensor, member.axis): member for member in first.members}
    seen = set()
    for group in groups:
        block, _, kind = group.name.rpartition(".")
        members = [m for m in group.members if (m.tensor, 1 - m.axis) in sides]
        places = [None if m.length is None else torch.arange(m.start, m.start + m.length) for m in members]
        if kind == "heads" and len(members) == 2:  # queries, keys and values of each head in one matrix (GPT-NeoX)
            [fused, out], width = members, members[1].inner
            thirds = torch.arange(3 * group.size * width).view(group.size, 3, width).unbind(dim=1)
            members, places = [fused, fused, fused, out], [*(third.flatten() for third in thirds), None]
        roles = [*ROLES.get(kind, "")] if kind != "mlp" else ["up"] * (len(members) - 1) + ["down"]
        if not block or len(roles) != len(members):  # another kind, or a gate among them
            continue
        for role, member, rows in zip(roles, members, places, strict=True):
            if (block, role, member.tensor) not in seen:
                seen.add((block, role, member.tensor))
                yield block, role, sides[member.tensor, 1 - member.axis], rows
