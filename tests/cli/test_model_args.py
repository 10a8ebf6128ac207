"""Several models share a verb's flags: each takes those that apply to its kind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from situs.cli import model_args
from situs.cli.model_args import (
    ImageArgs,
    ModelArgs,
    NamedArgs,
    check_folder,
    open_from,
    open_named,
    open_one_of,
    opening_arguments,
)
from situs.errors import SitusError
from situs.train.run import load_run

GIVEN: dict[str, Any] = {
    "weights": Path("w.safetensors"),
    "img_size": 32,
    "patch_size": 4,
    "in_chans": 1,
    "model_args": {"depth": 1},
    "key": Path("key.json"),
    "withheld": Path("parts"),
}
SHAPE = {"img_size", "patch_size", "in_chans", "model_args"}
LOCK = {"key", "withheld"}


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("vit_tiny_patch16_224", {"weights", *SHAPE}),
        ("vit_tiny_patch16_224=other.safetensors", SHAPE),
        ("{}/run", set()),
        ("{}/run=1", set()),
        ("{}/locked", LOCK),
        ("hf:owner/name@0123456789012345678901234567890123456789", set()),
    ],
)
def test_each_model_takes_the_flags_of_its_kind(
    source: str, taken: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run", "run=1", "locked"):
        (tmp_path / name).mkdir()
    (tmp_path / "locked" / "manifest.json").write_text(json.dumps({"format": "situs-lock"}))
    calls: list[tuple[str, NamedArgs]] = []
    monkeypatch.setattr(model_args, "open_named", lambda *call: calls.append(call))
    source = source.format(tmp_path)
    open_one_of(source, NamedArgs(model=source, **GIVEN))
    ((opened, args),) = calls
    assert opened == source
    empty = NamedArgs(model=source)
    expected = {name: value if name in taken else getattr(empty, name) for name, value in GIVEN.items()}
    assert {name: getattr(args, name) for name in GIVEN} == expected


def test_a_share_that_would_have_no_effect_is_refused(trained: Any, tmp_path: Path) -> None:
    """The data has splits of its own; other data, without any, is held out."""
    args: dict[str, Any] = {"model": str(trained.one), "device": "cpu", "out": tmp_path / "out"}
    with pytest.raises(SitusError, match="has its own evaluation split") as error:
        open_from(ImageArgs(**args, held_out=0.5))
    assert error.value.field == "held_out"
    assert open_from(ImageArgs(**args, held_out=0.0)).data.held_out == 0.0
    held = open_from(ImageArgs(**args, held_out=0.25, data=str(trained.data / "train")))
    assert held.data.held_out == 0.25
    assert open_from(ImageArgs(**args)).data.held_out == load_run(trained.one).config.data.held_out


def test_a_locked_model_and_tensors_that_are_not_used_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for locked, notes, said in (
        (True, {}, "situs: m: without the key, its blocks stay permuted"),
        (False, {"left out": "head.bias"}, "situs: m=w: these tensors of the file are not used: head.bias\n"),
        (False, {"other": "x"}, ""),
    ):
        model = SimpleNamespace(locked=locked, name="m", notes=notes)
        for rank in (0, 1):
            monkeypatch.setattr("situs.models.open_model", lambda *_, model=model, **__: model)
            monkeypatch.setattr("situs.train.distributed.rank", lambda rank=rank: rank)
            assert open_named("m=w", NamedArgs(model="m=w")) is model
            told = capsys.readouterr().err
            assert told.startswith(said) if said and not rank else told == ""  # the first rank speaks for all


def test_flags_become_arguments_of_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    from situs.cli.result import MeasureArgs

    args = MeasureArgs(model="m", seed=5, device="cpu", img_size=32)
    given = opening_arguments("m", args)
    assert (given["seed"], str(given["device"]), given["img_size"], given["unlock"]) == (5, "cpu", 32, None)
    assert opening_arguments("m", args, "meta")["device"] == "meta"
    assert opening_arguments("m", NamedArgs(model="m"))["seed"] == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("new", ""),
        ("new/deep/er", ""),
        ("here", ""),
        ("file", "must be a folder"),
        ("file/below", "is not writable"),
        ("new.json", "must be a folder"),
        ("new.html", "must be a folder"),
        ("new.txt", ""),
        ("x" * 300, "cannot be written: "),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    if said:
        with pytest.raises(SitusError) as error:
            check_folder(tmp_path / path)
        assert said in str(error.value) and error.value.field == "out"
    else:
        check_folder(tmp_path / path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "here"]  # nothing is made
    check_folder(None, "settings")


@pytest.mark.parametrize(
    ("there", "asked", "told"),
    [
        ((), ("a",), []),
        (("a.json",), ("a", "b"), ["a"]),
        (("b.html", "a.html"), ("a", "b"), ["a", "b"]),
        (("c.json",), ("a",), []),
    ],
)
def test_results_that_will_be_replaced_are_named(
    there: tuple[str, ...], asked: tuple[str, ...], told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in there:
        (tmp_path / name).touch()
    check_folder(tmp_path, *asked)
    lines = [f"situs: {tmp_path / name}.html and .json exist and will be replaced" for name in told]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_studys_folder_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "study.toml").touch()
    check_folder(tmp_path, "gradients")
    with pytest.raises(SitusError, match=r"a study has its own settings\.json"):
        check_folder(tmp_path, "gradients", "settings")


def test_a_name_without_weights_is_opened_only_where_any_will_do(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"img_size": 32, "model_args": {"depth": 1}, "device": "cpu"}
    for args in (ImageArgs(model="test_vit", out=tmp_path, **shape), ModelArgs(model="test_vit", **shape)):
        for refused in (open_from, lambda args: open_named("test_vit", args)):
            with pytest.raises(SitusError, match="weights"):
                refused(args)
        assert open_from(args, any_weights=True).backbone.num_tokens == 4
        assert open_named("test_vit", args, any_weights=True).backbone.num_tokens == 4
