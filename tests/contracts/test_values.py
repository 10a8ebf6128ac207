"""Configs, findings and results are values: made once, compared, hashed, and never changed."""

from __future__ import annotations

import re
from pathlib import Path

import situs

SOURCE = Path(situs.__file__).parent
CHANGING = {
    *("audit/engine.py", "audit/one_step.py", "audit/reference.py", "audit/split/audit.py", "audit/split/prompts.py"),
    *("audit/split/text.py", "audit/sweep/weakest.py", "audit/text/audit.py", "backbones/layout.py", "cli/shell.py"),
    *("data/sources/cifar.py", "data/sources/folder.py", "progress.py", "report/html.py", "split/client.py"),
    *("split/remote.py", "split/run.py", "split/sequences.py", "studies/run.py", "train/contract.py"),
    *("train/private.py",),
}
"""Files in which a dataclass is the state of something under way."""


DATACLASS = re.compile(r"^@dataclass(?:\((?P<options>[^)]*)\))?[^\n]*\nclass (?P<name>\w+)", re.MULTILINE)


def test_a_dataclass_is_frozen_where_nothing_is_under_way() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), match["name"]): "frozen=True" in (match["options"] or "")
        for path in SOURCE.rglob("*.py")
        for match in DATACLASS.finditer(path.read_text(encoding="utf-8"))
    }
    changing = [place for place, frozen in found.items() if not frozen]
    assert len(found) > 150 and len(changing) <= 31, changing
    assert {file for file, _ in changing} == CHANGING
    assert not [name for _, name in changing if name.endswith(("Config", "Result"))]
