"""docs/make_reference.py as a module, for the tests of the pages that it makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="package")
def maker() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "docs" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
