"""`situs finetune --preset coco-maskrcnn` and `situs evaluate accuracy` on COCO's layout, and their faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figures import NUMPY, by_pycocotools, write_coco
from PIL import Image

from situs.cli.main import main
from situs.train.export import PARTS

QUICK = ["--device", "cpu", "--batch", "3", "--data.workers", "0", "--epochs", "2", "--optim.warmup-steps", "0"]
SMALL = """
[backbone]
patch_size = 4
[method]
name = "detection"
width = 8
hidden = 8
anchor = 1.0
proposals = 16
anchors = 16
regions = 8
score = 0.0
detections = 10
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_coco(tmp_path / "coco", {"train": 4, "val": 3})


def tune(data: Path, tmp_path: Path, *more: str, out: str = "ft") -> int:
    (tmp_path / "small.toml").write_text(SMALL)
    words = ["--preset", "coco-maskrcnn", "--config", str(tmp_path / "small.toml"), "--data", str(data)]
    return main(["finetune", *words, "--data.img-size", "32", *QUICK, "--out", str(tmp_path / out), *more])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("situs: ") and said.count("\n") == 1
    return said.removeprefix("situs: ").rstrip("\n")


@NUMPY
def test_a_run_is_fine_tuned_judged_exported_and_looked_at(
    trained: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(data, tmp_path, "--from", str(trained.mp3), "--data.resident", "always") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("coco (train): 4 images of 3 classes, streamed")
    assert lines[1].startswith("coco (train): is streamed") and "resident=always" in lines[1]
    assert "val ap" in lines[-2]
    assert lines[-1].startswith(f"next: situs evaluate accuracy {tmp_path / 'ft'}, or situs export")
    config = json.loads((tmp_path / "ft" / "config.json").read_text())
    assert config["data"]["objects"] == {"classes": ["rectangle", "disc", "crowd of dots"]}
    look = ["--device", "cpu", "--out", str(tmp_path / "look"), "--show", "2"]
    file = tmp_path / "found.json"
    assert main(["evaluate", "accuracy", str(tmp_path / "ft"), "--save-detections", str(file), *look]) == 0
    assert "for masks on 4 objects of 3 classes in 3 images" in capsys.readouterr().out.replace("\n", " ")
    held = json.loads((tmp_path / "look" / "objects.json").read_text())
    assert len(held["worst"]) == 2 and (tmp_path / "look" / "objects.html").is_file()
    results = json.loads(file.read_text())
    means, _ = by_pycocotools(data / "annotations" / "instances_val2017.json", results, "bbox")
    assert len(results) > 3 and held["boxes"]["ap"] == pytest.approx(means[0], abs=1e-6)
    assert main(["export", str(tmp_path / "ft"), "--out", str(tmp_path / "exported")]) == 0
    again = ["evaluate", "accuracy", str(tmp_path / "exported"), "--data", str(data), "--device", "cpu"]
    assert main([*again, "--out", str(tmp_path / "other")]) == 0
    assert json.loads((tmp_path / "other" / "objects.json").read_text())["boxes"] == held["boxes"]
    capsys.readouterr()
    assert main([*again, "--save-detections", str(data)]) == 2
    assert refused(capsys) == f"{data}: must be a file for the detections, but is a folder (--save-detections)"
    (tmp_path / "exported" / PARTS).unlink()
    assert main(again) == 2
    assert (
        refused(capsys) == f"exported: has no file {PARTS}, so its heads are missing; export the model again (MODEL…)"
    )
    assert main(["evaluate", "consistency", str(tmp_path / "ft"), "--device", "cpu"]) == 2
    assert "detects objects" in capsys.readouterr().err


Change = Callable[[dict[str, Any]], None]
FAULTS: dict[str, tuple[Change | str, str]] = {
    "missing file": (lambda told: told["images"][1].update(file_name="no.jpg"), "1 of its 4 images is not in"),
    "missing image": (lambda told: told["annotations"][0].update(image_id=3), "belongs to the image 3, but no image"),
    "category": (lambda told: told["annotations"][0].update(category_id=91), "has the category 91, but the"),
    "empty": (lambda told: told["annotations"].clear(), "its list of annotations is empty"),
    "mask of another size": (lambda told: told["annotations"][2]["segmentation"].update(size=[9, 9]), "9 × 9 pixels"),
    "broken json": ("{", "is not valid JSON"),
    "no objects": (lambda told: [row.update(bbox=[1, 1, 0, 0]) for row in told["annotations"]] and None, "has a box"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence(trained: Any, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = FAULTS[fault]
    data = write_coco(tmp_path / "coco", {"train": 4, "val": 1}, None if isinstance(change, str) else change)
    if isinstance(change, str):
        (data / "annotations" / "instances_train2017.json").write_text(change)
    assert tune(data, tmp_path, "--from", str(trained.mp3)) == 2
    told = refused(capsys)
    assert said in told and told.endswith("(--data)")
    assert not (tmp_path / "ft").exists()


def test_what_is_no_object_or_cannot_be_read_is_left_out_and_told(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_coco(
        tmp_path / "coco", {"train": 4, "val": 1}, lambda told: told["annotations"][0].update(bbox=[9, 9, 0, 4])
    )
    Image.new("RGB", (7, 7)).save(data / "train2017" / f"{1:012}.png")
    assert tune(data, tmp_path, "--from", str(trained.mp3)) == 0
    told = capsys.readouterr().out
    assert "left out 1 object with a box that has no area within its image; the first is annotation 1" in told
    assert "1 of 4 images of coco (train) could not be read and was replaced by the next readable one" in told
    assert "1.png: is 7 × 7, but its annotations say 46 × 50" in told
    words = ["--from", str(trained.mp3), "--data", str(data / "train2017"), "--method", "detection", *QUICK]
    assert main(["finetune", *words, "--out", str(tmp_path / "x")]) == 2
    assert "contains no json with objects" in refused(capsys)
