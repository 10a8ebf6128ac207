"""The reference is made from the code: every verb, flag and config field is in it, and nothing is told twice."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from situs.cli.main import VERBS, verb_type
from situs.cli.parser.flags import configured_of, flags_of
from situs.config import choices_of
from situs.train.run import RunConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"


def parts(page: str) -> dict[str, str]:
    """Heading -> what stands below it."""
    found = re.split(r"^### (.+)$", page, flags=re.MULTILINE)[1:]
    assert len(found[::2]) == len(set(found[::2])), "a heading stands twice"
    return dict(zip(found[::2], found[1::2], strict=True))


def cells(table: str) -> set[str]:
    """The first cell of every row, without its quotes."""
    return {cell.replace("\\|", "|") for cell in re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)}


def test_every_verb_and_flag_is_told(maker: ModuleType) -> None:
    page = maker.verbs_page()
    told = parts(page)
    assert not re.search(r"\|  \|$", page, flags=re.MULTILINE), "a flag without words"
    assert list(told) == [f"situs {verb}" for verb in VERBS]
    for verb in VERBS:
        args = verb_type(verb)
        held = configured_of(args)
        flags = flags_of(args, every=True)
        if held is not None and issubclass(held[1].cls, RunConfig):
            assert "config.md#a-training" in told[f"situs {verb}"], verb
            flags = [flag for flag in flags if flag.in_args or not flag.group]
        shown = {cell.partition(" ")[0] for cell in cells(told[f"situs {verb}"])}
        named = {flag.metavar.partition(" ")[0] if flag.positional else flag.name for flag in flags}
        assert shown == named, verb


def test_every_config_field_is_told_with_its_words(maker: ModuleType) -> None:
    page = maker.config_page()
    told = parts(page)
    for cls in maker.config_classes():
        if issubclass(cls, RunConfig) and cls is not RunConfig:
            continue  # its own fields are RunConfig's
        name = f"`{cls.__module__}.{cls.__name__}`"
        shown = [cells(text) for text in told.values() if name in text]
        assert len(shown) == 1 or cls.__name__ == "SpectrogramConfig", name
        kinds = get_type_hints(cls)
        own = {
            each.name for each in fields(cls) if each.name not in choices_of(cls) and not is_dataclass(kinds[each.name])
        }
        assert {cell.rpartition(".")[2] for cell in shown[0]} == own, name
    # A flag of a training is its field's path.
    paths = {flag.fields[0] for flag in flags_of(verb_type("pretrain"), every=True) if flag.group and not flag.in_args}
    assert paths <= set().union(*map(cells, told.values()))
    assert not re.search(r"\|  \|$", page.partition("## Other")[0], flags=re.MULTILINE), "a field without words"


def test_every_page_is_in_the_contents_and_includes_what_is_there() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^(?:.+ <)?([a-z0-9_/]+)>?$", index, flags=re.MULTILINE))
    pages = {
        page.relative_to(DOCS).with_suffix("").as_posix(): page
        for page in DOCS.rglob("*.md")
        if "_build" not in page.parts
    }
    assert pages.keys() - {"index"} <= listed
    pattern = r"\{literalinclude\} (\S+)\n((?::.*\n)*)"
    for page in pages.values():
        for file, options in re.findall(pattern, page.read_text(encoding="utf-8")):
            lines = (page.parent / file).read_text(encoding="utf-8").splitlines()
            for mark in re.findall(r':(?:start-at|end-before): "?([^"\n]+)', options):
                assert any(mark in line for line in lines), (page.name, mark)
    for page in (DOCS / "tutorials").glob("*.md"):
        assert "../../examples/" in page.read_text(encoding="utf-8"), page.name
