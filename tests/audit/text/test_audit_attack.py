"""Which words may be in a batch, and when the attack cannot be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import WORDS, sentences, victim

from situs.audit.defences import Noise
from situs.audit.text.audit import find_sentences, reads_embedding, refusal, usable_words
from situs.audit.text.layers import qkv_weights, words_at
from situs.audit.text.recovered import UNNAMED
from situs.audit.text.rows import named_words
from situs.audit.text.victim import text_gradients, word_weight

TEXTS = ("3 7 1 9", "4 3 8 2")


def test_the_embedding_names_the_words_where_nothing_hides_them(tmp_path: Path) -> None:
    made = victim(tmp_path / "bert", "bert")
    batch, weight = sentences(made, *TEXTS), word_weight(made.backbone)
    upload = text_gradients(made, batch, labels=[0, 1])
    assert set(usable_words(made.backbone, upload).tolist()) == {word for one in batch for word in one}
    every = list(range(len(WORDS)))
    kept = {name: g for name, g in upload.items() if name != weight}
    assert usable_words(made.backbone, kept).tolist() == every
    assert usable_words(made.backbone, upload, noise=1e-3).tolist() == every
    half = {name: g.half() for name, g in upload.items()}  # small numbers may have become zeros
    assert not reads_embedding(made.backbone, half) and usable_words(made.backbone, half).tolist() == every
    tied = victim(tmp_path / "llama", "llama", tie_word_embeddings=True)
    upload = text_gradients(tied, sentences(tied, *TEXTS))
    assert not reads_embedding(tied.backbone, upload) and not len(named_words(tied.backbone, upload))


def test_masked_sentences_come_back_with_their_words(tmp_path: Path) -> None:
    made = victim(tmp_path, "masked")
    batch = sentences(made, *TEXTS)
    upload = text_gradients(made, batch, dtype=torch.float64, seed=1)
    hidden = made.tokeniser.mask_token_id
    seen = find_sentences(made.backbone, upload, 2)
    assert all(hidden in one for one in seen.sentences)
    found = find_sentences(made.backbone, upload, 2, hidden=hidden)
    assert sorted(found.sentences) == sorted(batch) and found.words >= {word for one in batch for word in one}


def test_a_sentence_with_a_gap_tells_no_masked_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = victim(tmp_path, "masked")
    [truth], hidden = sentences(made, TEXTS[0]), made.tokeniser.mask_token_id
    upload = text_gradients(made, [truth], dtype=torch.float64, seed=1)
    [masked] = find_sentences(made.backbone, upload, 1).sentences
    gap = next(place for place, word in enumerate(masked) if word != hidden)

    def lost(backbone: Any, span: Any, words: torch.Tensor, place: int, vector: Any) -> torch.Tensor:
        return words[:0] if place == gap else words_at(backbone, span, words, place, vector)

    monkeypatch.setattr("situs.audit.text.encoder.words_at", lost)
    found = find_sentences(made.backbone, upload, 1, hidden=hidden)
    assert found.sentences == (tuple(UNNAMED if at == gap else word for at, word in enumerate(masked)),)
    assert UNNAMED not in found.words and "no complete sentence" in str(found.reason)
    monkeypatch.setattr("situs.audit.text.encoder.at_places", lambda _: ())
    assert find_sentences(made.backbone, upload, 1, hidden=hidden).sentences == ()


def test_what_cannot_be_attacked_is_a_reason(tmp_path: Path) -> None:
    made = victim(tmp_path / "one", "llama", num_hidden_layers=1)
    truth = sentences(made, *TEXTS)
    upload = text_gradients(made, truth)
    found = find_sentences(made.backbone, upload, 2)
    assert found.sentences == () and found.reason is not None and "second block" in found.reason
    assert found.words == {
        word for one in truth for word in one[:-1]
    }  # which the embedding names; the last is not read
    del upload[word_weight(made.backbone)]
    assert not find_sentences(made.backbone, upload, 2).words
    two = victim(tmp_path / "two", "gpt2")
    upload = text_gradients(two, sentences(two, *TEXTS))
    assert refusal(two.backbone, set(upload)) is None
    [name] = qkv_weights(two.backbone, 2)
    said = refusal(two.backbone, set(upload) - {name})
    assert said is not None and name in said and "not sent" in said


def test_noise_below_what_is_rounded_off_hides_nothing(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert", width=64)
    batch = sentences(made, *TEXTS)
    found = {}
    for sigma in (0.0, 1e-30):
        sent = text_gradients(made, batch, labels=[0, 1], defence=Noise(sigma), dtype=torch.bfloat16)
        found[sigma] = find_sentences(made.backbone, sent, 2, noise=sigma)
    assert found[1e-30].facts["rank"] == found[0.0].facts["rank"] and found[1e-30].words == found[0.0].words
    assert set(found[0.0].sentences) <= set(found[1e-30].sentences) and found[0.0].sentences


def test_words_whose_rows_are_more_than_noise_are_sure(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert")
    batch = sentences(made, *TEXTS)
    words, sizes = {word for one in batch for word in one}, []
    for sigma in (1e-9, 1e-3, 1e-1, 10.0):
        sent = text_gradients(made, batch, labels=[0, 1], defence=Noise(sigma))
        sure = named_words(made.backbone, sent)
        assert sure <= words
        coarse = text_gradients(made, batch, labels=[0, 1], defence=Noise(sigma), dtype=torch.int8)
        assert named_words(made.backbone, coarse) <= words
        sizes.append(len(sure))
    assert sizes[0] == len(words) and sizes[-1] == 0
    coarse = text_gradients(made, batch, labels=[0, 1], dtype=torch.int8)
    assert named_words(made.backbone, coarse) == words  # zeros stay zeros
    half = {name: g.half() for name, g in text_gradients(made, batch, labels=[0, 1]).items()}
    assert named_words(made.backbone, half) == words
    found = find_sentences(made.backbone, coarse, 2, steps=True)
    assert found.words >= words
    assert not len(named_words(made.backbone, {n: g for n, g in sent.items() if n != word_weight(made.backbone)}))


def test_much_noise_is_no_sentence_and_a_reason(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama")
    batch = sentences(made, *TEXTS)
    found = find_sentences(made.backbone, text_gradients(made, batch, defence=Noise(10.0)), 2, noise=10.0)
    assert found.sentences == () and found.reason is not None
