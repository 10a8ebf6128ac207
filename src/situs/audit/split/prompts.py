"""What a server reads of the texts whose states it receives, with the public model.

Threat model: the server knows the public weights, the tokeniser, the number of blocks before the cut, the veil and its
strength, the type of the numbers sent, and has public text. It does not know the texts and the key.

A causal model's state of a word depends on this word and the words before it. With the words before it known, the
server computes the state of candidates (`next_states`, with a cache of keys and values) and compares. The right word
reproduces the state sent as well as rounding and noise allow, and a wrong one does not: this residual is the
certificate. Candidates are ordered by how likely the state is under each word: a linear regression from the word's
vector to its state, learned on public text, with the covariance of what it leaves. The states of the words already
tried correct the regression for the present context. The work is linear in the length of the text. Under noise the
candidate is chosen that is most probable: the noise gives its likelihood, and the words read so far and public text
give how often the word follows. The certificate takes only the likelihood.

An encoder's states depend on all words. The search starts from the likeliest word at each place. L-BFGS then moves the
vectors that enter the blocks until the blocks' output is near the states sent, and takes the words nearest to them.
Last, single words are changed as long as the states computed come closer. The certificate is the same.

Behind permuted columns the order of the channels is first estimated from their statistics on public text. Sorted
values, which a permutation keeps, then verify candidates; a recovered text gives the order by assignment.

Paper: "Language model inversion" names the threat; "Hidden No More" (Thomas et al., 2025) reads permuted states word by
word. Ours: candidates by likelihood instead of the whole vocabulary, an expected residual instead of a threshold, and
an order of columns that is solved once for all texts.

Rows in a secret order for each text hide nothing at depth 0: the state of a word contains its position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.deadline import Deadline
from situs.audit.text.recovered import SURE, UNNAMED
from situs.audit.text.victim import Sentence
from situs.backbones.block import Stream, run_blocks
from situs.backbones.halves import enter
from situs.backbones.hf.text import DecoderBackbone, PromptCache, TextBackbone
from situs.errors import SitusError, counted
from situs.findings import Certificate
from situs.locks.attacks.columns import recover_columns
from situs.locks.attacks.match import assign

RIDGE, SMALLEST = 1e-3, 1e-3
"""Of the regression, relative to the spread of word vectors; added to the covariance of standardised states."""

BFLOAT16 = torch.finfo(torch.bfloat16).eps / 2 / math.sqrt(3)
"""Standard deviation of the rounding to bfloat16, relative to a number just above a power of two."""

FIRST, LARGEST, NEAR = 8, 512, 4
"""Candidates tried together at first, and at most; how many times as many words a shortlist has as are asked for."""

TRIED, UNPROVED = 16384, 64
"""Candidates tried at a place if none fits and the earlier words do; and at another place. Under noise wrong words may
fit too, so at least the second number is tried."""

RELEARNED = 256
"""Candidates after which the guide is learned anew, from the states of those tried in this context."""

SAMPLE = 1024
"""Words that stand for all: for the effect of a position, and far from those that a guide names."""

ROUNDED = 30.0
"""How many times the rounding measured on public text the state of the right word may be off: 15 times on a GPU, whose
kernels depend on a text's length. Other words are off by 10,000 times and more (both measured)."""

DEVIATIONS = 4.0
"""Standard deviations by which a squared distance may exceed what noise predicts."""

EVALUATIONS, LOOK, UNCHANGED = 400, 50, 3
"""Of L-BFGS on an encoder's blocks: evaluations in all, evaluations between two looks at the nearest words, and looks
without a change that end it."""

SWEEPS, CHANGES, WIDEST, COMPUTED = 16, 16, 1024, 2**16
"""Of an encoder's search: rounds; words tried at a place, at first and at most; states computed for a text at most."""


@torch.no_grad()
def states_at(backbone: TextBackbone, ids: Tensor, depths: Sequence[int]) -> dict[int, Tensor]:
    """depth -> the states after so many blocks, [B, N, D], for ids [B, N]."""
    z = enter(backbone, ids).z
    states = {0: z} if 0 in depths else {}

    def keep(number: int, out: Tensor) -> None:
        if number in depths:
            states[number] = out.clone()

    if max(depths):
        positions = backbone.positions((ids.shape[1],))
        backbone.run_layers(Stream(z, 0, positions.rotary, positions.bias), None, [keep])
    return states


