"""The functions for Python users: what each takes as a model, as a key and as a path."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from situs import locks
from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.locks.key import Key
from situs.models import open_model
from situs.models.export import export_run

pytest.importorskip("cryptography")
KEPT = Path(__file__).parent.parent / "data" / "kept"


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import sys, situs.locks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(getattr(locks, name) for name in locks.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        _ = locks.no_such


def test_the_owners_way(tmp_path: Path) -> None:
    key = locks.new_key(str(tmp_path / "owner.key"))
    exported = export_run(KEPT / "tuned", tmp_path / "exported").path
    locked = locks.lock(exported, key, tmp_path / "locked")
    assert str(locked).startswith(f"{tmp_path / 'locked'}: ") and "obfuscation, not encryption" in str(locked)
    model = open_model(tmp_path / "locked", unlock=locks.unlocking(tmp_path / "owner.key"))
    for name, tensor in open_model(exported).backbone.model.state_dict().items():
        assert torch.equal(model.backbone.model.state_dict()[name], tensor)
    found = locks.verify(model, steps=0)
    assert found.worst < 1e-10 and found.summary().sentence in str(found) and "blocks  " in str(found)
    audit = locks.audit_lock(locked, base=exported, key=str(tmp_path / "owner.key"))
    assert audit.strength == 0 and audit.verdict in str(audit) and "public-base" in str(audit)
    opened = locks.unlock(locked, key, tmp_path / "opened")
    assert "bit for bit" in str(opened)
    locks.unlock(locks.lock(KEPT / "tuned", key, tmp_path / "of-run"), key, tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    names = sorted(path.name for path in exported.iterdir())
    assert filecmp.cmpfiles(exported, opened, names, shallow=False)[0] == names


def test_what_is_locked_as_a_model_keeps_its_bits(tmp_path: Path) -> None:
    """A backbone, an open model: the tensors that were in memory come back, whatever dtype; a name gets its weights."""
    key, module = Key(bytes(32)), create_backbone("test_vit").to(torch.bfloat16)
    sources = {"module": module, "model": open_model("test_vit", weights="random")}
    for name, source in sources.items():
        locks.lock(source, key, tmp_path / name)
        locks.unlock(tmp_path / name, key, tmp_path / f"{name}-open")
        state = (module if name == "module" else source.backbone).model.state_dict()
        opened = load_file(tmp_path / f"{name}-open" / "model.safetensors")
        assert all(torch.equal(opened[each], tensor) for each, tensor in state.items())
    locks.lock("test_vit", key, tmp_path / "name", weights="random")
    with pytest.raises(SitusError) as raised:
        locks.lock(tmp_path / "module-open", key, tmp_path / "again", weights="random")
    assert raised.value.field == "weights"
    with pytest.raises(SitusError, match="cannot be rebuilt from a config"):
        locks.lock(timm.create_model("test_vit"), key, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_verify_takes_what_a_model_is_opened_from() -> None:
    module = timm.create_model("test_vit").to(torch.float64)
    assert locks.verify(module, steps=0).dtype == "float64"
    assert locks.verify("test_vit", steps=0, img_size=32).dtype == "float32"
    own = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    own(torch.zeros(1, 3, 8, 8))
    assert {each.status for each in locks.verify(own, img_size=8).findings} == {"refused"}
    with pytest.raises(SitusError) as raised:
        locks.verify(own)
    assert raised.value.field == "img_size"
