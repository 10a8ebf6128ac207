"""The README keeps its promise: what and for whom, two commands, three stories with pictures before line 60."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import readme

import situs


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos/, and the functions with settings that a test can wait for."""
    readme.fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    for module, name, value in readme.smaller():
        monkeypatch.setattr(module, name, value)
    return tmp_path


@pytest.mark.usefixtures("undrawn")
def test_code_runs(root: Path, small: Path, run_python_blocks: Callable[[Path], dict[str, Any]]) -> None:
    names = run_python_blocks(root / "README.md")
    assert names["tuned"] == Path("runs/ft")
    assert "noise" in (small / "audit.html").read_text()
    assert names["passed"] is False  # without a defence the image is read off
    assert names["model"].classes == ("cat", "dog")


def test_order_of_the_first_lines(root: Path) -> None:
    head = "\n".join((root / "README.md").read_text(encoding="utf-8").splitlines()[:60])
    found = re.search(
        r"\A# Situs\n\n[A-Z][^\n]*(?:\n[^\n!]+)*\.\n"  # what it is, and for whom
        r".*?!\[[^\]]+\]\((?P<picture>[^)]+)\)"
        r".*?^```(?:bash|sh)\n(?P<commands>.*?)^```$"
        r"(?P<stories>.*)",
        head,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert found is not None, head
    assert (root / found["picture"]).is_file()
    assert re.findall(r"^make \w+", found["commands"], flags=re.MULTILINE) == ["make demo", "make test"]
    story = r"^\*\*[^*]+\*\*.*?^!\[[^\]]+\]\(([^)]+)\)$.*?^```python\n(.*?)^```$"
    stories = re.findall(story, found["stories"], flags=re.MULTILINE | re.DOTALL)
    told = ("pretrain", "audit_gradients", "lock")
    assert [name for _, code in stories for name in told if f"situs.{name}(" in code] == list(told)
    pictures = {root / picture for picture, _ in stories}
    assert len(pictures) == 3
    assert all(picture.stat().st_size < 200_000 for picture in pictures)


def test_it_is_short_and_names_eight_files_to_read_first(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 750
    files = re.findall(r"\]\((src/situs/[^)]+\.py)\)", text.partition("## Dive into the code")[2])
    assert len(files) == len({*files}) == 8


def test_links_lead_somewhere(root: Path) -> None:
    pages = [page for page in sorted((root / "docs").rglob("*.md")) if "_build" not in page.parts]
    for page in [root / "README.md", root / "CONTRIBUTING.md", *pages]:
        links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        missing = [link for link in links if not (page.parent / link).exists()]
        assert missing == [], page.name


def test_the_changelog_is_short_and_the_version_is_the_same_everywhere(root: Path) -> None:
    parts = re.split(
        r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    versions = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert next(iter(versions)) == situs.__version__
    for version, text in versions.items():
        assert len([line for line in text.splitlines() if line.strip()]) <= 20, version
        assert text.lstrip().startswith("You gain:"), version
    assert f"\nversion: {situs.__version__}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")
