"""Weight matching: the permutations that make a base model's weights those of a locked one.

A locked tensor is a base tensor with permuted channels, so the key is the assignment of channels with the least sum of
squared differences. The squared norms in that sum do not depend on the assignment, so the sum of inner products is
maximised, each tensor in units of its standard deviation. This is the most likely key if the two models differ by noise
proportional to the weights.

With several groups (the residual key and cover), a channel of one group is compared along axes that another group has
permuted. The first assignment therefore uses sorted values, which do not depend on the order. Then each group in turn
is assigned with the current keys of the others, until nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from situs.backbones.layout import Group, Member
from situs.core.permutation import identity
from situs.errors import SitusError
from situs.locks.groups import permute_state

State = Mapping[str, Tensor]
Keys = dict[str, Tensor]

MAX_ROUNDS = 20
"""Rounds over the groups at most; exact weights need two or three."""


@dataclass(frozen=True)
class Match:
    """keys: group name -> permutation. error: remaining mean squared difference, in variances of the weights."""

    keys: Keys
    error: float
    rounds: int


def assign(similarity: Tensor) -> Tensor:
    """The permutation q [n] with the largest sum of similarity[i, q[i]]; similarity: [n, n]."""
    _, chosen = linear_sum_assignment(similarity.double().cpu().numpy(), maximize=True)
    return torch.from_numpy(chosen).long()


def match_keys(locked: State, base: State, groups: Sequence[Group]) -> Match:
    """The best keys with locked ≈ permute_state(base, groups, keys).

    With inner groups, two starts are tried (inner groups not permuted, or unknown), and the one with the smaller error
    is continued. Tensors of both must have the same names and shapes.
    """
    _check(locked, base, groups)
    ordered = sorted(groups, key=lambda group: group.kind != "residual")
    residual = [group for group in ordered if group.kind == "residual"]
    plain = {group.name: identity(group.size) for group in ordered}
    first = _turn(locked, base, ordered, residual, plain, set())
    if len(ordered) == 1 or fit_error(locked, base, ordered, first) == 0:
        return Match(first, fit_error(locked, base, ordered, first), 1)
    hidden = {group.name for group in ordered}
    starts = (first, _turn(locked, base, ordered, ordered, plain, hidden))
    keys = min(starts, key=lambda start: fit_error(locked, base, ordered, start))
    for rounds in range(2, MAX_ROUNDS + 1):
        before, keys = keys, _turn(locked, base, ordered, ordered, keys, set())
        if all(torch.equal(before[name], keys[name]) for name in keys):
            return Match(keys, fit_error(locked, base, ordered, keys), rounds)
    return Match(keys, fit_error(locked, base, ordered, keys), MAX_ROUNDS)


def _turn(
    locked: State, base: State, groups: Sequence[Group], chosen: Sequence[Group], keys: Keys, unknown: set[str]
) -> Keys:
    """Assigns each of the `chosen` groups once, given the others. unknown: groups without an assignment so far."""
    keys, unknown = dict(keys), set(unknown)
    for group in chosen:
        hidden = [other for other in groups if other.name in unknown and other.name != group.name]
        keys[group.name] = _assign_group(locked, base, group, groups, keys, hidden)
        unknown.discard(group.name)
    return keys


def _assign_group(
    locked: State, base: State, group: Group, groups: Sequence[Group], keys: Keys, hidden: Sequence[Group]
) -> Tensor:
    """The group's key from its channels, given the current keys of the other groups."""
    others = [other for other in groups if other.name != group.name and other.name not in {h.name for h in hidden}]
    names = {member.tensor for member in group.members}
    moved = permute_state({name: base[name] for name in names}, others, keys)
    similarity = torch.zeros(group.size, group.size, dtype=torch.float64)
    for member in group.members:
        theirs, ours = (channels(state[member.tensor], member, group.size, hidden) for state in (locked, moved))
        scale = ours.std(correction=0)
        if scale > 0:  # a constant tensor is no evidence
            similarity += (((theirs - theirs.mean(0)) / scale) @ ((ours - ours.mean(0)) / scale).T).double()
    return assign(similarity)


