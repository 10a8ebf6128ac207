"""Configs, findings and results are values: made once, compared, hashed, and never changed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import situs

SOURCE = Path(situs.__file__).parent
CHANGING = {
    "audit.engine": {"Client", "_Trial", "_UploadGroup"},
    "audit.one_step": {"OneStep"},
    "audit.reference": {"Pass"},
    "audit.split.audit": {"Split", "_Trial"},
    "audit.split.prompts": {"_Whole"},
    "audit.split.text": {"Prompts", "_Trial"},
    "audit.sweep.weakest": {"Search"},
    "audit.text.audit": {"Texts", "_Trial"},
    "backbones.layout": {"_Draft"},
    "cli.shell": {"_Answer"},
    "data.sources.cifar": {"_Array", "_Dtype"},
    "data.sources.folder": {"LeftOut"},
    "progress": {"Task", "_Open"},
    "report.html": {"Finding", "Page", "Section"},
    "split.client": {"Flight"},
    "split.remote": {"Remote"},
    "split.run": {"_Training"},
    "studies.run": {"_Runner", "_Running"},
    "train.contract": {"RunState"},
    "train.private": {"Private"},
}
"""Dataclasses that are not frozen, by module: most are the state of something that goes on, and change in place."""


def test_a_dataclass_is_frozen_unless_it_is_listed() -> None:
    """A key, a setting, a manifest that was checked, a message that was counted: whoever has one can rely on it."""
    changing: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"@(dataclasses\.)?dataclass\b(?!\(frozen=True\b)", text):  # to parse them all takes seconds
            continue
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for kind in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            how = [each for each in map(ast.unparse, kind.decorator_list) if "dataclass" in each.partition("(")[0]]
            if any("frozen=True" not in each for each in how):
                changing.setdefault(module, set()).add(kind.name)
    assert changing == CHANGING
    assert not [name for names in changing.values() for name in names if name.endswith(("Config", "Result"))]
