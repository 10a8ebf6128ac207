"""Every command that a page shows is one: its verb is known, and so is each of its flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_origin

from situs.cli.main import VERBS
from situs.cli.parser.flags import flags_of
from situs.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]


def commands(text: str) -> Iterator[list[str]]:
    """The words behind each `situs` in code, fenced or inline."""
    fenced = re.findall(r"^```(?:bash|text|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [*lines, *(" ".join(code.split()) for code in inline)]:
        for part in re.split(r"&&|\|\||;|\s\|\s", line.partition(" #")[0]):
            found = re.search(r"(?:^|\s|/)situs ((?:[a-z]|--).*)", part)
            if found and not re.match(r"\s*(?:import|from|pip)\b", part):
                yield found[1].split()


@cache
def flags(verb: str) -> tuple[set[str], tuple[str, ...]]:
    """A verb's flags, those that put something off among them, and the beginnings of those that take any key."""
    known = flags_of(import_module(VERBS[verb][0]).Args, every=True)
    names = {flag.name for flag in known}
    for flag in known:
        table, dot, last = flag.name[2:].rpartition(".")
        names |= {f"--{table}{dot}no-{last}"} if flag.kind is bool else set()
    return names, tuple(f"{flag.name}." for flag in known if get_origin(flag.kind) is dict)


def wrong(words: list[str]) -> str | None:
    """What is no word of the command line, or None."""
    if words[0].startswith("--"):
        return None if words[0].rstrip(",.") in ("--help", "--version") else words[0]
    verb = next((" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in VERBS), None)
    if verb is None:
        return None if any(known.startswith(f"{words[0]} ") for known in VERBS) else words[0]  # a group of verbs
    names, tables = flags(verb)
    method = words[words.index("--method") + 1] if "--method" in words[:-1] else ""
    if method.isidentifier() and method not in METHODS:  # another package's, whose fields nobody knows here
        tables = (*tables, "--method.")
    for word in words:
        flag = re.match(r"--[a-zA-Z][\w.-]*\w", word)
        if flag and flag[0] not in names and not flag[0].startswith(tables) and flag[0] != "--help":
            return f"{verb} {flag[0]}"
    return None


def test_commands_are_found_and_mistakes_in_them_too() -> None:
    text = "`situs pretrain --nosuch 3`\n```bash\nsitus lock a \\\n  --key k && situs nosuch b   # words\n```\n"
    assert [wrong(words) for words in commands(text)] == [None, "nosuch", "pretrain --nosuch"]


def test_every_command_of_every_page_is_one() -> None:
    found = [(page.name, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert len(found) > 150
    assert [(name, mistake) for name, words in found if (mistake := wrong(words)) is not None] == []
