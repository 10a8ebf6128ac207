"""Every command that a page shows is one: its verb is known, and so is each of its flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_origin

from situs.cli.main import VERBS, verb_type
from situs.cli.parser.flags import flags_of
from situs.methods import METHODS
from situs.presets import preset_names
from situs.studies.plan import load_study, planned, study_names

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
    known = flags_of(verb_type(verb), every=True)
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


SCRIPT = re.compile(r"(?:^|\s)python (\S+\.py)((?: .*)?)$")


def scripts(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each script of ours that inline code runs, and its words."""
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        if found := SCRIPT.search(" ".join(code.split())):
            yield found[1], found[2].split()


def wrong_script(name: str, words: list[str]) -> str | None:
    """The script that is not there, or the flag that it does not take."""
    if not (ROOT / name).is_file():
        return name
    taken = set(re.findall(r"""add_argument\(\s*["'](--[\w-]+)""", (ROOT / name).read_text(encoding="utf-8")))
    taken |= {f"--no-{flag[2:]}" for flag in taken}
    return next((f"{name} {word}" for word in words if word.startswith("--") and word not in taken), None)


def without_command(text: str) -> list[str]:
    """Headings above a table or a picture and no command that makes it."""
    parts = re.split(r"^#{2,3} (.*)$", text, flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    shown = {name: body for name, body in sections.items() if re.search(r"^\||^!\[", body, flags=re.MULTILINE)}
    return [name for name, body in shown.items() if not (any(commands(body)) or any(scripts(body)))]


def test_scripts_of_every_page_are_there_and_take_their_flags() -> None:
    assert wrong_script("benchmarks/nosuch.py", []) and wrong_script("benchmarks/text.py", ["--model", "--nosuch"])
    found = [(page.name, *each) for page in PAGES for each in scripts(page.read_text(encoding="utf-8"))]
    assert len(found) > 15
    assert [(page, mistake) for page, *each in found if (mistake := wrong_script(*each)) is not None] == []


def test_every_table_and_picture_of_the_results_names_its_command() -> None:
    assert without_command("## a\n| 1 |\n## b\n`situs doctor`\n| 2 |\n## c\n![x](y.png)\n## d\nwords") == ["a", "c"]
    pages = [page for page in PAGES if page.parent.name == "results"]
    assert len(pages) >= 8
    assert [(page.name, part) for page in pages for part in without_command(page.read_text(encoding="utf-8"))] == []


def test_every_study_and_preset_that_a_page_names_is_there() -> None:
    studies, presets, seen = study_names(), preset_names(), 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = [(studies, name) for name in re.findall(r"stud(?:y|ies)\s+`([a-z0-9-]+)[ `]", text)]
        for words in commands(text):
            found += [(studies, words[2])] if words[:2] == ["study", "run"] and len(words) > 2 else []
            found += [(presets, words[words.index("--preset") + 1])] if "--preset" in words[:-1] else []
        for known, name in found:
            if re.fullmatch(r"[a-z0-9-]+", name):  # and no NAME, PATH or file.toml
                assert name in known, (page.name, name)
                seen += 1
    assert seen > 40


def misfit(words: list[str]) -> str | None:
    """What of `study run NAME …` that study does not have: a data set, a scale, a job."""
    if words[:2] != ["study", "run"] or words[2:3] == [] or words[2] not in study_names():
        return None
    study = load_study(words[2], configs=False)
    given = {flag: value.strip("'\"") for flag, value in pairwise(words) if flag.startswith("--")}
    sets = [each.partition("=") for each in given.get("--data", "").split(",") if each not in ("", "…")]
    wrong = [name for name, named, _ in sets if (name not in study.data if named else len(study.data) != 1)]
    wrong += [scale for scale in [given.get("--scale", "paper")] if scale not in study.scale_names()]
    jobs = [*(jobs := planned(study)), *(f"{name}-0" for name in jobs)]
    wrong += [each for each in given.get("--only", "*").split(",") if not any(fnmatchcase(job, each) for job in jobs)]
    return f"{words[2]}: {', '.join(wrong)}" if wrong else None


def test_studies_on_a_page_are_given_what_they_have() -> None:
    command = ["study", "run", "mp3-table3", "--data", "PATH", "--scale", "huge", "--only", "nosuch*"]
    assert misfit(command) == "mp3-table3: PATH, huge, nosuch*"
    found = [(page.name, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert [(name, mistake) for name, words in found if (mistake := misfit(words)) is not None] == []


def test_commands_are_found_and_mistakes_in_them_too() -> None:
    text = "`situs pretrain --nosuch 3`\n```bash\nsitus lock a \\\n  --key k && situs nosuch b   # words\n```\n"
    assert [wrong(words) for words in commands(text)] == [None, "nosuch", "pretrain --nosuch"]


def test_every_command_of_every_page_is_one() -> None:
    found = [(page.name, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert len(found) > 150
    assert [(name, mistake) for name, words in found if (mistake := wrong(words)) is not None] == []
