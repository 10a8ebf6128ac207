"""Several models share a verb's flags: each takes those that apply to its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli import model_args
from situs.cli.model_args import NamedArgs, open_one_of

GIVEN: dict[str, Any] = {
    "weights": Path("w.safetensors"),
    "img_size": 32,
    "patch_size": 4,
    "in_chans": 1,
    "model_args": {"depth": 1},
    "key": Path("key.json"),
    "withheld": Path("parts"),
}
SHAPE = {"img_size", "patch_size", "in_chans", "model_args"}
LOCK = {"key", "withheld"}


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("vit_tiny_patch16_224", {"weights", *SHAPE}),
        ("vit_tiny_patch16_224=other.safetensors", SHAPE),
        ("{}/run", set()),
        ("{}/run=1", set()),
        ("{}/locked", LOCK),
        ("hf:owner/name@0123456789012345678901234567890123456789", set()),
    ],
)
def test_each_model_takes_the_flags_of_its_kind(
    source: str, taken: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run", "run=1", "locked"):
        (tmp_path / name).mkdir()
    (tmp_path / "locked" / "manifest.json").write_text(json.dumps({"format": "situs-lock"}))
    calls: list[tuple[str, NamedArgs]] = []
    monkeypatch.setattr(model_args, "open_named", lambda *call: calls.append(call))
    source = source.format(tmp_path)
    open_one_of(source, NamedArgs(model=source, **GIVEN))
    ((opened, args),) = calls
    assert opened == source
    empty = NamedArgs(model=source)
    expected = {name: value if name in taken else getattr(empty, name) for name, value in GIVEN.items()}
    assert {name: getattr(args, name) for name in GIVEN} == expected
