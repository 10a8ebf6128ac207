"""How well a language model knows the next word: perplexity over a whole text, in blocks; exact.

Each word but the first of its block is guessed from those before it in the block, so that a longer block gives a lower
perplexity, and the tokeniser decides what a word is: compare models with one tokeniser and one length alone.
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
Each word but the first of its block is guessed from those before it there; the perplexity is the exponential of the
mean of -log p, the model's probability of the word that stands there. A longer block and another tokeniser give another
perplexity of the same text.
"""


@dataclass(frozen=True)
class WordScores:
    """perplexity: exp(loss). loss: mean of -log p of a word, in nats. accuracy: share guessed. words: how many."""

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
        """Perplexity and what it means."""
        found, name = self.scores, self.provenance.name
        said = (
            f"{name} has a perplexity of {found.perplexity:.4g} over {counted(found.words, 'words')}: it is as unsure "
            f"of the next one as if it chose evenly among {found.perplexity:.3g}."
        )
        row = [name, f"{found.perplexity:.4f}", f"{found.loss:.5f}", percent(found.accuracy, 2)]
        title = self.provenance.title(counted(found.words, "words"))
        table = Table(title, ["", "perplexity", "loss", "words guessed"], [row])
        return Summary(said, (table,), numbers=((f"{found.perplexity:.2f}", "perplexity"),))

    def numbers(self) -> dict[str, Any]:
        """The scores."""
        return asdict(self.scores)

    def figures(self) -> list[Figure]:
        """The share of the words that are guessed."""
        return [Figure("", "", "bars", ({"next words guessed right": 100 * self.scores.accuracy}, "%"))]


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
        raise SitusError(f"{model.name}: has no head for the next word, so that it has no perplexity")
    loader = load_any(model, data, shared=True, target="words", **chosen)
    found = measure_perplexity(model.backbone, loader, precision=precision)
    if math.isnan(found.loss):
        raise SitusError(f"{model.name}: some of its outputs are not numbers (NaN), so that it has no perplexity")
    return Perplexity(found, provenance=made_with(model, loader, seed, precision))


def measure_perplexity(
    model: Callable[[Tensor, Tensor | None], Tensor], batches: Iterable[Batch], *, precision: str = "fp32"
) -> WordScores:
    """The scores of `model` (ids and mask to logits) over all `batches`, summed over the ranks."""
    total = Total()
    with evaluating(model):
        for batch in batches:
            with autocast(batch.inputs.device, precision):
                logits = model(batch.inputs, batch.mask)
            words = batch.targets["words"]
            each, known = word_losses(logits, words)
            right = (logits[:, :-1].argmax(dim=-1) == words[:, 1:]) & known
            total.add(torch.stack([each.double().sum(), right.sum().double(), known.sum().double()]))
    loss, right, count = total.over_ranks().tolist()
    if not count:
        raise SitusError("there is no word to predict: every block has only one", field="data")
    return WordScores(math.exp(min(loss / count, 700.0)), loss / count, right / count, int(count))
