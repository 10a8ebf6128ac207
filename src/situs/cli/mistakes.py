"""What the parser says in a frame of many lines, as one sentence that names the value, what is allowed and the flag."""

from __future__ import annotations

import re
from collections.abc import Sequence

WIDE = "10000"
"""Columns that keep the parser from breaking its lines, so that they can be read."""

_KINDS = {
    "INT": "a whole number",
    "N": "a whole number",
    "FLOAT": "a number",
    "STR": "text",
    "PATH": "a path",
    "INT INT": "two whole numbers",
}


def sentence(frame: str, argv: Sequence[str], prog: str) -> str:
    """One sentence for what is in the parser's frame; its first part as it stands where it is of no known form."""
    sections = _sections(frame) or [[]]
    said = " ".join(sections[0]) or " ".join(frame.split())
    for tell in (_choice, _unknown, _missing_value, _required, _value):
        found = tell(said, sections, argv, prog)
        if found is not None:
            return f"{found} (see {prog} --help)"
    return f"{said} (see {prog} --help)"


def _sections(frame: str) -> list[list[str]]:
    """The lines between the rules of a frame, its borders off and their indents kept.

    A terminal that knows no lines to draw with gets the title above a rule instead of in the border.
    """
    found: list[list[str]] = [[]]
    for line in frame.splitlines():
        if line.startswith(("╭", "╰")):
            continue
        inside = line[2:].rstrip("│ ")
        if inside and not inside.strip("─-"):
            found.append([])
        elif inside:
            found[-1].append(inside)
    return found if "╭" in frame else found[1:]


def _choice(said: str, _: list[list[str]], __: Sequence[str], ___: str) -> str | None:
    match = re.search(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)", said)
    if match is None:
        return None
    allowed = [word.strip().strip("'") for word in match[3].split(",") if word.strip()]
    return f"{match[2]} {match[1]}: must be {_or(allowed)}"


def _unknown(said: str, sections: list[list[str]], _: Sequence[str], prog: str) -> str | None:
    match = re.fullmatch(r"Unrecognized options: (.*)", said)
    if match is None:
        return None
    words = match[1].split(", ")
    if not words[0].startswith("-"):
        return f"{' '.join(words)}: more than {prog} takes"
    meant = [line.split()[0] for lines in sections[1:] for line in lines if re.match(r" {4}--", line)]
    perhaps = f"; perhaps {_or(meant[:3])}" if meant else ""
    return f"{' '.join(words)}: {prog} has no such flag{perhaps}"


def _missing_value(said: str, _: list[list[str]], __: Sequence[str], ___: str) -> str | None:
    match = re.search(r"Missing value for argument '(\S+)'\. Expected (\d+) values", said)
    if match is None:
        return None
    return f"{match[1]}: needs {'a value' if match[2] == '1' else f'{match[2]} values'}"


def _required(said: str, sections: list[list[str]], _: Sequence[str], prog: str) -> str | None:
    if not said.startswith(f"Missing from {prog}:"):
        return None
    missing = [line.strip() for line in sections[0] if re.match(r" {4}\S", line)]
    return f"{_and(missing)}: must be given"


def _value(said: str, sections: list[list[str]], argv: Sequence[str], _: str) -> str | None:
    match = re.match(r"Error parsing (\S+):", said)
    usage = next((line.split(maxsplit=1) for lines in sections[1:] for line in lines if line.startswith("    ")), None)
    if match is None or usage is None:
        return None
    flag, kind = match[1], usage[1] if len(usage) > 1 else "something else"
    kinds = [_KINDS.get(each, each) for each in kind.removeprefix("{None}|").split("|")]
    return f"{' '.join([flag, *_given(argv, flag)])}: must be {_or(kinds)}"


def _given(argv: Sequence[str], flag: str) -> list[str]:
    """The words that were given to a flag."""
    for number, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return [word.removeprefix(f"{flag}=")]
        if word == flag:
            rest = list(argv[number + 1 :])
            end = next((i for i, each in enumerate(rest) if each.startswith("--")), len(rest))
            return rest[:end]
    return []


def _or(words: list[str]) -> str:
    return _listed(words, "or")


def _and(words: list[str]) -> str:
    return _listed(words, "and")


def _listed(words: list[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
