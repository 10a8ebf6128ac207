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
                    raise SitusError(f"{member.tensor}: {what} has no such tensor; is it another model?", field="base")
            shapes = tuple(locked[member.tensor].shape), tuple(base[member.tensor].shape)
            if shapes[0] != shapes[1]:
                raise SitusError(
                    f"{member.tensor}: is {list(shapes[0])} in the locked model and {list(shapes[1])} in the "
                    "base; the two have different architectures",
                    field="base",
                )
