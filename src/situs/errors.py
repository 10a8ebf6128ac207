"""The one error a user's mistake raises. It stands below every package so that all of them may use it.

Below the command line an error knows *fields*, never flags. Three forms:

    SitusError(field="mask_ratio", value=1.2, allowed="in [0, 1)")       # mask_ratio=1.2: must be in [0, 1)
    SitusError("there are no images to look at", field="data")           # a sentence about a field
    SitusError(f"{folder}: holds no run")                                # a sentence about no field

A field is the name a caller of that function or config knows: an argument (`ratios`), a field of the config the check
stands in (`mask_ratio`), or the dotted path from the config the caller gave (`train.epochs`). `situs.config` puts the
path of nested configs in front (`method.mask_ratio`); `situs.cli` adds the flag, where the verb has one:
`method.mask_ratio=1.2: must be in [0, 1) (--method.mask-ratio)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any


class SitusError(ValueError):
    """A mistake in what the user gave: one sentence, and the fields, the value and what is allowed where it has them.

    The command line prints the sentence and exits with 2; a library caller sees an ordinary `ValueError`.
    """

    def __init__(
        self, sentence: str = "", *, field: str | Iterable[str] = (), value: Any = None, allowed: str = ""
    ) -> None:
        """field: what can be changed to mend it, one or several. Without a sentence, `value` and `allowed` make it."""
        self.fields = (field,) if isinstance(field, str) else tuple(field)
        self.value, self.allowed = value, allowed
        super().__init__(sentence or self._by_value())

    @property
    def field(self) -> str | None:
        """The field it is about, the first where it names several."""
        return self.fields[0] if self.fields else None

    def under(self, path: str) -> SitusError:
        """The same mistake as the holder of this config sees it: its fields have `path` in front."""
        by_value = str(self) == self._by_value()
        fields = tuple(f"{path}.{field}" for field in self.fields)
        return SitusError("" if by_value else str(self), field=fields, value=self.value, allowed=self.allowed)

    def said_of(self, where: str) -> SitusError:
        """The same mistake with the place it was found in (a file, a preset) in front of the sentence."""
        return SitusError(f"{where}: {self}", field=self.fields, value=self.value, allowed=self.allowed)

    def _by_value(self) -> str:
        value = str(self.value) if isinstance(self.value, PurePath) else repr(self.value)
        return f"{self.field}={value}: must be {self.allowed}"


class DataError(SitusError):
    """What lies where the data should be is not what was asked for: `data` is the field to change."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, field="data")


class BrokenSampleError(SitusError):
    """A sample that cannot be read: an image or a clip that cannot be decoded, a row that holds none.

    Loaders skip and count it, or stop at it when they are strict.
    """


def unknown_name(kind: str, name: str, choices: Iterable[str], *, field: str | Iterable[str] = ()) -> SitusError:
    """The error for a name that is in no dict: the choices come from the dict itself, so they cannot go stale."""
    listed = ", ".join(sorted(choices))
    sentence = f"unknown {kind} {name!r}; choose one of: {listed}"
    return SitusError(sentence, field=field, value=name, allowed=f"one of {listed}")


def missing_extra(package: str, extra: str, purpose: str) -> SitusError:
    """The error for an optional dependency that is not installed."""
    return SitusError(f"{purpose} needs the package {package!r}: pip install 'situs[{extra}]'")


def counted(count: int, things: str) -> str:
    """So many of some things, for a sentence: 1,200 images, 1 image, 1 class."""
    one = things.removesuffix("es" if things.endswith(("sses", "xes", "ches")) else "s")
    return f"{count:,} {one if count == 1 else things}"


def verb(count: int, many: str) -> str:
    """The verb of so many things: were, and of one was."""
    irregular = {"are": "is", "were": "was", "do": "does", "have": "has"}
    return many if count != 1 else irregular.get(many, f"{many}s")


def first_line(error: Exception) -> str:
    """What another library's error says, for a sentence: its first line, cut at 120 characters, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def none_read(name: str, count: int, things: str) -> str:
    """A set's name, and that none of its samples can be read."""
    several = f"none of its {count:,} {things} can be read"
    return f"{name}: " + (several if count > 1 else f"its only {things[:-1]} cannot be read")
