"""What the numbers in mask files mean: which is the first class, which mean none, and what the classes are called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from situs.config import Checked
from situs.data.batch import VOID
from situs.errors import BrokenSampleError, DataError, SitusError
from situs.limits import Natural

_STRANGE = -2
_NUMBERS = 1 << 16  # that a mask file may hold
_OFTEN_VOID = 255
_LISTS = ("objectInfo150.txt", "classes.txt")


@dataclass(frozen=True)
class MaskConfig(Checked):
    """How masks are read: class numbers in files, to classes from 0 on."""

    first: Natural | None = None
    """Number of the first class in the mask files: 1 in ADE20K's. By default 0; where nobody names the classes and no
    mask of the training split holds 0, 1."""

    void: tuple[Natural, ...] = (255,)
    """Numbers that mean no class: 0 in ADE20K's. No class has one of them, whatever lies between."""

    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of their numbers; by default those of a list beside the images
    (objectInfo150.txt, as ADE20K has it, or classes.txt), else one for each number up to the largest of the training
    split."""

    @property
    def start(self) -> int:
        """The first class's number."""
        return self.first or 0

    def check(self) -> None:
        if len({*self.classes}) < len(self.classes):
            raise SitusError(field="classes", value=self.classes, allowed="names that differ")


MASKS = MaskConfig()


def class_numbers(config: MaskConfig, count: int) -> list[int]:
    """The numbers of `count` classes in the files: from the first on, those that mean none left out."""
    found, number = [], config.start
    while len(found) < count:
        if number not in config.void:
            found.append(number)
        number += 1
    return found


def to_classes(numbers: Tensor, config: MaskConfig, count: int, name: str) -> Tensor:
    """A file's numbers [H, W] as classes [H, W] int16, VOID where there is none; refused by `name` where one is none.

    count: how many classes there are.
    """
    known = _table(config.start, config.void, count)
    numbers = numbers.long()
    within = numbers.clamp(0, _NUMBERS - 1)
    classes = known[within].masked_fill_(within != numbers, _STRANGE)
    strange = classes == _STRANGE
    if bool(strange.any()):
        number, last = int(numbers[strange][0]), class_numbers(config, count)[-1]
        void = f", and {', '.join(map(str, config.void))} for none" if config.void else ""
        have = f"the class has {last}" if count == 1 else f"the {count} classes have {config.start} to {last}"
        said = f"holds the class number {number:,}, and {have}{void}"
        if number == _OFTEN_VOID:
            said += "; where 255 means no class, name it among those that do"
        raise BrokenSampleError(f"{name}: its mask {said}", field=("data.masks.first", "data.masks.void"))
    if not bool((classes != VOID).any()):
        raise BrokenSampleError(f"{name}: its mask is empty, every pixel is void")
    return classes


@lru_cache(maxsize=8)
def _table(first: int, void: tuple[int, ...], count: int) -> Tensor:
    table = torch.full((_NUMBERS,), _STRANGE, dtype=torch.int16)
    numbers = class_numbers(MaskConfig(first, void), count)
    if numbers[-1] >= _NUMBERS:
        raise SitusError(f"class number {numbers[-1]:,}: a mask holds numbers below {_NUMBERS:,}", field="masks.first")
    table[numbers] = torch.arange(count, dtype=torch.int16)
    table[[number for number in void if number < _NUMBERS]] = VOID
    return table


def _list_beside(path: Path) -> Path | None:
    """The list of classes in the data's folder; of a file the folder that it lies in."""
    folder = path if path.is_dir() else path.parent
    return next((folder / name for name in _LISTS if (folder / name).is_file()), None)


def names_beside(path: Path) -> tuple[str, ...]:
    """The names of a list that lies in the data's folder; none where there is no list."""
    file = _list_beside(path)
    if file is None:
        return ()
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    if file.name == _LISTS[0]:  # under a header a row a class: its number, counts, its names
        rows = [[row[-1].partition(",")[0].partition(";")[0]] for row in rows if row[0].strip().isdigit()]
    names = tuple(row[0].strip() for row in rows)
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        if file.name != _LISTS[0]:
            raise DataError(f"{file}: names the class {twice!r} twice")
        names = tuple(f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1))
    return names


def usual_masks(path: str | None, first: int | None, void: tuple[int, ...] | None) -> MaskConfig:
    """How the masks at a path are read, where None says nothing: ADE20K's list of names tells of its own way."""
    place = Path(path or "").expanduser()
    file = _list_beside(place) if path and place.exists() else None
    usual = MaskConfig(1, (0,)) if file is not None and file.name == _LISTS[0] else MASKS
    return MaskConfig(usual.first if first is None else first, usual.void if void is None else void)


def numbered(found: Iterable[int], config: MaskConfig, where: str) -> tuple[str, ...]:
    """The class numbers up to the largest of all that are found in masks as names, where nobody names any.

    255 is asked about where a number before it is in no mask: nearly everywhere it means no class.
    """
    numbers = sorted({*found} - {*config.void})
    most = numbers[-1] if numbers else -1
    before = {*range(config.start, _OFTEN_VOID)} - {*config.void}
    if most == _OFTEN_VOID and (missing := before - {*numbers}):
        raise SitusError(
            f"{where}: its masks hold 255, and {len(missing)} of the {len(before)} numbers before it are in none, so "
            "that 255 would be a class: name it among the numbers that mean no class, or name the classes",
            field=("data.masks.void", "data.masks.classes"),
        )
    if most < config.start:
        raise SitusError(f"{where}: its masks hold no class, numbers from {config.start} on", field="data.masks.first")
    return tuple(str(number) for number in range(config.start, most + 1) if number not in config.void)
