"""The error for a user's mistake, and words for sentences.

Below the command line an error knows *fields*, never flags. Three forms:

    SitusError(field="mask_ratio", value=1.2, allowed="in [0, 1)")       # mask_ratio=1.2: must be in [0, 1)
    SitusError("there are no images to look at", field="data")           # a sentence about a field
    SitusError(f"{folder}: is not a run")                                # a sentence without a field

A field is a name that the caller knows: an argument (`ratios`), a field of the checked config (`mask_ratio`), or a
dotted path from the caller's config (`train.epochs`). `situs.config` puts the path of nested configs in front
(`method.mask_ratio`); `situs.cli` adds the flag, where the verb has one:
`method.mask_ratio=1.2: must be in [0, 1) (--method.mask-ratio)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any


class SitusError(ValueError):
    """A user's mistake: one sentence and, where they apply, the fields, the value and what is allowed.

    The command line prints the sentence and exits with 2; a library caller sees an ordinary `ValueError`.

    >>> try:
    ...     situs.extract_features("runs/mp3", count=0)
    ... except situs.SitusError as error:
    ...     error.field
    'count'
    """

    def __init__(
        self, sentence: str = "", *, field: str | Iterable[str] = (), value: Any = None, allowed: str = ""
    ) -> None:
        """field: what to change, one or several. Without a sentence, `value` and `allowed` make one."""
        self.fields = (field,) if isinstance(field, str) else tuple(field)
        self.value, self.allowed = value, allowed
        super().__init__(one_line(sentence) or self._by_value())

    @property
    def field(self) -> str | None:
        """The (first) field to change."""
        return self.fields[0] if self.fields else None

    def under(self, path: str) -> SitusError:
        """The same error for the config that contains this one: its fields have `path` in front."""
        by_value = str(self) == self._by_value()
        fields = tuple(f"{path}.{field}" for field in self.fields)
        return SitusError("" if by_value else str(self), field=fields, value=self.value, allowed=self.allowed)

    def prefixed(self, where: str) -> SitusError:
        """The same error with its source (a file, a preset) in front of the sentence."""
        return SitusError(f"{where}: {self}", field=self.fields, value=self.value, allowed=self.allowed)

    def _by_value(self) -> str:
        value = str(self.value) if isinstance(self.value, PurePath) else repr(self.value)
        return one_line(f"{self.field}={value}: must be {self.allowed}")


def one_line(text: str) -> str:
    """Text with its line breaks and control characters escaped: names in files may have any."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class DataError(SitusError):
    """An error in the data that the user named: `data` is the field to change."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, field="data")


class BrokenSampleError(SitusError):
    """A sample that cannot be read: an image or a clip that cannot be decoded, an empty row.

    Loaders skip and count it; strict ones raise it.
    """


def unknown_name(kind: str, name: str, choices: Iterable[str], *, field: str | Iterable[str] = ()) -> SitusError:
    """The error for an unknown name, with all choices."""
    listed = ", ".join(sorted(choices))
    sentence = f"unknown {kind} {name!r}; choose one of: {listed}"
    return SitusError(sentence, field=field, value=name, allowed=f"one of {listed}")


def missing_extra(package: str, extra: str, purpose: str) -> SitusError:
    """The error for an optional dependency that is not installed."""
    return SitusError(f"{purpose} needs the package {package!r}: pip install 'situs[{extra}]'")


def counted(count: int, things: str) -> str:
    """A count with its noun, for a sentence: 1,200 images, 1 image, 1 class."""
    one = things.removesuffix("es" if things.endswith(("sses", "xes", "ches")) else "s")
    return f"{count:,} {one if count == 1 else things}"


def verb(count: int, many: str) -> str:
    """The verb in the right number: were, or was for one."""
    irregular = {"are": "is", "were": "was", "do": "does", "have": "has"}
    return many if count != 1 else irregular.get(many, f"{many}s")


def reason_of(error: OSError) -> str:
    """The system's reason, as part of a sentence."""
    return (error.strerror or str(error)).lower()


def first_line(error: Exception) -> str:
    """The message of another library's error, for a sentence: its first line, cut at 120 characters, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def none_read(name: str, count: int, things: str) -> str:
    """The sentence that none of a set's samples can be read."""
    several = f"none of its {count:,} {things} can be read"
    return f"{name}: " + (several if count > 1 else f"its only {things[:-1]} cannot be read")
