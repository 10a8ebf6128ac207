"""Causal models: every sentence comes back whole, from the left, the last word from what is learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_texts import WORDS, sentences, victim

from situs.audit.deadline import Deadline
from situs.audit.text.audit import find_sentences
from situs.audit.text.causal import causal_sentences
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.victim import TextVictim, text_gradients
from situs.backbones.hf.text import DecoderBackbone

HARD = ("3 7 1 9", "3 7 8 2", "4 3 7 1", "3 7 8", "20 21 22 23 24 25")
"""Shared beginnings, a sentence that is the beginning of another, words at several places."""


def attack(
    made: TextVictim, *texts: str, deadline: Deadline | None = None, batch: int = 0, words: tuple[int, ...] = ()
) -> Recovered:
    truth = sentences(made, *texts)
    upload = text_gradients(made, truth, labels=[number % 2 for number in range(len(truth))], dtype=torch.float64)
    assert isinstance(made.backbone, DecoderBackbone)
    tried = torch.tensor(words or range(len(WORDS)))
    return causal_sentences(made.backbone, upload, batch or len(truth), tried, deadline or Deadline())


@pytest.mark.parametrize("kind", ["gpt2", "llama", "untied"])
def test_every_sentence_comes_back_whole(kind: str, tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": False, "num_key_value_heads": 2} if kind == "untied" else {}
    made = victim(tmp_path, "llama" if kind == "untied" else kind, **fields)
    found = attack(made, *HARD)
    truth = sentences(made, *HARD)
    assert sorted(found.sentences) == sorted(truth) and found.reason is None and found.partial is None
    assert found.words == {word for sentence in truth for word in sentence}
    assert found.facts["beginnings"] == len({one[:end] for one in truth for end in range(1, len(one))})


def test_a_first_word_that_is_repeated_and_equal_sentences(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama")
    # Without a table (w5 w5) has the vector of (w5) in every block: only what follows tells them apart.
    texts = ("5 5 8 2", "5 9 1")
    assert sorted(attack(made, *texts).sentences) == sorted(sentences(made, *texts))
    twice = ("3 7 1 9", "3 7 1 9")
    assert list(attack(made, *twice).sentences) == sentences(made, *twice)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_stopped_it_says_how_far_it_came_and_claims_no_more(kind: str, tmp_path: Path) -> None:
    made = victim(tmp_path, kind)
    clock = iter(range(1000))
    found = attack(made, *HARD, deadline=Deadline(seconds=8, clock=lambda: float(next(clock))))
    assert found.partial is not None and "beginnings of sentences" in found.partial
    assert all(sentence[-1] == UNNAMED for sentence in found.sentences)
    truth = {one[:end] for one in sentences(made, *HARD) for end in range(1, len(one))}
    assert all(sentence[:-1] in truth for sentence in found.sentences)


def test_as_many_tokens_as_channels_is_a_reason_and_no_pass(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama", width=8)
    found = attack(made, *HARD)
    assert found.sentences == () and found.reason is not None and "too many tokens" in found.reason


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_no_beginning_that_passes_is_a_reason_and_no_pass(kind: str, tmp_path: Path) -> None:
    found = attack(victim(tmp_path, kind), *HARD, words=(40, 41))  # neither stands in the batch
    assert found.sentences == () and found.reason is not None and "no beginning of a sentence that ends" in found.reason


def test_branches_are_the_models_own_first_block(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0}
    for kind, fields in (("gpt2", {}), ("llama", {}), ("qwen3", window)):
        made = victim(tmp_path / kind, kind, **fields)
        backbone, prefix, words = made.backbone, torch.tensor([7, 9, 7]), torch.tensor([5, 7, 30])
        assert isinstance(backbone, DecoderBackbone)
        with torch.no_grad():
            found = backbone.branches(prefix, words)
            for word, z in zip(words, found, strict=True):
                ids = torch.cat([prefix, word[None]])[None]
                seen: list[torch.Tensor] = []
                stream = backbone.assemble(backbone.embed(ids), backbone.positions((4,)))
                backbone.run_layers(stream, None, [lambda number, out, seen=seen: seen.append(out)])
                assert torch.allclose(seen[0][0, -1], z, atol=1e-12)


CLASSIFIERS = {
    "gpt2": {"n_layer": 3},
    "llama": {"num_hidden_layers": 3},
    "qwen3": {"num_hidden_layers": 4},
    "gpt_neox": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_classifier_gives_back_whole_sentences_also_one_that_begins_another(kind: str, tmp_path: Path) -> None:
    made = victim(tmp_path, f"{kind} classes", **CLASSIFIERS[kind])
    recovered = attack(made, *HARD)
    truth = sentences(made, *HARD)
    assert made.task == "classes"
    assert sorted(recovered.sentences) == sorted(truth) and recovered.reason is None
    assert recovered.facts["beginnings"] == len({one[:end] for one in truth for end in range(1, len(one) + 1)})


def test_equal_sentences_of_a_classifier(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama classes", num_hidden_layers=3)
    assert list(attack(made, "3 7 1 9", "3 7 1 9").sentences) == sentences(made, "3 7 1 9", "3 7 1 9")
    several = attack(made, "3 7 1 9", "3 7 1 9", "4 2 8")
    assert len(several.sentences) == 2 and several.reason is not None and "2 sentences, not of 3" in several.reason


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_classifier_of_two_blocks_is_refused(kind: str, tmp_path: Path) -> None:
    made = victim(tmp_path, f"{kind} classes")
    upload = text_gradients(made, sentences(made, *HARD), labels=[0, 1, 0, 1, 0], dtype=torch.float64)
    recovered = find_sentences(made.backbone, upload, 5)
    assert recovered.reason is not None and "is the last one" in recovered.reason and not recovered.sentences
