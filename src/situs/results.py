"""What a measurement returns: its numbers, a sentence and tables, and how they were made.

Nothing here draws or writes; `situs.pages` makes the page of a result.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, SupportsFloat

from situs.errors import counted

Cell = str | int | float | bool | None
"""A value of a table or of a list of facts; None is shown as a dash."""

_IMAGE = re.compile(r"(?<![\w/+.-])(?:(?P<article>[Aa]n) )?(?P<first>[Ii])mage(?P<many>s?)(?![\w/+=])")


Tone = Literal["good", "bad", "unsure"]


class Table(NamedTuple):
    """A table for people. title: above it on a terminal. caption: instead of the title on a page."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def cells(self) -> list[list[str]]:
        """The cells as text, row by row, the header first if there is one."""
        return [[show(cell) for cell in row] for row in (*([self.header] if self.header else []), *self.rows)]

    def __str__(self) -> str:
        """As plain text: columns as wide as their widest cell, no trailing blanks."""
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([self.title, *(f"  {line}" for line in lines), ""])


class Summary(NamedTuple):
    """A result in words: one verdict, its tables, and notes that a reader must not overlook.

    numbers: the few on a page's first screen, each with its label.
    """

    sentence: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()


class Figure(NamedTuple):
    """A figure of a page. name: of its file. draw: the function of `situs.report` that draws it, such as
    "figures.curves", or "bars" for bars in the page itself, without a file; values, options: its arguments. section:
    its heading."""

    name: str
    caption: str
    draw: str
    values: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    section: str = "Numbers"


class Origin(NamedTuple):
    """A model or a run that was measured. identity: a hash that distinguishes models of one name."""

    name: str
    identity: str


@dataclass(frozen=True)
class Provenance:
    """How a result was made, without paths and dates.

    facts: written with the numbers and shown at the page's end. of: what was measured. left_out: sentences on samples
    that were not measured. things: the name of its samples.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    of: tuple[Origin, ...] = ()
    left_out: tuple[str, ...] = ()
    things: str = "images"

    @classmethod
    def joint(cls, parts: Iterable[Provenance], facts: Mapping[str, Any] = MappingProxyType({})) -> Provenance:
        """The provenance of several results together; facts: true of all of them."""
        parts = list(parts)
        left_out = dict.fromkeys(sentence for part in parts for sentence in part.left_out)
        things = parts[0].things if parts else cls.things
        return cls(facts, tuple(origin for part in parts for origin in part.of), tuple(left_out), things)

    @property
    def name(self) -> str:
        """The name of what was measured, the first of several."""
        return self.of[0].name if self.of else "model"

    def counted(self, count: int) -> str:
        """A count of samples in words: 1,000 images."""
        return counted(count, self.things)

    def worded(self, text: str) -> str:
        """A sentence about images in the words of the samples: for clips "an image" becomes "a clip".

        The measurements and sentences are the same for both; the addresses of pictures in a page stay.
        """
        if self.things == "images":
            return text
        one = self.things.removesuffix("s")

        def reword(match: re.Match[str]) -> str:
            word = one.capitalize() if match["first"] == "I" else one
            return f"{match['article'][0]} {word}" if match["article"] else f"{word}{match['many']}"

        return _IMAGE.sub(reword, text)

    def title(self, text: str) -> str:
        """`text` after the name of the data."""
        return f"{self.facts['data']}, {text}" if "data" in self.facts else text


@dataclass(frozen=True, kw_only=True)
class Result(ABC):
    """A measurement with everything that its page needs. file: the name of its files. subject: what was measured, for
    the
    page's title. meaning: what the numbers mean, for the page's end."""

    file: ClassVar[str]
    subject: ClassVar[str] = ""
    meaning: ClassVar[str] = ""

    provenance: Provenance = Provenance()

    @property
    def tone(self) -> Tone | None:
        """Whether the verdict is good, bad or unsure, if there is one: only a passed gate is good."""
        return None

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"{self.provenance.name}: {self.subject or self.file}"

    @property
    def mark(self) -> str:
        """The tone in two or three words."""
        return ""

    @property
    def private(self) -> bool:
        """Whether its page shows private data."""
        return False

    @abstractmethod
    def summary(self) -> Summary:
        """The sentence and the tables for terminal, page and JSON."""

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What was measured, for JSON."""

    def figures(self) -> Sequence[Figure]:
        """The figures of the page; the first figure is on the first screen."""
        return ()

    def details(self) -> Sequence[Table]:
        """Tables for the page alone, each under its title."""
        return ()

    def in_words(self) -> Summary:
        """`summary` in the words of its samples."""
        summary, word = self.summary(), self.provenance.worded
        tables = [
            Table(
                word(table.title),
                [word(name) for name in table.header],
                [[word(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows],
            )
            for table in summary.tables
        ]
        notes = tuple(map(word, summary.notes))
        return summary._replace(sentence=word(summary.sentence), tables=tuple(tables), notes=notes)

    def __str__(self) -> str:
        """The tables, the sentence and the notes."""
        summary = self.in_words()
        return "\n".join([*map(str, summary.tables), summary.sentence, *summary.notes])

    def __init_subclass__(cls, **options: Any) -> None:
        """A dataclass would write every tensor, private pixels among them, wherever a result is shown."""
        super().__init_subclass__(**options)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Result.__repr__

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.title}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text of a notebook's cell."""
        printer.text(repr(self) if cycle else str(self))

    def _repr_html_(self) -> str:
        """The page in a notebook's cell, with its pictures."""
        return import_module("situs.pages").as_frame(self)  # pages draw results, so that they stand above them

    def to_json(self) -> dict[str, Any]:
        """What was measured, how it was measured, and the numbers."""
        of = [origin.identity for origin in self.provenance.of]
        return {**({"of": of} if of else {}), **self.provenance.facts, **self.numbers()}


def finite(value: Any) -> Any:
    """A value for JSON: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(share: SupportsFloat, digits: int | None = 1) -> str:
    """A share as "65.6 %", with a space before the unit (SI). digits: after the point; None: as many as it has.

    >>> percent(0.656), percent(0.9, 0), percent(0.125, None)
    ('65.6 %', '90 %', '12.5 %')
    """
    value = 100 * float(share)
    return f"{value:g} %" if digits is None else f"{value:.{digits}f} %"


def points(share: float | None, digits: int = 2) -> str | None:
    """A share as a number of percent, for a column whose header has the unit; None for None and NaN.

    >>> points(0.65625), points(0.9, 0), points(None)
    ('65.62', '90', None)
    """
    return None if share is None or math.isnan(share) else f"{100 * share:.{digits}f}"


def show(value: Cell) -> str:
    """A value as text: four significant digits for a float, yes or no, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value


def channels_drawn(channels: int) -> str:
    """The sentence for images that are neither grey nor RGB, on how they are drawn; otherwise empty."""
    if channels in (1, 3):
        return ""
    drawn = "as the mean of both" if channels == 2 else "with the first three as red, green and blue"
    return f"The images have {channels} channels and are drawn {drawn}."
