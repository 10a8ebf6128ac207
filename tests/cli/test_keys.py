"""`situs keygen`, `situs lock` and `situs unlock`: the owner's whole way."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from safetensors.torch import load_file, save_file

from situs.cli.main import main
from situs.locks.folder import write_model

pytest.importorskip("cryptography")


def same_files(one: Path, two: Path) -> bool:
    names, others = (sorted(path.name for path in folder.iterdir()) for folder in (one, two))
    return names == others and filecmp.cmpfiles(one, two, names, shallow=False)[0] == names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    dict(embed_dim=24, depth=2, num_heads=3)
    torch.manual_seed(0)
    write_model(small_vit(width=24, heads=3, patch_size=8), folder)
    return folder


@pytest.fixture
def key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["keygen", "--out", str(tmp_path / "owner.key")]) == 0
    capsys.readouterr()
    return tmp_path / "owner.key"


def test_key_new_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "owner.key"
    assert main(["keygen", "--out", str(path)]) == 0
    said = capsys.readouterr().out
    held = json.loads(path.read_text())
    assert held["id"] in said and "0600" in said and held["seed"] not in said
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["keygen", "--out", str(path)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert json.loads(path.read_text()) == held


@pytest.mark.parametrize("flags", [[], ["--seal", "--cover"]], ids=" ".join)
def test_the_whole_way(model: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list) -> None:
    locked, opened = tmp_path / "locked", tmp_path / "open"
    assert main(["lock", str(model), "--key", str(key), "--out", str(locked), *flags]) == 0
    said = capsys.readouterr().out
    assert "obfuscation, not encryption" in said and f"situs audit lock {locked}" in said
    assert "24 residual" in said and ("groups inside the blocks" in said) == ("--cover" in flags)
    assert ("encrypted" in said) == ("--seal" in flags)
    assert not re.search(r"\d+[- ]bit|2\^|strong|secure", said), "a strength is the attack's to tell"
    assert main(["unlock", str(locked), "--key", str(key), "--out", str(opened)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert same_files(model, opened)


@pytest.mark.parametrize("flags", [[], ["--seal"]], ids=["plain", "sealed"])
def test_withheld_parts(
    model: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list
) -> None:
    locked, second, opened = (tmp_path / name for name in ("locked", "second", "open"))
    words = ["lock", str(model), "--key", str(key), "--out", str(locked), *flags]
    assert main([*words, "--withheld", str(second)]) == 2
    assert "name the parts in the option `withhold` (--withhold)" in capsys.readouterr().err
    assert main([*words, "--withhold", "head"]) == 2
    assert "withhold='head': must be embedding or blocks=K" in capsys.readouterr().err
    assert main([*words, "--withhold", "embedding,blocks=1", "--withheld", str(second)]) == 0
    said = capsys.readouterr().out
    held, total = 0, 0
    for name, tensor in load_file(model / "model.safetensors").items():
        total += tensor.numel()
        held += tensor.numel() * name.startswith(("blocks.0.", "patch_embed.", "pos_embed", "cls_token"))
    assert (
        f"the embedding and the first block ({100 * held / total:.1f} % " in said
        and "Final norm and head are not locked" in said
    )
    assert f"--withheld {second} --out DIR" in said and second.stat().st_mode & 0o777 == 0o600
    words = ["unlock", str(locked), "--key", str(key), "--out", str(opened)]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "withheld by the lock" in error and "(--withheld)" in error and error.count("\n") == 1
    assert main([*words, "--withheld", str(second)]) == 0
    assert same_files(model, opened) and {path.stat().st_mode & 0o777 for path in opened.iterdir()} == {0o600}


def test_the_share_that_moved_and_what_is_left_out(
    model: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    (source / "model.safetensors.bak").write_bytes((source / "model.safetensors").read_bytes())
    assert main(["lock", str(source), "--key", str(key), "--out", str(tmp_path / "locked")]) == 0
    said = capsys.readouterr().out
    clear, locked = (load_file(place / "model.safetensors") for place in (source, tmp_path / "locked"))
    moved = sum(clear[name].numel() for name in clear if not torch.equal(clear[name], locked[name]))
    same = {name for name in clear if torch.equal(clear[name], locked[name])}
    # Vectors of ones or zeros do not show whether they moved; the trained ones of a model do.
    moved += sum(clear[name].numel() for name in same if name.startswith("blocks") and clear[name].shape == (24,))
    total = sum(tensor.numel() for tensor in clear.values())
    assert f"{100 * moved / total:.1f} % of the parameters" in said
    assert "Files left out" in said and "model.safetensors.bak" in said
    assert not (tmp_path / "locked" / "model.safetensors.bak").exists()


def test_a_run_is_locked_as_its_export_is(trained: Any, key: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    assert main(["export", str(trained.one), "--out", str(export)]) == 0
    for source in (export, trained.one):
        locked, opened = tmp_path / f"locked-{source.name}", tmp_path / f"open-{source.name}"
        assert main(["lock", str(source), "--key", str(key), "--out", str(locked)]) == 0
        assert main(["unlock", str(locked), "--key", str(key), "--out", str(opened)]) == 0
        assert same_files(export, opened)


def test_mistakes_are_one_sentence(model: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = str(tmp_path / "locked")
    assert main(["lock", str(model), "--key", str(key), "--out", locked]) == 0
    assert main(["keygen", "--out", str(tmp_path / "other.key")]) == 0
    out = str(tmp_path / "open")
    cases = {
        "if you mean the timm model of this name, set weights": [
            "lock",
            "vit_tiny_patch16_224",
            "--key",
            str(key),
            "--out",
            out,
        ],
        "locked already": ["lock", locked, "--key", str(key), "--out", out],
        "exists already": ["unlock", locked, "--key", str(key), "--out", locked],
        "was locked with the key": ["unlock", locked, "--key", str(tmp_path / "other.key"), "--out", out],
        "the key cannot be read": ["unlock", locked, "--key", str(tmp_path / "no.key"), "--out", out],
        "not a locked model": ["unlock", str(model), "--key", str(key), "--out", out],
    }
    capsys.readouterr()
    for said, words in cases.items():
        assert main(words) == 2
        error = capsys.readouterr().err
        assert said in error and error.startswith("situs: ") and error.count("\n") == 1
    weights = Path(locked) / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert main(["unlock", locked, "--key", str(key), "--out", out]) == 2
    assert "altered" in capsys.readouterr().err
    assert not Path(out).exists()


def test_retrained_is_accepted_and_said(
    model: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locked, opened = tmp_path / "locked", tmp_path / "open"
    assert main(["lock", str(model), "--key", str(key), "--out", str(locked)]) == 0
    state = load_file(locked / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in state.items()}, locked / "model.safetensors")
    words = ["unlock", str(locked), "--key", str(key), "--out", str(opened)]
    assert main(words) == 2
    assert "altered" in capsys.readouterr().err
    assert main([*words, "--retrained"]) == 0
    assert "accepted as retrained" in capsys.readouterr().out
    clear, got = load_file(model / "model.safetensors"), load_file(opened / "model.safetensors")
    assert all(torch.equal(got[name], 2 * tensor) for name, tensor in clear.items())


def test_passphrase(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, locked = str(tmp_path / "owner.key"), str(tmp_path / "locked")
    assert main(["keygen", "--out", key, "--passphrase"]) == 2  # no terminal here
    assert "SITUS_PASSPHRASE" in capsys.readouterr().err
    monkeypatch.setenv("SITUS_PASSPHRASE", "correct horse")
    assert main(["keygen", "--out", key, "--passphrase"]) == 0
    assert main(["lock", str(model), "--key", key, "--out", locked]) == 0
    monkeypatch.setenv("SITUS_PASSPHRASE", "wrong")
    capsys.readouterr()
    assert main(["unlock", locked, "--key", key, "--out", str(tmp_path / "open")]) == 2
    assert "the passphrase is wrong" in capsys.readouterr().err
    shutil.rmtree(locked)


def test_passphrase_asked_at_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from situs.locks.key import load_key

    monkeypatch.delenv("SITUS_PASSPHRASE", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["one", "two", "", "one", "one"])
    monkeypatch.setattr("getpass.getpass", lambda _: next(answers))
    key = str(tmp_path / "owner.key")
    for said in ("differ", "empty"):
        assert main(["keygen", "--out", key, "--passphrase"]) == 2
        assert said in capsys.readouterr().err
    assert main(["keygen", "--out", key, "--passphrase"]) == 0
    assert load_key(key, "one").id in capsys.readouterr().out


@pytest.mark.parametrize("withheld", [None, Path("parts.safetensors")])
def test_how_a_locked_model_is_opened_is_said(
    withheld: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Locked:
        def __init__(self) -> None:
            self.withheld = withheld

        def __str__(self) -> str:
            return "it is locked"

    asked: dict[str, Any] = {}
    monkeypatch.setattr("situs.locks.lock", lambda *given, **more: asked.update(more, given=given) or Locked())
    assert main(["keygen", "--out", str(tmp_path / "k")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'k'}: key ") and first.endswith(
        ", without a passphrase, readable by you alone (mode 0600)."
    )
    assert "without the key, a locked model cannot be unlocked" in second
    words = ["lock", "m", "--key", str(tmp_path / "k"), "--out", "locked"]
    assert main([*words, "--cover", "--withhold", "embedding,blocks=2"]) == 0
    said, opening = capsys.readouterr().out.splitlines()
    flag = "" if withheld is None else " --withheld parts.safetensors"
    assert said == "it is locked"
    assert opening == f"To unlock the model: situs unlock locked --key {tmp_path / 'k'}{flag} --out DIR"
    assert asked["given"][0] == "m" and asked["given"][2] == Path("locked")
    assert (asked["cover"], asked["seal"], asked["withhold"]) == (True, False, ("embedding", "blocks=2"))
