"""The public face: every name resolves, type checkers see the same names, and importing it costs no torch."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import situs

HOMES = situs._HOMES


@pytest.mark.parametrize("name", sorted(HOMES))
def test_name_resolves_to_its_home(name: str) -> None:
    assert getattr(situs, name) is getattr(import_module(HOMES[name]), name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(situs.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # `X as X` is what makes a re-export public to a type checker
    }
    assert seen == HOMES


def test_all_and_dir_list_the_face() -> None:
    assert set(situs.__all__) == {"__version__", *HOMES}
    assert set(situs.__all__) <= set(dir(situs))


def test_the_page_of_help_opens_with_every_function() -> None:
    """Its name and the first line of its docstring."""
    listed = dict(re.findall(r"^    (\w+) {2,}(.+)$", situs.__doc__ or "", re.MULTILINE))
    functions = {name: getattr(situs, name) for name in HOMES if name != "SitusError"}
    assert listed == {name: (each.__doc__ or "").partition("\n")[0] for name, each in functions.items()}
    assert all(inspect.isfunction(each) for each in functions.values())


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nosuchname'"):
        _ = situs.nosuchname  # pyright: ignore[reportAttributeAccessIssue]


def test_import_brings_no_heavy_package() -> None:
    heavy = {"torch", "timm", "transformers", "numpy", "matplotlib", "cyclopts"}
    code = f"import sys, situs; print(*sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == []
