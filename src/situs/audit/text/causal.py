"""Sentences from the gradients of a causal model: the words first, then their order, word by word from the left.

The input of the first block's attention is one of V vectors (for each place of a table), so a span test names the
words. The input of the second block's at a place depends only on the words up to there: a right beginning passes its
span test; another word after it, or the right one after another beginning, fails. Where the next word is learned, the
last word of a sentence is a target and never an input, so it is in neither span: it follows from the gradient at its
place (`learned`). A classifier reads the last word of a sentence: all words are inputs, and the last block's gradient
tells which beginnings are whole sentences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from situs.audit.attacks.spans import Span
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.text.layers import entering, qkv_weights, span_of, tells, words_at
from situs.audit.text.learned import classified, endings
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.victim import Sentence
from situs.backbones.base import Stream
from situs.backbones.hf.decoders import DecoderBackbone
from situs.errors import counted

REPEATED = 8
"""How often a first word is repeated at most, where no table tells its places apart."""


@torch.no_grad()
def causal_sentences(
    backbone: DecoderBackbone, upload: Gradients, batch: int, words: Tensor, deadline: Deadline, even: bool = False
) -> Recovered:
    """The sentences behind an upload of `batch` of them. words: those that may be in it. even: noise was added."""
    first, second = (qkv_weights(backbone, depth) for depth in (1, 2))
    one, two = (span_of(backbone, upload, names, even) for names in (first, second))
    facts = {"rank": one.rank, "rank_of_second": two.rank, "channels": backbone.dim}
    if reason := full(one, backbone.dim) or full(two, backbone.dim):
        return Recovered(facts=facts, reason=reason)
    table = backbone.positions((1,)).table is not None
    named: set[int] = set()
    inside, nodes = Tensor(), list[Sentence]()
    level: list[Sentence] = [()]
    for place in range(backbone.num_tokens):
        if table or place == 0:
            inside = words_at(backbone, one, words, place)
            named.update(inside.tolist())
        deadline.say(f"place {place + 1}: {len(level)} beginnings, {len(inside)} words")
        longer = []
        for prefix in level:
            if deadline.over():
                nodes = nodes if table else _pruned(nodes)
                remark = f"{len(nodes)} of about {two.rank} beginnings of sentences"
                ends = _ends(nodes, () if backbone.num_classes else (UNNAMED,))
                return Recovered(frozenset(named), tuple(ends), facts, partial=remark)
            longer += [(*prefix, word) for word in _next(backbone, two, second[0], prefix, inside)]
        level = [node for node in longer if table or len(node) <= REPEATED or not _repeats(node)]
        nodes += level
        if not level or len(nodes) > 2 * two.rank + REPEATED * batch:
            break
    nodes = _pruned(nodes) if not table else nodes
    count = sum(table or not _repeats(node) for node in nodes)
    facts |= {"beginnings": count}
    if count > two.rank:
        remark = "more beginnings of sentences pass the second block's test than there are tokens: noise hides the rest"
        return Recovered(frozenset(named), (), facts, reason=remark)
    whole = (classified if backbone.num_classes else endings)(backbone, upload, nodes, batch)
    reason = None
    if count < two.rank:
        reason = f"{two.rank - count} of {two.rank} tokens belong to no beginning that passes the test"
    elif backbone.num_classes and len(whole) != batch:
        reason = f"{counted(len(whole), 'sentences')} of {batch} end where the last block's gradient tells it"
    elif len(whole) != batch or any(UNNAMED in sentence for sentence in whole):
        reason = "the last words of some sentences are not determined"
    named.update(word for sentence in whole for word in sentence if word != UNNAMED)
    return Recovered(frozenset(named), tuple(whole), facts, reason=reason)


def full(span: Span, channels: int) -> str | None:
    """Why a span says nothing: it has as many directions as the layer has channels, or none; None where it does."""
    if tells(span):
        return None
    if span.rank == 0:
        return (
            "no direction is above the noise: the noise is too strong, or the batch has as many tokens as "
            f"channels ({channels})"
        )
    return f"the batch has as many tokens as the model has channels ({channels}), so every word passes the test"


def _next(backbone: DecoderBackbone, span: Span, weight: str, prefix: Sentence, words: Tensor) -> list[int]:
    """Those of `words` that make `prefix` one word longer and pass the second block's test."""
    if not len(words):
        return []
    z = backbone.branches(torch.tensor(prefix, dtype=torch.long, device=words.device), words).unsqueeze(1)
    more = backbone.layer_inputs(Stream(z, 0, backbone.positions((1,)).rotary, None, None))
    inputs = entering(backbone, weight, lambda: backbone.layers()[1](z, attention_mask=None, **more))[:, 0]
    return words[span.holds(inputs.double())].tolist()


def _repeats(node: Sentence) -> bool:
    """Whether it is one word several times: without a table such a token has the vector of the first in every block."""
    return len(node) > 1 and len(set(node)) == 1


def _pruned(nodes: list[Sentence]) -> list[Sentence]:
    """Without the repetitions of a first word that no other word follows: nothing says that they are there."""
    others = [node for node in nodes if len(set(node)) > 1]
    return [node for node in nodes if not _repeats(node) or any(one[: len(node)] == node for one in others)]


def _ends(nodes: list[Sentence], unknown: Sentence) -> list[Sentence]:
    """Beginnings that are part of no longer one, and behind each what is not known."""
    inner = {node[:-1] for node in nodes}
    return [(*node, *unknown) for node in nodes if node not in inner]
