"""Which axes of which tensors move together under a key.

A *group* is a set of axes that one permutation moves together. The residual group (the stream between the blocks) is
the lock: with its weights keyed, blocks'(z[..., p]) = blocks(z)[..., p]. The inner groups (MLP units, heads, value and
query/key channels) are moved on both sides of a product, which leaves the function unchanged: they are cover and add no
strength (SPEC §6).

All heads of a layer (or all kv groups) share an inner key, so any two groups commute: the inverse keys, in any order,
give back the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.backbones.layout import Group, Member
from situs.core.permutation import compose, invert, is_permutation
from situs.errors import SitusError


def residual_only(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The residual groups, in the order of the stream (one for each stage of a hierarchical model)."""
    return tuple(group for group in groups if group.kind == "residual")


def entrance_and_exit(groups: Sequence[Group]) -> tuple[str, str]:
    """The names of the stream's keys before the first block and after the last (they differ only in Swin)."""
    residual = residual_only(groups)
    if not residual:
        raise SitusError("the residual channels of this model cannot be permuted by a key")
    return residual[0].name, residual[-1].name


def axis_index(member: Member, size: int, length: int, p: Tensor) -> Tensor:
    """The gather index [length] of a member's whole axis for its group's key p [size]."""
    stretch = (length if member.length is None else member.start + member.length) - member.start
    if member.outer * size * member.inner != stretch:
        raise SitusError(
            f"{member.tensor}: axis {member.axis} has {stretch} entries, but the key for this axis permutes "
            f"{member.outer * size * member.inner} entries ({member.outer} x {size} x {member.inner})"
        )
    if size == length:
        return p
    index = torch.arange(length, device=p.device)
    laid_out = index[member.start : member.start + stretch].view(member.outer, size, member.inner)
    moved = laid_out.index_select(1, p).flatten()
    return torch.cat([index[: member.start], moved, index[member.start + stretch :]])


Move = tuple[int, tuple[int, int] | None, Tensor]
"""How a tensor is moved: axis, the slice of another axis that moves (None: all), gather index."""


def moves_of(
    groups: Sequence[Group], keys: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[Move]]:
    """The moves of each tensor under the keys; keys of one axis are composed, so it is moved once.

    shapes: of a whole state dict or of a part of it (a shard); members outside it are left out.
    """
    check_keys(groups, keys)
    moves: dict[str, dict[tuple[int, tuple[int, int] | None], Tensor]] = {}
    for group in groups:
        for member in group.members:
            if member.tensor not in shapes:
                continue
            index = axis_index(member, group.size, shapes[member.tensor][member.axis], keys[group.name])
            indices, place = moves.setdefault(member.tensor, {}), (member.axis, member.at)
            indices[place] = compose(indices[place], index) if place in indices else index
    return {name: [(*place, index) for place, index in indices.items()] for name, indices in moves.items()}


def permute_state(
    state: Mapping[str, Tensor], groups: Sequence[Group], keys: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state with every group moved by its key (gather: y[i] = x[p[i]]); bits are copied, not computed.

    Tensors in no group are returned as the same objects.
    """
    moves = moves_of(groups, keys, {name: tensor.shape for name, tensor in state.items()})
    with torch.no_grad():
        return {name: _moved(tensor, moves.get(name, ()), _select, torch.clone) for name, tensor in state.items()}


def changes_of(
    groups: Sequence[Group], keys: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Tensor name -> the function that moves it, for files that are read tensor by tensor.

    numpy's take on integers moves the columns of bfloat16 four times as fast as torch's index_select.
    """
    moves = moves_of(groups, keys, shapes)
    return {name: partial(_moved, moves=steps, select=_take, clone=np.copy) for name, steps in moves.items()}


def _select(values: Tensor, index: Tensor, axis: int) -> Tensor:
    return values.index_select(axis, index.to(values.device))


def _take(values: np.ndarray, index: Tensor, axis: int) -> np.ndarray:
    return values.take(index.numpy(), axis=axis)


def _moved(values: Any, moves: Iterable[Move], select: Callable[..., Any], clone: Callable[..., Any]) -> Any:
    for axis, at, index in moves:
        if at is None:
            values = select(values, index, axis)
        else:
            # One slice of a table moves; the axis that picks it is gone inside the slice.
            values = clone(values)
            inside = (slice(None),) * at[0] + (at[1],)
            values[inside] = select(values[inside], index, axis - (axis > at[0]))
    return values


def within(groups: Sequence[Group], names: Collection[str]) -> tuple[Group, ...]:
    """The groups restricted to members among `names`; groups without such members are dropped."""
    kept = [replace(group, members=tuple(m for m in group.members if m.tensor in names)) for group in groups]
    return tuple(group for group in kept if group.members)


def rename(groups: Sequence[Group], names: Mapping[str, str]) -> tuple[Group, ...]:
    """The same groups with their tensors renamed; every tensor must be in `names`."""
    missing = next((m.tensor for group in groups for m in group.members if m.tensor not in names), None)
    if missing is not None:
        raise SitusError(f"{missing}: the model and its files must both have this tensor, with the same shape")
    return tuple(
        replace(group, members=tuple(replace(member, tensor=names[member.tensor]) for member in group.members))
        for group in groups
    )


def check_keys(groups: Sequence[Group], keys: Mapping[str, Tensor]) -> None:
    """Refuses keys that are missing, of the wrong size, or no permutations."""
    for group in groups:
        if group.name not in keys:
            raise SitusError(
                f"no key is given for the group {group.name!r}, only for: {', '.join(sorted(keys)) or 'no group'}"
            )
        p = keys[group.name]
        if p.shape != (group.size,) or not bool(is_permutation(p)):
            raise SitusError(f"the key of {group.name!r} is not a permutation of {group.size} channels")


def invert_keys(keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys that undo `keys`."""
    return {name: invert(p) for name, p in keys.items()}


def random_keys(groups: Sequence[Group], generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """A random permutation for each group, from torch's generator: for tests and checks, never for a lock.

    Not the identity, under which every law holds and nothing is tested, except in a group of one channel.
    """
    return {group.name: non_identity(group.size, generator) for group in groups}


def non_identity(size: int, generator: torch.Generator | None = None) -> Tensor:
    """A random permutation of `size` channels that is not the identity, unless there is only one channel."""
    while True:
        p = torch.randperm(size, generator=generator)
        if size < 2 or not torch.equal(p, torch.arange(size)):
            return p
