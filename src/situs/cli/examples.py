"""`situs VERB --example`: the example of a verb's help, after the commands that make the files it needs.

A verb's docstring holds its example after "For example:". If one example writes a path (`--out runs/mp3`) that another
one names, it comes first. Files that no example makes are named in parentheses after "For example", and become a
comment. The docstrings are read without importing their modules.
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

EXAMPLE = re.compile(r"For example(?: \((?P<needs>.+?)\))?:\s(?P<command>situs .+?)(?:\n\n|\Z)", re.DOTALL)


def own_example(entry: str, part: str = "command") -> str:
    """The command in the docstring of a verb (module:class), or the files it `needs`; "" if there is none."""
    module, _, name = entry.partition(":")
    match = EXAMPLE.search(_docstrings(module)[name])
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
    """The commands, the verb's own last; a server runs in the background (&). modules: verb -> module:class."""
    commands = {name: own_example(entry) for name, entry in modules.items()}
    makers = {path: name for name in reversed(commands) for path in _values(commands[name], "--out", "--listen")}
    ordered: list[str] = []

    def add_with_makers(name: str) -> None:
        outputs = _values(commands[name], "--out", "--listen")
        for word in shlex.split(commands[name]):
            maker = makers.get(word) or makers.get(word.split("/")[0])
            if maker is not None and word not in outputs and maker not in ordered:
                add_with_makers(maker)
        ordered.append(name)

    add_with_makers(verb)
    before = [commands[name] + " &" * ("--listen" in commands[name]) for name in ordered[:-1]]
    needs = own_example(modules[verb], "needs")
    return [*before, *([f"# {needs}"] if needs else []), commands[verb]]


def _values(command: str, *flags: str) -> list[str]:
    words = shlex.split(command)
    return [value for flag, value in pairwise(words) if flag in flags]
