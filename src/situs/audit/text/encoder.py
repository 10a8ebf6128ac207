"""Sentences from the gradients of an encoder with a table of positions (BERT): words at places, then which belong
together.

A word at a place is a candidate if its vector lies in the span of the first block's gradients. That span cannot tell
the pairs that are there from the closure of the graph of words and places: the MLP can (`roots`), and gives the
attention's output o of a token. All of a sentence share one attention: Σ_s w_s e_s (v_s - o) = 0, where
e_s = exp(q·k_s/√d) is known for every candidate s, and w_s is 1 for those of its sentence and 0 for all others. What
comes of one token is a whole sentence, which the second block's span then tells right or wrong; so one token of each
sentence is enough. Where that span has fewer directions than the sentence tokens, as in the last block of a classifier,
of which [CLS] alone is read, it cannot: how exactly the sentence solves the attention decides then.

Under MJP some tokens of a sentence have one learned vector instead of their positions. An informed attacker tests every
word with that vector too, and recovers those tokens like the others; which of the gaps each of them came from is in no
gradient, so that it fills the gaps in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from situs.audit.attacks.solver import (
    TELLING,
    Activation,
    BlockTail,
    Descent,
    Family,
    Flat,
    Group,
    Heads,
    Norm,
    Range,
    Tokens,
    pulls,
)
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients, Step
from situs.audit.text.causal import full
from situs.audit.text.layers import ONE, Inputs, calls_before, entering, qkv_weights, span_of, word_inputs, words_at
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.victim import Sentence
from situs.backbones.hf.text import TextEncoder
from situs.errors import counted, verb

# ---------------------------------------------------------------------------------------------------------------------
# The attention's output of a token that is known: what the first block of an encoder adds to a word at its place.
#
#     y = z + W o + b        z: the word at its place, known; o: the attention's output, in the span of ∂W
#     u = norm(y)            in the span of the MLP's first gradient
#     a = act(fc1(u))        in the span of its second
#
# The second line leaves a family of o: with n tokens of which only r1 vectors z are independent, n - r1 directions.
# The third has a root in it for a word that is there, and none for one that only lies in the closure of the words and
# places.


ROUNDS, POLISH = 30, 12
"""Steps of a search, and from its end to the root."""

NEAR = 3 * TELLING
"""The largest relative residual of the activation at which a search is continued to a root."""

FLAT = 3e-3
"""Directions in which the linear equations change by less than this share of the largest change are left to the search,
because rounding blurs the equations there."""


class Roots(NamedTuple):
    """fits: [m] bool; loosely, for what is made of a root is held against the second block. outputs: o [m, D]."""

    fits: Tensor
    outputs: Tensor


def block_weights(backbone: TextEncoder) -> list[str]:
    """The matrices of the first block behind its attention: out, fc1 and fc2."""
    roles = backbone.roles()
    matrices = [name for name, p in backbone.named_parameters() if p.dim() == 2 and roles[name].depth == 1]
    return [name for name in matrices if roles[name].part == "block"]


class FirstBlock(BlockTail):
    """The first block of an encoder with the spans of an upload; all in float64."""

    def __init__(self, backbone: TextEncoder, upload: Gradients, even: bool = False) -> None:
        self.names = out, fc1, fc2 = block_weights(backbone)
        self.out, self.fc1, self.fc2 = (span_of(backbone, upload, [name], even).plain for name in (out, fc1, fc2))
        layer: Any = backbone.parts()[0]
        parts = (
            tensor.detach().double()
            for part in (layer.norm1, layer.attention.out, layer.mlp.up[0])
            for tensor in (part.weight, part.bias)
        )
        weight, bias, mixing, self.shift, *self._entry = parts
        self.norm2, self.into, self._act = Norm(weight, bias, layer.norm1.eps), mixing.T, layer.mlp.act
        self.basis = self.out.inside / self.out.column
        """Of the attention's outputs, [n, D]."""
        self.group, self.activation = Group(self.norm2, self.fc1), Activation(self)
        rows = self.group.rows(self.basis @ self.into)
        self.flat = Flat(rows, lambda values: int((values > FLAT * values[:1]).sum()))

    def entry(self) -> tuple[Tensor, Tensor]:
        return self._entry[0], self._entry[1]

    def tail(self, entered: Tensor) -> Tensor:
        return self._act(entered)

    @property
    def open(self) -> int:
        """How many directions of o the linear equations leave."""
        return len(self.flat.free)

    def family(self, z: Tensor) -> Family:
        """What the linear equations leave of the attention's outputs of tokens z [m, D]."""
        known, parts = z + self.shift, (self.flat.least(self.group(z + self.shift)), self.flat.free)
        least, along = (part[:, : len(self.basis)] @ self.basis for part in parts)
        fixed = Tokens(least[:, :0], least, z, known + least @ self.into)
        moves = Tokens(along[:, :0], along, torch.zeros_like(along @ self.into), along @ self.into)
        return Family(fixed, moves, self.flat.values)

    def search(self, z: Tensor, start: int = 0) -> Roots:
        """The root of each token z [m, D] that is nearest to the least o, or to another start."""
        family, every = self.family(z), torch.arange(len(z), device=z.device)
        phi = z.new_zeros(len(z), self.open)
        if start:
            drawn = torch.randn(phi.shape, generator=torch.Generator().manual_seed(start), dtype=phi.dtype)
            size = (family.fixed.o * self.out.column).norm(dim=1, keepdim=True)
            phi = drawn.to(z.device) * size / max(self.open, 1) ** 0.5
        if self.open:
            coarse, fine = (
                Descent(self.activation, family, self.fc2, Range(z[0, :0], z[0, :0]), dtype=dtype)
                for dtype in (torch.float32, torch.float64)
            )
            rest = coarse.run(every, phi, ROUNDS)
            phi, near = rest.phi, (rest.cost <= NEAR**2).nonzero()[:, 0]
            phi[near] = fine.run(near, phi[near], POLISH).phi
        tokens = family.tokens(every, phi)
        fits = (self.fc2.residual(self.late(tokens.m)), self.fc1.residual(self.norm2.apply(tokens.m)))
        return Roots(torch.maximum(*fits) <= TELLING, tokens.o)


