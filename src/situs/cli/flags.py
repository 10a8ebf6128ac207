"""The flags of a verb by the fields they set: a mistake names its field, and here it gets the flag that mends it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from situs.config import choices_of
from situs.errors import SitusError

SHORT = {
    "data.path": "data",
    "data.batch": "batch",
    "train.epochs": "epochs",
    "train.max_steps": "steps",
    "train.parallel": "parallel",
}
"""Fields of a run's config that a verb's own flag stands for, where it has that flag."""

NAMES = {"source": "from", "config_file": "config"}
"""Fields of `Args` whose flag has another name."""


def explained(error: SitusError, args_type: type[Any]) -> str:
    """The sentence, with the flags that mend it behind: those of its fields that are flags of the verb."""
    flags = dict.fromkeys(filter(None, (flag_of(field, args_type) for field in error.fields)))
    said = str(error)
    return f"{said} ({', '.join(flags)})" if flags and not all(flag in said for flag in flags) else said


def flag_of(field: str, args_type: type[Any]) -> str | None:
    """The flag that sets this field, or None where the verb has none.

    A field that the verb does not have as it is named (a method says mask_ratio, the verb has method.mask_ratio) is the
    one that ends in it, if there is only one.
    """
    field = field.partition("[")[0]
    known = known_fields(args_type)
    short = SHORT.get(field)
    if short is not None and short in known:
        return known[short]
    if field in known:
        return known[field]
    ends = [flag for path, flag in known.items() if path.endswith(f".{field}")]
    return ends[0] if len(ends) == 1 else None


def known_fields(args_type: type[Any]) -> dict[str, str]:
    """Every field a verb's flags can set, by its path in the config or its name, with the flag."""
    hints = get_type_hints(args_type)
    found: dict[str, str] = {}
    for each in fields(args_type):
        if is_dataclass(hints[each.name]):
            found = _paths(hints[each.name]) | found
        else:
            found[each.name] = _flag(NAMES.get(each.name, each.name))
    return found


def _paths(cls: Any, path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    hints = get_type_hints(cls)
    for each in fields(cls):
        below = f"{path}{each.name}"
        if is_dataclass(hints[each.name]):
            found |= _paths(hints[each.name], f"{below}.")
        else:
            found[below] = _flag(below)
    for name, chosen in choices_of(cls).items():
        for option in chosen.options:
            config = chosen.options[option].Config
            found |= {f"{path}{name}.{each.name}": _flag(f"{path}{name}.{each.name}") for each in fields(config)}
    return found


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")
