"""`situs VERB --example`: the command that the verb's own help gives, with those that make what it needs before it.

A verb's docstring holds its example, behind "For example:". What one of them writes (`--out runs/mp3`) is what another
names, and this is how the order is found. What no verb's example makes stands behind "For example" in parentheses, and
becomes a comment. Nothing is imported for it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

GIVEN = re.compile(r"For example(?: \((?P<needs>.+?)\))?:\s(?P<command>situs .+?)(?:\n\n|\Z)", re.DOTALL)


def own_example(place: str, part: str = "command") -> str:
    """The command in a verb's docstring, or what it needs of the user's own; "" where there is none."""
    module, _, name = place.partition(":")
    match = GIVEN.search(_docstrings(module)[name])
    return " ".join((match[part] or "").split()) if match else ""


@cache
def _docstrings(module: str) -> dict[str, str]:
    """The docstring of every class of a module, which is not imported."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}


def examples_of(verb: str, modules: Mapping[str, str]) -> list[str]:
    """The commands, the verb's own last; one that serves goes on behind the others. modules: of every verb."""
    commands = {each: own_example(module) for each, module in modules.items()}
    made = {place: each for each in reversed(commands) for place in _values(commands[each], "--out", "--listen")}
    wanted: list[str] = []

    def want(each: str) -> None:
        mine = _values(commands[each], "--out", "--listen")
        for word in shlex.split(commands[each]):
            maker = made.get(word) or made.get(word.split("/")[0])
            if maker is not None and word not in mine and maker not in wanted:
                want(maker)
        wanted.append(each)

    want(verb)
    before = [commands[each] + " &" * ("--listen" in commands[each]) for each in wanted[:-1]]
    needs = own_example(modules[verb], "needs")
    return [*before, *([f"# {needs}"] if needs else []), commands[verb]]


def _values(command: str, *flags: str) -> list[str]:
    words = shlex.split(command)
    return [value for flag, value in pairwise(words) if flag in flags]
