"""Words become cases: what a word says goes before the flags, and what is wrong with one is said at once."""

from __future__ import annotations

import pytest

from situs.bench.cases import StepCase, StepConfig, make_cases
from situs.config import from_dict, to_dict
from situs.errors import SitusError


def test_every_word_meets_every_model_and_batch() -> None:
    config = StepConfig(models=("a", "b"), batches=(2, 4), patch_size=8)
    found = make_cases(["supervised", "mp3:0.5"], config)
    assert [(case.label, case.model, case.batch) for case in found] == [
        (label, model, batch) for label in ("supervised", "mp3:mask_ratio=0.5") for model in "ab" for batch in (2, 4)
    ]
    assert {case.patch_size for case in found} == {8}
    assert make_cases(["supervised"], StepConfig()) == [StepCase()]  # the flags and the case have the same defaults


def test_a_word_says_more_than_the_flags_and_is_measured_once() -> None:
    words = "mp3:mask_ratio=.25,model=c,batch=8,img_size=7x14,in_chans=1,model_args.depth=8,compile=false"
    [case] = make_cases([words], StepConfig(models=("a", "b"), batches=(2, 4), model_args={"embed_dim": 32}))
    assert case == StepCase(
        method="mp3", settings={"mask_ratio": 0.25}, model="c", batch=8, img_size=(7, 14), in_chans=1,
        model_args={"embed_dim": 32, "depth": 8}, compile=False,
    )  # fmt: skip
    assert case.shape == "c, px 7×14, channels 1, embed_dim 32, depth 8"
    assert from_dict(StepCase, to_dict(case)) == case


def test_an_empty_value_is_none_and_comes_back_in_the_label() -> None:
    [case] = make_cases(["droppos:affinity=,tau=0.5"], StepConfig())
    assert case.settings == {"affinity": None, "tau": 0.5}
    assert case.label == "droppos:affinity=,tau=0.5"
    assert make_cases([case.label], StepConfig()) == [case]


def test_what_is_computed_is_told_from_what_it_is_computed_with() -> None:
    one, two, three = make_cases(["mp3", "mp3:precision=fp32,graph=false", "mp3:drop_path=0.1"], StepConfig())
    assert one.work == two.work != three.work


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("mp3:2.0", "mp3:2.0: mask_ratio=2.0: must be in [0, 1)"),
        ("mp3:mask=0.5", "mp3:mask=0.5: mask: unknown key, perhaps mask_ratio"),
        ("mp3:batch=0", "mp3:batch=0: batch=0: must be >= 1"),
        ("mp4", "unknown method 'mp4'; choose one of: "),
    ],
)
def test_a_word_that_is_wrong_is_one_sentence(word: str, said: str) -> None:
    with pytest.raises(SitusError) as error:
        make_cases(["supervised", word], StepConfig())
    assert str(error.value).startswith(said)


def test_there_must_be_a_case() -> None:
    with pytest.raises(SitusError, match="nothing to measure"):
        make_cases([], StepConfig())


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), (".5", 0.5), ("1e-3", 0.001), ("-2", -2), ("true", True), ("false", False), ("none", None), ("", None),
     ("2x3", [2, 3]), ("2x3x4", "2x3x4"), ("2xb", "2xb"), ("x", "x"), ("gelu", "gelu")],
)  # fmt: skip
def test_a_value_is_a_number_a_size_a_truth_or_a_word(text: str, value: object) -> None:
    [case] = make_cases([f"backbone:model_args.a={text}"], StepConfig())
    assert case.model_args == {"a": value} and type(case.model_args["a"]) is type(value)


def test_a_shape_names_what_is_not_the_models_own() -> None:
    assert StepCase().shape == "vit_base_patch16_224"
    other = StepCase(model="m", img_size=32, patch_size=8, in_chans=4, drop_path=0.1)
    assert other.shape == "m, px 32, patch 8, channels 4, drop_path 0.1"
    assert StepCase(method="mjp", settings={"unknown": False, "positions": True}).label == (
        "mjp:unknown=false,positions=true"
    )
