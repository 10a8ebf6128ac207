"""`situs export`: what a run learned, loadable by timm alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from situs.cli.main import main
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run


def with_timm(folder: Path, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """What timm reads; tests/train/test_export.py does it in an interpreter that never sees Situs."""
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).double().eval()
    with torch.no_grad():
        return {"features": model.forward_features(images.double()), "out": model(images.double())}


def test_a_run_goes_to_timm_with_its_story(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained.one), "--out", str(tmp_path / "x")]) == 0
    assert "Load it with timm.create_model" in capsys.readouterr().out
    loaded = load_run(trained.one)
    images = next(iter(make_eval_loader(loaded.config))).inputs
    found = with_timm(tmp_path / "x", images)
    with torch.no_grad():
        torch.testing.assert_close(found["out"], loaded.method.double().backbone(images.double()))
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["label_names"] == ["dark", "light", "middle"]
    card = (tmp_path / "x" / "README.md").read_text()
    assert str(trained.data.parent) not in card
    assert "moving average (EMA)" in card
    assert "Updates: 6" in card
    assert "| accuracy |" in card


def test_an_upload_is_the_hubs_own_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "x"), "--push", "me/vit"]) == 2
    assert "--push was removed: use hf upload OWNER/NAME FOLDER" in capsys.readouterr().err


def test_mp3_goes_without_positions_and_head(trained: Any, tmp_path: Path) -> None:
    assert main(["export", str(trained.mp3), "--out", str(tmp_path / "x")]) == 0
    loaded = load_run(trained.mp3)
    backbone = loaded.method.double().backbone
    images = next(iter(make_eval_loader(loaded.config))).inputs
    found = with_timm(tmp_path / "x", images)
    with torch.no_grad():
        features = backbone.encode(backbone.embed(images.double()), None)
    torch.testing.assert_close(found["features"], torch.cat(features[:2], dim=1))
    assert "trained without positions" in (tmp_path / "x" / "README.md").read_text()


def test_the_weights_themselves_on_request(trained: Any, tmp_path: Path) -> None:
    assert main(["export", str(trained.one), "--out", str(tmp_path / "x"), "--no-ema"]) == 0
    checkpoint = load_run(trained.one).run.latest()
    assert checkpoint is not None
    name = "backbone.model.head.weight"
    written = load_file(tmp_path / "x" / "model.safetensors")["head.weight"]
    assert torch.equal(written, checkpoint.tensors("model")[name])
    assert not torch.equal(written, checkpoint.tensors("ema")[name])


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for words, said in (
        ([str(tmp_path / "none"), "--out", str(tmp_path / "x")], "none"),
        ([str(trained.one), "--out", str(tmp_path / "full")], "not empty"),
        ([str(trained.one), "--out", str(tmp_path / "full"), "--force"], "not replaced"),
    ):
        assert main(["export", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("library", "step", "error", "lines"),
    [
        (
            "timm",
            7,
            1.25e-7,
            [
                "out: vit after 7 updates",
                "The export was loaded again with timm: AGREES 1.2e-07 (relative).",
                'Load it with timm.create_model("local-dir:out", pretrained=True).',
            ],
        ),
        (
            "transformers",
            1,
            0.0,
            [
                "out: vit after 1 update",
                "The export was loaded again with transformers: AGREES 0.0e+00 (relative).",
                'Load it with transformers.vit.from_pretrained("out").',
            ],
        ),
        ("onnxruntime", None, None, ["out: vit"]),
    ],
)
def test_how_an_export_is_loaded_is_said_for_its_library(
    library: str, step: int | None, error: float | None, lines: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[Any] = []
    made = SimpleNamespace(architecture="vit", step=step, notes=["a note"], error=error, library=library)
    monkeypatch.setattr("situs.models.export.export_model", lambda *given, **more: asked.append((given, more)) or made)
    assert main(["export", "run", "--out", "out"]) == 0
    shown = capsys.readouterr().out.replace("its outputs differ from the original model's by at most", "AGREES")
    assert shown.splitlines() == [lines[0], "a note", *lines[1:]]
    assert asked == [((Path("run"), Path("out")), {"form": None, "features": None, "ema": None, "force": False})]
    assert (
        main(["export", "run", "--out", "out", "--no-ema", "--force", "--format", "onnx", "--features", "pooled"]) == 0
    )
    assert asked[1][1] == {"form": "onnx", "features": "pooled", "ema": False, "force": True}
