"""Which axes of which tensors move together under a key.

A *group* is a set of axes that one permutation moves as one. The residual group (the stream between the blocks) is
the lock: with its weights keyed, blocks'(z[..., p]) = blocks(z)[..., p]. The inner groups (MLP units, heads, value and
query/key channels) move on both their sides and leave the function as it was: cover, never strength (SPEC §6).

Inner keys are shared by all heads of a layer (or by all kv groups), so that every two groups commute: applying the
inverse of each key, in whatever order, gives back the very bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    index = torch.arange(length, device=p.device)
    stretch = (length if member.length is None else member.start + member.length) - member.start
    if member.outer * size * member.inner != stretch:
        raise SitusError(
            f"{member.tensor}: axis {member.axis} holds {stretch} places where the group has "
            f"{member.outer} x {size} x {member.inner}"
        )
    laid_out = index[member.start : member.start + stretch].view(member.outer, size, member.inner)
    moved = laid_out.index_select(1, p).flatten()
    return torch.cat([index[: member.start], moved, index[member.start + stretch :]])


def permute_state(
    state: Mapping[str, Tensor], groups: Sequence[Group], keys: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state with every group moved by its key (gather: y[i] = x[p[i]]); bits are copied, never computed.

    state: a whole state dict or a part of one (a shard): members that it does not hold are left out. Tensors in no
    group come back as the same objects. Axes are composed first, so a tensor is read once for each axis that moves.
    """
    check_keys(groups, keys)
    moves: dict[tuple[str, int, tuple[int, int] | None], Tensor] = {}
    for group in groups:
        for member in group.members:
            if member.tensor not in state:
                continue
            length = state[member.tensor].shape[member.axis]
            index = axis_index(member, group.size, length, keys[group.name])
            place = (member.tensor, member.axis, member.at)
            moves[place] = compose(moves[place], index) if place in moves else index
    moved = dict(state)
    for (name, axis, at), index in moves.items():
        moved[name] = _move(moved[name], axis, index.to(moved[name].device), at)
    return moved


def _move(tensor: Tensor, axis: int, index: Tensor, at: tuple[int, int] | None) -> Tensor:
    with torch.no_grad():
        if at is None:
            return tensor.index_select(axis, index)
        whole = tensor.clone()
        # select removes its axis, so that those behind it move up by one.
        whole.select(*at).copy_(tensor.select(*at).index_select(axis - (axis > at[0]), index))
        return whole


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
