"""Multi-label columns of parquet files, written here by pyarrow alone."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import png

from situs.data.open import open_source
from situs.data.sources.base import Wanted
from situs.data.sources.labels import note_singletons, singleton_classes
from situs.data.sources.parquet import ParquetSource
from situs.errors import SitusError


def write(file: Path, described: Any = None, **columns: Any) -> Path:
    count = len(next(iter(columns.values())))
    table = pa.table({"image": [{"bytes": png(row), "path": None} for row in range(count)], **columns})
    if described is not None:
        told = {"info": {"features": {"labels": described}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(told)})
    pq.write_table(table, file, row_group_size=3)
    return file


def labels(source: Any) -> list[list[int]]:
    assert source.multi_label
    return [source.read(row)["label"].tolist() for row in range(len(source))]


NAMES = [["b", "a"], [], None, ["c"]]
NAMED = {"feature": {"names": ["x", "y", "z"], "_type": "ClassLabel"}, "_type": "Sequence"}
HOT = [[1, 1, 0], [0, 0, 0], [-1, -1, -1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("described", "column", "classes"),
    [
        (None, pa.array(NAMES), ("a", "b", "c")),
        (None, pa.array(NAMES, pa.large_list(pa.large_string())), ("a", "b", "c")),
        (None, pa.array([[1, 0], [], None, [2]]), ("0", "1", "2")),
        (NAMED, pa.array([[1, 0, 1], [], None, [2]], pa.list_(pa.int16())), ("x", "y", "z")),
        ([NAMED["feature"]], pa.array([["y", "x"], [], None, ["z"]]), ("x", "y", "z")),
    ],
    ids=["names", "large", "numbers", "numbers named", "names in order"],
)
def test_a_list_of_names_or_numbers(tmp_path: Path, described: Any, column: Any, classes: tuple[str, ...]) -> None:
    source = open_source(write(tmp_path / "x.parquet", described, labels=column), multi_label=True)
    assert (source.classes, labels(source)) == (classes, HOT)


def test_classes_that_nobody_names_are_those_of_all_splits(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", labels=[["b"], ["c"]])
    write(tmp_path / "test-0.parquet", labels=[["a"], []])
    train, test = (open_source(tmp_path, split, multi_label=True) for split in ("train", "test"))
    assert train.classes == test.classes == ("a", "b", "c")
    assert (labels(train), labels(test)) == ([[0, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    "columns",
    [
        {"bald": [True, False, None, True], "smiling": [False] * 4, "celeb_id": [3, 9, 9, 3]},
        {"bald": [1, 0, None, 1], "smiling": [0.0] * 4, "name": list("abcd")},
        {"bald": [1.0, -1.0, float("nan"), 1.0], "smiling": pa.array([-1] * 4, pa.int8())},
    ],
    ids=["bool", "0/1", "-1/1"],
)
def test_a_column_a_class(tmp_path: Path, columns: Any) -> None:
    source = open_source(write(tmp_path / "x.parquet", **columns), multi_label=True)
    assert source.classes == ("bald", "smiling")
    assert labels(source) == [[1, 0], [0, 0], [-1, 0], [1, 0]]


def test_row_groups_are_read_when_asked_for_and_in_workers(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "x.parquet", labels=NAMES), Wanted(multi_label=True), memory_bytes=0)
    assert [source.label(row).tolist() for row in (3, 0, 2)] == [HOT[3], HOT[0], HOT[2]]
    assert labels(pickle.loads(pickle.dumps(source))) == HOT


MISTAKES: dict[str, dict[str, Any]] = {
    "row group 1, row 0: class 'w' is not among the 3": {
        "described": NAMED,
        "labels": [["x"], [], ["y"], ["z", "w"]],
    },
    "row group 0, row 1: class 3 is not among the 3": {"described": NAMED, "labels": [[0], [3]]},
    "row group 0, row 0: class None is not among the 2": {"labels": [["a", None], ["b"]]},
    "row group 1, row 0: column 'bald' contains 7; labels must be 0 and 1": {"bald": [1, 0, 0, 7]},
    "row group 0, row 2: the labels contain -1 and 0, but": {"bald": [1, -1, 0]},
    "column 'label' contains one class per image": {"label": [1, 0, 0, 7]},
    "a multi-label set needs a column that contains lists of labels, or columns of 0 and 1": {"name": ["a", "b"]},
    "column 'labels' contains lists of double": {"labels": [[0.5], []]},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_sentences_with_file_and_row(tmp_path: Path, said: str) -> None:
    file = write(tmp_path / "x.parquet", **MISTAKES[said])
    with pytest.raises(SitusError, match=rf"x\.parquet.*{re.escape(said)}"):
        open_source(file, multi_label=True)


def test_several_classes_are_not_taken_for_one(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match="labels must be integers; for several labels per image, set multi_label"):
        open_source(write(tmp_path / "x.parquet", labels=NAMES))
    assert open_source(write(tmp_path / "y.parquet", bald=[True, False])).classes is None


@pytest.mark.parametrize(
    ("counts", "noted"),
    [
        ([3, 2], False),
        ([1, 2], True),
        ([1, 1, 2], False),
        ([1, 1, 2, 3], True),
        ([1, 0, 0, 0], False),
        ([1, 0, 5], True),
    ],
)
def test_classes_of_one_sample_are_noted_up_to_half_of_those_with_samples(counts: list[int], noted: bool) -> None:
    classes = [f"c{number}" for number in range(len(counts))]
    notes = note_singletons("birds", classes, counts)
    assert len(notes) == noted
    single, sentence = singleton_classes(classes, counts)
    assert single == counts.count(1)
    assert not noted or sentence in notes[0]
