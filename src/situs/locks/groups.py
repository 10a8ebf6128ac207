"""Which axes of which tensors move together under a key.

A *group* is a set of axes that one permutation moves as one. The residual group (the stream between the blocks) is
the lock: with its weights keyed, blocks'(z[..., p]) = blocks(z)[..., p]. The inner groups (MLP units, heads, value and
query/key channels) move on both their sides and leave the function as it was: cover, never strength (SPEC §6).

Inner keys are shared by all heads of a layer (or by all kv groups), so that every two groups commute: applying the
inverse of each key, in whatever order, gives back the very bits.
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
    """The groups that make the lock, in the order of the stream (one for each stage of a hierarchical model)."""
    return tuple(group for group in groups if group.kind == "residual")


def entrance_and_exit(groups: Sequence[Group]) -> tuple[str, str]:
    """The names of the keys that the stream has before the first block and after the last (equal but in Swin)."""
    residual = residual_only(groups)
    if not residual:
        raise SitusError("these groups hold no residual key, so nothing enters or leaves the blocks permuted")
    return residual[0].name, residual[-1].name


def axis_index(member: Member, size: int, length: int, p: Tensor) -> Tensor:
    """The gather index [length] of a member's whole axis when its group's key is p [size]."""
    stretch = (length if member.length is None else member.start + member.length) - member.start
    if member.outer * size * member.inner != stretch:
        raise SitusError(
            f"{member.tensor}: axis {member.axis} holds {stretch} places where the group has "
            f"{member.outer} x {size} x {member.inner}"
        )
    if size == length:
        return p
    index = torch.arange(length, device=p.device)
    laid_out = index[member.start : member.start + stretch].view(member.outer, size, member.inner)
    moved = laid_out.index_select(1, p).flatten()
    return torch.cat([index[: member.start], moved, index[member.start + stretch :]])


Move = tuple[int, tuple[int, int] | None, Tensor]
"""What happens to a tensor: axis, the slice of another axis that moves (None: all), gather index."""


def moves_of(
    groups: Sequence[Group], keys: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[Move]]:
    """What the keys do to each tensor of these shapes. Keys of one axis are composed, so that it is moved once.

    shapes: of a whole state dict or a part of one (a shard): members that it does not hold are left out.
    """
    check_keys(groups, keys)
    found: dict[str, dict[tuple[int, tuple[int, int] | None], Tensor]] = {}
    for group in groups:
        for member in group.members:
            if member.tensor not in shapes:
                continue
            index = axis_index(member, group.size, shapes[member.tensor][member.axis], keys[group.name])
            own, place = found.setdefault(member.tensor, {}), (member.axis, member.at)
            own[place] = compose(own[place], index) if place in own else index
    return {name: [(*place, index) for place, index in own.items()] for name, own in found.items()}


def permute_state(
    state: Mapping[str, Tensor], groups: Sequence[Group], keys: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state with every group moved by its key (gather: y[i] = x[p[i]]); bits are copied, never computed.

    Tensors in no group come back as the same objects.
    """
    moves = moves_of(groups, keys, {name: tensor.shape for name, tensor in state.items()})
    with torch.no_grad():
        return {name: _moved(tensor, moves.get(name, ()), _select, torch.clone) for name, tensor in state.items()}


def changes_of(
    groups: Sequence[Group], keys: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """What the keys do to the tensors of files, of which there are more than memory holds: name -> function.

    numpy's take on whole numbers moves the columns of bfloat16 four times as fast as torch's index_select.
    """
    moves = moves_of(groups, keys, shapes)
    return {name: partial(_moved, moves=own, select=_take, clone=np.copy) for name, own in moves.items()}


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
    """The groups with the members that are among `names`; those of which nothing is left are dropped."""
    kept = [replace(group, members=tuple(m for m in group.members if m.tensor in names)) for group in groups]
    return tuple(group for group in kept if group.members)


def rename(groups: Sequence[Group], names: Mapping[str, str]) -> tuple[Group, ...]:
    """The same groups over tensors of other names; every one of them must have one."""
    lacking = next((m.tensor for group in groups for m in group.members if m.tensor not in names), None)
    if lacking is not None:
        raise SitusError(f"{lacking}: the model and its files do not both hold it, in one shape")
    return tuple(
        replace(group, members=tuple(replace(member, tensor=names[member.tensor]) for member in group.members))
        for group in groups
    )


def check_keys(groups: Sequence[Group], keys: Mapping[str, Tensor]) -> None:
    """Refuses keys that are missing, of the wrong size or no permutations."""
    for group in groups:
        if group.name not in keys:
            raise SitusError(f"no key for the group {group.name!r}; keys given: {', '.join(sorted(keys)) or 'none'}")
        p = keys[group.name]
        if p.shape != (group.size,) or not bool(is_permutation(p)):
            raise SitusError(f"the key of {group.name!r} is no permutation of {group.size} places")


def invert_keys(keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys that undo `keys`."""
    return {name: invert(p) for name, p in keys.items()}


def random_keys(groups: Sequence[Group], generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """A random permutation for each group, from torch's generator: for tests and checks, never for a lock.

    Never the identity, under which every law holds and nothing is tested; but a group of one place has no other.
    """
    return {group.name: moving(group.size, generator) for group in groups}


def moving(size: int, generator: torch.Generator | None = None) -> Tensor:
    """A random permutation of `size` places that is not the identity, unless there is only one place."""
    while True:
        p = torch.randperm(size, generator=generator)
        if size < 2 or not torch.equal(p, torch.arange(size)):
            return p