# --- words at places, then which belong together ---------------------------------------------------------------------


TOGETHER, UNKNOWNS, STARTS = 32, 2048, 3
"""Candidates that are searched together, fewer where that is more unknowns, and from how many starts."""


HIDDEN, PATIENCE = -1, 8
"""The place of a word without one, and after how many places without a word a sentence is taken to have ended. An
attacker who knows of hidden places goes on for as many places as the batch has tokens."""


PAIRS = 1 << 16
"""The most words at places that are searched where the first block's test passes every word."""


EXACT = 1e-3
"""The share of a token's attention that a sentence may leave unexplained, where that decides."""


class Candidates(NamedTuple):
    """words, places: [C], `HIDDEN` for a word without one. vectors: what enters the first block, [C, D] in float64."""

    words: Tensor
    places: Tensor
    vectors: Tensor


@torch.no_grad()
def encoder_sentences(
    backbone: TextEncoder,
    upload: Gradients,
    batch: int,
    words: Tensor,
    deadline: Deadline,
    even: bool = False,
    unknown: Tensor | None = None,
    step: Step = ONE,
) -> Recovered:
    """The sentences behind an upload of `batch` of them. words: those that may be in it. even: noise was added.

    unknown: [D], the vector that the attacker knows hidden places to have. step: the client's.
    """
    first, second = (qkv_weights(backbone, depth) for depth in (1, 2))
    one, two = (span_of(backbone, upload, names, even, step) for names in (first, second))
    if first[0] not in upload:
        return _of_products(backbone, batch, words, deadline, (one, two))
    block = FirstBlock(backbone, upload, even)
    facts = {"rank": one.rank, "tokens": block.fc1.rank, "channels": backbone.dim, "free": block.open}
    if (shared := len(backbone.block_modules())) < backbone.depth:  # what is read of a gradient is of every run
        facts["runs"] = backbone.depth // shared
    fc1 = Inputs(((block.fc1, None),))
    if reason := next(filter(None, (full(span, backbone.dim, step) for span in (one, two, fc1))), None):
        runs = (
            f"; each token counts {facts['runs']} times, because each block runs {facts['runs']} times"
            if "runs" in facts
            else ""
        )
        return Recovered(facts=facts, reason=reason + runs)
    if len(words) * block.fc1.rank > PAIRS and _all_pass(backbone, one):
        channels = f"a word vector has only {backbone.token_dim} channels"
        remark = f"the batch has too many tokens ({channels}), so every word fits the gradients"
        return Recovered(facts=facts, reason=remark)
    able = candidates(backbone, one, words, deadline, unknown, block.fc1.rank)
    named = frozenset(able.words.tolist())
    facts |= {"candidates": len(able.words)}
    if not len(able.words) and deadline.over():
        return Recovered(facts=facts, partial=f"0 of {counted(batch, 'sentences')}")
    if not len(able.words):
        return Recovered(
            facts=facts, reason="no word of the vocabulary lies in the span of the gradients: noise hides the words"
        )
    search = _Search(backbone, block, able, two, unknown)
    partial = search.run(batch, deadline)
    sentences, reason = tuple(search.sentences), None
    if partial is None and len(sentences) < batch:
        count = f"{len(sentences)} of {counted(batch, 'sentences')} {verb(batch, 'were')} found"
        reason = f"{count}; equal sentences cannot be distinguished"
    facts |= {"searched": len(search.tried), "roots": search.roots}
    if not sentences and batch == 1 and (placed := at_places(able)):
        remark = "no complete sentence was confirmed; the page shows a word only where no other word fits the gradients"
        sentences, reason = (placed,), reason and remark
    return Recovered(named, sentences, facts, reason, partial)