def channels(tensor: Tensor, member: Member, size: int, hidden: Sequence[Group] = ()) -> Tensor:
    """The values of each channel of a member, [size, values], sorted along the axes of the `hidden` groups."""
    front = tensor.detach().movedim(member.axis, 0)
    if member.at is not None:
        axis, index = member.at
        front = front.select(axis + (axis < member.axis), index)  # movedim shifted the axes before it by one
    stop = None if member.length is None else member.start + member.length
    stretch = front[member.start : stop].float()
    values = stretch.reshape(member.outer, size, member.inner, -1).permute(1, 0, 2, 3)
    touching = {other.axis for group in hidden for other in group.members if other.tensor == member.tensor}
    if not touching:
        return values.reshape(size, -1)
    if touching == {member.axis}:  # heads and the channels inside them share an axis
        return values.flatten(1, 2).sort(dim=1).values.reshape(size, -1)
    if member.axis not in touching and tensor.dim() == 2:
        return values.reshape(size, member.outer * member.inner, -1).sort(dim=2).values.reshape(size, -1)
    return values.reshape(size, -1).sort(dim=1).values


def fit_error(locked: State, base: State, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> float:
    """Mean squared difference of locked and keyed base over the groups' tensors, each in its own variance."""
    names = {member.tensor for group in groups for member in group.members}
    moved = permute_state({name: base[name] for name in names}, groups, keys)
    total, count = 0.0, 0
    for name in sorted(names):
        ours, theirs = moved[name].double(), locked[name].double()
        variance = float(ours.var(correction=0)) or 1.0
        total += float((ours - theirs).square().sum()) / variance
        count += ours.numel()
    return total / max(count, 1)


def _check(locked: State, base: State, groups: Sequence[Group]) -> None:
    for group in groups:
        for member in group.members:
            for what, state in (("the locked model", locked), ("the base", base)):
                if member.tensor not in state:
                    raise SitusError(
                        f"{member.tensor}: is missing from {what}, so the locked model and the base are different "
                        "models",
                        field="base",
                    )
            shapes = tuple(locked[member.tensor].shape), tuple(base[member.tensor].shape)
            if shapes[0] != shapes[1]:
                raise SitusError(
                    f"{member.tensor}: is {list(shapes[0])} in the locked model and {list(shapes[1])} in the "
                    "base; the two models have different architectures",
                    field="base",
                )


# --- by correlations alone: the steps of the attack with samples ------------------------------------------------------
# A side is a Gram matrix over D channels; `correlation_rows` makes it a table that does not depend on the channels'
# scales. A permutation q (locked channel i is clear channel q[i]) is good if two locked channels correlate as their
# clear ones do. The search goes from a soft assignment, started by a hint on single channels, to a hard one
# (`graduated_assignment`, `hard_assignment`). `agreement` scores the result without the true key.
# `refined_assignment` combines many pairs of tables at the end.


BALANCE = 10
"""Iterations of Sinkhorn's algorithm."""

CUT = 60.0
"""Logits are clipped this far below their row's largest, so nothing underflows."""

HARD_ROUNDS = 50
"""Rounds of hard assignment at most; a few suffice."""

REFINE = 6
"""Rounds of the refinement."""


def correlations(gram: Tensor) -> Tensor:
    """G_ij / √(G_ii G_jj), [D, D]: a Gram matrix without the channels' scales."""
    scale = gram.diagonal().clamp_min(1e-30).rsqrt()
    return gram * scale[:, None] * scale[None, :]


def root_correlations(gram: Tensor) -> Tensor:
    """The square root of the correlation matrix: trained weights read a stream's strong directions less than
    proportionally."""
    values, vectors = torch.linalg.eigh(correlations(gram).double())
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).float()


def correlation_rows(gram: Tensor) -> Tensor:
    """Correlations of a Gram matrix [D, D] without its diagonal, each row centred and of unit length."""
    return centred_rows(correlations(gram))


def centred_rows(table: Tensor) -> Tensor:
    """A table without its diagonal, each row centred and of unit length."""
    table = table.clone().fill_diagonal_(0.0)
    return unit_rows(table - table.mean(dim=1, keepdim=True))


def unit_rows(table: Tensor) -> Tensor:
    """Rows of unit length; a row of zeros stays."""
    return table / table.norm(dim=1, keepdim=True).clamp_min(1e-30)


