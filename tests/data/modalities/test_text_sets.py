"""Sentences from every form of table, plain text in blocks, and one sentence for each fault."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentences import lines
from tiny_texts import WORDS, write_folder

from situs.data.modalities.text import BlockSource, TextSource, read_table, text_of
from situs.data.open import kind_of, open_source, splits_at
from situs.data.sources.base import Wanted
from situs.data.sources.subset import Subset
from situs.data.text import TextConfig
from situs.data.tokeniser import Ids, Tokeniser
from situs.errors import BrokenSampleError, SitusError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokeniser(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tmp_path_factory.mktemp("bert"), "bert"))


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with file.open("w", newline="") as opened:
            writer = csv.writer(opened, delimiter="\t" if file.suffix == ".tsv" else ",")
            writer.writerows([list(rows[0]), *(["" if v is None else v for v in row.values()] for row in rows)])
    return file


def read(path: Path, tokeniser: str | None, split: str | None = None, **text: Any) -> TextSource:
    found = open_source(path, split, text=TextConfig(tokeniser=tokeniser, **text))
    assert isinstance(found, TextSource)
    return found


def ids(text: str) -> list[int]:
    return [2, *(WORDS.index(word) for word in text.split()), 3]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("named", [False, True])
def test_every_table_gives_the_same_sentences(suffix: str, named: bool, tokeniser: str, tmp_path: Path) -> None:
    for name, count in (("train", 12), ("validation", 5)):
        rows = [
            {"idx": at, "sentence": text, "label": ("bad", "good")[label] if named else label}
            for at, (text, label) in enumerate(lines(count, len(name)))
        ]
        write(tmp_path / f"{name}{suffix}", rows)
    assert kind_of(tmp_path) == "text" and splits_at(tmp_path) == {"train", "validation"}
    for split, count in ((None, 12), ("val", 5)):
        source = read(tmp_path, tokeniser, split)
        wanted = lines(count, 5 if split is None else 10)
        assert source.classes == (("bad", "good") if named else ("0", "1")) and source.things == "sentences"
        found = [source.read(index) for index in range(len(source))]
        assert [(each["ids"].tolist(), each["label"]) for each in found] == [(ids(t), n) for t, n in wanted]
    one = read(tmp_path / f"train{suffix}", None)
    assert one.read(3) == {"text": lines(12, 5)[3][0], "label": lines(12, 5)[3][1]}
    with pytest.raises(SitusError, match="has no split 'val'"):
        read(tmp_path / f"train{suffix}", tokeniser, "val")


def test_names_written_beside_a_parquet_file_are_the_classes(tmp_path: Path, tokeniser: str) -> None:
    table = pa.Table.from_pylist([{"text": "w1 w2", "label": 1}])
    told = {"info": {"features": {"label": {"names": ["negative", "positive"], "_type": "ClassLabel"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(told)}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", tokeniser).classes == ("negative", "positive")


def test_longer_sentences_are_cut_as_transformers_cuts_them_and_it_is_said(tokeniser: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": text, "label": label} for text, label in lines(30)])
    source = read(path, tokeniser, longest=6)
    own = transformers.AutoTokenizer.from_pretrained(tokeniser, local_files_only=True)
    wanted = own([text for text, _ in lines(30)], truncation=True, max_length=6)["input_ids"]
    assert [source.read(index)["ids"].tolist() for index in range(30)] == wanted
    long = sum(len(text.split()) > 4 for text, _ in lines(30))
    assert 0 < long < 30 and source.notes == [f"a: {long} of 30 sentences were cut at 6 tokens (text.longest)"]
    assert read(path, tokeniser, longest=14).notes == []


@pytest.mark.parametrize("longest", [64, 9])
def test_pairs_are_what_transformers_makes_of_two_sentences(longest: int, tokeniser: str, tmp_path: Path) -> None:
    rows = [{"a": a, "label": n, "b": b} for (a, n), (b, _) in zip(lines(30), lines(30, 1), strict=True)]
    source = read(write(tmp_path / "a.jsonl", rows), tokeniser, pair="b", longest=longest)  # the other column is a
    own = transformers.AutoTokenizer.from_pretrained(tokeniser, local_files_only=True)
    asked = {"truncation": True, "max_length": longest, "return_token_type_ids": True}
    told = own([row["a"] for row in rows], [row["b"] for row in rows], **asked)
    found = [source.read(index) for index in range(30)]
    assert [each["ids"][0].tolist() for each in found] == told["input_ids"]
    assert [each["ids"][1].tolist() for each in found] == told["token_type_ids"]
    assert [each["label"] for each in found] == [row["label"] for row in rows]
    assert [source.length(index) for index in range(30)] == [len(each) for each in told["input_ids"]]
    long = sum(len(f"{row['a']} {row['b']}".split()) > longest - 3 for row in rows)
    assert source.notes == ([f"a: {long} of 30 pairs were cut at 9 tokens (text.longest)"] if longest == 9 else [])
    assert source.key(3) == f"{rows[3]['a']}\t{rows[3]['b']}" != source.key(4)


def test_the_second_sentence_is_not_taken_for_the_label(tokeniser: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": "w1", "label": "w2 w3", "class": 1}])
    assert read(path, tokeniser, pair="label").read(0)["label"] == 1


def test_faults_of_pairs(tokeniser: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": "w1", "b": "w2", "label": 1}, {"a": "w1", "b": " ", "label": 1}])
    with pytest.raises(BrokenSampleError, match="row 1: a sentence of the pair is empty"):
        read(path, tokeniser, pair="b").read(1)
    with pytest.raises(SitusError, match="has no column 'c', only a, b, label"):
        read(path, tokeniser, pair="c")
    with pytest.raises(SitusError, match="column 'label' contains 1, which is not a sentence") as error:
        read(path, tokeniser, column="a", label="b", pair="label")
    assert error.value.fields == ("text.pair",)
    with pytest.raises(SitusError, match="pair='a': must be neither the column of the first"):
        TextConfig(column="a", pair="a")
    with pytest.raises(SitusError, match="more than the 3 special ids that the tokeniser adds"):
        read(path, tokeniser, pair="b", longest=3)
    for asked in ({"target": "words"}, {"text": {"unlabelled": True}}):
        text = TextConfig(tokeniser=tokeniser, pair="b", **asked.pop("text", {}))
        with pytest.raises(SitusError, match="pair='b': only classifiers accept pairs of sentences"):
            open_source(path, kind="text", text=text, **asked)


def test_empty_sentences_and_missing_labels_are_broken_samples(tokeniser: str, tmp_path: Path) -> None:
    rows = [
        {"text": "w1", "label": 1},
        {"text": "  ", "label": 0},
        {"text": "w2", "label": None},
        {"text": None, "label": 1},
    ]
    source = read(write(tmp_path / "a.jsonl", rows), tokeniser)
    assert source.read(0)["label"] == 1
    for index, said in ((1, "the sentence is empty"), (2, "the row has no label"), (3, "the sentence is empty")):
        with pytest.raises(BrokenSampleError, match=said):
            source.read(index)


@pytest.mark.parametrize(
    ("rows", "text", "said"),
    [
        ([{"label": 1, "n": 2.5}], {}, "has no column of sentences, only label, n"),
        (
            [{"a": "w1", "b": "w2", "label": 1}],
            {},
            "several columns contain text .a, b.; set `column` .* also set `pair`",
        ),
        ([{"a": "w1", "label": 1}], {"column": "c"}, "has no column 'c', only a, label"),
        ([{"a": "w1", "label": 1}], {"label": "c"}, "has no column 'c', only a, label"),
        ([{"a": "w1", "label": 0.5}], {}, "row 0: the label 0.5 is neither a class number nor a class name"),
        ([{"a": "w1", "label": -7}], {}, "the label -7 is neither a class number"),
        ([{"a": "w1", "label": [1]}], {}, r"the label \[1\] is neither a class number"),
        ([{"a": "w1", "label": 1}, {"a": "w1", "label": "x"}], {}, "numbers or names, .* such as 'x'"),
    ],
)
def test_each_fault_is_one_sentence(rows: list[Any], text: Any, said: str, tokeniser: str, tmp_path: Path) -> None:
    with pytest.raises(SitusError, match=said):
        read(write(tmp_path / "a.jsonl", rows), tokeniser, **text)


def test_faults_of_files(tokeniser: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\nw2\n')
    (tmp_path / "b.csv").write_text("text,label\nw1,1\nw2\n")
    (tmp_path / "c.csv").write_bytes(b"text,label\n\xff\xfe,1\n")
    (tmp_path / "d.txt").write_text("w1 w2")
    (tmp_path / "e.csv").write_text("")
    said = {
        "a.jsonl": "line 2: is not JSON",
        "b.csv": "line 3: has 1 cell, but the heading has 2",
        "c.csv": "cannot be read",
    }
    said |= {"d.txt": "is plain text without labels", "e.csv": "contains no rows"}
    for name, sentence in said.items():
        with pytest.raises(SitusError, match=sentence):
            open_source(tmp_path / name, text=TextConfig(tokeniser=tokeniser))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SitusError, match=r"contains no files of sentences ..parquet, .csv"):
        open_source(tmp_path / "empty", kind="text")
    with pytest.raises(SitusError, match=r"has no tokenizer\.json"):
        Tokeniser(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SitusError, match=r"tokenizer\.json: cannot be read"):
        Tokeniser(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.csv",
            b"text,label, text\nw1,1,w2\n",
            r"two of its columns have the same name \(text, label, text\)",
        ),
        ("a.jsonl", b'\n{"text": "w1"}\n \n["w1"]\n', r"line 4: must be a JSON object with a name for each value"),
        ("a.pdf", b"%PDF", r"a\.pdf: sentences are read from \.parquet, \.csv, \.tsv, \.jsonl$"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl: cannot be read \('utf-8' codec can't decode byte 0xff"),
        *(("a.jsonl", rb'{"text": "\%s"}' % half, "line 1: has a lone surrogate") for half in (b"ud800", b"uDFFF")),
    ],
)
def test_a_file_that_is_no_table_is_one_sentence(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SitusError, match=said) as error:
        read_table(tmp_path / name)
    assert "\n" not in str(error.value)


def test_blank_lines_of_json_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "w1", "label": 1}\n  \n{"text": "w2"}\n\n')
    assert read_table(tmp_path / "a.jsonl").columns == {"text": ["w1", "w2"], "label": [1, None]}


def test_json_escapes_any_character_but_half_of_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "\ud7ff\ue000\ud83d\ude00"}')
    assert read_table(tmp_path / "a.jsonl").columns == {"text": ["\ud7ff\ue000\U0001f600"]}


def test_files_of_one_set_have_the_same_columns(tokeniser: str, tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", [{"said": "w1", "label": 1}])
    for other, has in (({"told": "w2", "label": 1}, "('told', 'label')"), ({"said": "w2"}, "('said', None)")):
        write(tmp_path / "train-1.jsonl", [other])
        said = f"train-1.jsonl: its columns are {has}, but those of train-0.jsonl are ('said', 'label')"
        with pytest.raises(SitusError, match=re.escape(said)):
            read(tmp_path, tokeniser)
    (tmp_path / "train-1.jsonl").unlink()
    write(tmp_path / "train-0.jsonl", [{"said": "w1"}])
    write(tmp_path / "val-0.jsonl", [{"said": "w1", "label": 1}])
    assert read(tmp_path, tokeniser).classes is None
    with pytest.raises(SitusError, match=r"train-0\.jsonl: has no column 'label' of labels, but other files") as error:
        read(tmp_path, tokeniser, "val")
    assert error.value.fields == ("text.label",)


def test_plain_text_must_be_utf_8(tokeniser: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"w1 \xff")
    with pytest.raises(SitusError, match=r"a\.txt: is not text in UTF-8 \('utf-8' codec can't decode byte 0xff in "):
        open_source(tmp_path / "a.txt", text=TextConfig(tokeniser=tokeniser), target="words")


def test_only_a_set_with_a_tokeniser_can_be_a_models_input(tokeniser: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": f"w{number}", "label": number % 2} for number in range(4)])
    coded = read(file, tokeniser)
    assert text_of(coded) is text_of(Subset(coded, 2)) is coded
    with pytest.raises(SitusError, match=r"^a: its sentences were not tokenised$"):
        text_of(read(file, None))


def test_a_sentence_of_unknown_words_alone_is_broken(tmp_path: Path) -> None:
    """Of a tokeniser that adds no ids of its own, and has none for what it does not know."""
    from tokenizers import Tokenizer as Coder
    from tokenizers import models, pre_tokenizers

    coder = Coder(models.BPE(vocab={"w": 0}, merges=[]))
    coder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    coder.save(str(tmp_path / "tokenizer.json"))
    file = write(tmp_path / "a.jsonl", [{"text": "w w", "label": 1}, {"text": "x y", "label": 0}])
    source = read(file, str(tmp_path))
    assert source.read(0)["ids"].tolist() == [0, 0]
    with pytest.raises(BrokenSampleError, match=r"row 1: the sentence has no word that the tokeniser knows$"):
        source.read(1)


@pytest.mark.parametrize("unlabelled", [False, True])
@pytest.mark.parametrize(
    ("name", "rows"), [("a.csv", "w1 w2,1\nw3,0\n"), ("a.csv", "w1\nw2\n"), ("a.tsv", "1\tw1\n0\tw2")]
)
def test_a_first_row_of_sentences_is_not_lost_as_a_heading(
    name: str, rows: str, unlabelled: bool, tokeniser: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(rows)
    shown = ", ".join(rows.splitlines()[0].replace("\t", ",").split(","))
    with pytest.raises(SitusError, match=rf"a\..sv: its first row must be a heading with one of .* {shown}. If"):
        read(file, tokeniser, unlabelled=unlabelled)
    with pytest.raises(SitusError, match=f"no column 'text'; .*first row .*{shown}"):
        read(file, tokeniser, column="text", unlabelled=unlabelled)
    file.write_text("said\nw1\n")
    with pytest.raises(SitusError, match=r"with one of .* said. If the file has no heading, add one"):
        read(file, tokeniser, unlabelled=unlabelled)
    assert read(file, tokeniser, column="said", unlabelled=unlabelled).text(0) == "w1"


def test_a_label_that_the_training_split_has_not_is_refused(tokeniser: str, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": "w1", "label": "x"}])
    write(tmp_path / "val.jsonl", [{"text": "w1", "label": "y"}])
    with pytest.raises(SitusError, match="the label 'y' is not among the 1 labels of the training split"):
        read(tmp_path, tokeniser, "val")


def test_a_number_beside_named_classes_is_a_name_and_no_place_in_their_order(tokeniser: str, tmp_path: Path) -> None:
    for name, labels in {"train": ("neg", "pos"), "val": ("0", "1")}.items():
        (tmp_path / f"{name}.csv").write_text("sentence,label\n" + "".join(f"w1 w2,{each}\n" for each in labels))
    with pytest.raises(SitusError, match="row 0: the label 0 is not among the 2 labels of the training split"):
        read(tmp_path, tokeniser, "val")
    (tmp_path / "train.csv").write_text("sentence,label\nw1,1\nw1,2\nw1,3+\n")
    (tmp_path / "val.csv").write_text("sentence,label\nw1,1\nw1,2\n")  # which a csv reads as numbers
    found = read(tmp_path, tokeniser, "val")
    assert found.classes == ("1", "2", "3+") and [found.label(row) for row in (0, 1)] == [0, 1]


def test_a_number_written_as_text_is_that_number(tokeniser: str, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": "w1", "label": label} for label in (0, 2)])
    write(tmp_path / "val.jsonl", [{"text": "w1", "label": "2"}])
    assert read(tmp_path, tokeniser, "val").label(0) == 2


def test_named_classes_may_be_numbers_elsewhere(tokeniser: str, tmp_path: Path) -> None:
    """Names in the metadata of the training split give each name its number."""
    described = json.dumps({"info": {"features": {"label": {"names": ["no", "yes"]}}}})
    for split, label in (("train", "yes"), ("val", 1)):
        table = pa.Table.from_pylist([{"text": "w1", "label": label}])
        pq.write_table(table.replace_schema_metadata({"huggingface": described}), tmp_path / f"{split}.parquet")
    assert [read(tmp_path, tokeniser, split).label(0) for split in ("train", "val")] == [1, 1]


def test_numbers_with_gaps_are_the_classes_and_names_are_not(tokeniser: str, tmp_path: Path) -> None:
    for name, labels in (("numbers", ("0", "7")), ("names", ("no", "yes"))):
        (tmp_path / f"{name}.csv").write_text("sentence,label\n" + "".join(f"w1 w2,{each}\n" for each in labels))
    gaps, names = (read(tmp_path / f"{name}.csv", tokeniser) for name in ("numbers", "names"))
    assert (len(gaps.classes), gaps.label(1)) == (8, 7) and names.classes == ("no", "yes")
    assert "8 classes, 0 to 7; 6 of them have no sample (1, 2, 3, …)" in gaps.notes[0]
    assert names.notes == []


def test_a_class_of_one_sample_is_said_for_it_may_be_mistyped(tokeniser: str, tmp_path: Path) -> None:
    rows = [("good", 3), ("bad", 3), ("bda", 1)]
    for split, more in (("train", 1), ("val", 0)):
        lines = [f"w1 w2,{label}\n" * count for label, count in rows if count > 1 or more]
        (tmp_path / f"{split}.csv").write_text("sentence,label\n" + "".join(lines))
    said = "1 of its 3 classes has only one sample ('bda'); check them, because a mistyped label counts as a class"
    train, val = (read(tmp_path, tokeniser, split) for split in ("train", "val"))
    assert train.notes == [f"{train.name}: {said}"] and val.notes == []
    (tmp_path / "few.csv").write_text("sentence,label\nw1,a\nw1,b\nw1,c\nw1,c\n")
    assert read(tmp_path / "few.csv", tokeniser).notes == []  # most classes have one
    (tmp_path / "gaps.csv").write_text("sentence,label\nw1,0\nw1,9\n")
    assert len(read(tmp_path / "gaps.csv", tokeniser).notes) == 1  # and here all that have any


def test_spaces_around_a_heading_or_a_label_are_none_of_it(tokeniser: str, tmp_path: Path) -> None:
    """They made a column that nobody asked for, and classes of their own."""
    (tmp_path / "a.csv").write_text("sentence, label\nw1,pos\nw1, pos\nw1,neg \nw1, \n")
    found = read(tmp_path / "a.csv", tokeniser)
    assert found.classes == ("neg", "pos") and [found.label(row) for row in range(3)] == [1, 1, 0]
    with pytest.raises(BrokenSampleError, match="row 3: the row has no label"):
        found.label(3)


def test_hidden_labels_are_no_labels(tokeniser: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", [{"text": "w1", "label": -1}]), tokeniser).classes is None


def test_plain_text_comes_in_blocks_of_every_word_once(tokeniser: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"w{number}" for number in range(50)))
    source = open_source(tmp_path / "a.txt", text=TextConfig(tokeniser=tokeniser, longest=8), target="words")
    assert isinstance(source, BlockSource) and len(source) == 7 and source.things == "blocks"
    found = [source.read(index)["ids"].tolist() for index in range(7)]
    assert [len(each) for each in found] == [8] * 6 + [2]
    assert [word for each in found for word in each] == [WORDS.index(f"w{number}") for number in range(50)]
    held = open_source(
        tmp_path / "a.txt", "val", held_out=0.5, text=TextConfig(tokeniser=tokeniser, longest=8), target="words"
    )
    assert 0 < len(held) < 7
    (tmp_path / "b.txt").write_text("w1")
    with pytest.raises(SitusError, match="has 1 word;"):
        open_source(tmp_path / "b.txt", text=TextConfig(tokeniser=tokeniser), target="words")
    with pytest.raises(SitusError, match="a tokeniser is needed"):
        open_source(tmp_path / "b.txt", target="words")


def test_equal_sentences_are_held_out_together(tokeniser: str, tmp_path: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in lines(20)] * 2
    path = write(tmp_path / "a.jsonl", rows)
    sides = [open_source(path, split, held_out=0.4, text=TextConfig(tokeniser=tokeniser)) for split in ("train", "val")]
    first, second = ({tuple(side.read(at)["ids"].tolist()) for at in range(len(side))} for side in sides)
    assert first and second and not first & second and sum(map(len, sides)) == 40


def test_glues_own_names_and_blank_lines_are_read(tokeniser: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nw1 w2\t1\n\nw3\t0\n\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nw4\t1\n")
    (tmp_path / "developed.tsv").write_text("sentence\tlabel\nw5\t1\n")  # which names no split
    train, val = (read(tmp_path, tokeniser, split) for split in (None, "val"))
    assert [train.text(row) for row in range(len(train))] == ["w1 w2", "w3"] and [train.label(0), train.label(1)] == [
        1,
        0,
    ]
    assert [val.text(row) for row in range(len(val))] == ["w4"] and splits_at(tmp_path) == {"train", "dev"}


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_table_without_rows_is_called_so(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"train{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"sentence": pa.array([], pa.string()), "label": pa.array([], pa.int64())}), file)
    else:
        file.write_text("sentence,label\n" if suffix == ".csv" else "")
    with pytest.raises(SitusError, match=f"train{suffix}: contains no rows"):
        read(tmp_path, None)


def test_too_short_a_sample_and_a_column_of_numbers_are_refused(tokeniser: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "w1 w2", "label": 1}, {"text": 7, "label": 0}])
    with pytest.raises(SitusError, match=r"a.jsonl, row 1: column 'text' contains 7, which is not a sentence"):
        read(file, tokeniser)
    with pytest.raises(SitusError, match=r"row 0: column 'label' contains 1, which is not a sentence"):
        read(file, tokeniser, column="label")
    write(file, [{"text": "w1 w2", "label": 1}])
    with pytest.raises(
        SitusError, match=r"text.longest=2: must be more than the 2 special ids that the tokeniser adds"
    ):
        read(file, tokeniser, longest=2)
    assert len(read(file, tokeniser, longest=3).read(0)["ids"]) == 3
    with pytest.raises(SitusError, match=r"text.longest=1: must be at least 2"):
        open_source(file, text=TextConfig(tokeniser=tokeniser, longest=1), target="words")


def test_quotation_marks_of_a_tsv_file_belong_to_its_sentences(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text('sentence\tlabel\n"w1 w2\t1\nsaid "w3\t0\n')
    source = open_source(tmp_path, "train", kind="text")
    assert [source.read(row)["text"] for row in range(len(source))] == [
        '"w1 w2',
        'said "w3',
    ]  # one opens and never ends


def test_categories_of_a_parquet_file_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    """pandas writes them so; a column of labels that is passed over would leave the set without labels, in silence."""
    columns = {"sentence": ["w1 w2", "w3", "w1 w2"], "label": ["up", "down", "up"]}
    pq.write_table(
        pa.table({name: pa.array(own).dictionary_encode() for name, own in columns.items()}), tmp_path / "a.parquet"
    )
    source = open_source(tmp_path / "a.parquet", kind="text")
    assert source.classes == ("down", "up")
    assert [source.read(row) for row in range(3)] == [
        {"text": "w1 w2", "label": 1}, {"text": "w3", "label": 0}, {"text": "w1 w2", "label": 1}
    ]  # fmt: skip


def test_tables_of_spreadsheets_are_read(tokeniser: str, tmp_path: Path) -> None:
    """A mark of UTF-8 in front, semicolons or tabs, line ends of Windows, line breaks and marks within quotes."""
    rows = [("w1 w2", "0"), ('w3, "w4"', "1"), ("w5\nw6", "1"), ("w7; w8", "")]
    wanted = [text for text, _ in rows]
    for delimiter in ",;\t":
        with (tmp_path / "set.csv").open("w", encoding="utf-8-sig", newline="") as opened:
            writer = csv.writer(opened, delimiter=delimiter, lineterminator="\r\n")
            writer.writerows([("sentence", "label"), *rows])
        found = read(tmp_path / "set.csv", tokeniser)
        assert [found.text(at) for at in range(4)] == wanted and found.classes == ("0", "1")
        assert [found.label(at) for at in range(3)] == [0, 1, 1]
        with pytest.raises(BrokenSampleError, match="row 3: the row has no label"):
            found.read(3)
    (tmp_path / "set.csv").write_text("sentence,label\n" + "w1 " * 100_000 + ",1\n")
    assert len(read(tmp_path / "set.csv", None).text(0)) == 300_000
    line = json.dumps({"sentence": "w1 w2", "label": 0})
    (tmp_path / "set.jsonl").write_text(line, encoding="utf-8-sig")
    assert read(tmp_path / "set.jsonl", tokeniser).read(0)["ids"].tolist() == ids("w1 w2")
    (tmp_path / "set.txt").write_text("w1 w2", encoding="utf-8-sig")
    plain = open_source(tmp_path / "set.txt", text=TextConfig(tokeniser=tokeniser), target="words")
    assert plain.read(0)["ids"].tolist() == [WORDS.index("w1"), WORDS.index("w2")]


def test_columns_of_other_kinds(tokeniser: str, tmp_path: Path) -> None:
    texts, file = [text for text, _ in lines(4)], tmp_path / "set.parquet"
    kind = pa.string_view() if int(pa.__version__.split(".")[0]) >= 21 else pa.large_string()  # older ones write none
    pq.write_table(pa.table({"sentence": pa.array(texts, kind), "label": [0.0, math.nan, 1.0, 0.0]}), file)
    found = read(file, tokeniser)
    assert [found.text(at) for at in range(4)] == texts and found.classes == ("0", "1")
    with pytest.raises(BrokenSampleError, match="row 1: the row has no label"):
        found.read(1)
    held = {"sentence": pa.array([text.encode() for text in texts]), "label": pa.array([[0]] * 4)}
    pq.write_table(pa.table({**held, "text": texts}), file)
    assert read(file, tokeniser).notes == [
        "set: its column 'label' has the type list<element: int64>, so it is not used as labels"
    ]
    with pytest.raises(SitusError, match="column 'sentence' has the type binary, which is neither text nor numbers"):
        read(file, tokeniser, column="sentence")
    pq.write_table(pa.table(held), file)
    with pytest.raises(SitusError, match=r"contains neither text nor numbers, only sentence \(binary\), label \(list"):
        open_source(file, kind="text", text=TextConfig(tokeniser=tokeniser))
    pq.write_table(pa.table({**held, "label": [0, 1, 0, 1]}), file)
    with pytest.raises(SitusError, match=r"has no column of sentences, only label, sentence \(binary\)"):
        open_source(file, kind="text", text=TextConfig(tokeniser=tokeniser))
    (tmp_path / "set.jsonl").write_text('{"sentence": "w1", "label": 0}\n{"sentence": "w1 \\ud83d", "label": 1}\n')
    with pytest.raises(SitusError, match=r"line 2: .*half a character"):
        read(tmp_path / "set.jsonl", tokeniser)


class Letters:
    """Stands for a tokeniser: a letter is an id."""

    def __init__(self, end: int | None) -> None:
        self.end = end

    def encode(self, texts: list[str], *, special: bool) -> Ids:
        assert not special
        flat = np.array([ord(letter) for text in texts for letter in text], np.int16)
        return Ids(flat, np.cumsum([len(text) for text in texts], dtype=np.int64), 0)


@pytest.mark.parametrize("end", [None, 0])
@pytest.mark.parametrize("longest", [2, 3, 4, 7, 8, 9, 100])
@pytest.mark.parametrize("texts", [["abcdefgh"], ["abc", " ", "de", ""], ["ab"], ["a", "b", "c"]])
def test_blocks_hold_every_id_that_has_a_word_before_or_after_it(texts: list[str], longest: int, end: Any) -> None:
    source = BlockSource("set", texts, Letters(end), TextConfig(longest=longest), Wanted())  # pyright: ignore[reportArgumentType]
    flat = [each for text in texts if text.strip() for each in [*map(ord, text), *([] if end is None else [end])]]
    blocks = [flat[start : start + longest] for start in range(0, len(flat), longest)]
    blocks = [block for block in blocks if len(block) > 1]
    assert [source.read(index)["ids"].tolist() for index in range(len(source))] == blocks
    assert [source.length(index) for index in range(len(source))] == [len(block) for block in blocks]
    ids, many = sum(map(len, blocks)), "blocks" if len(blocks) > 1 else "block"
    assert source.notes == [f"set: {ids} tokens in {len(blocks)} {many} of {longest}"]


def test_too_few_words_make_no_block() -> None:
    for texts, words in ((["a"], "1 word"), ([" "], "0 words")):
        with pytest.raises(SitusError, match=f"set: has {words}; a language model needs at least two"):
            BlockSource("set", texts, Letters(None), TextConfig(), Wanted())  # pyright: ignore[reportArgumentType]
    assert len(BlockSource("set", ["a"], Letters(0), TextConfig(), Wanted())) == 1  # pyright: ignore[reportArgumentType]
