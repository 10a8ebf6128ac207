"""The tables of reference/verbs.md, config.md and attacks.md and of studies.md, made whenever the docs are built.

.venv/bin/python docs/make_reference.py verbs    (or config, attacks) prints a page; flags counts every flag.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import situs
from situs.audit.registry import attacks_table
from situs.cli.main import SECTIONS, verb_type
from situs.cli.parser.flags import Flag, configured_of, flags_of, metavar_of, texts_of
from situs.config import Checked, choices_of
from situs.limits import Rule
from situs.studies.load import load_study, study_names
from situs.train.assemble import RunConfig

HEADER = {"verbs": ("flag", "default", "meaning"), "config": ("field", "type", "default", "meaning")}
SPECIAL = re.compile(r"([|*$<>\[\]])")


def verbs_page() -> str:
    """Every verb: what it does, and its flags."""
    lines: list[str] = []
    for heading, verbs in SECTIONS.items():
        lines += [f"## {heading}", ""]
        for verb in verbs:
            lines += [f"### situs {verb}", "", *_verb(verb_type(verb))]
    return "\n".join(lines)


def _verb(kind: type[Any]) -> Iterator[str]:
    held = configured_of(kind)
    flags = flags_of(kind, every=True)
    yield from _prose(inspect.getdoc(kind) or "")
    if held is not None and issubclass(held[1].cls, RunConfig):  # two hundred flags, told once
        flags = [flag for flag in flags if flag.own or not flag.group]
        yield "Every field of [a training's config](config.md#a-training) is a flag too, as `--optim.lr 1e-3`."
        yield ""
    yield from _table(HEADER["verbs"], ((_flag(flag), _shown(flag.default), _text(flag.help)) for flag in flags))


def flags_page() -> str:
    """Every flag that verbs have by themselves, how it is written, and in how many verbs it stands."""
    verbs: dict[str, list[str]] = {}
    written: dict[str, set[str]] = {}
    for verb in (verb for section in SECTIONS.values() for verb in section):
        for flag in flags_of(verb_type(verb)):
            if not flag.positional and (flag.own or "." not in flag.name):
                verbs.setdefault(flag.name, []).append(verb)
                written.setdefault(flag.name, set()).add("" if flag.kind is bool else flag.metavar)
    most = sorted(verbs, key=lambda name: (-len(verbs[name]), name))
    rows = ((_code(name), str(len(verbs[name])), _text(", ".join(sorted(written[name])))) for name in most)
    return "\n".join(_table(("flag", "verbs", "value"), rows))


def _flag(flag: Flag) -> str:
    if flag.positional:
        return _code(flag.metavar)
    return _code(flag.name if flag.kind is bool else f"{flag.name} {flag.metavar}")


def config_page() -> str:
    """Every config: first those of a training, by the tables of its file, then each other class by its module."""
    told: set[type[Any]] = set()
    about = "Each is a table of the TOML file that `--config` takes; a method's fields stand beside its `name`."
    lines = ["## A training", "", about, ""]
    for table in _tables(RunConfig, ""):
        lines += _config(f"### {table.title}", table.cls, table.prefix, told)
    lines += ["## Other settings", "", "Arguments of the functions and flags of the verbs named with each.", ""]
    for cls in config_classes():
        if cls not in told and not issubclass(cls, RunConfig):
            lines += _config(f"### {cls.__module__}.{cls.__name__}", cls, "", told)
    return "\n".join(lines)


class Table(NamedTuple):
    """A table of a training's file. prefix: what stands before its fields in a flag, as `data.audio.`."""

    title: str
    cls: type[Any]
    prefix: str


def _tables(cls: type[Any], prefix: str) -> Iterator[Table]:
    """The config itself, then each config in it, a method's by its name."""
    yield Table(f"`[{prefix.rstrip('.')}]`" if prefix else "The run", cls, prefix)
    held, choices = get_type_hints(cls), choices_of(cls)
    for each in fields(cls):
        below = f"{prefix}{each.name}."
        if each.name in choices:
            options = choices[each.name].options
            for name in sorted(options):
                if options[name].__module__.startswith("situs."):  # and not another package's
                    yield Table(f'`[{below[:-1]}]` with `name = "{name}"`', options[name].Config, below)
        elif is_dataclass(held[each.name]):
            yield from _tables(held[each.name], below)  # pyright: ignore[reportArgumentType]


