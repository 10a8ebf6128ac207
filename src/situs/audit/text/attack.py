"""The attack `sentences` on one upload: which of its forms applies, and with which words."""

from __future__ import annotations

from dataclasses import replace

import torch

from situs.audit.attacks.base import rounded_off
from situs.audit.client import LEVELS
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.text.causal import causal_sentences
from situs.audit.text.encoder import encoder_sentences
from situs.audit.text.found import UNNAMED, Found
from situs.audit.text.layers import qkv_weights
from situs.audit.text.learned import masked_words
from situs.audit.text.victim import is_tied, word_weight
from situs.backbones.hf.decoders import DecoderBackbone
from situs.backbones.hf.encoders import TextEncoder
from situs.backbones.hf.text import TextBackbone

NAME = "sentences"

BEYOND = 8.0
"""Deviations of noise beyond the length that it gives a row: none of a whole vocabulary is so long by chance."""


def refusal(backbone: TextBackbone, sent: set[str]) -> str | None:
    """Why the attack cannot be made of gradients of these names; None where it can. It says nothing about privacy."""
    if backbone.depth < 2:
        return "it holds what it finds against the second block, and the model has one"
    if lacking := [name for depth in (1, 2) for name in qkv_weights(backbone, depth) if name not in sent]:
        return f"the gradient of {lacking[0]} is not sent, so there is nothing to hold words against"
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
) -> Found:
    """What one who knows the weights and the size of the batch reads off an upload. Words whose rows of the embedding's
    gradient are more than noise are in the batch, whatever else comes of the search.

    noise: deviation of the noise that was added, which he knows. steps: whether numbers come in even ones. hidden: the
    id that stands for masked words. unknown: [D], the vector that he knows MJP to give words in the stead of their
    places.
    """
    deadline = deadline or Deadline()
    words = usable_words(backbone, upload, noise or float(steps))  # even steps may make a row zero that was none
    sure = frozenset(named_words(backbone, upload, noise, steps).tolist())
    if said := refusal(backbone, set(upload)):
        return Found(sure, reason=said)
    names = [name for depth in (1, 2) for name in qkv_weights(backbone, depth)]
    even = steps or (noise > 0 and all(noise >= rounded_off(upload[name], upload[name].dtype) for name in names))
    if isinstance(backbone, DecoderBackbone):
        found = causal_sentences(backbone, upload, batch, words, deadline, even=even)
        return replace(found, words=found.words | sure)
    assert isinstance(backbone, TextEncoder)
    found = encoder_sentences(backbone, upload, batch, words, deadline, even, unknown)
    found = replace(found, words=found.words | sure)
    if hidden is None or any(
        UNNAMED in sentence for sentence in found.sentences
    ):  # what stands around it must be known
        return found
    named = masked_words(backbone, upload, found.sentences, hidden)
    return replace(found, sentences=tuple(named), words=found.words | {word for sentence in named for word in sentence})


def usable_words(backbone: TextBackbone, upload: Gradients, noise: float = 0.0) -> torch.Tensor:
    """The words that may be in the batch: those with a row in the word embedding's gradient that is not zero.

    All of them where it is not sent, where the head has the same weight and names every word, or where noise or a
    number too small for its type may have changed what is zero.
    """
    weight = word_weight(backbone)
    size = backbone.inner.get_input_embeddings().weight.shape[0]
    every = torch.arange(size, device=backbone.inner.get_input_embeddings().weight.device)
    if not reads_embedding(backbone, upload) or noise > 0:
        return every
    return every[(upload[weight] != 0).any(dim=1)]


def named_words(backbone: TextBackbone, upload: Gradients, noise: float = 0.0, steps: bool = False) -> torch.Tensor:
    """The words that are in the batch for sure: noise alone would not make their rows of the embedding's gradient so
    long. None where it is not sent, or is the head's too. steps: as of `find_sentences`; they leave a zero as it is."""
    if (weight := word_weight(backbone)) not in upload or is_tied(backbone):
        return torch.zeros(0, dtype=torch.long)
    rows = upload[weight].double()
    size = rows.shape[1] ** 0.5
    off = float(rows.abs().max()) / LEVELS * size / 2 if steps and noise else 0.0
    return (rows.norm(dim=1) > noise * (size + BEYOND) + off).nonzero()[:, 0]


def reads_embedding(backbone: TextBackbone, upload: Gradients) -> bool:
    """Whether the word embedding's gradient is sent and says more than the others."""
    weight = word_weight(backbone)
    return weight in upload and not is_tied(backbone) and upload[weight].dtype != torch.float16