def _of_products(
    backbone: TextEncoder,
    batch: int,
    words: Tensor,
    deadline: Deadline,
    spans: tuple[Inputs, Inputs],
) -> Recovered:
    """The sentence of a batch of one behind the gradients of LoRA's products alone: where one word passes at each
    place, the second block tests all of them."""
    one, two = spans
    facts = {"rank": one.rank, "rank_of_second": two.rank, "channels": backbone.dim}
    if reason := full(one, backbone.dim) or full(two, backbone.dim):
        return Recovered(facts=facts, reason=reason)
    able = candidates(backbone, one, words, deadline, tokens=one.rank)
    named, sentence = frozenset(able.words.tolist()), at_places(able)
    alone = batch == 1 and 0 < len(sentence) == len(able.words) and UNNAMED not in sentence
    if alone and bool(two.holds(_enter_second(backbone, sentence)).all()):
        return Recovered(named, (sentence,), facts)
    reason = "LoRA's gradients reveal words and their positions, but not which words belong to the same sentence"
    return Recovered(named, (), facts, reason)


def _all_pass(backbone: TextEncoder, span: Inputs) -> bool:
    """Whether every word lies in the span, as in a model whose words have few channels."""
    if backbone.token_dim == backbone.dim:
        return False
    weight = backbone.inner.get_input_embeddings().weight
    some = torch.arange(0, len(weight), max(1, len(weight) // 64), device=weight.device)
    return len(words_at(backbone, span, some, 0)) == len(some)


def at_places(able: Candidates) -> Sentence:
    """The words at places where only one word passes, `UNNAMED` between them: what a batch of one reveals even where no
    whole sentence is confirmed."""
    words_of: dict[int, set[int]] = {}
    for word, place in zip(able.words.tolist(), able.places.tolist(), strict=True):
        words_of.setdefault(place, set()).add(word)
    sure = {place: next(iter(words)) for place, words in words_of.items() if len(words) == 1 and place != HIDDEN}
    return tuple(sure.get(place, UNNAMED) for place in range(max(sure, default=-1) + 1))


def candidates(
    backbone: TextEncoder,
    span: Inputs,
    words: Tensor,
    deadline: Deadline,
    unknown: Tensor | None = None,
    tokens: int = 0,
) -> Candidates:
    """Every word at every place that passes the first block's test, until some places have none; and with `unknown`.

    tokens: of the whole batch, as its gradients tell: no sentence is longer.
    """
    sure = 0 if unknown is None else tokens
    passing, places, vectors, empty = [], [], [], 0
    for place in [*([] if unknown is None else [HIDDEN]), *range(backbone.num_tokens)]:
        if place % 8 == 0:
            deadline.say(f"from position {place + 1}: testing {len(words)} words with the first block's gradients")
        vector = unknown if place == HIDDEN else None
        some = words_at(backbone, span, words, max(place, 0), vector)
        empty = 0 if len(some) else empty + 1
        if deadline.over() or (empty > PATIENCE and place >= sure):
            break
        passing.append(some)
        places.append(torch.full_like(some, place))
        vectors.append(word_inputs(backbone, some, max(place, 0), vector).double())
    if not passing:
        return Candidates(words[:0], words[:0], torch.zeros(0, backbone.dim, dtype=torch.float64))
    return Candidates(torch.cat(passing), torch.cat(places), torch.cat(vectors))


class _Search:
    """Root after root, until every word is in a sentence and there are as many sentences as the batch has."""

    def __init__(
        self, backbone: TextEncoder, block: FirstBlock, able: Candidates, two: Inputs,
        unknown: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.backbone, self.block, self.able, self.two = backbone, block, able, two
        self.unknown, self.gaps = unknown, dict[Sentence, list[int]]()
        attention = backbone.parts()[0].attention
        matrices, biases = ([part.weight for part in attention.qkv], [part.bias for part in attention.qkv])
        weights = torch.cat(matrices).double(), torch.cat(biases).double()
        self.heads = Heads(*weights, attention.heads, attention.scale)
        self.q, self.k, self.v = self.heads.split(able.vectors)
        self.sentences: list[Sentence] = []
        self.tried: set[tuple[int, int]] = set()
        self.refuted: set[Sentence] = set()
        self.unexplained: dict[Sentence, float] = {}
        self.roots = 0

    def run(self, batch: int, deadline: Deadline) -> str | None:
        """Fills `sentences`; how far it came where it was stopped."""
        for start in range(STARTS):
            while len(self.sentences) < batch and (rows := self._next(start)):
                if deadline.over():
                    return f"{len(self.sentences)} of {counted(batch, 'sentences')}"
                progress = f"{len(self.sentences)} of {counted(batch, 'sentences')}"
                tried = sum(at == start for _, at in self.tried)
                progress += f", {tried} of {counted(len(self.able.words), 'pairs')}"
                again = f" from start {start + 1} of {STARTS}" if start else ""
                deadline.say(f"{progress} searched{again}, {self.roots} roots")
                self._try(rows, start)
            if not self.block.open:
                break  # a linear solution does not hang on where it starts
        return None

    def _next(self, start: int) -> list[int]:
        """The candidates to look at now: those of words in no sentence yet that have the fewest places, then others."""
        covered = {word for sentence in self.sentences for word in sentence}
        pairs = {(word, place) for sentence in self.sentences for place, word in enumerate(sentence)}
        words, places = self.able.words.tolist(), self.able.places.tolist()
        count = {word: words.count(word) for word in set(words)}
        rows = [
            row
            for row, pair in enumerate(zip(words, places, strict=True))
            if (row, start) not in self.tried and pair not in pairs
        ]
        return sorted(rows, key=lambda row: (words[row] in covered, count[words[row]], words[row]))[: self._together()]

    def _together(self) -> int:
        return max(4, min(TOGETHER, UNKNOWNS // max(self.block.open, 1)))

    def _try(self, rows: list[int], start: int) -> None:
        self.tried.update((row, start) for row in rows)
        roots = self.block.search(self.able.vectors[rows], start)
        self.roots += int(roots.fits.sum())
        for number in roots.fits.nonzero()[:, 0].tolist():
            sentence, left = self._sentence(rows[number], roots.outputs[number])
            self.unexplained[sentence] = min(left, self.unexplained.get(sentence, left))
            weak = self.two.rank < len(sentence)  # another root may solve it more exactly
            if sentence not in self.sentences and (weak or sentence not in self.refuted):
                (self.sentences.append if self.holds(sentence) else self.refuted.add)(sentence)

    def _sentence(self, row: int, output: Tensor) -> tuple[Sentence, float]:
        """The sentence of candidate `row`, whose attention gave `output` [D], and the share it leaves unexplained."""
        paid = self.heads.paid(self.q[:, row : row + 1], self.k)[:, 0]
        parts = pulls(paid, self.v, output.unflatten(0, (self.heads.count, -1)))
        others = [at for at in range(len(parts)) if at != row]
        weights = np.ones(len(parts))
        system, goal = parts[others].T.cpu().numpy(), -parts[row].cpu().numpy()
        try:
            weights[others], left = nnls(system, goal, maxiter=20 * len(parts))
        except RuntimeError:  # it does not settle, and no sentence comes of this root
            return (), 1.0
        left = float(left / max(np.linalg.norm(goal), 1e-300))
        words, places = self.able.words.tolist(), self.able.places.tolist()
        best: dict[int, tuple[float, int]] = {}
        bag: list[int] = []
        for word, place, weight in zip(words, places, weights.tolist(), strict=True):
            if weight > 0.5 and place == HIDDEN:
                bag += [word] * round(weight)
            elif weight > 0.5:
                best[place] = max(best.get(place, (0.0, 0)), (weight, word))
        if not bag:
            return tuple(best[place][1] for place in range(len(best)) if place in best), left
        gaps = [place for place in range(len(best) + len(bag)) if place not in best]
        if len(gaps) != len(bag):  # it has no such length
            return (), 1.0
        filled = {**{place: word for place, (_, word) in best.items()}, **dict(zip(gaps, bag, strict=True))}
        sentence = tuple(filled[place] for place in range(len(filled)))
        self.gaps[sentence] = gaps
        return sentence, left

    def holds(self, sentence: Sentence) -> bool:
        """Whether a sentence lies in the span of the second block's gradients, where that has enough directions."""
        if not sentence:
            return False
        if self.two.rank < len(sentence):
            return self.unexplained.get(sentence, 1.0) < EXACT
        return bool(self.two.holds(_enter_second(self.backbone, sentence, self.gaps.get(sentence), self.unknown)).all())


def _enter_second(
    backbone: TextEncoder, sentence: Sentence, gaps: Sequence[int] | None = None, unknown: Tensor | None = None
) -> Tensor:
    """What enters the second block's attention, [N, D] in float64. gaps: places that have the vector `unknown`."""
    ids = torch.tensor([sentence], device=next(backbone.parameters()).device)
    places = backbone.positions((len(sentence),))
    if gaps:
        hidden = torch.zeros(1, len(sentence), dtype=torch.bool, device=ids.device)
        hidden[0, list(gaps)] = True
        places = places.forget(hidden, unknown)
    weight, calls = qkv_weights(backbone, 2)[0], calls_before(backbone, 2)
    return entering(backbone, weight, lambda: backbone.encode(backbone.embed(ids), places), calls=calls)[0].double()
