"""The README keeps its promise: sentence, picture, two commands and ten running lines before line 40."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_code_runs(root: Path, run_python_blocks: Callable[[Path], dict[str, Any]]) -> None:
    names = run_python_blocks(root / "README.md")
    assert names["whole"].patches.shape == (2, 140, 384)
    assert names["lost"].patches.shape == (2, 140, 384)


def test_order_of_the_first_forty_lines(root: Path) -> None:
    head = "\n".join((root / "README.md").read_text(encoding="utf-8").splitlines()[:39])
    found = re.search(
        r"\A# Situs\n\n[A-Z][^\n]*(?:\n[^\n!]+)*\.\n"  # one sentence
        r".*?!\[[^\]]+\]\((?P<picture>[^)]+)\)"
        r".*?^```(?:bash|sh)\n(?P<commands>.*?)^```$"
        r".*?^```python\n(?P<code>.*?)^```$",
        head,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert found is not None, head
    assert (root / found["picture"]).is_file()
    assert re.findall(r"^make \w+", found["commands"], flags=re.MULTILINE) == ["make demo", "make test"]
    assert 8 <= sum(bool(line.strip()) for line in found["code"].splitlines()) <= 10


def test_links_lead_somewhere(root: Path) -> None:
    for page in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]:
        links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        missing = [link for link in links if not (page.parent / link).exists()]
        assert missing == [], page.name
