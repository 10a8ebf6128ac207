from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from situs.results import Provenance, Result, Summary, Table, channels_drawn, finite, percent, points, show


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [(0.656, 1, "65.6 %"), (0.9, 0, "90 %"), (0.12345, 2, "12.35 %"), (0.15, None, "15 %"), (0.125, None, "12.5 %")],
)
def test_the_unit_stands_apart_from_its_number(share: float, digits: int | None, text: str) -> None:
    assert percent(share, digits) == text


@given(st.floats(-2, 2), st.integers(0, 4))
def test_it_reads_back(share: float, digits: int) -> None:
    assert float(percent(share, digits).removesuffix(" %")) == pytest.approx(100 * share, abs=0.51 * 10**-digits)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (True, "yes"), (False, "no"), (12345, "12,345"), (1 / 3, "0.3333"), ("t", "t")]
)
def test_show(value: str | float | bool | None, shown: str) -> None:
    assert show(value) == shown


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [(0.65625, 2, "65.62"), (0.9, 0, "90"), (1.0, 1, "100.0"), (None, 2, None), (math.nan, 2, None)],
)
def test_points_are_percent_without_the_unit(share: float | None, digits: int, text: str | None) -> None:
    assert points(share, digits) == text


@pytest.mark.parametrize(
    ("channels", "drawn"),
    [(1, None), (2, "as the mean of both"), (3, None), (4, "with the first three as red, green and blue")],
)
def test_channels_that_are_no_colours_say_how_they_are_drawn(channels: int, drawn: str | None) -> None:
    said = f"The images have {channels} channels and are drawn {drawn}."
    assert channels_drawn(channels) == (said if drawn else "")


def test_a_title_begins_with_the_name_of_the_data() -> None:
    assert Provenance({"data": "flowers"}).title("top-1") == "flowers, top-1"
    assert Provenance({"split": "val"}).title("top-1") == "top-1"


def test_plain_columns_are_aligned() -> None:
    assert str(Table("It can do", ("", "holds"), [("tokens", True), ("a [row]", 12345)])) == (
        "It can do\n           holds\n  tokens   yes\n  a [row]  12,345\n"
    )


def test_samples_are_called_what_their_source_calls_them() -> None:
    clips, joint = Provenance(things="clips"), Provenance.joint([Provenance(things="clips"), Provenance()])
    assert Provenance().counted(1200) == "1,200 images" and Provenance().counted(1) == "1 image"
    assert clips.counted(1200) == joint.counted(1200) == "1,200 clips"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("An image, an image's, 2 images and the worst image.", "A clip, a clip's, 2 clips and the worst clip."),
        ("Images once: ImageNet, imagery, img_size.", "Clips once: ImageNet, imagery, img_size."),
        (
            '<img src="data:image/png;base64,a+image+b/image/c=">',
            '<img src="data:image/png;base64,a+image+b/image/c=">',
        ),
        ("<p>image</p>", "<p>clip</p>"),
    ],
)
def test_sentences_on_images_are_said_of_clips(text: str, said: str) -> None:
    assert Provenance(things="clips").worded(text) == said
    assert Provenance().worded(text) == text


@dataclass(frozen=True, kw_only=True)
class Measured(Result):
    file = "measured"
    value: float

    def summary(self) -> Summary:
        return Summary(f"It is {self.value:g}.", [Table("Values", ("name",), [["images"]])], ("of 3 images",))

    def numbers(self) -> dict[str, Any]:
        return {"value": self.value}


class Named(Measured):
    def __repr__(self) -> str:
        return "by its own name"


def test_a_result_shows_its_tables_its_sentence_and_its_notes_and_its_repr_no_numbers() -> None:
    result, printed = Measured(value=17.5), list[str]()
    assert "17.5" not in repr(result) and repr(result) == f"<Measured: {result.title}>"
    assert repr(Named(value=1.0)) == "by its own name"
    assert str(result) == f"{result.summary().tables[0]}\nIt is 17.5.\nof 3 images"
    for cycle in (False, True):
        result._repr_pretty_(SimpleNamespace(text=printed.append), cycle)
    assert printed == [str(result), repr(result)]
    assert (result.tone, result.mark, result.private, result.figures(), result.details()) == (None, "", False, (), ())
    assert result.to_json() == {**result.provenance.facts, "value": 17.5}


def test_of_clips_every_word_of_a_result_is_of_clips() -> None:
    result = Measured(value=2.0, provenance=Provenance(things="clips"))
    assert str(result).splitlines()[-1] == "of 3 clips" and "clips" in str(result).splitlines()[-4]


def test_json_has_no_infinite_numbers() -> None:
    value = {"a": [1.0, math.inf, (math.nan, "x")], "b": {"c": -math.inf, "d": 3}}
    assert finite(value) == {"a": [1.0, None, [None, "x"]], "b": {"c": None, "d": 3}}