def config_classes() -> list[type[Any]]:
    """Every config of the package (each derives from `Checked`), by module."""
    for module in pkgutil.walk_packages(situs.__path__, "situs."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    found, waiting = set(), [Checked]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found |= {cls for cls in below if is_dataclass(cls) and cls.__module__.startswith("situs.")}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__name__))


def _config(heading: str, cls: type[Any], prefix: str, told: set[type[Any]]) -> Iterator[str]:
    told.add(cls)
    texts, kinds = texts_of(cls), get_type_hints(cls, include_extras=True)
    rows = [
        (f"`{prefix}{each.name}`", _kind(kinds[each.name]), _shown(_default(each)), _text(texts[each.name]))
        for each in fields(cls)
        if each.name not in choices_of(cls) and not is_dataclass(kinds[each.name])
    ]
    yield from (heading, "", f"`{cls.__module__}.{cls.__name__}`", "", *_prose(cls.__doc__ or ""))
    if rows:
        yield from _table(HEADER["config"], rows)


def _default(each: Any) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _kind(kind: Any) -> str:
    """The words of a type, and its limits."""
    if kind is bool:
        return "yes or no"
    limits = ", ".join(dict.fromkeys(rule.allowed for rule in _rules(kind)))
    return _code(metavar_of(kind)) + (f", {_text(limits)}" if limits else "")


def _rules(kind: Any) -> Iterator[Rule]:
    for note in (*get_args(kind), *getattr(kind, "__metadata__", ())):
        if isinstance(note, Rule):
            yield note
        elif note is not kind:
            yield from _rules(note)


# --- Markdown -----------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    if value is MISSING:
        return "must be given"
    if value in (None, "", ()) or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        value = ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return _code(value)


def _code(text: object) -> str:
    return f"`{str(text).replace('|', chr(92) + '|')}`"  # a bare bar would end the cell


def _text(text: str) -> str:
    """One line of ours as Markdown: what stands between backticks stays as it is, else signs stand for themselves."""
    parts = " ".join(text.split()).split("`")
    plain = [
        SPECIAL.sub(r"\\\1", part) if index % 2 == 0 else part.replace("|", r"\|") for index, part in enumerate(parts)
    ]
    return "`".join(plain)


def _prose(text: str) -> Iterator[str]:
    """A docstring's paragraphs; an indented one is shown as it is."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        drawn = paragraph.startswith("    ")
        yield from (("```text", inspect.cleandoc(paragraph), "```") if drawn else (_text(paragraph),))
        yield ""


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    header = tuple(header)
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(cell.replace(chr(10), ' ') for cell in row)} |"
    yield ""


def attacks_page() -> str:
    """Every attack of every scenario."""
    table = attacks_table()
    return "\n".join(_table(map(str, table.header), ([_text(cell) for cell in row] for row in table.cells()[1:])))


def studies_page() -> str:
    """Every study: what it shows of which paper, and what is missing."""
    lines = ["## Every study", ""]
    by_paper: dict[str, list[tuple[str, str, str]]] = {}
    for name in study_names():
        study = load_study(name, configs=False)
        missing = dict.fromkeys(each.package + ("" if each.whole else " (in part)") for each in study.missing)
        title = f"{study.place}: {study.title}" if study.paper else study.title
        by_paper.setdefault(study.paper, []).append((f"`{name}`", _text(title), _text(", ".join(missing)) or "–"))
    for paper, rows in by_paper.items():
        lines += _table((_text(paper) or "of Situs", "shows", "missing"), rows)
    return "\n".join(lines)


PAGES = {
    "reference/verbs": verbs_page,
    "reference/config": config_page,
    "reference/attacks": attacks_page,
    "studies": studies_page,
}
"""Pages of the docs -> what makes their tables."""


def add_tables(app: object, name: str, source: list[str]) -> None:
    """Sphinx's event `source-read`: what is written by hand opens the page, the tables follow."""
    if name in PAGES:
        source[0] = f"{source[0]}\n{PAGES[name]()}"


if __name__ == "__main__":
    if sys.argv[1] == "flags":
        sys.exit(print(flags_page()))
    hand = Path(__file__).parent / "reference" / f"{sys.argv[1]}.md"
    print(f"{hand.read_text(encoding='utf-8')}\n{PAGES[f'reference/{sys.argv[1]}']()}")
