"""The attack `sentences` on one upload: which of its forms applies, and with which words."""

from __future__ import annotations

from dataclasses import replace

import torch

from situs.audit.attacks.base import rounded_off
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.text.causal import causal_sentences
from situs.audit.text.encoder import encoder_sentences
from situs.audit.text.layers import qkv_weights
from situs.audit.text.learned import masked_words
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.rows import Matched, match_rows, named_words, place_weight
from situs.audit.text.victim import is_tied, word_weight
from situs.backbones.hf.decoders import DecoderBackbone
from situs.backbones.hf.encoders import TextEncoder
from situs.backbones.hf.text import TextBackbone
from situs.errors import counted

NAME = "sentences"


def refusal(backbone: TextBackbone, sent: set[str]) -> str | None:
    """Why the attack does not apply to gradients of these names, which says nothing about privacy; None where it
    does."""
    if backbone.depth < 2:
        return "it tests sentences with the second block, and the model has only one"
    if isinstance(backbone, DecoderBackbone) and backbone.num_classes and backbone.depth < 3:
        return "the second block of this causal classifier is its last, whose gradient does not tell its tokens apart"
    if lacking := [name for depth in (1, 2) for name in qkv_weights(backbone, depth) if name not in sent]:
        return f"the gradient of {lacking[0]} is not sent, so words cannot be tested"
    return None


def find_sentences(
    backbone: TextBackbone,
    upload: Gradients,
    batch: int,
    *,
    noise: float = 0.0,
    steps: bool = False,
    hidden: int | None = None,
    unknown: torch.Tensor | None = None,
    deadline: Deadline | None = None,
) -> Recovered:
    """What an attacker who knows the weights and the size of the batch recovers from an upload: first by the spans of
    the blocks' gradients, which are exact, then, for what they leave open, by matching rows of words with rows of
    places.

    noise: its deviation, which the attacker knows. steps: whether numbers come in even steps (int8). hidden: the id of
    masked words. unknown: [D], the vector that MJP gives words instead of their position, for an informed attacker.
    """
    deadline = deadline or Deadline()
    recovered = _by_spans(backbone, upload, batch, noise, steps, hidden, unknown, deadline)
    if len(recovered.sentences) == batch and not any(UNNAMED in sentence for sentence in recovered.sentences):
        return recovered
    if word_weight(backbone) not in upload or deadline.over():
        return recovered
    deadline.say("rows of words against rows of places")
    return _joined(recovered, match_rows(backbone, upload, batch, steps=steps), batch, place_weight(backbone))


def _by_spans(
    backbone: TextBackbone,
    upload: Gradients,
    batch: int,
    noise: float,
    steps: bool,
    hidden: int | None,
    unknown: torch.Tensor | None,
    deadline: Deadline,
) -> Recovered:
    """What the spans of the blocks' gradients tell, with the words that the embedding's gradient names."""
    words = usable_words(backbone, upload, noise or float(steps))  # rounding to even steps may make a row zero
    sure = named_words(backbone, upload)
    if reason := refusal(backbone, set(upload)):
        return Recovered(sure, reason=reason)
    names = [name for depth in (1, 2) for name in qkv_weights(backbone, depth)]
    even = steps or (noise > 0 and all(noise >= rounded_off(upload[name], upload[name].dtype) for name in names))
    if isinstance(backbone, DecoderBackbone):
        recovered = causal_sentences(backbone, upload, batch, words, deadline, even=even)
        return replace(recovered, words=recovered.words | sure)
    assert isinstance(backbone, TextEncoder)
    recovered = encoder_sentences(backbone, upload, batch, words, deadline, even, unknown)
    recovered = replace(recovered, words=recovered.words | sure)
    if hidden is None or any(
        UNNAMED in sentence for sentence in recovered.sentences
    ):  # what stands around it must be known
        return recovered
    named = masked_words(backbone, upload, recovered.sentences, hidden)
    return replace(
        recovered, sentences=tuple(named), words=recovered.words | {word for sentence in named for word in sentence}
    )


def _joined(recovered: Recovered, rows: Matched, batch: int, table: str | None) -> Recovered:
    """What the spans tell, with what rows of words and places add. table: the position table's name, None without."""
    words = recovered.words | rows.words | {word for word, _, _ in rows.tokens}
    facts = {**recovered.facts, "matched": len(rows.tokens), "noise_of_rows": rows.noise}
    if not rows.tables:
        lacks = "the model has no table of positions" if table is None else f"the gradient of {table} is not sent"
        return replace(
            recovered, words=words, facts=facts, reason=_also(recovered, f"{lacks}, whose rows would place words")
        )
    if not rows.tokens:
        reason = f"no row of a word matches the row of a place: the noise of the rows is {rows.noise:.2g}"
        return replace(recovered, words=words, facts=facts, reason=_also(recovered, reason))
    if batch > 1:
        reason = (
            f"{counted(len(rows.tokens), 'words')} placed by rows; it was not tried which of them belong to one "
            "sentence"
        )
        placed = frozenset((word, place) for word, place, _ in rows.tokens)
        return replace(recovered, words=words, placed=placed, facts=facts, reason=_also(recovered, reason))
    spans = next(iter(recovered.sentences), ())
    length = max(len(spans), rows.length)
    before, after = (one + (UNNAMED,) * (length - len(one)) for one in (spans, rows.sentence))
    sentence = tuple(old if old != UNNAMED else new for old, new in zip(before, after, strict=True))
    reason = f"rows placed {len(rows.tokens)} words; no word is likely at {sentence.count(UNNAMED)} of {length} places"
    return replace(recovered, words=words, sentences=(sentence,), facts=facts, reason=_also(recovered, reason))


def _also(recovered: Recovered, reason: str) -> str:
    return f"{recovered.reason}; {reason}" if recovered.reason else reason


def usable_words(backbone: TextBackbone, upload: Gradients, noise: float = 0.0) -> torch.Tensor:
    """The words that may be in the batch: those whose row in the word embedding's gradient is not zero.

    All words where it is not sent, where the head shares its weight and so touches every row, or where noise or
    underflow may have changed which rows are zero.
    """
    weight = word_weight(backbone)
    size = backbone.inner.get_input_embeddings().weight.shape[0]
    every = torch.arange(size, device=backbone.inner.get_input_embeddings().weight.device)
    if not reads_embedding(backbone, upload) or noise > 0:
        return every
    return every[(upload[weight] != 0).any(dim=1)]


def reads_embedding(backbone: TextBackbone, upload: Gradients) -> bool:
    """Whether the word embedding's gradient is sent and its zero rows can be trusted."""
    weight = word_weight(backbone)
    return weight in upload and not is_tied(backbone) and upload[weight].dtype != torch.float16
