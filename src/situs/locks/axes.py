"""Types for axes: which stretches of which axes one permutation must move together.

An axis is a product of *atoms*, outermost first: 72 channels of a fused projection, viewed as (3, 4, 6), are three
atoms. Operations unite atoms (what is added must be permuted alike), split them (a view cuts an axis in two), or freeze
them (a slice tells its places apart). What is left free at the end can be permuted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod


class Atom:
    """A stretch of an axis. Atoms of one class share a root; a root that was split has two children instead."""

    def __init__(self, size: int, frozen: str | None = None) -> None:
        self.size = size
        self.frozen = frozen
        self._parent: Atom | None = None
        self._children: tuple[Atom, Atom] | None = None

    def root(self) -> Atom:
        """The one atom that stands for the class."""
        if self._parent is None:
            return self
        self._parent = self._parent.root()
        return self._parent

    def leaves(self) -> list[Atom]:
        """The class's root, or those of its parts where it was split."""
        root = self.root()
        if root._children is None:
            return [root]
        return [leaf for child in root._children for leaf in child.leaves()]

    def split(self, first: int) -> None:
        """Cuts a root in (first, the rest); both inherit what froze it."""
        assert self._parent is None
        assert self._children is None
        assert self.size % first == 0
        self._children = (Atom(first, self.frozen), Atom(self.size // first, self.frozen))

    def unite(self, other: Atom) -> None:
        """Makes two roots of one size one class; either's frost is the other's."""
        assert self.size == other.size
        if self is not other:
            other._parent = self
            self.frozen = self.frozen or other.frozen


Axis = list[Atom]
"""Atoms, outermost first; their sizes multiply to the length. An axis of length 1 has none."""


def axis(size: int, frozen: str | None = None) -> Axis:
    """A new axis of its own."""
    return [Atom(size, frozen)] if size > 1 else []


def leaves(atoms: Iterable[Atom]) -> list[Atom]:
    """The axis as roots that are not split."""
    return [leaf for atom in atoms for leaf in atom.leaves()]


def length(atoms: Iterable[Atom]) -> int:
    """How many places an axis has."""
    return prod(atom.size for atom in atoms)


def freeze(atoms: Iterable[Atom], reason: str) -> None:
    """These places can be told apart; the first reason stays."""
    for atom in leaves(atoms):
        atom.frozen = atom.frozen or reason


def unify(a: Axis, b: Axis, reason: str) -> None:
    """Both axes must be permuted alike. Where their cuts cannot be brought together, both are frozen."""
    assert length(a) == length(b), f"{reason}: {length(a)} and {length(b)} places"
    done = 0
    while True:
        left, right = leaves(a), leaves(b)
        if done >= len(left) or done >= len(right):
            return
        x, y = left[done], right[done]
        if x.size == y.size:
            x.unite(y)
            done += 1
            continue
        large, small = (x, y) if x.size > y.size else (y, x)
        if large.size % small.size:
            freeze([*left, *right], f"{reason}: axes cut in ways that do not meet")
            return
        large.split(small.size)


def partition(atoms: Axis, shape: Sequence[int], reason: str) -> list[Axis]:
    """The axes of a view: atoms handed out to axes of the sizes `shape`, cut where an axis ends inside one."""
    out: list[Axis] = []
    rest = leaves(atoms)
    for size in shape:
        taken: Axis = []
        missing = size
        while missing > 1:
            head = rest[0]
            if head.size > missing and head.size % missing == 0:
                head.split(missing)
                rest = leaves(rest)  # the same atom may stand in it twice
                continue
            if missing % head.size:
                freeze(atoms, f"{reason}: a view that cuts across its axes")
                return [axis(n, f"{reason}: a view that cuts across its axes") for n in shape]
            taken.append(head)
            rest = rest[1:]
            missing //= head.size
        out.append(taken)
    # A split that came late also cuts what was handed out before.
    return [leaves(each) for each in out]
