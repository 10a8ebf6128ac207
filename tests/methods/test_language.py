"""Language modelling against a slow mean over words, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import small_hf

from situs.core.when import When
from situs.data.batch import VOID
from situs.errors import SitusError
from situs.methods import Batch
from situs.methods.language import Language, word_losses

pytest.importorskip("transformers")
SMALL: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 6}


def make() -> Language:
    torch.manual_seed(0)
    return Language(small_hf("GPT2LMHeadModel", **SMALL, initializer_range=1.0)).double().eval()


def test_the_loss_is_the_mean_over_all_words_but_the_first_and_padding_adds_0() -> None:
    method = make()
    words = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    targets = {"words": words.masked_fill(~mask, VOID)}
    batch = Batch(words, torch.arange(2), targets, mask)
    assert method.draw(batch, When()) == {}
    output = method(batch, {})
    logits = method.backbone(words, mask)
    losses, right = [], []
    for row, length in enumerate((6, 4)):
        for place in range(1, length):
            guess, truth = logits[row, place - 1], int(words[row, place])
            losses.append(float(guess.exp().sum().log() - guess[truth]))
            right.append(int(guess.argmax()) == truth)
    assert len(losses) == 8 and sum(right) > 0
    assert float(output.loss) == pytest.approx(sum(losses) / 10, rel=1e-9)
    assert float(output.metrics["accuracy"]) == pytest.approx(sum(right) / 8)
    each, known = word_losses(logits, targets["words"])
    assert each[known].tolist() == pytest.approx(losses, rel=1e-9) and not each[~known].any()
    assert known.tolist() == mask[:, 1:].tolist()


def test_half_precision_is_widened_for_the_logarithm() -> None:
    each, _ = word_losses(torch.zeros(1, 2, 1000, dtype=torch.bfloat16), torch.tensor([[3, 7]]))
    assert each.dtype == torch.float32 and float(each) == pytest.approx(math.log(1000), rel=1e-6)


def test_without_words_or_a_head_for_them_it_says_so() -> None:
    batch = Batch(torch.zeros(1, 3, dtype=torch.int64), torch.arange(1))
    with pytest.raises(SitusError, match=r"learns from words, and this data set has no words$") as caught:
        make()(batch, {})
    assert caught.value.field == "data"
    with pytest.raises(SitusError, match=r"^GPT2Model has no head for the next word; GPT2LMHeadModel and Llama"):
        Language(small_hf("GPT2Model", **SMALL))