def nearest(rows: Tensor, norms: Tensor, point: Tensor, count: int, bonus: Tensor | float = 0.0) -> Tensor:
    """Which rows [V, D], of squared lengths [V], are nearest to a point [D], the nearest first.

    bonus: [V], is subtracted from the squared distances."""
    far = norms - 2 * (rows @ point.to(rows)) - bonus
    return far.topk(min(count, len(rows)), largest=False).indices


@dataclass(frozen=True)
class Guide:
    """How likely a state is under each word. mean, spread: [D], of the states. whiten: [D, D]. expected: [V, D], each
    word's whitened state."""

    mean: Tensor
    spread: Tensor
    whiten: Tensor
    expected: Tensor

    @classmethod
    def learn(cls, states: Tensor, words: Tensor, embedding: Tensor, sigma: float = 0.0) -> Guide:
        """From states [n, D] of words [n] with vectors `embedding` [V, E]. sigma: of noise that is added to states."""
        states, vectors = states.double(), embedding.double()
        mean, spread = states.mean(dim=0), states.std(dim=0).clamp(min=1e-30)
        x, middle = (states - mean) / spread, vectors[words].mean(dim=0)
        y = vectors[words] - middle
        eye = torch.eye(y.shape[1]).to(y)
        slope = torch.linalg.solve(y.T @ y + RIDGE * len(y) * y.var(dim=0).mean().clamp(min=1e-30) * eye, y.T @ x)
        left = x - y @ slope
        covariance = left.T @ left / len(left) + torch.diag(SMALLEST + (sigma / spread).square())
        whiten = torch.linalg.cholesky(torch.linalg.inv(covariance))
        expected = (vectors - middle).float() @ (slope @ whiten).float()
        return cls(mean, spread, whiten, expected)

    def whitened(self, states: Tensor) -> Tensor:
        """States [..., D] as `expected` holds them."""
        return ((states.double() - self.mean) / self.spread @ self.whiten).float()

    @cached_property
    def norms(self) -> Tensor:
        """[V]: the squared length of each expected state."""
        return torch.linalg.vecdot(self.expected, self.expected)

    def likeliest(self, goal: Tensor, count: int, offset: Tensor | float = 0.0, prior: Tensor | float = 0.0) -> Tensor:
        """So many words, the likeliest for a whitened state [D] first. offset: what the context adds to it. prior: the
        logarithm of each word's probability without the state."""
        return nearest(self.expected, self.norms, goal - offset, count, 2 * prior)

    def offset(self, words: Tensor, states: Tensor) -> Tensor:
        """What the context adds, from the states [m, D] of words [m] in it."""
        return (self.whitened(states) - self.expected[words]).mean(dim=0)


