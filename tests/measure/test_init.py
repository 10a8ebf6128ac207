"""The evaluations as functions: any model, any data, a result that can be published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_vit
from PIL import Image

from situs import measure
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.models import Model, open_model
from situs.results import Result

LABELS = torch.arange(12) % 3
CLASSES = ("a", "b", "c")


def pixels() -> torch.Tensor:
    return torch.randint(256, (12, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        for number, (image, label) in enumerate(zip(pixels(), LABELS.tolist(), strict=True)):
            place = root / split / CLASSES[label] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(place)
    return root


def classifier(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return open_model(small_vit(8, depth=1, num_classes=3).eval())


def run_of(method: str, **config: Any) -> Model:
    torch.manual_seed(0)
    backbone = small_vit(8, depth=1, positions="sincos", patch_size=2)
    return replace(open_model(backbone), method=small_method(method, backbone, **config).eval())


def test_one_set_will_do_where_nothing_is_learned_from_it() -> None:
    source = TensorSource(pixels(), LABELS, CLASSES, "twelve")
    made: dict[str, Result] = {
        "accuracy": measure.evaluate_accuracy(classifier(), source, count=7),
        "consistency": measure.evaluate_consistency(classifier(), source, ratios=(0.5,), count=7),
        "ensemble": measure.evaluate_ensemble([classifier(), classifier(1)], source, count=7),
        "position": measure.evaluate_position(run_of("mp3"), source, ratios=(0.5,), count=7),
        "robustness": measure.evaluate_robustness(
            classifier(), source, corruptions=("contrast",), severities=(1,), count=7
        ),
    }
    for name, found in made.items():
        told = found.to_json()
        counted = {
            "ensemble": lambda told: told["together"]["count"],
            "consistency": lambda told: told["rows"][0]["count"],
            "robustness": lambda told: told["clean"]["count"],
        }.get(name, lambda told: told["count"])
        assert counted(told) == 7, name
        assert told["data"].startswith("twelve"), name
        assert found.summary().sentence, name
    assert list(made["ensemble"].alone) == ["vit_tiny_patch16_224", "vit_tiny_patch16_224 (2)"]  # type: ignore[attr-defined]


def test_what_learns_from_the_images_is_judged_on_others(folder: Path) -> None:
    knn = measure.evaluate_knn(classifier(), folder, k=3, train_count=9)
    assert (knn.bank, knn.count) == (9, 12)
    classes = measure.evaluate_probe(classifier(), folder, kind="class")
    assert next(iter(classes.probes.values())).score.count == 12
    places = measure.evaluate_probe(classifier(), folder, after=classifier(1))
    assert list(places.probes) == ["vit_tiny_patch16_224", "vit_tiny_patch16_224 (after)"]
    found = measure.extract_features(classifier(), folder, split="val", count=5)
    assert found.features.shape == (5, 16) and found.classes == CLASSES and len(found.names or ()) == 5
    source = TensorSource(pixels(), LABELS, CLASSES, "twelve")
    for learns in (measure.evaluate_knn, measure.evaluate_probe):
        with pytest.raises(SitusError) as error:
            learns(classifier(), source)
        assert error.value.field == "data"


def test_a_droppos_run_has_a_grid_and_other_methods_nothing() -> None:
    source = TensorSource(pixels(), LABELS, CLASSES, "twelve")
    run = run_of("droppos", decoder_width=16, decoder_heads=2)
    found = measure.evaluate_position(run, source, ratios=(0.5,), position_ratios=(0.5, 0.75))
    assert [(cell["visible"], cell["dropped"]) for cell in found.to_json()["cells"]] == [(8, 4), (8, 6)]
    for model, field in ((run_of("mp3"), "position_ratios"), (classifier(), None)):
        with pytest.raises(SitusError) as error:
            measure.evaluate_position(model, source, position_ratios=(0.5,))
        assert error.value.field == field
