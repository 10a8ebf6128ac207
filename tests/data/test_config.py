"""Which fields of a set's config belong to images and which to clips, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from situs.config import from_dict, to_dict
from situs.data.audio import AudioConfig
from situs.data.config import DataConfig
from situs.data.modalities.base import ModelInput
from situs.errors import SitusError

CLIPS: dict[str, Any] = {"kind": "audio", "channels": 1}


def test_the_size_of_clips_follows_from_their_features() -> None:
    assert DataConfig(**CLIPS).size == (40, 98)
    halves = DataConfig(**CLIPS, audio=AudioConfig(kind="logmel", mels=20, seconds=0.5))
    assert halves.size == (20, 48)
    assert halves.normalisation == ((0.0,) * 20, (1.0,) * 20)
    assert DataConfig(**CLIPS, img_size=(40, 98)).size == (40, 98)
    assert from_dict(DataConfig, to_dict(halves)) == halves


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"crop_share": 0.5}, "crop_share=0.5: does not apply to clips, which words contains"),
        ({"crop_share": 0.9}, r"crop_share=0\.9: does not apply to clips"),
        ({"multi_label": True}, "multi_label=True: does not apply to clips"),
        ({"img_size": (98, 40)}, r"must be the size of the clips' features \(40,98\)"),
        ({"mean": (0.5,)}, "must be 40 numbers, one per feature"),
    ],
)
def test_what_is_for_images_is_refused_of_clips(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        DataConfig(path="words", **CLIPS, **wrong)


def test_images_keep_their_channels() -> None:
    with pytest.raises(SitusError, match="must be 3 numbers, one per channel"):
        DataConfig(mean=(0.5,))
    with pytest.raises(SitusError, match="img_size: must be set"):
        _ = DataConfig().size
    assert DataConfig(channels=1).normalisation == ((0.5,), (0.25,))


def test_the_size_of_images_is_that_of_the_model() -> None:
    data = DataConfig(channels=1)

    def fitted(data: DataConfig, *takes: Any) -> DataConfig:
        return data.modality.fit(data, lambda: ModelInput("swin", *takes), learns=True)

    assert fitted(data, (32, 48)) == DataConfig(channels=1, img_size=(32, 48))
    assert fitted(given := DataConfig(img_size=7), None, 0, 9) is given  # whatever the model says
    for takes, field, said in (
        ((None,), "data.img_size", "img_size: must be set, because swin has no fixed input size"),
        (
            ((8, 8), 0, 30),
            "data.kind",
            "the kind of the data must be text, not images, because swin reads sentences",
        ),
    ):
        with pytest.raises(SitusError) as caught:
            fitted(data, *takes)
        assert (str(caught.value), caught.value.field) == (said, field)


def test_what_a_method_learns_from_is_read_and_nothing_else() -> None:
    assert DataConfig().for_method("detection", ("objects",)).target == "objects"
    assert DataConfig().for_method("segmentation", ("mask",)).target == "mask"
    assert DataConfig().for_method("mp3", ()).target == "class"
    # A folder of images often has a table beside it, so that sentences are not found where nobody asks for them.
    kinds = {need: DataConfig().for_method("any", (need,)).kind for need in ("objects", "mask", "words")}
    assert kinds == {"objects": None, "mask": None, "words": "text"}
    for target, things in (("mask", "masks"), ("objects", "objects"), ("words", "words")):
        asked = DataConfig(target=target)
        with pytest.raises(SitusError, match=f"mp3 learns without {things}, but the target of the data is {things}"):
            asked.for_method("mp3", ())
        with pytest.raises(
            SitusError, match=f"supervised learns a class of each sample, but the target of the data is {things}"
        ):
            asked.for_method("supervised", ("label",))
