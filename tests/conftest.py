"""What the whole suite shares: one thread a process, repeatable hypothesis, the place of the big data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported: the suite's tensors are small, and two test processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Figures are files here, never windows.
os.environ.setdefault("MPLBACKEND", "Agg")
# A test that would fetch a model from the network is wrong; let it fail at once and say so.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"

# No deadline: the first example pays for an import or a compilation, and a busy machine is no failure.
settings.register_profile("situs", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("situs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `shared_data` where the data is absent, and starts with the longest test."""
    # Type checking takes as long as all the rest: begun first, it runs beside the others in `make test`.
    items.sort(key=lambda item: "[pyright]" not in item.name)
    if SHARED_DATA.is_dir():
        return
    skip = pytest.mark.skip(reason="../shared/data is not beside this checkout")
    for item in items:
        if item.get_closest_marker("shared_data"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data beside the checkout; only for tests marked `shared_data`."""
    return SHARED_DATA


@pytest.fixture(scope="session")
def run_python_blocks() -> Callable[[Path], dict[str, Any]]:
    """Runs the python blocks of a Markdown page in order, as a reader would; gives their names back."""

    def run(page: Path) -> dict[str, Any]:
        text = page.read_text(encoding="utf-8")
        names: dict[str, Any] = {"__name__": page.stem}
        for match in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
            line = text[: match.start(1)].count("\n")
            # Blank lines in front make a traceback name the page's own line.
            exec(compile("\n" * line + match[1], str(page), "exec"), names)
        return names

    return run
