"""Uploads of Adam's steps: the first is inverted as far as rounding lets it; of more, only rows of words are left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_texts import sentences, victim

from situs.audit.defences import Step
from situs.audit.defences.trained import FedAdam
from situs.audit.text.audit import find_sentences, undone
from situs.audit.text.recovered import Recovered
from situs.audit.text.victim import TextVictim, text_gradients, word_weight

TEXTS = ("3 7 1 9", "3 7 8 2", "20 21 22 23 24 25")


def attack(made: TextVictim, texts: tuple[str, ...], steps: int, dtype: torch.dtype, sent: bool) -> Recovered:
    truth, client = sentences(made, *texts), FedAdam(steps, 1e-3)
    labels = [number % 2 for number in range(len(truth))]
    upload = text_gradients(made, truth, labels=labels, defence=client, dtype=dtype)
    kept = {name: u for name, u in upload.items() if sent or name != word_weight(made.backbone)}
    return find_sentences(made.backbone, kept, len(truth), step=client.step(Step()))


def test_a_first_step_is_torchs_and_is_inverted_up_to_rounding(tmp_path: Path) -> None:
    made = victim(tmp_path, "gpt2")
    truth = sentences(made, *TEXTS)
    before = {name: p.detach().clone() for name, p in made.backbone.named_parameters()}
    upload = text_gradients(made, truth, defence=FedAdam(1, 1e-3), dtype=torch.float64)
    gradients = text_gradients(made, truth, dtype=torch.float64)
    optimiser = torch.optim.Adam(made.backbone.parameters(), lr=1e-3)
    for name, parameter in made.backbone.named_parameters():
        parameter.grad = gradients[name]
    optimiser.step()
    for name, parameter in made.backbone.named_parameters():
        assert torch.allclose((before[name] - parameter) / 1e-3, upload[name], atol=1e-9), name
    for dtype in (torch.float64, torch.float32):
        for name, g in undone({name: u.to(dtype) for name, u in upload.items()}).items():
            known = g.isfinite() & (gradients[name].abs() > 1e-30)
            away = ((g - gradients[name]) / gradients[name])[known].abs()
            assert not len(away) or float(away.max()) <= 2e-3, name
            assert bool(known.any()) or dtype == torch.float32


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "llama classes"])
def test_sentences_come_back_from_a_first_step_in_float64(kind: str, tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 3} if kind == "llama classes" else {}
    made = victim(tmp_path, kind, width=64, **fields)
    texts = (*TEXTS, "3 7 1") if fields else TEXTS  # it begins another
    recovered = attack(made, texts, 1, torch.float64, False)
    assert sorted(recovered.sentences) == sorted(sentences(made, *texts)) and recovered.reason is None


def test_a_first_step_on_more_tokens_than_channels_is_a_reason(tmp_path: Path) -> None:
    made = victim(tmp_path, "gpt2", width=48)
    recovered = attack(made, tuple(f"{word} {word + 1} {word + 2}" for word in range(32)), 1, torch.float64, False)
    assert not recovered.sentences and "only 48 channels" in str(recovered.reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_several_steps_words_are_left_and_no_sentence_of_a_batch(dtype: torch.dtype, tmp_path: Path) -> None:
    made = victim(tmp_path / "bert", "bert", width=64)
    batch = attack(made, TEXTS, 2, dtype, True)
    assert batch.words == {word for one in sentences(made, *TEXTS) for word in one} and not batch.sentences
    assert "the gradients of 2 steps of Adam cannot be recovered" in str(batch.reason)
    alone = attack(made, TEXTS[:1], 2, dtype, True)  # a word's row and its place's are made of the same numbers
    assert list(alone.sentences) == sentences(made, TEXTS[0])
    assert attack(made, TEXTS, 2, dtype, False) == Recovered(reason=attack(made, TEXTS, 2, dtype, False).reason)
    tied = victim(tmp_path / "gpt2", "gpt2", width=64)
    assert not attack(tied, TEXTS, 2, dtype, True).words  # each row of the table has a gradient of the head


def test_a_first_step_that_rounding_hides_is_a_reason(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama")
    recovered = attack(made, TEXTS, 1, torch.float32, False)
    assert not recovered.sentences and "rounding hides" in str(recovered.reason)
