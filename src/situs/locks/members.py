"""What a key moves: axes of tensors, and groups of axes that move as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["residual", "hidden", "heads", "value", "query"]


@dataclass(frozen=True)
class Member:
    """One axis of one tensor, laid out (outer, size, inner); the middle one is permuted.

    start, length: only that stretch of the axis has the layout (the values' third of a fused qkv); None: to its end.
    at: (axis, index) of another axis; only that slice moves (one layer's part of a table that all layers share).
    """

    tensor: str
    axis: int
    outer: int = 1
    inner: int = 1
    start: int = 0
    length: int | None = None
    at: tuple[int, int] | None = None


@dataclass(frozen=True)
class Group:
    """Axes that one permutation [size] moves together."""

    name: str
    kind: Kind
    size: int
    members: tuple[Member, ...]
