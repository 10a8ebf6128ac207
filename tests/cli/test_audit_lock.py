"""`situs audit lock`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from situs.cli.main import main

pytest.importorskip("cryptography")


class Locked(NamedTuple):
    """The export of a trained run, its key, and the folder that was locked with it, plain and with cover."""

    export: Path
    key: Path
    plain: Path
    cover: Path


@pytest.fixture(scope="module")
def locked(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Locked:
    place = tmp_path_factory.mktemp("audit")
    made = Locked(place / "export", place / "k", place / "plain", place / "cover")
    assert main(["export", str(trained.one), "--to", str(made.export)]) == 0
    assert main(["key", "new", "--out", str(made.key)]) == 0
    words = ["lock", str(made.export), "--key", str(made.key), "--out"]
    assert main([*words, str(made.plain)]) == 0
    assert main([*words, str(made.cover), "--cover"]) == 0
    return made


def audit(*words: Any) -> int:
    return main(["audit", "lock", *map(str, words)])


def test_a_public_base_opens_it(locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (locked.plain, locked.cover):
        out = tmp_path / folder.name
        assert audit(folder, "--attacker", "public-base", "--base", locked.export, "--out", out) == 0
        printed = capsys.readouterr().out
        assert "100.0 % (16 of 16)" in printed
        assert "min(256, best attack) = 0 bits" in printed
        written = json.loads((out / "audit.json").read_text())
        assert written["strength_bits"] == 0
        assert [attack["share"] for attack in written["attacks"]] == [1.0]
        page = (out / "report.html").read_text()
        assert "16 of 16" in page and "public-base" in page
        assert str(tmp_path) not in page + json.dumps(written)
    assert "inner groups as cover" in printed


def test_several_attackers_with_data_and_key(
    trained: Any, locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--attacker", "drifted-base,no-base", "--attacker", "labels"]
    words = ["--base", trained.two, "--key", locked.key, "--data", trained.data, "--drift", 0, 0.3, "--steps", 4]
    assert audit(locked.plain, *names, *words, "--k", 6, "--out", tmp_path) == 0
    written = json.loads((tmp_path / "audit.json").read_text())
    assert [attack["attacker"] for attack in written["attacks"]] == [
        "drifted-base, 0 ×",
        "drifted-base, 0.3 ×",
        "no-base",
        "labels",
    ]
    for attack in written["attacks"]:
        assert attack["size"] == 16 and 0 <= attack["right"] <= 16
        assert all(0 <= attack[name] <= 1 for name in ("before", "after", "owner"))
    last = written["attacks"][-1]
    assert last["cost"] == "6 labelled samples, 4 steps of 6"
    assert 0 <= last["control"] <= 1
    assert written["strength_bits"] == min(256, *(attack["bits"] for attack in written["attacks"]))
    printed = capsys.readouterr().out
    assert "with the key" in printed and "random blocks" in printed
    assert "<img" in (tmp_path / "report.html").read_text()  # share against drift


def test_what_nobody_knows_is_not_judged(trained: Any, locked: Locked, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(locked.plain, "--base", trained.two, "--attacker", "public-base") == 0
    printed = capsys.readouterr().out
    assert "Not judged, for nobody told the true key (--key): public-base. No strength can be given." in printed
    assert "256" not in printed  # nobody judged the attack, so it proves no strength


def test_without_a_key_no_strength_is_claimed(
    locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(locked.plain, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "Not judged" in printed and "the locked file alone" in printed
    assert json.loads((tmp_path / "audit.json").read_text())["strength_bits"] is None
    page = (tmp_path / "report.html").read_text()
    assert "256" not in printed and "= 256 bits" not in page and "Not judged" in page


def test_a_sealed_lock_is_attacked_below_its_seal(
    locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = tmp_path / "sealed"
    assert main(["lock", str(locked.export), "--key", str(locked.key), "--out", str(sealed), "--seal"]) == 0
    capsys.readouterr()
    before = sorted(path.name for path in sealed.iterdir())
    assert audit(sealed, "--key", locked.key, "--base", locked.export, "--out", tmp_path / "page") == 0
    printed = capsys.readouterr().out
    assert "16 of 16" in printed and "= 0 bits" in printed
    assert sorted(path.name for path in sealed.iterdir()) == before
    written = json.loads((tmp_path / "page" / "audit.json").read_text())
    assert [attack["attacker"] for attack in written["attacks"]] == ["no-base", "public-base"]


def spoil(folder: Path, out: Path) -> Path:
    """A copy of a model whose last tensor holds a NaN."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    state = load_file(out / "model.safetensors")
    name = max(state)
    state[name].view(-1)[0] = torch.nan
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_weights_that_are_no_numbers_are_one_sentence(
    locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, base = spoil(locked.plain, tmp_path / "lock"), spoil(locked.export, tmp_path / "base")
    for words, said in (([lock], f"{lock}: "), ([locked.plain, "--base", base], f"base={base}: ")):
        assert audit(*words) == 2
        printed = capsys.readouterr()
        assert said in printed.err and "holds NaN or infinite numbers" in printed.err
        assert printed.err.count("\n") == 1 and printed.out == ""


def test_mistakes_are_one_sentence(
    trained: Any, locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = tmp_path / "sealed"
    assert main(["lock", str(locked.export), "--key", str(locked.key), "--out", str(sealed), "--seal"]) == 0
    capsys.readouterr()
    for words, said in (
        ([locked.plain, "--attacker", "guess"], "guess"),
        ([locked.plain, "--attacker", "public-base"], "(--base)"),
        ([locked.plain, "--attacker", "labels"], "(--data)"),
        ([locked.plain, "--base", "vit_tiny_patch16_224"], "(--weights)"),
        ([locked.plain, "--base", locked.export, "--drift", -1], "drift=-1.0"),
        ([locked.plain, "--k", 0], "(--k)"),
        ([locked.export], "holds no manifest.json"),
        ([sealed], "the file is encrypted and nothing was attacked"),
    ):
        assert audit(*words) == 2, words
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
