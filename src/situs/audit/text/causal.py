"""Sentences from the gradients of a causal model: the words first, then their order, word by word from the left.

The input of the first block's attention is one of V vectors (for each place of a table), so a span test names the
words. The input of the second block's at a place depends only on the words up to there: a right beginning passes its
span test; another word after it, or the right one after another beginning, fails. Where the next word is learned, the
last word of a sentence is a target and never an input, so it is in neither span: it follows from the gradient at its
place (`learned`). A classifier reads the last word of a sentence: all words are inputs, and the last block's gradient
tells which beginnings are whole sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.solver import TELLING, whole_rows
from situs.audit.deadline import Deadline
from situs.audit.defences import FedAvg, Gradients, Step
from situs.audit.text.layers import (
    DOWN,
    ONE,
    UP,
    Inputs,
    as_rows,
    entering,
    midway,
    qkv_weights,
    read_names,
    span_of,
    weight_names,
    words_at,
)
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.victim import Sentence, TextVictim, padded, text_gradients
from situs.backbones.base import Stream
from situs.backbones.hf.text import DecoderBackbone, TextEncoder
from situs.errors import counted

# ---------------------------------------------------------------------------------------------------------------------
# What a place learned whose input is known: the last words of sentences, masked words, and where a sentence ends.
#
# The gradient of the last layer before the head is ∂W = Σ_t δ_t a_t^T, and what enters it, a_t, follows from the words
# in front. With fewer places than a has channels, every δ_t is the solution of a linear system. It is J^T U^T Σ (p -
# e_y) over the sentences that share the beginning t: U holds the words' rows of the head, J is what is done between,
# and p what the model predicts; only the right y fits.


SKETCH, NEAR = 64, 32
"""Directions in which all words are compared first, and how many of the nearest are then compared in all."""

WHOLE = 0.05
"""How far a number of equal sentences may be from a whole one."""


AGAIN = 1e-3
"""The largest relative difference of an upload that was made again: rounding in float32 makes less, one wrong word
among thousands more."""


class Place(NamedTuple):
    """What a place learned. delta: δ_t [D]. at: the stream there, [D]. likely: p [V]."""

    delta: Tensor
    at: Tensor
    likely: Tensor


class Head:
    """How δ of a place depends on the word that it learned."""

    def __init__(self, place: Place, tail: Callable[[Tensor], Tensor], words: Tensor) -> None:
        """tail: [D] -> [E], between the layer and the head. words: the head's weight, [V, E]."""
        self.delta, self.words = place.delta.double(), words
        with torch.enable_grad():
            jacobian = torch.func.jacrev(tail)(place.at)
        self.jacobian = jacobian.double()
        self.mean = self.jacobian.T @ (words.T @ place.likely.to(words.dtype)).double()
        chance = torch.Generator().manual_seed(0)
        self.sketch = torch.randn(len(self.delta), SKETCH, generator=chance, dtype=torch.float64).to(self.mean.device)

    @cached_property
    def short(self) -> Tensor:
        """J^T U^T e_y of every word in the sketch's directions, [V, SKETCH]."""
        return self.words @ (self.jacobian @ self.sketch).to(self.words.dtype)

    def step(self, words: Tensor | Sequence[int]) -> Tensor:
        """J^T U^T (p - e_y) for words y [m]: [m, D]."""
        return self.mean - self.words[words].double() @ self.jacobian

    def fit(self) -> tuple[int, float, float]:
        """The word y with which δ is nearest to a multiple of its step, that factor, and the share that is left."""
        goal = (self.delta @ self.sketch).to(self.short.dtype)
        steps = (self.mean @ self.sketch).to(self.short.dtype) - self.short
        near = (steps @ goal / steps.norm(dim=1).clamp(min=1e-30)).topk(min(NEAR, len(steps))).indices
        steps = self.step(near)
        factors = steps @ self.delta / steps.square().sum(dim=1).clamp(min=1e-300)
        left = (self.delta - factors.unsqueeze(1) * steps).norm(dim=1) / self.delta.norm().clamp(min=1e-300)
        best = int(left.argmin())
        return int(near[best]), float(factors[best]), float(left[best])

    def nearest(self, rest: Tensor) -> tuple[int, Tensor]:
        """The word whose step leaves least of `rest` [D], and what it leaves."""
        goal = ((self.mean - rest) @ self.sketch).to(self.short.dtype)
        near = (self.short - goal).norm(dim=1).topk(min(NEAR, len(self.short)), largest=False).indices
        left = rest - self.step(near)
        best = int(left.norm(dim=1).argmin())
        return int(near[best]), left[best]


