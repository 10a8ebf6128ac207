"""Perplexity of a language model over a whole text, in blocks; exact.

Every word but the first of a block is predicted from the words before it in the block. So a longer block gives a lower
perplexity, and the tokeniser decides what a word is: compare only models with the same tokeniser and block length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from situs.errors import SitusError, counted
from situs.methods.base import Batch
from situs.methods.language import word_losses
from situs.models.data import AnyData, AnyModel, Chosen, load_any, made_with, opened
from situs.models.inference import Total, evaluating
from situs.results import Figure, Result, Summary, Table, percent
from situs.train.step import autocast

MEANING = """
The text is cut into blocks. Here, a word is one token of the tokeniser. In each block, the model predicts every word
except the first from the preceding words. The perplexity is the exponential of the mean of -log p over all predicted
words, where p is the model's probability of the true word. With another block length or another tokeniser, the same
text has another perplexity.
"""


@dataclass(frozen=True)
class WordScores:
    """perplexity: exp(loss). loss: mean of -log p, in nats. accuracy: share predicted right. words: how many."""

    perplexity: float
    loss: float
    accuracy: float
    words: int


@dataclass(frozen=True)
class Perplexity(Result):
    """A language model's scores on a text."""

    file: ClassVar[str] = "perplexity"
    meaning: ClassVar[str] = MEANING
    scores: WordScores

    def summary(self) -> Summary:
        """Perplexity, loss and accuracy."""
        scores, name = self.scores, self.provenance.name
        sentence = (
            f"{name} has a perplexity of {scores.perplexity:.4g} on {counted(scores.words, 'words')}: the model is as "
            f"uncertain about the next word as a random choice among {scores.perplexity:.3g} words."
        )
        row = [name, f"{scores.perplexity:.4f}", f"{scores.loss:.5f}", percent(scores.accuracy, 2)]
        title = self.provenance.title(counted(scores.words, "words"))
        table = Table(title, ["", "perplexity", "loss", "words right"], [row])
        return Summary(sentence, (table,), numbers=((f"{scores.perplexity:.2f}", "perplexity"),))

    def numbers(self) -> dict[str, Any]:
        """The scores."""
        return asdict(self.scores)

    def figures(self) -> list[Figure]:
        """The share of the words that are predicted right."""
        return [Figure("", "", "bars", ({"next words predicted right": 100 * self.scores.accuracy}, "%"))]


def evaluate_perplexity(
    model: AnyModel,
    data: AnyData = None,
    *,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> Perplexity:
    """Measures the perplexity of a causal language model on a split of a text.

    model: whatever `open_model` takes. data: a path or a source; None for the text that a run was trained on.
    precision: fp32, or bf16 for autocast. seed: of random weights. chosen: see `load_any`. Under torchrun the ranks
    share the blocks.
    """
    model = opened(model, seed)
    if not model.backbone.next_words:
        raise SitusError(f"{model.name}: has no head that predicts the next word, so it has no perplexity")
    loader = load_any(model, data, shared=True, target="words", **chosen)
    scores = measure_perplexity(model.backbone, loader, precision=precision)
    if math.isnan(scores.loss):
        raise SitusError(f"{model.name}: some of its outputs are NaN, so it has no perplexity")
    return Perplexity(scores, provenance=made_with(model, loader, seed, precision))


def measure_perplexity(
    model: Callable[[Tensor, Tensor | None], Tensor], batches: Iterable[Batch], *, precision: str = "fp32"
) -> WordScores:
    """The scores of `model` (ids, mask -> logits) over all `batches`, summed over the ranks."""
    total = Total()
    with evaluating(model):
        for batch in batches:
            with autocast(batch.inputs.device, precision):
                logits = model(batch.inputs, batch.mask)
            words = batch.targets["words"]
            losses, known = word_losses(logits, words)
            right = (logits[:, :-1].argmax(dim=-1) == words[:, 1:]) & known
            total.add(torch.stack([losses.double().sum(), right.sum().double(), known.sum().double()]))
    loss, right, count = total.over_ranks().tolist()
    if not count:
        raise SitusError("there is no word to predict, because each block of the text has a single word", field="data")
    return WordScores(math.exp(min(loss / count, 700.0)), loss / count, right / count, int(count))
