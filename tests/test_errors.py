"""An error knows its field, its value and what is allowed; what is around it may put a path or a place in front."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

from situs.errors import (
    DataError,
    SitusError,
    counted,
    first_line,
    missing_extra,
    none_read,
    one_line,
    reason_of,
    unknown_name,
    verb,
)


def test_a_wrong_value_is_said_with_its_field_and_what_is_allowed():
    error = SitusError(field="mask_ratio", value=1.2, allowed="in [0, 1)")
    assert str(error) == "mask_ratio=1.2: must be in [0, 1)"
    assert (error.field, error.value, error.allowed) == ("mask_ratio", 1.2, "in [0, 1)")
    assert str(SitusError(field="out", value=Path("a.json"), allowed="a folder")) == "out=a.json: must be a folder"
    assert str(SitusError(field="dal", value="x", allowed="none")) == "dal='x': must be none"


def test_a_sentence_needs_no_field_and_may_have_several():
    assert str(SitusError("runs/x: holds no run")) == "runs/x: holds no run"
    assert SitusError("runs/x: holds no run").field is None
    error = SitusError("two images are needed", field=("count", "data"))
    assert (str(error), error.field, error.fields) == ("two images are needed", "count", ("count", "data"))


def test_the_holder_of_a_config_sees_the_whole_path():
    error = SitusError(field="mask_ratio", value=1.2, allowed="in [0, 1)").under("method").under("recipe")
    assert str(error) == "recipe.method.mask_ratio=1.2: must be in [0, 1)"
    assert (error.field, error.value) == ("recipe.method.mask_ratio", 1.2)
    told = SitusError("no such file", field="path").under("data")
    assert (str(told), told.field) == ("no such file", "data.path")
    assert str(SitusError("no field at all").under("data")) == "no field at all"


def test_the_place_it_was_found_in_opens_the_sentence():
    error = SitusError(field="lr", value=0, allowed="> 0").under("optim").prefixed("preset small")
    assert str(error) == "preset small: optim.lr=0: must be > 0"
    assert (error.field, error.value, error.allowed) == ("optim.lr", 0, "> 0")


def test_an_unknown_name_lists_the_choices():
    error = unknown_name("attack", "aprill", ["patchembed", "april"], field="attack")
    assert str(error) == "unknown attack 'aprill'; choose one of: april, patchembed"
    assert (error.field, error.value) == ("attack", "aprill")


def test_it_survives_what_carries_it_between_processes():
    error = SitusError(field="size", value=3, allowed="even")
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(same) == str(error)
        assert (same.fields, same.value, same.allowed) == (("size",), 3, "even")


def test_one_thing_is_no_plural() -> None:
    things = ("images", "classes", "patches", "boxes", "unusable annotations")
    assert [counted(1, each) for each in things] == ["1 image", "1 class", "1 patch", "1 box", "1 unusable annotation"]
    assert counted(0, "images") == "0 images" and counted(1200, "classes") == "1,200 classes"
    assert [verb(count, "were") for count in (0, 1, 2)] == ["were", "was", "were"]


def test_what_others_raise_is_the_end_of_a_sentence() -> None:
    assert reason_of(OSError(2, "No such file", "/secret")) == "no such file"
    assert reason_of(OSError("Broken Pipe")) == "broken pipe"  # some libraries give no number
    assert first_line(ValueError("  one\n two")) == "one" and first_line(ValueError("")) == "ValueError"
    assert first_line(ValueError("\n")) == "ValueError" and first_line(ValueError("x" * 121)) == "x" * 120


def test_control_characters_are_shown_and_other_letters_stay() -> None:
    assert one_line("a\nb\tc\x1b ä’") == r"a\nb\tc\x1b ä’" and one_line("ä b") == "ä b"
    assert str(SitusError("runs/a\nb: holds no run")) == r"runs/a\nb: holds no run"
    assert str(DataError("one\rtwo")) == r"one\rtwo" and DataError("x").field == "data"


def test_of_a_set_none_of_whose_samples_can_be_read_the_number_is_told() -> None:
    assert none_read("set", 1, "images") == "set: its only image cannot be read"
    assert none_read("set", 2, "clips") == "set: none of its 2 clips can be read"
    assert none_read("set", 1200, "images") == "set: none of its 1,200 images can be read"


def test_what_is_not_installed_is_told_with_the_command_that_installs_it() -> None:
    said = "An export to ONNX needs the package 'onnxscript': pip install 'situs[onnx]'"
    assert str(missing_extra("onnxscript", "onnx", "An export to ONNX")) == said