def normal_scores(values: Tensor) -> Tensor:
    """The normal quantiles of the ranks of a vector [D]."""
    order = values.argsort(stable=True).argsort()
    return torch.special.ndtri((order.double() + 0.5) / values.numel())


def score_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """[D, D]: minus the squared distance of the normal scores of two vectors [D]."""
    return -(normal_scores(ours).float()[:, None] - normal_scores(theirs).float()[None, :]).square()


def likelihood_ratio(ours: Tensor, theirs: Tensor, correlation: float) -> Tensor:
    """[D, D]: log-likelihood ratio of pairs of normal scores, correlated against independent."""
    x, y = normal_scores(ours).float()[:, None], normal_scores(theirs).float()[None, :]
    r = correlation
    return (2 * r * x * y - r * r * (x * x + y * y)) / (2 * (1 - r * r))


def zscore(table: Tensor) -> Tensor:
    """Rows standardised to mean 0 and variance 1, then columns."""
    for dim in (1, 0):
        table = table - table.mean(dim=dim, keepdim=True)
        table = table / table.std(dim=dim, keepdim=True, correction=0).clamp_min(1e-30)
    return table


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [D, D] scaled so that rows and columns sum to 1, columns exactly.

    After clipping, the scales stay within float64, so one vector for rows and one for columns suffice.
    """
    kernel = (logits - logits.max(dim=1, keepdim=True).values).clamp_min(-CUT).exp().double()
    columns = kernel.new_ones(kernel.shape[1])
    rows = columns
    for _ in range(BALANCE):
        rows = 1 / (kernel @ columns)
        columns = 1 / (kernel.T @ rows)
    return (rows[:, None] * kernel * columns).float()


@dataclass(frozen=True)
class Schedule:
    """A graduated assignment from soft to hard. start: the hint's first weight; steps: (temperature, hint's weight)."""

    start: float
    steps: tuple[tuple[float, float], ...]


def short_schedule(temperature: float) -> Schedule:
    """12 steps from `temperature` to .05, for a hint −(difference of scores)² whose weight falls from 3 to .1."""
    steps = zip(_falling(temperature, 0.05, 12), _falling(3.0, 0.1, 12), strict=True)
    return Schedule(1 / temperature, tuple((heat, weight / heat) for heat, weight in steps))


def long_schedule(temperature: float) -> Schedule:
    """40 steps from `temperature` to .05, for a hint in log-likelihoods whose weight falls from 2 to .5."""
    return Schedule(1.0, tuple(zip(_falling(temperature, 0.05, 40), _falling(2.0, 0.5, 40), strict=True)))


def _falling(first: float, last: float, count: int) -> list[float]:
    return [first * (last / first) ** (step / (count - 1)) for step in range(count)]


def graduated_assignment(a: Tensor, b: Tensor, hint: Tensor, schedule: Schedule) -> Tensor:
    """q [D] by graduated assignment of the tables a (locked) and b (clear), started from `hint` [D, D]."""
    place = sinkhorn(schedule.start * hint)
    for heat, weight in schedule.steps:
        place = sinkhorn(zscore(a @ place @ b.T) / heat + weight * hint)
    return assign(place)


def hard_assignment(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    """q after rounds that assign every channel by its correlations with the others as placed by q, until none moves."""
    for _ in range(HARD_ROUNDS):
        before, q = q, assign(a @ b[:, q].T)
        if torch.equal(before, q):
            break
    return q


def agreement(a: Tensor, b: Tensor, q: Tensor) -> float:
    """J(q) = mean_i Σ_k a[i, k] b[q[i], q[k]]: how well the two tables agree; it needs no key."""
    return float((a * b[q][:, q]).sum(dim=1).mean())


def refined_assignment(ours: Sequence[Tensor], theirs: Sequence[Tensor], hint: Tensor, q: Tensor) -> Tensor:
    """q after rounds in which every pair of tables votes, weighted by its agreement with the current q."""
    place = torch.zeros_like(hint)
    every = identity(len(q))
    place[every, q] = 1.0
    hinted = zscore(hint)
    for _ in range(REFINE):
        total = float(hinted[every, q].mean()) * hinted
        for a in ours:
            moved = a @ place
            for b in theirs:
                vote = zscore(moved @ b.T)
                total = total + float(vote[every, q].mean()) * vote
        q = assign(total)
        place = place / 2
        place[every, q] += 0.5
    return q
