"""What a measurement returns: its numbers, the sentence and the tables they come to, and how they were made.

Nothing here draws or writes; `situs.pages` knows the page of each type of result.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, SupportsFloat

from situs.errors import counted

Cell = str | int | float | bool | None
"""What a table or a list of facts may hold; None is shown as a dash."""

_IMAGE = re.compile(r"(?<![\w/+.-])(?:(?P<article>[Aa]n) )?(?P<first>[Ii])mage(?P<many>s?)(?![\w/+=])")


Tone = Literal["good", "bad", "unsure"]


class Table(NamedTuple):
    """A table for people. title: what stands over it on a terminal. caption: on a page, in the title's place."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def cells(self) -> list[list[str]]:
        """As people read them, row by row, the header first where there is one."""
        return [[show(cell) for cell in row] for row in (*([self.header] if self.header else []), *self.rows)]

    def __str__(self) -> str:
        """As plain text: columns as wide as their widest cell, no trailing blanks."""
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([self.title, *(f"  {line}" for line in lines), ""])


class Summary(NamedTuple):
    """A result in words: one verdict, the tables it stands on, and what a reader must not overlook.

    numbers: the few of a page's first screen, each with what it is of.
    """

    sentence: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()


class Figure(NamedTuple):
    """A picture of a page. name: of its file. draw: the function of `situs.report` that draws it, as "figures.curves",
    or "bars" for bars in the page itself, without a file; values, options: what it takes. section: its heading."""

    name: str
    caption: str
    draw: str
    values: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    section: str = "Numbers"


class Origin(NamedTuple):
    """A model or a run that was measured. identity: a hash by which one's files are told from another's."""

    name: str
    identity: str


@dataclass(frozen=True)
class Provenance:
    """How a result was made, without paths or dates.

    facts: written with the numbers and shown at the page's end. of: what was measured. left_out: sentences on what the
    measurement did not see. things: what its samples are called.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    of: tuple[Origin, ...] = ()
    left_out: tuple[str, ...] = ()
    things: str = "images"

    @classmethod
    def joint(cls, parts: Iterable[Provenance], facts: Mapping[str, Any] = MappingProxyType({})) -> Provenance:
        """That of several beside each other; facts: what holds for all of them."""
        parts = list(parts)
        left_out = dict.fromkeys(said for part in parts for said in part.left_out)
        things = parts[0].things if parts else cls.things
        return cls(facts, tuple(origin for part in parts for origin in part.of), tuple(left_out), things)

    @property
    def name(self) -> str:
        """Of what was measured, the first of several."""
        return self.of[0].name if self.of else "model"

    def counted(self, count: int) -> str:
        """So many samples, in words: 1,000 images."""
        return counted(count, self.things)

    def worded(self, text: str) -> str:
        """A sentence that speaks of images in the words of the samples: of clips "an image" is "a clip".

        What is measured is the same of both, and so are the sentences; the addresses of pictures in a page stay.
        """
        if self.things == "images":
            return text
        one = self.things.removesuffix("s")

        def own(found: re.Match[str]) -> str:
            word = one.capitalize() if found["first"] == "I" else one
            return f"{found['article'][0]} {word}" if found["article"] else f"{word}{found['many']}"

        return _IMAGE.sub(own, text)

    def title(self, text: str) -> str:
        """`text` behind the name of the data."""
        return f"{self.facts['data']}, {text}" if "data" in self.facts else text


@dataclass(frozen=True, kw_only=True)
class Result(ABC):
    """A measurement with all that its page needs. file: the name of its files. subject: what of the model was measured,
    as the page's title says it. meaning: what the numbers mean, for the page's end."""

    file: ClassVar[str]
    subject: ClassVar[str] = ""
    meaning: ClassVar[str] = ""

    provenance: Provenance = Provenance()

    @property
    def tone(self) -> Tone | None:
        """How the verdict is to be taken, where it is one: only what was judged and passed is good."""
        return None

    @property
    def title(self) -> str:
        """Of the page."""
        return f"{self.provenance.name}: {self.subject or self.file}"

    @property
    def mark(self) -> str:
        """The tone in two or three words."""
        return ""

    @property
    def private(self) -> bool:
        """Whether its page shows what is for its owner alone."""
        return False

    @abstractmethod
    def summary(self) -> Summary:
        """The sentence and the tables; terminal, page and JSON take them from here."""

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What was measured, as JSON holds it."""

    def figures(self) -> Sequence[Figure]:
        """The pictures of the page; the first stands on its first screen."""
        return ()

    def details(self) -> Sequence[Table]:
        """Tables for the page alone, each under its title."""
        return ()

    def in_words(self) -> Summary:
        """`summary` in the words of its samples."""
        said, word = self.summary(), self.provenance.worded
        tables = [
            Table(
                word(table.title),
                [word(name) for name in table.header],
                [[word(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows],
            )
            for table in said.tables
        ]
        return said._replace(sentence=word(said.sentence), tables=tuple(tables), notes=tuple(map(word, said.notes)))

    def __str__(self) -> str:
        """The tables, the sentence and the notes."""
        said = self.in_words()
        return "\n".join([*map(str, said.tables), said.sentence, *said.notes])

    def to_json(self) -> dict[str, Any]:
        """What it is of, how it was made, and what was measured."""
        of = [origin.identity for origin in self.provenance.of]
        return {**({"of": of} if of else {}), **self.provenance.facts, **self.numbers()}


def finite(value: Any) -> Any:
    """What JSON can hold of a value: a number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {key: finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [finite(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(share: SupportsFloat, digits: int | None = 1) -> str:
    """A share as "65.6 %", the unit apart from its number (SI). digits: behind the point; None: as many as it has.

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
    """A value as people read it: four significant digits for a float, yes or no, a dash for nothing."""
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
    """What a page must say of images whose channels are not grey or red, green and blue; nothing of others."""
    if channels in (1, 3):
        return ""
    drawn = "by the mean of both" if channels == 2 else "by the first three, as red, green and blue"
    return f"The images have {channels} channels and are drawn {drawn}."
