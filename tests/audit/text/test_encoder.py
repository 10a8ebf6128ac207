"""Encoders: every sentence of a batch comes back, false pairs or not; what does not hold is no sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny_texts import WORDS, sentences, victim

from situs.audit.deadline import Deadline
from situs.audit.text.encoder import FirstBlock, Roots, encoder_sentences
from situs.audit.text.recovered import Recovered
from situs.audit.text.victim import TextVictim, text_gradients
from situs.backbones.hf.text import TextEncoder

HARD = ("3 7 1 9", "4 3 8 2 9", "11 7 13 1 3", "30 31")


def attack(made: TextVictim, *texts: str, deadline: Deadline | None = None) -> Recovered:
    truth = sentences(made, *texts)
    upload = text_gradients(made, truth, labels=[row % 2 for row in range(len(truth))], dtype=torch.float64)
    assert isinstance(made.backbone, TextEncoder)
    return encoder_sentences(made.backbone, upload, len(truth), torch.arange(len(WORDS)), deadline or Deadline())


@pytest.mark.thin(2)
@pytest.mark.parametrize("texts", [HARD[:1], HARD, ("3 7 1", "3 7 2", "4 7 1")])
def test_every_sentence_comes_back_whole(texts: tuple[str, ...], tmp_path: Path) -> None:
    made = victim(tmp_path, "bert", width=64)
    found, truth = attack(made, *texts), sentences(made, *texts)
    assert sorted(found.sentences) == sorted(truth) and found.reason is None and found.partial is None
    assert found.words == {word for sentence in truth for word in sentence}
    pairs = {(word, place) for sentence in truth for place, word in enumerate(sentence)}
    candidates = found.facts["candidates"]
    assert isinstance(candidates, int) and candidates >= len(pairs)
    if texts == HARD:
        assert candidates > len(pairs)  # false ones were among them


def test_equal_sentences_are_found_once_and_that_is_said(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert")
    found = attack(made, "3 7 1", "3 7 1")
    assert list(found.sentences) == sentences(made, "3 7 1")
    assert found.reason is not None and found.reason.startswith("1 of 2 sentences were found; equal sentences")


def test_progress_counts_the_pairs_of_one_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every start goes through the same pairs: never more of them than there are."""

    def fails(self: FirstBlock, z: torch.Tensor, _: int) -> Roots:
        self.flat.free = torch.ones(1, 2)  # there is a family, so that it starts again
        return Roots(torch.zeros(len(z), dtype=torch.bool), z)

    monkeypatch.setattr(FirstBlock, "search", fails)
    said: list[str] = []
    attack(victim(tmp_path, "bert"), "3 7 1", deadline=Deadline(said.append))
    told = [re.search(r"(\d+) of (\d+) pairs searched", line) for line in said]
    counts = [(int(found[1]), int(found[2])) for found in told if found]
    assert len(counts) > 1 and all(done <= there for done, there in counts), said


def test_stopped_and_too_many_tokens(tmp_path: Path) -> None:
    made = victim(tmp_path / "wide", "bert")
    over = attack(made, *HARD, deadline=Deadline(seconds=4, clock=iter(range(1000)).__next__))
    assert over.partial is not None and over.reason is None
    small = attack(victim(tmp_path / "small", "bert", width=8), *HARD)
    assert small.sentences == () and small.reason is not None and "too many tokens" in small.reason


def test_a_stop_before_the_first_word_is_no_noise(tmp_path: Path) -> None:
    clock = iter([0.0, 0.0, *[9.0] * 99])
    found = attack(
        victim(tmp_path, "bert", width=64), *HARD[:1], deadline=Deadline(seconds=1, clock=lambda: next(clock))
    )
    assert found.partial == "0 of 1 sentence" and found.reason is None


def test_an_order_that_does_not_settle_is_no_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsettled(*_: object, **__: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("situs.audit.text.encoder.nnls", unsettled)
    made = victim(tmp_path, "bert", width=64)
    found = attack(made, *HARD[:2])
    assert found.sentences == () and "0 of 2 sentences were found" in str(found.reason)
    alone = attack(made, *HARD[:1])  # whose words have places all the same
    assert list(alone.sentences) == sentences(made, *HARD[:1]) and "where no other word fits" in str(alone.reason)
