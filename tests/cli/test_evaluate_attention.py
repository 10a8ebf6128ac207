"""`situs evaluate attention` on tiny runs, on real weights, and on models that have no such attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.cli.main import main

SWIN = ["swin_tiny_patch4_window7_224", "--model-args.depths", "[1, 1]", "--model-args.embed-dim", "12"]
SWIN += ["--model-args.num-heads", "[1, 2]"]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_looks_at_a_run_that_has_no_positions(trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "attention", str(trained.mp3), "--show", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "mp3: attention over 15 images"
    assert printed[-1] == str(tmp_path / "attention.html")
    assert printed[-2].startswith("In layer 2, ")  # in words what the table and the page say
    numbers = json.loads((tmp_path / "attention.json").read_text())
    assert numbers["positions"] is False
    assert numbers["maps"] | {"on_brightest_tenth": 0, "on_brightest_tenth_by_head": 0} == {
        "layer": 2, "of": "cls", "images": 2, "on_brightest_tenth": 0, "on_brightest_tenth_by_head": 0,
    }  # fmt: skip
    assert "runs without positions here" in (tmp_path / "attention.html").read_text()
    assert "(val)" in (tmp_path / "attention.html").read_text().partition("How this page was made")[2]
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"attention-{name}.png" for name in ("images", "heads", "relative")} <= names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["test_resnet", "--weights", "random"],
            "test_resnet: has no attention maps, because not every token attends to every other token: it is a",
        ),
        ([*SWIN, "--weights", "random"], "not every token attends to every other token"),
        (["{one}", "--layer", "3"], "layer=3: must be in 1 to 2"),
        (["{one}", "--show", "0"], "show=0: must be >= 1"),
        (["{empty}"], "neither a run nor an export"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(
    words: list[str], said: str, trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    filled = [word.format(one=trained.one, empty=tmp_path / "empty") for word in words]
    assert main(["evaluate", "attention", *filled, "--data", str(trained.data), "--out", str(tmp_path / "x")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert said in complaint
    assert not (tmp_path / "x").exists()


@pytest.mark.shared_data
@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is absent")
@pytest.mark.slow
def test_a_real_vit_looks_at_objects() -> None:
    """DINOv2's CLS gathers its attention on few patches; random weights spread it (10 % on a tenth of them)."""
    from situs.measure.attention import image_maps, top_share
    from situs.models import open_model
    from situs.models.data import load_set

    found = {}
    file = SHARED / "weights" / "vit_small_patch14_dinov2_fp16.safetensors"
    for weights in (str(file), "random"):
        subject = open_model("vit_small_patch14_dinov2", weights=weights, img_size=(112, 112))
        loader = load_set(subject, SHARED / "imagenet-samples", split="train", batch=4, count=4)
        maps = image_maps(subject.backbone, next(iter(loader)).inputs, 11)
        found[weights] = top_share(maps.mean(dim=1)).mean()
    assert found[str(file)] > 0.3
    assert found["random"] < 0.2
