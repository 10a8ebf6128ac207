"""How a model's images are prepared: what is written for other libraries, and that it is read back."""

from __future__ import annotations

from typing import Any

import pytest

from situs.data.config import DataConfig
from situs.data.modalities.base import ModelInput
from situs.data.preparation import Preparation, timm_words

GREY = DataConfig("here", img_size=(28, 21), channels=1, crop_share=0.875, mean=(0.25,), std=(0.5,), multi_label=True)
PHOTOGRAPHS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def test_each_library_is_told_in_its_own_words() -> None:
    prepared = Preparation(GREY)
    assert prepared.to_timm(PHOTOGRAPHS, 1) == {"mean": [0.25], "std": [0.5], "crop_pct": 0.875}
    assert prepared.to_onnx() == {"mean": [0.25], "std": [0.5], "crop": 0.875}
    common = {"image_processor_type": "BitImageProcessor", "image_mean": [0.25], "image_std": [0.5]}
    assert prepared.to_hf((28, 21), 1) == {
        **common, "size": {"height": 32, "width": 24}, "crop_size": {"height": 28, "width": 21},
        "do_convert_rgb": False,
    }  # fmt: skip
    square = prepared.to_hf((28, 28), 3)
    assert (square["size"], square["do_convert_rgb"]) == ({"shortest_edge": 32}, True)
    assert prepared.multi_label and prepared.tokeniser is None and prepared.to_situs() == {}


def test_where_nothing_is_known_values_stay_as_they_are() -> None:
    unknown = Preparation()
    assert (unknown.multi_label, unknown.to_situs(), unknown.to_onnx()) == (False, {}, {})
    assert unknown.to_timm(PHOTOGRAPHS, 3) == {
        "mean": [*PHOTOGRAPHS["mean"]],
        "std": [*PHOTOGRAPHS["std"]],
        "crop_pct": 1.0,
    }
    assert unknown.to_timm(PHOTOGRAPHS, 2) == {"mean": [0.0] * 2, "std": [1.0] * 2, "crop_pct": 1.0}
    hf = unknown.to_hf((8, 8), 2)
    assert (hf["image_mean"], hf["image_std"], hf["size"]) == ([0.0] * 2, [1.0] * 2, {"shortest_edge": 8})


def test_what_timm_is_told_is_read_back() -> None:
    told = Preparation(GREY).to_timm(PHOTOGRAPHS, 1)
    again = Preparation.read(ModelInput("model", (28, 21), 1), told, {}, multi_label=True, path="here")
    assert again.data == GREY


@pytest.mark.parametrize(
    ("told", "size", "normalised", "share"),
    [
        ({"mean": (0.1,) * 3, "std": (0.2,) * 3, "crop_pct": 0.9}, (224, 224), ((0.1,) * 3, (0.2,) * 3), 0.9),
        ({"mean": (0.1,), "std": (0.2,), "input_size": (3, 32, 48)}, (32, 48), None, 1.0),
        ({"mean": (0.1,) * 3, "std": (0.2,), "crop_pct": 1.4}, (224, 224), None, 1.0),
        ({"crop_pct": None}, (224, 224), None, 1.0),
    ],
    ids=["fits", "other channels", "deviation of other channels", "nothing"],
)  # fmt: skip
def test_of_a_folder_only_what_fits_its_channels_is_taken(
    told: dict[str, Any], size: Any, normalised: Any, share: float
) -> None:
    data = Preparation.read(ModelInput("model", None, 3), told, {}).data
    assert data is not None
    assert (data.img_size, data.crop_share) == (size, share)
    assert (data.mean, data.std) == (normalised or ((), ()))


def test_a_model_of_unknown_input_has_no_preparation() -> None:
    assert Preparation.read(ModelInput("model", None), {}, {}) == Preparation()


@pytest.mark.parametrize(
    ("written", "share"),
    [
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}, 0.875),
        ({"size": {"height": 256, "width": 320}, "crop_size": {"height": 224}}, 0.875),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224}, "do_center_crop": False}, 1.0),
        ({"size": 256, "crop_size": {"height": 224}}, 1.0),
        ({"size": {"shortest_edge": 256}}, 1.0),
    ],
)  # fmt: skip
def test_what_transformers_wrote_is_timm_s_words(written: dict[str, Any], share: float) -> None:
    assert timm_words(written) == {"mean": (), "std": (), "crop_pct": share}
    scale = {"image_mean": [0.5], "image_std": [0.25]}
    assert timm_words({**written, **scale}) == {"mean": [0.5], "std": [0.25], "crop_pct": share}
