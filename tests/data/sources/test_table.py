"""Tables of labels in every form, written here by hand; and every mistake in one, with its file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from situs.data.open import judged_split, open_source
from situs.data.sources.base import Source
from situs.data.sources.subset import Subset
from situs.errors import SitusError


def images(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5)).save(folder / name)


def opened(path: Path, split: str | None = None, **wanted: float) -> Source:
    return open_source(path, split, multi_label=True, **wanted)


def labels(source: Source) -> dict[str, list[int]]:
    assert source.multi_label and source.target == "labels"
    return {source.key(row): source.read(row)["label"].tolist() for row in range(len(source))}


def test_a_column_a_class(tmp_path: Path) -> None:
    images(tmp_path, "b.png", "a.png", "deep/c.png", "d.png")
    table = "file,red,green,blue\na.png,1,0,1\n\nb.png,,0.0,NaN\n./deep/c.png, 1 ,True,false\nd.png,0,0,0\n"
    (tmp_path / "labels.csv").write_text("\ufeff" + table, encoding="utf-8")
    source = opened(tmp_path)
    assert source.classes == ("red", "green", "blue") and source.notes == []
    assert labels(source) == {"a.png": [1, 0, 1], "b.png": [-1, 0, -1], "d.png": [0, 0, 0], "deep/c.png": [1, 1, 0]}
    assert labels(Subset(source, 4)) == labels(source)
    (tmp_path / "labels.csv").rename(tmp_path / "of mine.csv")
    assert labels(opened(tmp_path / "of mine.csv")) == labels(source)
    held = [labels(opened(tmp_path / "of mine.csv", split, held_out=0.5)) for split in ("train", "val")]
    assert held[0] | held[1] == labels(source) and not held[0].keys() & held[1].keys()


def test_a_column_of_names_where_nothing_is_no_class_and_nan_is_unknown(tmp_path: Path) -> None:
    images(tmp_path, "train/a.png", "train/b.png", "val/a.png", "val/c.png")
    rows = ["train/a.png,red; green", "train/b.png,", "val/a.png,nan", "val/c.png"]
    (tmp_path / "labels.csv").write_text("\n".join(["file,labels", *rows]))
    assert opened(tmp_path, "val").classes == ("green", "red")
    assert labels(opened(tmp_path)) == {"a.png": [1, 1], "b.png": [0, 0]}
    assert labels(opened(tmp_path, "val")) == {"a.png": [-1, -1], "c.png": [0, 0]}


def test_a_class_of_one_image_is_said_for_it_may_be_mistyped(tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "labels.csv").write_text("file,labels\na.png,red; green\nb.png,red;gren;green\nc.png,\n")
    said = "1 of its 3 classes has only one sample ('gren'); check them, because a mistyped label counts as a class"
    assert opened(tmp_path).notes == [f"{tmp_path.name}: {said}"]
    images(split := tmp_path / "split", "train/a.png", "train/b.png", "val/a.png", "val/b.png")
    rows = ["train/a.png,red;green", "train/b.png,red;green", "val/a.png,red;green", "val/b.png,red"]
    (split / "labels.csv").write_text("\n".join(["file,labels", *rows]))
    assert opened(split).notes == opened(split, "val").notes == []  # of few images held out one is no slip


def test_celeba_as_it_is_unpacked(tmp_path: Path) -> None:
    images(tmp_path, *(f"img_align_celeba/00000{number}.jpg" for number in range(1, 5)))
    rows = [f"00000{number}.jpg {'1' if number > 2 else '-1'}  1 -1" for number in range(1, 5)]
    (tmp_path / "list_attr_celeba.txt").write_text("\n".join(["4", "Bald Big_Nose Smiling", *rows]))
    source = opened(tmp_path)
    assert source.classes == ("Bald", "Big_Nose", "Smiling") and judged_split(tmp_path, multi_label=True) is None
    assert [*labels(source).values()] == [[0, 1, 0], [0, 1, 0], [1, 1, 0], [1, 1, 0]]
    (tmp_path / "list_eval_partition.txt").write_text("000001.jpg 0\n000002.jpg 1\n000003.jpg 0\n000004.jpg 2\n")
    assert judged_split(tmp_path, multi_label=True) == "val"
    found = {split: [key[-8:-4] for key in labels(opened(tmp_path, split))] for split in ("train", "val", "test")}
    assert found == {"train": ["0001", "0003"], "val": ["0002"], "test": ["0004"]}
    assert opened(tmp_path).name == f"{tmp_path.name} (train)" and opened(tmp_path).notes == []
    plain = open_source(tmp_path)  # one class per image: the folder is none, and nothing is split
    assert (plain.classes, plain.multi_label, len(plain)) == (None, False, 4)
    (tmp_path / "list_eval_partition.txt").write_text("000001.jpg 0\n")
    with pytest.raises(SitusError, match=r"000002.jpg: has no line in .*list_eval_partition.txt"):
        opened(tmp_path)
    (tmp_path / "list_eval_partition.txt").write_text("".join(f"00000{number}.jpg 0\n" for number in range(1, 5)))
    assert len(opened(tmp_path)) == 4
    with pytest.raises(SitusError, match=f"^{tmp_path}: contains no image of the split$"):
        opened(tmp_path, "val")
    (tmp_path / "list_eval_partition.txt").write_text("000001.jpg 3\n")
    with pytest.raises(SitusError, match=r"partition\.txt, line 1: '3' is not a split"):
        opened(tmp_path)


def test_each_split_may_have_its_table_and_the_classes_are_those_of_training(tmp_path: Path) -> None:
    images(tmp_path, "train/a.png", "val/a.png")
    (tmp_path / "train/labels.csv").write_text("file,red,green\na.png,1,-1\n")
    (tmp_path / "val/labels.csv").write_text("file,green,red\na.png,1,0\n")
    assert opened(tmp_path, "val").classes == opened(tmp_path).classes == ("red", "green")
    assert (labels(opened(tmp_path)), labels(opened(tmp_path, "val"))) == ({"a.png": [1, 0]}, {"a.png": [0, 1]})
    assert open_source(tmp_path).classes is None
    (tmp_path / "val/labels.csv").write_text("file,green,blue\na.png,1,0\n")
    with pytest.raises(SitusError, match=r"val/labels\.csv, line 1: 'blue' is a class in only one of the splits"):
        opened(tmp_path, "val")
    (tmp_path / "val/labels.csv").write_text("file,tags\na.png,green;blue\n")
    with pytest.raises(SitusError, match="line 2: class 'blue' is not among the 2"):
        opened(tmp_path, "val")


MISTAKES = {
    "file,red,green\na.png,1,2\nb.png,0,0\n": "labels.csv, line 2: '2' of 'green' is not a label; labels "
    "must be 0 and 1",
    "file,red\na.png,yes\nb.png,0\n": "labels.csv, line 2: 'yes' of 'red' is not a label",
    "file,red\na.png,0\nb.png,-1\n": "labels.csv, line 3: the labels contain -1 and 0, but",
    "file,red\n\na.png,1\nb.png,0\nc.png,0\n": "labels.csv, line 5: there is no image 'c.png' below",
    "file,red\na.png,1\n": "b.png: has no line in labels.csv",
    "file,red\na.png,1\nb.png,1\na.png,1\n": "labels.csv, line 4: 'a.png' is in line 2 already",
    "file,red,red\na.png,1,1\nb.png,0,0\n": "labels.csv, line 1: has the column 'red' twice",
    "file,red,green\na.png,1\nb.png,0,0\n": "labels.csv, line 2: has 1 label for 2 classes",
    "file,labels\na.png,red,green\nb.png,red\n": "labels.csv, line 2: has 3 values: put all class names into one",
    "file,labels\na.png,\nb.png,\n": "labels.csv: names no class in any line",
    "file\na.png\n": "labels.csv, line 1: must be a heading: first the name of the column",
    "file,red\n": "labels.csv: has no line for any image",
    "": "labels.csv, line 1: must be a heading",
}


@pytest.mark.parametrize("table", MISTAKES)
def test_mistakes_are_sentences_with_file_and_line(tmp_path: Path, table: str) -> None:
    images(tmp_path, "a.png", "b.png")
    (tmp_path / "labels.csv").write_text(table)
    with pytest.raises(SitusError, match=re.escape(MISTAKES[table])):
        opened(tmp_path)


def test_what_is_no_such_set_is_said(tmp_path: Path) -> None:
    images(tmp_path, "red/a.png", "green/a.png")
    one = "has one class per image; for several classes per image, use parquet, or image files with a table"
    for path in (tmp_path, "samples"):
        with pytest.raises(SitusError, match=one):
            opened(path)  # type: ignore[arg-type]
    (tmp_path / "labels.csv").write_text("file,x\na.png,1\n")
    assert open_source(tmp_path).classes == ("green", "red")  # as ever, where nobody asks for several
    with pytest.raises(
        SitusError, match=r"green/a.png and red/a.png have the same name, but the table does not name their folders"
    ):
        opened(tmp_path)
    with pytest.raises(SitusError, match="to read a table of labels, set multi_label"):
        open_source(tmp_path / "labels.csv", kind="image")
    (tmp_path / "labels.csv").write_bytes(b"file,\xff\n")
    with pytest.raises(SitusError, match="must be a table in UTF-8"):
        opened(tmp_path)
    (tmp_path / "list_attr_celeba.txt").write_text("3\nx y\na.jpg 1 -1\n")
    with pytest.raises(SitusError, match="line 1: announces 3 files, but 1 follow"):
        opened(tmp_path / "list_attr_celeba.txt")
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    (tmp_path / "labels.csv").unlink()
    (tmp_path / "list_attr_celeba.txt").rename(tmp_path / "train" / "list_attr_celeba.txt")
    with pytest.raises(SitusError, match="val: has no table of labels"):
        opened(tmp_path, "val")