def last_weight(backbone: DecoderBackbone) -> str:
    """The name of the last matrix before the final norm."""
    return weight_names(backbone, backbone.depth)[-1]


@torch.no_grad()
def endings(backbone: DecoderBackbone, upload: Gradients, nodes: Sequence[Sentence], batch: int) -> list[Sentence]:
    """The whole sentences of which `nodes` are all beginnings, each with the word that it learned last.

    A sentence whose last word does not fit any has `UNNAMED` there.
    """
    inner = {node[:-1] for node in nodes}
    unknown = [(*node, UNNAMED) for node in nodes if node not in inner]
    if not nodes or (places := _places(backbone, upload, nodes)) is None:
        return unknown
    words = backbone.model.get_output_embeddings().weight
    heads = {node: Head(places[node], backbone.final_norm, words) for node in nodes}
    fits = {node: fit for node in nodes if node not in inner and (fit := heads[node].fit())[2] < TELLING}
    factors = [factor for _, factor, _ in fits.values() if factor > 0]
    if not factors:
        return unknown
    unit = min(factors)  # 1 / tokens of the batch: what one sentence at one place adds
    sentences, weights = list[Sentence](), dict[Sentence, float]()
    for node in sorted(nodes, key=len, reverse=True):
        children = [child for child in weights if child[:-1] == node]
        weights[node] = sum(weights[child] for child in children)
        if node in fits:  # one sentence, the same several times, or one whose gradient was clipped
            word, factor, _ = fits[node]
            weights[node] = factor / unit
            times = round(weights[node])
            sentences += [(*node, word)] * (times if abs(weights[node] - times) < WHOLE else 1)
            continue
        rest = heads[node].delta / unit
        for child in children:
            rest = rest - weights[child] * heads[node].step([child[-1]])[0]
        ended = _ended(heads[node], rest, batch, inner=bool(children))
        sentences += [(*node, word) for word in ended]
        weights[node] += len(ended)
    return sentences * (batch // len(sentences)) if sentences and batch % len(sentences) == 0 else sentences


@torch.no_grad()
def after_steps(
    backbone: DecoderBackbone, upload: Gradients, nodes: Sequence[Sentence], batch: int, step: Step
) -> list[Sentence]:
    """The same behind several local steps: each with the word that fits best with the weights in the middle of the
    steps. They are accepted where the same steps on them make the upload again; else their last words are `UNNAMED`."""
    inner = {node[:-1] for node in nodes}
    ends = [node for node in nodes if node not in inner]
    moved = midway(backbone, upload, step)
    places = _places(moved, upload, nodes) if len(ends) == batch else None
    if places is not None:
        words = moved.model.get_output_embeddings().weight
        whole = [(*node, Head(places[node], moved.final_norm, words).fit()[0]) for node in ends]
        del places, moved
        if makes_again(backbone, upload, whole, step):
            return whole
    return [(*node, UNNAMED) for node in ends]


def makes_again(backbone: DecoderBackbone, upload: Gradients, sentences: Sequence[Sentence], step: Step) -> bool:
    """Whether a client's local steps on these sentences, made here, give the upload of a model of next words."""
    client = FedAvg(step.local_steps, step.lr)
    again = text_gradients(
        TextVictim(backbone, None, "next words", backbone.name), sentences, defence=client, dtype=torch.float64
    )
    left = sum(float((sent.double() - again[name]).square().sum()) for name, sent in upload.items())
    return left <= AGAIN**2 * sum(float(sent.double().square().sum()) for sent in upload.values())


def _whole(
    backbone: DecoderBackbone, upload: Gradients, nodes: Sequence[Sentence], batch: int, even: bool, step: Step
) -> list[Sentence]:
    """The whole sentences of which `nodes` are all beginnings."""
    if backbone.num_classes:
        return classified(backbone, upload, nodes, batch, even, step)
    if step.local_steps > 1:
        return after_steps(backbone, upload, nodes, batch, step)
    return endings(backbone, upload, nodes, batch)


@torch.no_grad()
def classified(
    backbone: DecoderBackbone, upload: Gradients, nodes: Sequence[Sentence], batch: int, even: bool, step: Step
) -> list[Sentence]:
    """The whole sentences of which `nodes` are all beginnings, of a causal classifier.

    It reads the last token alone: in its last block only the beginnings that are whole sentences have a gradient, in
    whose span their inputs lie. Where that span tells nothing, those that are part of no longer beginning are given. Of
    several that are equal one is given.
    """
    inner = {node[:-1] for node in nodes}
    ends, weight = [node for node in nodes if node not in inner], last_weight(backbone)
    if nodes and read_names(weight, upload):
        span = span_of(backbone, upload, [weight], even, step)
        if span.tells:
            holds = span.holds(_entering_last(backbone, nodes)[0].double()).tolist()
            ends = [node for node, lies in zip(nodes, holds, strict=True) if lies]
    return ends * batch if len(ends) == 1 and batch else ends


@torch.no_grad()
def masked_words(
    backbone: TextEncoder, upload: Gradients, sentences: Sequence[Sentence], hidden: int
) -> list[Sentence]:
    """Sentences with the words that a masked model learned where `hidden` stands; it stays where none fits."""
    head = backbone.word_head()
    if head is None or not sentences:
        return list(sentences)
    weight = next(name for name, p in backbone.named_parameters() if p is head.dense.weight)
    ids, mask = padded(sentences, device=next(backbone.parameters()).device)
    rows, columns = ((ids == hidden) & mask).nonzero(as_tuple=True)
    if weight not in upload or not 0 < len(rows) < backbone.dim:
        return list(sentences)
    logits: list[Tensor] = []
    inputs = entering(backbone, weight, lambda: logits.append(backbone(ids, mask)), on=True)[rows, columns]
    delta = _deltas(inputs, as_rows(backbone, weight, upload[weight]))
    if delta is None:
        return list(sentences)
    likely, at = logits[0][rows, columns].softmax(dim=-1), head.dense(inputs)
    named = ids.tolist()
    for number, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        place = Place(delta[number], at[number], likely[number])
        word, factor, left = Head(place, head.tail, backbone.model.get_output_embeddings().weight).fit()
        if left < TELLING and factor > 0:
            named[row][column] = word
    return [tuple(words[: len(sentence)]) for words, sentence in zip(named, sentences, strict=True)]


def _deltas(inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """δ [m, out] of ∂W = Σ_t δ_t a_t^T for what entered, a [m, in]; None where that has too few channels."""
    rows = whole_rows(gradient.T)  # [in, out]
    if len(inputs) >= inputs.shape[1] or len(rows) < inputs.shape[1]:
        return None
    # Equal places make the system deficient: the usual driver of torch 2.9 is then wrong, that of a GPU refuses.
    return torch.linalg.lstsq(inputs.double().T.cpu(), rows.cpu(), driver="gelsd").solution.to(inputs.device)


def _ended(head: Head, rest: Tensor, most: int, inner: bool) -> list[int]:
    """The last words of the sentences that end here; at the end of a branch there is one at least."""
    scale = max(float(rest.norm()), float(head.mean.norm()))
    words = []
    while len(words) < most and float(rest.norm()) > TELLING * scale * (10 if inner and not words else 1):
        word, left = head.nearest(rest)
        if float(left.norm()) >= float(rest.norm()):
            break
        rest = left
        words.append(word)
    if inner or words:
        return words if float(rest.norm()) <= 10 * TELLING * scale else [UNNAMED] * (not inner)
    return [UNNAMED]


def _entering_last(backbone: DecoderBackbone, nodes: Sequence[Sentence]) -> tuple[Tensor, Tensor]:
    """Of beginnings [m]: the inputs of the last layer, [m, ·], and the stream behind it, [m, D]."""
    inner = {node[:-1] for node in nodes}
    ends = [node for node in nodes if node not in inner]
    ids, mask = padded(ends, device=next(backbone.parameters()).device)
    streams: list[Tensor] = []

    def run() -> None:
        stream = backbone.assemble(backbone.embed(ids), backbone.positions((ids.shape[1],)), mask)
        streams.append(backbone.run_layers(stream, None))

    inputs = entering(backbone, last_weight(backbone), run, on=True)
    at = {node[: place + 1]: (row, place) for row, node in enumerate(ends) for place in range(len(node))}
    rows, columns = (torch.tensor([at[node][axis] for node in nodes]) for axis in (0, 1))
    return inputs[rows, columns], streams[0][rows, columns]


def _places(backbone: DecoderBackbone, upload: Gradients, nodes: Sequence[Sentence]) -> dict[Sentence, Place] | None:
    """What every beginning learned; None where the last layer's gradient is not sent or has too few channels."""
    weight = last_weight(backbone)
    if not read_names(weight, upload):
        return None
    inputs, z = _entering_last(backbone, nodes)
    if weight in upload:
        delta = _deltas(inputs, as_rows(backbone, weight, upload[weight]))
    else:  # LoRA's product scale · up · down, of which ∂up = scale · Σ_t δ_t (down a_t)^T
        layer, named = weight.removesuffix(".weight"), dict(backbone.named_parameters())
        scale = dict(backbone.named_buffers())[f"{layer}{UP.removesuffix('up')}scale"]
        delta = _deltas(scale * inputs @ named[layer + DOWN].detach().T, upload[layer + UP])
    if delta is None:
        return None
    likely = backbone.model.get_output_embeddings()(backbone.final_norm(z)).softmax(dim=-1)
    return {node: Place(delta[i], z[i], likely[i]) for i, node in enumerate(nodes)}


REPEATED = 8
"""How often a first word is repeated at most, where no table tells its places apart."""


@torch.no_grad()
def causal_sentences(
    backbone: DecoderBackbone,
    upload: Gradients,
    batch: int,
    words: Tensor,
    deadline: Deadline,
    even: bool = False,
    step: Step = ONE,
) -> Recovered:
    """The sentences behind an upload of `batch` of them. words: those that may be in it. even: noise was added.

    step: the client's. The inputs of all its local steps are in the spans, those of the first step with the weights
    that the attacker knows; with more than one step a span has more directions than the batch has tokens.
    """
    first, second = (qkv_weights(backbone, depth) for depth in (1, 2))
    one, two = (span_of(backbone, upload, names, even, step) for names in (first, second))
    facts = {"rank": one.rank, "rank_of_second": two.rank, "channels": backbone.dim}
    table = backbone.positions((1,)).table is not None
    if reason := full(one, backbone.dim, step) or full(two, backbone.dim, step):
        alone = one.tells and not table  # then the first block's span names words, whatever the second says
        inside = words_at(backbone, one, words, 0).tolist() if alone else []
        return Recovered(frozenset(inside), facts=facts, reason=reason)
    named: set[int] = set()
    inside, nodes = Tensor(), list[Sentence]()
    level: list[Sentence] = [()]
    for place in range(backbone.num_tokens):
        if table or place == 0:
            inside = words_at(backbone, one, words, place)
            named.update(inside.tolist())
        deadline.say(f"position {place + 1}: {len(level)} beginnings, {len(inside)} words")
        longer = []
        for prefix in level:
            if deadline.over():
                nodes = nodes if table else _pruned(nodes)
                remark = f"finding {len(nodes)} of about {two.rank} beginnings of sentences"
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
        more = "more beginnings of sentences fit the gradients of the second block than the batch has tokens"
        return Recovered(frozenset(named), (), facts, reason=f"{more}, so noise hides the true sentences")
    deadline.say(f"where {counted(batch, 'sentences')} end")
    whole = _whole(backbone, upload, nodes, batch, even, step)
    complete = len(whole) == batch and not any(UNNAMED in sentence for sentence in whole)
    reason, settled = None, step.adam and complete  # Adam's uneven rounding may add to a rank
    if count < two.rank and step.local_steps == 1 and not settled:
        reason = (
            f"for {two.rank - count} of {two.rank} tokens, no beginning of a sentence fits the gradients of the second "
            "block"
        )
    elif backbone.num_classes and len(whole) != batch:
        reason = f"the gradient of the last block shows the end of {counted(len(whole), 'sentences')}, not of {batch}"
    elif not complete:
        reason = "the last words of some sentences are not determined"
    named.update(word for sentence in whole for word in sentence if word != UNNAMED)
    return Recovered(frozenset(named), tuple(whole), facts, reason=reason)


def full(span: Inputs, channels: int, step: Step = ONE) -> str | None:
    """Why a span says nothing: it has as many directions as are seen of an input, or none; None where it does."""
    if span.tells:
        return None
    plain = span.spans[0][1] is None
    kind = (
        f"the model has only {channels} channels" if plain else f"LoRA reduces a token to only {span.channels} channels"
    )
    if span.rank == 0:
        return f"the noise is too strong, or the batch has too many tokens ({kind})"
    if step.local_steps > 1:
        return (
            f"the layers have too many different inputs in {step.local_steps} local steps ({kind}), so every word fits "
            "the update"
        )
    return f"the batch has too many tokens ({kind}), so every word fits the gradients"


def _next(backbone: DecoderBackbone, span: Inputs, weight: str, prefix: Sentence, words: Tensor) -> list[int]:
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