@dataclass(frozen=True)
class Known:
    """What the server knows of the states at a cut. first, rest: guides for the first word and the others, None at
    depth 0. rows: public states [n, D] without the first words. scale: the unit of σ. typical: the root mean square of
    a state. rounding: of the computation, relative to the entry and `typical`. sigma: of the noise. wire: the relative
    rounding of the numbers sent. fixed: the words that the tokeniser puts before and behind every text. frequency: [V],
    the probability of each word in public text.
    """

    backbone: TextBackbone
    depth: int
    first: Guide | None
    rest: Guide | None
    rows: Tensor
    scale: float
    typical: float
    rounding: float
    frequency: Tensor
    sigma: float = 0.0
    wire: float = 0.0
    fixed: tuple[Sentence, Sentence] = ((), ())
    moments: dict[int, Tensor] = field(default_factory=dict)
    """Position -> [V, 4], what no order of the channels changes in the state of each word at depth 0."""

    def error(self, state: Tensor) -> Tensor:
        """The deviation that rounding and noise predict for each entry of states sent."""
        state = state.double().abs()
        computed = self.rounding * (state + self.typical)
        return (computed.square() + (self.wire * state).square() + self.sigma**2).sqrt()

    @property
    def limit(self) -> float:
        """The largest mean square of a distance, in units of `error`, that the right word explains."""
        return 1 + DEVIATIONS * math.sqrt(2 / self.rows.shape[1]) if self.sigma else ROUNDED**2

    def states_of(self, words: Tensor, place: int) -> Tensor:
        """[n, D]: the states of words [n] at a place of depth 0."""
        places = self.backbone.positions((place + 1,)).take(torch.full((len(words), 1), place, device=words.device))
        return self.backbone.assemble(self.backbone.embed(words[:, None]), places).z[:, 0]

    @property
    def embedding(self) -> Tensor:
        """[V, E]: the vector of each word."""
        return self.backbone.inner.get_input_embeddings().weight.detach()

    @cached_property
    def words(self) -> Tensor:
        """[V]: all words."""
        return torch.arange(len(self.embedding), device=self.embedding.device)

    @cached_property
    def sample(self) -> Tensor:
        """About `SAMPLE` words, evenly spread."""
        return self.words[:: max(1, len(self.words) // SAMPLE)]

    @cached_property
    def at_first(self) -> tuple[Tensor, Tensor]:
        """The state of every word at the first place, [V, D], and their squared lengths [V]."""
        rows = self.states_of(self.words, 0)
        return rows, torch.linalg.vecdot(rows, rows)

    def moved(self, place: int) -> Tensor:
        """[D]: by how much a place moves the states of words at depth 0, compared with the first place."""
        return (self.states_of(self.sample, place) - self.at_first[0][self.sample]).mean(dim=0)

    def distance(self, states: Tensor, place: int) -> Tensor:
        """[N]: the squared distance of each of the states [N, D] from the nearest word at a place of depth 0."""
        rows, norms = self.at_first
        far = norms[:, None] - 2 * rows @ (states - self.moved(place)).to(rows).T
        near = far.topk(min(NEAR, len(rows)), dim=0, largest=False).indices
        words = self.states_of(near.flatten(), place).unflatten(0, near.shape)
        return (words - states).square().sum(dim=-1).amin(dim=0)

    def nearest(self, state: Tensor, place: int, count: int, prior: Tensor | None = None) -> Tensor:
        """The words whose state at depth 0 is nearest. A position moves the states of all words nearly alike: a
        shortlist at the first place serves for all places. prior: as `Guide.likeliest` takes it."""
        bonus = state.new_zeros(len(self.words)) if prior is None else 2 * self.sigma**2 * prior.to(state)
        near = nearest(*self.at_first, state - self.moved(place), NEAR * count, bonus)
        rows = self.states_of(near, place)
        return near[nearest(rows, torch.linalg.vecdot(rows, rows), state, count, bonus[near])]

    def nearest_unordered(self, state: Tensor, place: int, count: int) -> Tensor:
        """The same by what no order of the channels changes."""
        place = place if self.backbone.positions((1,)).table is not None else 0
        if place not in self.moments:
            self.moments[place] = _moments(self.states_of(self.words, place))
        moments = self.moments[place]
        far = ((moments - _moments(state[None].to(moments))) / moments.std(dim=0)).square().sum(dim=1)
        return far.topk(min(count, len(far)), largest=False).indices


class Reading(NamedTuple):
    """What was read of one text. words: the likeliest at each place. certain: at how many places no other word that
    was tried is as likely. proved: at how many places, from the first, the word reproduces the state. states: [N, D],
    computed for the words. tried: candidates. cut: at which place it was stopped, None if it was not."""

    words: Sentence
    certain: int
    proved: int
    states: Tensor
    certificate: Certificate
    tried: int
    cut: int | None = None


class Prior:
    """How probable each word is at a place of a text under noise, before its state is looked at.

    The mean of two probabilities: in public text, and after the words read so far, if the model predicts words.
    """

    def __init__(self, known: Known) -> None:
        self.known, self.probability, self.cache = known, known.frequency, PromptCache()

    @property
    def log(self) -> Tensor:
        """[V]: of the next word."""
        return self.probability.log()

    def add(self, word: int) -> None:
        """Reads on."""
        backbone = self.known.backbone
        if isinstance(backbone, DecoderBackbone) and backbone.next_words:
            read = torch.tensor([word], device=self.probability.device)
            last = backbone.next_states(read, self.cache, backbone.depth)
            self.cache.add(0)
            logits = backbone.model.get_output_embeddings()(backbone.final_norm(last))[0]
            predicted = logits.double().softmax(dim=0)[: len(self.known.frequency)]
            self.probability = (self.known.frequency + predicted) / 2


@torch.no_grad()
def read_prompt(
    seen: Tensor, known: Known, deadline: Deadline | None = None, *, hidden: Tensor | None = None
) -> Reading:
    """The words behind the states [N, D] of one text.

    hidden: the same with channels in their unknown order; sorted values then verify candidates, and `seen` is only an
    estimate that orders them.
    """
    deadline = deadline or Deadline()
    if known.depth and not isinstance(known.backbone, DecoderBackbone):
        return _read_whole(seen, known, deadline, hidden)
    return _read_in_turn(seen, known, deadline, hidden)


def _read_in_turn(seen: Tensor, known: Known, deadline: Deadline, hidden: Tensor | None) -> Reading:
    """Word by word, from the first to the last."""
    cache, words, states = PromptCache(), list[int](), list[Tensor]()
    fits, sure, tried, residual, expected = list[bool](), 0, 0, 0.0, 0.0
    before, after = known.fixed
    prior = Prior(known) if known.sigma else None
    for place in range(len(seen)):
        if deadline.over():
            break
        target = Target.of(seen[place] if hidden is None else hidden[place], known, hidden is not None)
        number = place - (len(seen) - len(after))
        only = before[place] if place < len(before) else after[number] if number >= 0 else None
        searched = known.depth or not known.sigma  # at depth 0 under noise the first candidates are the nearest of all
        most = TRIED if all(fits) and searched else UNPROVED
        one = _best(seen[place], target, known, cache, place, most, only, prior)
        if prior is not None:
            prior.add(one.word)
        if known.depth:
            assert isinstance(known.backbone, DecoderBackbone)
            if one.number is None:
                known.backbone.next_states(torch.tensor([one.word], device=seen.device), cache, known.depth)
            cache.add(one.number or 0)
        words.append(one.word)
        states.append(one.state)
        fits.append(one.misfit <= known.limit)
        sure += one.sure
        tried += one.tried
        residual, expected = max((residual, expected), target.relative(one.misfit))
    done = len(words)
    whole = done == len(seen)
    certificate = Certificate(
        whole and all(fits) and sure == done,
        residual,
        expected,
        unique=sure == done,
        order_known=True,
        verdict=_verdict(fits, sure, done),
    )
    empty = seen.new_zeros(0, seen.shape[1])
    sentence = (*words, *[UNNAMED] * (len(seen) - done))
    proved = next((at for at, fit in enumerate(fits) if not fit), done)
    return Reading(
        sentence, sure, proved, torch.stack(states) if states else empty, certificate, tried, None if whole else done
    )


def _verdict(fits: Sequence[bool], sure: int, done: int) -> str:
    """Why the words are not proved; "" where they are."""
    if not all(fits):
        return f"no word tried at position {1 + list(fits).index(False)} reproduces the state that was sent"
    return "" if sure == done else f"at {counted(done - sure, 'positions')} a second word is equally likely"


class Target(NamedTuple):
    """States to reproduce, [..., D], and the error that is expected of each entry; sorted where channels are hidden."""

    state: Tensor
    error: Tensor
    ordered: bool

    @classmethod
    def of(cls, state: Tensor, known: Known, ordered: bool) -> Target:
        state = state.double()
        if ordered:
            state = state.sort(dim=-1).values
        return cls(state, known.error(state), ordered)

    def misfit(self, states: Tensor) -> Tensor:
        """[...]: the mean square of the distance of states [..., D], in units of the expected error."""
        states = states.double()
        states = states.sort(dim=-1).values if self.ordered else states
        return ((states - self.state) / self.error).square().mean(dim=-1)

    def relative(self, misfit: float) -> tuple[float, float]:
        """(the distance relative to the state, what is expected of it), of the mean square `misfit`."""
        expected = float(self.error.norm() / self.state.norm().clamp(min=1e-30))
        return math.sqrt(misfit) * expected, expected


class Candidate(NamedTuple):
    """The likeliest word at a place. sure: whether no other one that was tried is about as likely. number: among those
    tried last, None if it was tried before."""

    word: int
    state: Tensor
    misfit: float
    sure: bool
    tried: int
    number: int | None = None


def _best(
    seen: Tensor,
    target: Target,
    known: Known,
    cache: PromptCache,
    place: int,
    most: int,
    only: int | None,
    prior: Prior | None,
) -> Candidate:
    """The candidate that comes closest to the target, tried in the order of the guide until one fits. Under noise the
    most probable of so many candidates."""
    device, width = seen.device, len(seen)
    log = None if prior is None else prior.log
    words, states = torch.zeros(0, dtype=torch.long, device=device), seen.new_zeros(0, width)
    misfits, size = seen.new_zeros(0, dtype=torch.float64), FIRST
    new, listed = states, words
    while True:
        if only is not None:
            listed = torch.tensor([only], device=device)
        elif known.depth:
            listed = _guided(seen, known, place, words, states, size, log)
        elif len(listed) < min(len(words) + size, most):
            count = most if len(words) else LARGEST
            ordered = target.state.to(seen)
            listed = (
                known.nearest_unordered(ordered, place, count)
                if target.ordered
                else known.nearest(seen, place, count, log)
            )
        order = listed[~torch.isin(listed, words)][: min(size, most - len(words))]
        if not len(order):
            break
        if known.depth:
            assert isinstance(known.backbone, DecoderBackbone)
            new = known.backbone.next_states(order, cache, known.depth)
        else:
            new = known.states_of(order, place)
        words, states = torch.cat([words, order]), torch.cat([states, new.to(states)])
        misfits = torch.cat([misfits, target.misfit(new)])
        fits = bool(misfits.min() <= known.limit) and (not known.sigma or len(words) >= UNPROVED)
        if only is not None or len(words) >= most or fits:
            break
        size = min(2 * size, LARGEST)
    fit = -0.5 * width * misfits
    at = int((fit if log is None else fit + log[words]).argmax())
    last = at - (len(words) - len(new))
    odds = torch.softmax(fit, dim=0)
    return Candidate(
        int(words[at]), states[at], float(misfits[at]), float(odds[at]) > SURE, len(words), last if last >= 0 else None
    )


def _guided(
    seen: Tensor, known: Known, place: int, words: Tensor, states: Tensor, size: int, log: Tensor | None
) -> Tensor:
    """Words behind a cut deeper than 0, the likeliest first, at least `size` of them untried.

    words, states: those tried in this context. They correct the guide; many of them, some far off, replace it. log: of
    each word's probability without the state, None if it is not used.
    """
    guide, offset = known.rest if place else known.first, 0.0
    assert guide is not None
    if len(words) >= RELEARNED:
        if len(words) < 2 * RELEARNED:
            return known.sample
        guide = Guide.learn(states, words, known.embedding, known.sigma)
    elif len(words):
        offset = guide.offset(words, states)
    return guide.likeliest(guide.whitened(seen), len(words) + size, offset, 0.0 if log is None else log.to(seen))


def _moments(rows: Tensor) -> Tensor:
    """[V, 4] of rows [V, D]: mean, deviation, largest and least entry."""
    return torch.stack([rows.mean(dim=1), rows.std(dim=1), rows.amax(dim=1), rows.amin(dim=1)], dim=1)


@dataclass
class _Whole:
    """The words [N] of an encoder's text as far as they are known, their states [N, D] and each one's misfit [N].

    sure: at which places no other word that was tried is as likely. tried: texts whose states were computed."""

    known: Known
    target: Target
    words: Tensor
    states: Tensor
    misfit: Tensor
    sure: list[bool]
    tried: int = 0

    def states_of(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts [B, N]: their states and misfits."""
        self.tried += len(texts)
        known = self.known
        parts = [states_at(known.backbone, part, [known.depth])[known.depth] for part in texts.split(LARGEST)]
        states = torch.cat(parts)
        return states, self.target.misfit(states)

    def take(self, words: Tensor) -> bool:
        """Takes other words if their states are closer in sum; whether they are."""
        [states], [misfit] = self.states_of(words[None])
        if not (closer := bool(misfit.sum() < self.misfit.sum())):
            return False
        self.words, self.states, self.misfit = words, states, misfit
        return closer

    def change(self, place: int, others: Tensor) -> bool:
        """Takes the best of other words at one place; whether it is another one."""
        others = torch.cat([self.words[place : place + 1], others[others != self.words[place]]])
        texts = self.words.repeat(len(others), 1)
        texts[:, place] = others
        states, misfits = self.states_of(texts)
        total = misfits.sum(dim=1)
        best = int(total.argmin())
        self.sure[place] = float(torch.softmax(-0.5 * states.shape[-1] * total, dim=0)[best]) > SURE
        if best:
            self.words, self.states, self.misfit = texts[best].clone(), states[best], misfits[best]
        return best > 0

    @property
    def costs(self) -> int:
        """How many states were computed."""
        return self.tried * len(self.words)

    @property
    def fits(self) -> bool:
        """Whether rounding alone explains the distance of all states; never told under noise."""
        return not self.known.sigma and bool((self.misfit <= self.known.limit).all())


def _read_whole(seen: Tensor, known: Known, deadline: Deadline, hidden: Tensor | None) -> Reading:
    """All words at once, as long as the states come closer to those sent."""
    guide, size = known.rest, len(seen)
    assert guide is not None
    before, after = (torch.tensor(part, dtype=torch.long, device=seen.device) for part in known.fixed)
    free = range(len(before), size - len(after))
    goal = guide.whitened(seen)
    target = Target.of(seen if hidden is None else hidden, known, hidden is not None)
    words = torch.cat([before, *(guide.likeliest(goal[place], 1) for place in free), after])
    infinite = seen.new_full((size,), math.inf, dtype=torch.float64)
    whole = _Whole(known, target, words, seen, infinite, [False] * size)
    whole.take(words)
    cut = False
    for moved in _inverted(seen, words, known):
        if whole.fits or (cut := deadline.over()):
            break
        whole.take(torch.cat([before, moved[free.start : free.stop], after]))
    if not cut:
        cut = _by_words(whole, guide, goal, free, deadline)
    fits = (whole.misfit <= known.limit).tolist()
    certain = sum(whole.sure) + size - len(free) if known.sigma else sum(fits)
    residual, expected = target.relative(float(whole.misfit.max()))
    certificate = Certificate(
        all(fits) and certain == size,
        residual,
        expected,
        unique=certain == size,
        order_known=True,
        verdict=_verdict(fits, certain, size),
    )
    proved = size if all(fits) else 0  # every state depends on every word
    return Reading(
        tuple(whole.words.tolist()), certain, proved, whole.states, certificate, whole.tried, 0 if cut else None
    )


def _by_words(whole: _Whole, guide: Guide, goal: Tensor, free: range, deadline: Deadline) -> bool:
    """Changes all words together by the guide, then one by one, until nothing comes closer; whether it was stopped.

    goal: [N, D], the whitened states sent. free: the places whose words are not fixed."""
    known, count = whole.known, CHANGES
    for _ in range(SWEEPS):
        if whole.fits or whole.costs > COMPUTED:
            return False
        if deadline.over():
            return True
        offsets = guide.whitened(whole.states) - guide.expected[whole.words]
        moved = whole.words.clone()
        for place in free:
            moved[place] = guide.likeliest(goal[place], 1, offsets[place])[0]
        if whole.take(moved):
            continue
        changed = False
        for place in sorted(free, key=lambda place: -float(whole.misfit[place])):
            if (not known.sigma and whole.misfit[place] <= known.limit) or whole.costs > COMPUTED:
                continue
            if deadline.over():
                return True
            offset = guide.whitened(whole.states[place]) - guide.expected[whole.words[place]]
            changed |= whole.change(place, guide.likeliest(goal[place], count, offset))
        if not changed:
            if known.sigma or count >= min(WIDEST, len(guide.expected)):
                break
            count *= 4
    return False


def _inverted(seen: Tensor, words: Tensor, known: Known) -> Iterator[Tensor]:
    """The words [N] nearest to vectors that L-BFGS moves, from those of `words` on, so that the blocks' output for them
    comes closer to `seen` [N, D] in the guide's metric."""
    backbone, guide = known.backbone, known.rest
    assert guide is not None
    metric = (guide.whiten / guide.spread[:, None]).to(seen)
    layers, places = backbone.layers()[: known.depth], backbone.positions((len(seen),))
    z = states_at(backbone, words[None], [0])[0].clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [z], max_iter=LOOK, max_eval=LOOK, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=0.0,
        tolerance_change=0.0,
    )  # fmt: skip

    def loss() -> Tensor:
        with torch.enable_grad():
            out = run_blocks(layers, backbone.read, Stream(z, 0, places.rotary, places.bias), None)
            value = ((out[0] - seen) @ metric).square().mean()
            [z.grad] = torch.autograd.grad(value, [z])
        return value.detach()

    unchanged = 0
    for _ in range(EVALUATIONS // LOOK):
        optimiser.step(loss)
        rows = z.detach()[0]
        moved = torch.stack([known.nearest(row, place, 1)[0] for place, row in enumerate(rows)])
        unchanged = unchanged + 1 if torch.equal(moved, words) else 0
        if unchanged == UNCHANGED or not bool(rows.isfinite().all()):
            return
        words = moved
        yield words


# --- what the server learns on public text ---------------------------------------------------------------------------


REPLACED, SINGLE, CHECKED = 0.4, 1024, 1
"""Share of the words that are replaced at random in a copy of the public text, so that rare words are seen too; words
tried alone, for the guide of first words; public texts on which the rounding is measured."""


@torch.no_grad()
def study(
    backbone: TextBackbone,
    public: Sequence[Sentence],
    depths: Sequence[int],
    fixed: tuple[Sentence, Sentence],
    seed: int,
) -> dict[int, Known]:
    """depth -> what the server knows of the states there, without noise, from public texts."""
    chance, device = torch.Generator().manual_seed(seed), next(backbone.parameters()).device
    embedding = backbone.inner.get_input_embeddings().weight.detach()
    states: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    copies: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    words, replaced = list[Tensor](), list[Tensor]()
    for sentence in public:
        ids = torch.tensor(sentence)
        other = torch.where(
            torch.rand(len(ids), generator=chance) < REPLACED,
            torch.randint(len(embedding), (len(ids),), generator=chance),
            ids,
        )
        both = states_at(backbone, torch.stack([ids, other]).to(device), depths)
        for depth, z in both.items():
            states[depth].append(z[0, 1:])
            copies[depth].append(z[1, 1:])
        words.append(ids[1:])
        replaced.append(other[1:])
    frequency = _frequency(torch.cat(words), len(embedding)).to(device)
    some = torch.randperm(len(embedding), generator=chance)[:SINGLE]
    alone = states_at(backbone, some[:, None].to(device), depths)
    every, known = torch.cat([*words, *replaced]).to(device), dict[int, Known]()
    for depth in depths:
        rows = torch.cat(states[depth])
        whole = torch.cat([rows, *copies[depth]])
        if not all(bool(part.isfinite().all()) for part in (whole, alone[depth])):
            raise SitusError(
                f"{backbone.name}: the hidden states at depth {depth} contain NaN or infinity", field="model"
            )
        first = Guide.learn(alone[depth][:, 0], some.to(device), embedding) if depth else None
        rest = Guide.learn(whole, every, embedding) if depth else None
        typical = float(rows.double().square().mean(dim=1).sqrt().median())
        part = Known(
            backbone, depth, first, rest, rows, float(rows.double().std()), typical, 0.0, frequency, fixed=fixed
        )
        known[depth] = replace(part, rounding=_rounding(part, public))
    return known


def _frequency(words: Tensor, vocabulary: int) -> Tensor:
    """[V]: the probability of each word of a text [n]. Words that it lacks share what the number of different words
    says about new words (Witten and Bell)."""
    counts = torch.bincount(words, minlength=vocabulary).double()
    different = int((counts > 0).sum())
    return (counts + different / vocabulary) / (len(words) + different)


def _rounding(known: Known, public: Sequence[Sentence]) -> float:
    """The largest error of a computation over public texts: the client's, of a whole text, against the server's."""
    backbone, worst = known.backbone, torch.finfo(known.rows.dtype).eps
    for sentence in sorted(public, key=len)[-CHECKED:]:
        ids = torch.tensor(sentence, device=known.rows.device)
        sent = states_at(backbone, ids[None], [known.depth])[known.depth][0].double()
        if isinstance(backbone, DecoderBackbone) and known.depth:
            cache, rows = PromptCache(), list[Tensor]()
            for word in ids:
                rows.append(backbone.next_states(word.repeat(FIRST), cache, known.depth)[0])
                cache.add(0)
            computed = torch.stack(rows).double()
        else:
            computed = states_at(backbone, ids.repeat(FIRST, 1), [known.depth])[known.depth][0].double()
        error = (computed - sent) / (sent.abs() + known.typical)
        worst = max(worst, float(error.square().mean(dim=1).sqrt().max()))
    return worst


def under_noise(known: Known, sigma: float, wire: float) -> Known:
    """The same under noise of deviation sigma and numbers rounded by `wire`, relative to each entry."""
    guides = [
        None if guide is None or not sigma else _noisy(guide, sigma / guide.spread)
        for guide in (known.first, known.rest)
    ]
    first, rest = (new or old for new, old in zip(guides, (known.first, known.rest), strict=True))
    return replace(known, sigma=sigma, wire=wire, first=first, rest=rest)


def _noisy(guide: Guide, sigma: Tensor) -> Guide:
    """A guide for states with noise: its covariance is larger. sigma: [D], in units of the spread."""
    covariance = torch.linalg.inv(guide.whiten @ guide.whiten.T) + torch.diag(sigma.square())
    whiten = torch.linalg.cholesky(torch.linalg.inv(covariance))
    change = torch.linalg.solve(guide.whiten, whiten)
    return replace(guide, whiten=whiten, expected=guide.expected @ change.float())


# --- permuted rows and columns ---------------------------------------------------------------------------------------


@torch.no_grad()
def find_rows(seen: Tensor, known: Known) -> Tensor:
    """Gathers the rows [N, D] of a text at depth 0, sent in an unknown order, into the order of the text.

    A row has the state of a word at its place: no other place has a word that comes as near."""
    return assign(-torch.stack([known.distance(seen, place) for place in range(len(seen))])).to(seen.device)


ATTEMPTS = 4
"""Texts that may be read before the order of the channels is given up as unproved."""


class Columns(NamedTuple):
    """clear: [D], gathers the channels of what is sent into their own order. proved: whether recovered texts confirm
    it."""

    clear: Tensor
    proved: bool


@torch.no_grad()
def find_columns(
    hidden: Sequence[Tensor], known: Known, deadline: Deadline | None = None, *, rows_moved: bool = False
) -> Columns:
    """The order of the channels of states [N, D] of several texts. rows_moved: whether rows are in an unknown order."""
    rows = known.rows.double()
    if known.sigma:
        rows = rows + known.sigma * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).to(rows)
    seen = torch.cat([text[1:] for text in hidden]).double()
    seen = seen if len(seen) > 1 else torch.cat([*hidden]).double()  # one row has no deviation
    order = recover_columns(seen[None].cpu(), rows[None].cpu(), rows[:0].cpu()).q.to(rows.device)
    sent, computed, proved = list[Tensor](), list[Tensor](), False
    for text in sorted(hidden, key=len)[-ATTEMPTS:]:
        if proved or (deadline is not None and deadline.over()):
            break
        if rows_moved:
            text = text[find_rows(text[:, order.argsort()], known)]
        reading = read_prompt(text[:, order.argsort()], known, deadline, hidden=None if known.sigma else text)
        if known.sigma and sent and reading.certificate.holds:  # by an order that comes from other texts
            proved = True
        count = len(reading.states) if known.sigma else reading.proved
        if not count or proved:
            continue
        sent.append(text[:count].double())
        computed.append(reading.states[:count].double())
        left, right = torch.cat(sent), torch.cat(computed)
        size = known.error(left).mean(dim=1, keepdim=True)
        order = assign(-torch.cdist((left / size).T, (right / size).T).square()).to(rows.device)
        if not known.sigma:  # under noise an assignment makes wrong words fit too
            target = Target.of(left[:, order.argsort()], known, ordered=False)
            proved = bool((target.misfit(right) <= known.limit).all())
    return Columns(order.argsort(), proved)
