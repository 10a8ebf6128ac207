"""Runs, exports, locks and keys that an older version wrote still open: a key that does not is a lost model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from situs.cli.main import main

KEPT = Path(__file__).parent / "data" / "kept"
PASSPHRASE = "kept for the next version"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy to work on, with the modes that a key must have and git does not keep."""
    shutil.copytree(KEPT, tmp_path / "kept")
    for private in ("owner.key", "wrapped.key", "withheld.withheld.safetensors"):
        (tmp_path / "kept" / private).chmod(0o600)
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("locked", "key", "more"),
    [
        ("locked", "owner.key", []),
        ("sealed", "owner.key", []),
        ("withheld", "wrapped.key", ["--withheld", "withheld.withheld.safetensors"]),
    ],
)
def test_a_lock_opens_to_the_bit(
    kept: Path, monkeypatch: pytest.MonkeyPatch, locked: str, key: str, more: list[str]
) -> None:
    monkeypatch.chdir(kept)
    monkeypatch.setenv("SITUS_PASSPHRASE", PASSPHRASE)
    assert main(["unlock", locked, "--key", key, *more, "--out", "opened"]) == 0
    for clear in (KEPT / "export").iterdir():
        assert (kept / "opened" / clear.name).read_bytes() == clear.read_bytes()


def test_a_run_exports_what_it_exported(kept: Path) -> None:
    assert main(["export", str(kept / "tuned"), "--out", str(kept / "again")]) == 0
    before, now = (load_file(folder / "model.safetensors") for folder in (KEPT / "export", kept / "again"))
    assert before.keys() == now.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(now[name], tensor, rtol=0, atol=0)


def test_timm_alone_reads_the_export(kept: Path) -> None:
    model = timm.create_model(f"local-dir:{kept / 'export'}", pretrained=True)
    for name, tensor in load_file(KEPT / "export" / "model.safetensors").items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_run_recognises_as_much_as_it_did(kept: Path) -> None:
    assert main(["evaluate", "accuracy", str(kept / "tuned"), "--out", str(kept / "look")]) == 0
    found = json.loads((kept / "look" / "accuracy.json").read_text())
    before = json.loads((KEPT / "tuned" / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["top1"] == pytest.approx(before["val_top1"], abs=2e-3)
    assert found["loss"] == pytest.approx(before["val_loss"], abs=1e-4)


def test_a_run_goes_on_where_it_stopped(kept: Path) -> None:
    assert main(["pretrain", "--resume", str(kept / "pretrained"), "--steps", "9"]) == 0
    last = json.loads((kept / "pretrained" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 9
    assert last["loss"] == pytest.approx(2.776526, abs=1e-4)  # what the version that wrote the run reached
