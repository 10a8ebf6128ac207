"""What a model says of itself, and what it is refused for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_vit
from torch import nn

from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.methods import Batch
from situs.models.model import Model, check_classifier, folder_name, identity_of, puzzle_method


def test_who_has_no_position_head_is_told_so() -> None:
    backbone = small_vit()
    for name, more in (("droppos", {"decoder_width": 16, "decoder_heads": 2}), ("mp3", {})):
        method = small_method(name, small_vit(), **more)
        assert puzzle_method(Model("run", method.backbone, method)) is method
        places = method.eval().solve(Batch(torch.zeros(1, 3, 16, 16), torch.arange(1)), seed=0).places
        assert places.shape[0] == 1  # it has one indeed
    for name in ("mae", "mjp", "supervised"):
        method = small_method(name, small_vit(), **({"decoder_width": 16, "decoder_heads": 2} if name == "mae" else {}))
        said = f"run: was trained by {type(method).__name__}, which has no position head"
        with pytest.raises(SitusError, match=said):
            puzzle_method(Model("run", method.backbone, method))
    with pytest.raises(SitusError, match="x: is not a run, and only a run has a position head"):
        puzzle_method(Model("x", backbone))


def test_a_model_knows_what_was_trained_where_it_lies_and_what_it_takes() -> None:
    method = small_method("supervised")
    run, bare = Model("run", method.backbone, method, DataConfig(img_size=16)), Model("bare", method.backbone)
    assert run.trained is method and bare.trained is method.backbone
    assert run.device == torch.device("cpu")
    assert Model("meta", small_vit().to("meta")).device == torch.device("meta")
    method.backbone.model = nn.Identity()
    assert bare.device == torch.device("cpu")  # without a weight
    assert run.data.size == (16, 16)
    with pytest.raises(SitusError, match="bare: takes no images"):
        _ = bare.data


def test_a_model_is_printed_in_one_screen() -> None:
    """Its weights, blocks and a thousand names are not what somebody wants to see who prints it."""
    method = small_method("supervised")
    classes = tuple(f"class {number}" for number in range(1000))
    facts = {"kind": "run", "weights": "last epoch", **{f"fact {number}": "x\ny" * 300 for number in range(40)}}
    text = str(Model("mine", method.backbone, method, DataConfig(img_size=16), classes, facts))
    lines = text.splitlines()
    assert "  kind          run" in lines and any(line.startswith("  parameters") for line in lines)
    assert lines[0] == "Model mine" and len(lines) < 25 and max(map(len, lines)) < 120
    told = dict(line.strip().split(maxsplit=1) for line in str(Model("mine", method.backbone, method)).splitlines())
    backbone = method.backbone
    assert told["parameters"] == f"{sum(weight.numel() for weight in backbone.parameters()):,}"
    assert told["tokens"] == str(backbone.num_tokens) and told["input"] == "3 × 16 × 16"
    assert told["grid"] == f"{backbone.grid[0]} × {backbone.grid[1]}"
    assert "1000: class 0, class 1" in str(Model("mine", backbone, classes=classes))
    assert "no trained classifier" in repr(Model("mine", backbone, classifier=False))


def test_another_share_is_held_out_and_none_keeps_what_there_is() -> None:
    model = Model("run", small_vit(), input=DataConfig(img_size=16, held_out=0.25))
    assert model.holding_out(None) is model
    assert model.holding_out(0.5).data == DataConfig(img_size=16, held_out=0.5)
    assert model.data.held_out == 0.25


def test_a_head_that_was_never_trained_is_no_classifier() -> None:
    check_classifier(Model("run", small_vit()))
    with pytest.raises(SitusError, match="run: has no trained classifier"):
        check_classifier(Model("run", small_vit(), classifier=False))


@pytest.mark.parametrize(
    ("target", "said"), [("mask", "classifies pixels"), ("objects", "detects objects"), ("class", "has no trained")]
)
def test_a_model_that_tells_other_things_is_said_to(target: Any, said: str) -> None:
    with pytest.raises(SitusError, match=f"run: {said}"):
        check_classifier(Model("run", small_vit(), input=DataConfig(target=target), classifier=False))


def test_several_classes_a_sample_are_refused_where_they_are_not_asked_for() -> None:
    several = Model("run", small_vit(), input=DataConfig(multi_label=True))
    check_classifier(several, multi_label=True)
    with pytest.raises(SitusError, match="run: is multi-label, but only single-label classification"):
        check_classifier(several)


def test_an_identity_tells_models_apart_and_nobody_s_folders(tmp_path: Path) -> None:
    places = [str(tmp_path / name) for name in ("one", "two", "\udcff")]  # a name that is no UTF-8 too
    assert len({identity_of(place) for place in places}) == 3
    assert identity_of("abc") == "ba7816bf8f01cfea"  # results are compared by it: the head of SHA-256's own test vector
    for place in places:
        assert not any(part in identity_of(place) for part in Path(place).parts if len(part) > 2)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert {folder_name(tmp_path / way) for way in ("real", "link", "real/../real", "link/.")} == {"real"}


def test_who_tells_pixels_or_words_is_not_sent_to_learn_classes() -> None:
    for target, said in (
        ("mask", "classifies pixels"),
        ("words", "predicts the next word"),
        ("class", "has no"),
    ):
        config = (
            DataConfig(img_size=16)
            if target == "class"
            else replace(DataConfig(kind="text" if target == "words" else None), target=target)
        )
        with pytest.raises(SitusError, match=f"run: {said}"):
            check_classifier(Model("run", small_vit(), None, config, classifier=False))
