"""A long text in pieces, by tokenisers of several kinds that are trained here."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from situs.data.tokeniser import Tokeniser
from situs.errors import SitusError

tokenizers = pytest.importorskip("tokenizers")

WORDS = [
    "the",
    "film",
    "was",
    "wonderful",
    "playing",
    "unforgettable",
    "很好",
    "电影",
    "café",
    "😀",
    "👩\u200d👧",
    "فيلم",
]
NEW = ["🎉", "nearly", "行", "outplayed"]
"""Words that no tokeniser has seen: several ids each, of bytes several a letter."""


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_a_damaged_file_beside_the_tokeniser_is_named(name: str, tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "tokenizer.json"))
    assert (Tokeniser(tmp_path).pad, Tokeniser(tmp_path).end) == (0, None)
    for content, pad in ((b"[1]", 0), (b'{"pad_token": "b", "pad_token_id": 1}', 1)):
        (tmp_path / name).write_bytes(content)
        assert Tokeniser(tmp_path).pad == pad
    for content, said in ((b"{", "Expecting property name"), (b"\xff", "'utf-8' codec can't decode")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SitusError, match=rf"{name}: cannot be read: {said}") as error:
            Tokeniser(tmp_path)
        assert error.value.field == "text.tokeniser"


def test_without_the_package_one_sentence_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SitusError, match=r"reading text needs the package 'tokenizers': pip install 'situs\[hf\]'"):
        Tokeniser(tmp_path)


@pytest.fixture(scope="module", params=["bytes", "unigram", "bpe"])
def tokeniser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokeniser:
    from tokenizers import models, pre_tokenizers, trainers

    lines, folder = [" ".join(WORDS[at:]) for at in range(len(WORDS))], tmp_path_factory.mktemp(request.param)
    if request.param == "unigram":
        made, special = tokenizers.Tokenizer(models.Unigram()), ["<unk>"]
        trainer = trainers.UnigramTrainer(
            vocab_size=80,
            initial_alphabet=sorted({*"".join(NEW)}),
            special_tokens=special,
            unk_token="<unk>",
            show_progress=False,
        )
    else:
        made = tokenizers.Tokenizer(models.BPE())
        letters = pre_tokenizers.ByteLevel.alphabet() if request.param == "bytes" else sorted({*"".join(NEW)})
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False) if request.param == "bytes" else pre_tokenizers.Metaspace()
    made.pre_tokenizer = whole
    made.train_from_iterator(lines, trainer)
    made.save(str(folder / "tokenizer.json"))
    return Tokeniser(folder)


@pytest.mark.parametrize("longest", [4, 7, 20])
def test_pieces_hold_every_letter_once_and_none_is_cut(tokeniser: Tokeniser, longest: int) -> None:
    chance = random.Random(longest)
    texts = [" ".join(chance.choices(WORDS + NEW, k=chance.randrange(1, 60))) for _ in range(30)]
    found = tokeniser.pieces(texts, longest)
    assert max(map(len, found)) > 1
    for text, pieces in zip(texts, found, strict=True):
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
        assert tokeniser.encode(pieces, longest).cut == 0


def test_a_letter_of_more_ids_than_fit_stays_one_piece(tokeniser: Tokeniser) -> None:
    [pieces] = tokeniser.pieces(["😀 😀😀"], 1)
    assert "".join(pieces).replace(" ", "") == "😀😀😀"


def words_alone(folder: Path, count: int, **files: Any) -> Tokeniser:
    """One id a word: w0, w1, …, and <end> and <pad> last; with the begin <begin> and the end that a model adds."""
    from tokenizers import models, pre_tokenizers, processors

    names = [*(f"w{number}" for number in range(count - 3)), "<begin>", "<end>", "<pad>"]
    made = tokenizers.Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(name, names.index(name)) for name in ("<begin>", "<end>")]
    made.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", pair="<begin> $A <end> $B:1 <end>:1", special_tokens=special
    )
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokeniser(folder)


@pytest.mark.parametrize(
    ("files", "pad", "end"),
    [
        ({}, 0, None),
        ({"tokenizer_config": {"pad_token": "<pad>", "eos_token": "<end>"}}, 9, 8),
        ({"tokenizer_config": {"eos_token": {"content": "<end>"}}}, 8, 8),  # padded with the end where nothing else is
        ({"tokenizer_config": {"pad_token": "unknown"}, "special_tokens_map": {"pad_token": "<pad>"}}, 9, None),
        ({"tokenizer_config": {"pad_token": "<pad>"}, "special_tokens_map": {"pad_token": "w3"}}, 9, None),
        ({"config": {"pad_token_id": 9, "eos_token_id": 0}}, 9, 0),
        ({"config": {"pad_token_id": 10, "eos_token_id": -1}}, 0, None),  # beyond the words
        ({"config": {"eos_token_id": [8, 7]}}, 0, None),
        ({"config": [1, 2]}, 0, None),
    ],
)  # fmt: skip
def test_the_ids_of_padding_and_of_an_end_are_those_that_the_folder_names(
    files: Any, pad: int, end: int | None, tmp_path: Path
) -> None:
    found = words_alone(tmp_path, 10, **files)
    assert (found.words, found.pad, found.end) == (10, pad, end)


@pytest.mark.parametrize(("words", "kind"), [(10, np.int16), (2**15, np.int16), (2**15 + 1, np.int32)])
def test_the_last_word_of_a_vocabulary_has_its_own_id(words: int, kind: Any, tmp_path: Path) -> None:
    found = words_alone(tmp_path, words).encode(["w1 <pad>"], special=False)
    assert found.flat.dtype == kind and found[0].tolist() == [1, words - 1]


def test_special_ids_count_in_what_a_sample_may_be_long(tmp_path: Path) -> None:
    tokeniser = words_alone(tmp_path, 10)
    whole, short = (tokeniser.encode(["w1 w2 w3", "w4"], longest) for longest in (5, 4))
    assert [whole[number].tolist() for number in (0, 1)] == [[7, 1, 2, 3, 8], [7, 4, 8]] and whole.cut == 0
    assert [short[number].tolist() for number in (0, 1)] == [[7, 1, 2, 8], [7, 4, 8]] and short.cut == 1
    assert [short.length(number) for number in (0, 1)] == [4, 3]
    pairs = tokeniser.encode([("w1", "w2 w3"), ("w4", "w5")])
    assert pairs[1].tolist() == [[7, 4, 8, 5, 8], [0, 0, 0, 1, 1]] and pairs.flat.shape == (2, 11)
    assert tokeniser.encode(["w1 w2 w3"], 3)[0].tolist() == [7, 1, 8]
    with pytest.raises(SitusError, match=r"text.longest=2: must be more than the 2 special ids"):
        tokeniser.encode(["w1"], 2)
    with pytest.raises(SitusError, match=r"text.longest=3: must be more than the 3 special ids"):
        tokeniser.encode([("w1", "w2")], 3)
    assert tokeniser.encode([]).flat.size == 0 and tokeniser.decode([7, 1, 2, 8]) in ("w1 w2", "<begin> w1 w2 <end>")


def test_pieces_leave_room_for_special_ids(tmp_path: Path) -> None:
    tokeniser = words_alone(tmp_path, 10)
    assert tokeniser.pieces(["w1 w2 w3", "w4 w5", "w6"], 4) == [["w1 w2", "w3"], ["w4 w5"], ["w6"]]
    assert tokeniser.pieces(["w1 w2"], 3) == [["w1", "w2"]]
    with pytest.raises(SitusError, match=r"text.longest=2: must be more than the ids that the tokeniser adds"):
        tokeniser.pieces(["w1"], 2)


def test_the_end_of_a_long_list_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("situs.data.tokeniser._AT_ONCE", 2)
    tokeniser = words_alone(tmp_path, 10)
    texts = [f"w{number}" for number in range(5)]
    found = tokeniser.encode(texts, special=False)
    assert [found[number].tolist() for number in range(5)] == [[number] for number in range(5)]
    assert tokeniser.pieces(texts, 4) == [[text] for text in texts]
