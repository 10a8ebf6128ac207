"""The scores of a language model whose answers are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from sentences import write_plain
from tiny_texts import write_folder
from torch import Tensor

from situs.data.batch import VOID
from situs.errors import SitusError
from situs.measure.perplexity import Perplexity, WordScores, evaluate_perplexity, measure_perplexity
from situs.methods.base import Batch
from situs.models import open_model


def repeating(words: Tensor, mask: Tensor | None) -> Tensor:
    """Says of every word that it comes again, and of the other three that they are equally likely."""
    return 4.0 * torch.nn.functional.one_hot(words.clamp(min=0), 4).double()


def test_words_that_are_guessed_are_counted_and_padding_is_not() -> None:
    words = torch.tensor([[0, 0, 1, 1], [2, 2, 2, VOID]])  # of five words that follow another, four are the same
    found = measure_perplexity(repeating, [Batch(words, torch.arange(2), {"words": words})])
    assert (found.accuracy, found.words) == (4 / 5, 5)
    likely = math.exp(4) / (math.exp(4) + 3)
    assert found.loss == pytest.approx(-(4 * math.log(likely) + math.log((1 - likely) / 3)) / 5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_blocks_of_one_word_have_nothing_to_guess() -> None:
    words = torch.tensor([[0], [1]])
    with pytest.raises(SitusError, match="no word to predict"):
        measure_perplexity(repeating, [Batch(words, torch.arange(2), {"words": words})])


def test_the_summary_says_the_scores_in_words_and_figures() -> None:
    result = Perplexity(WordScores(12.345678, 2.5132938, 0.4321987, 1200))
    summary = result.summary()
    assert summary.sentence == (
        "model has a perplexity of 12.35 on 1,200 words: the model is as uncertain about the next word as a random "
        "choice among 12.3 words."
    )
    assert summary.tables[0].rows == [["model", "12.3457", "2.51329", "43.22 %"]]
    assert list(summary.numbers) == [("12.35", "perplexity")]


def test_a_loss_beyond_all_bounds_is_a_number_still() -> None:
    words = torch.tensor([[0, 1, 2]])
    for scale, perplexity in ((300.0, math.exp(300.0)), (2000.0, math.exp(700.0))):
        found = measure_perplexity(lambda ids, _, s=scale: repeating(ids, None) * s / 4, [
            Batch(words, torch.arange(1), {"words": words})])  # fmt: skip
        assert found.loss == pytest.approx(scale) and found.perplexity == pytest.approx(perplexity, rel=1e-6)
        assert (found.accuracy, found.words) == (0.0, 2)
    (bars,) = Perplexity(WordScores(2.0, 1.0, 0.25, 4)).figures()
    assert bars.values == ({"next words predicted right": 25.0}, "%")


def test_answers_that_are_no_numbers_have_no_perplexity(tmp_path: Path) -> None:
    data = write_plain(tmp_path / "data")
    model = open_model(write_folder(tmp_path / "model", "gpt2"))
    assert evaluate_perplexity(model, data, count=4).scores.words > 0
    with torch.no_grad():
        model.backbone.model.transformer.ln_f.weight.fill_(math.nan)
    with pytest.raises(SitusError, match="some of its outputs are NaN, so it has no perplexity"):
        evaluate_perplexity(model, data, count=4)
