"""A long text in pieces, by tokenisers of several kinds that are trained here."""

from __future__ import annotations

import random

import pytest

from situs.data.tokeniser import Tokeniser

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
