"""`situs features`: of a run, of its export and of a timm model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from situs.cli.main import main
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run


def read_features(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        return load_file(path), json.loads(file.metadata()["situs"])


NAME = "test_vit"  # timm's own tiny model for tests


def test_of_a_run_and_of_its_export(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.safetensors"
    assert main(["features", str(trained.mp3), "--out", str(tmp_path / "one.npz"), "--count", "1"]) == 0
    assert "one.npz: 1 feature of 16 numbers" in capsys.readouterr().out
    assert main(["features", str(trained.mp3), "--out", str(out), "--split", "val"]) == 0
    assert "15 features of 16 numbers, with labels" in capsys.readouterr().out
    found, facts = read_features(out)
    loaded = load_run(trained.mp3)
    [*batches] = make_eval_loader(loaded.config)
    backbone = loaded.method.backbone
    with torch.no_grad():
        expected = torch.cat([backbone.encode(backbone.embed(b.inputs), None).patches.mean(1) for b in batches])
    torch.testing.assert_close(found["features"], expected, rtol=1e-5, atol=1e-6)
    assert found["labels"].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert (facts["method"], facts["data"], facts["positions"]) == ("mp3", "data (val)", False)
    assert str(trained.data.parent) not in str(facts)
    table = (tmp_path / "run.names.csv").read_text().splitlines()
    assert table[6] == "5,5,light/0.png,1,light"
    names = [f"{name}/{number}.png" for name in ("dark", "light", "middle") for number in range(5)]
    assert [row.split(",")[2] for row in table[1:]] == names

    assert main(["export", str(trained.mp3), "--out", str(tmp_path / "x")]) == 0
    words = ["--data", str(trained.data), "--split", "val", "--out", str(tmp_path / "export.safetensors")]
    assert main(["features", str(tmp_path / "x"), *words]) == 0
    torch.testing.assert_close(read_features(tmp_path / "export.safetensors")[0]["features"], found["features"])


def test_cls_is_another_pool(trained: Any, tmp_path: Path) -> None:
    for pool in ("mean", "cls"):
        assert main(["features", str(trained.one), "--out", str(tmp_path / f"{pool}.safetensors"), "--pool", pool]) == 0
    mean, cls = (read_features(tmp_path / f"{pool}.safetensors")[0] for pool in ("mean", "cls"))
    assert mean["features"].shape == cls["features"].shape == (24, 16)
    assert not torch.allclose(mean["features"], cls["features"])


def test_of_every_patch(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["features", str(trained.one), "--out", str(tmp_path / "x.npz"), "--tokens", "patches", "--count", "5"]
    assert main(words) == 0
    assert "x.npz: 5 features of 4 × 16 numbers" in capsys.readouterr().out
    with np.load(tmp_path / "x.npz") as file:
        assert file["features"].shape == (5, 4, 16)
        facts = json.loads(str(file["metadata"]))
    assert facts["grid"] == [2, 2] and facts["tokens"] == "patches" and "pool" not in facts
    monkeypatch.setattr("situs.measure.features._LARGEST", 5 * 4 * 16 * 4 - 1)
    assert main(words) == 2
    assert "5 images take" in (told := capsys.readouterr().err) and "--count" in told


def test_of_a_timm_name(trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    words = ["--data", str(trained.data), "--out", str(out), "--img-size", "32", "--split", "val"]
    assert main(["features", NAME, *words, "--weights", "random"]) == 0
    found, facts = read_features(out)
    assert found["features"].shape[0] == 15
    assert (facts["model"], facts["weights"], facts["img_size"]) == (NAME, "random", [32, 32])


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["features", str(trained.one), "--out", str(tmp_path / "x.npz"), "--tokens", "patches", "--pool", "cls"]
    assert main(words) == 2
    assert (
        "has no effect on patch features, which are not pooled; do not set pool (--pool, --tokens)"
        in capsys.readouterr().err
    )
    data, out = ["--data", str(trained.data)], ["--out", str(tmp_path / "x.npy")]
    for words, said in (
        ([NAME, *data, *out], "(--weights)"),
        ([NAME, *out, "--weights", "random"], "(--data)"),
        (["no_such_model", *data, *out, "--weights", "random"], "no_such_model"),
        ([str(trained.one), *out, "--weights", "random"], "a run has its own weights; do not set weights (--weights)"),
        ([str(trained.one), *out, "--data", str(tmp_path / "none")], "none"),
        ([str(trained.one), *out, "--split", "middle"], "split"),
        ([str(trained.one), "--out", str(tmp_path / "x.pt")], "must be a file ending in .safetensors, .npz, .npy"),
    ):
        assert main(["features", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
    assert list(tmp_path.iterdir()) == []
