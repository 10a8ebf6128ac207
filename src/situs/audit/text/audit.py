"""Audits of gradients, from a language model and a file of sentences: what Python users and the command line call."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from situs.audit.attacks.base import rounded_off
from situs.audit.attacks.solver import SPARE, Span
from situs.audit.captured import Captured, Sent, open_uploads
from situs.audit.client import EPS, StepConfig, split_options
from situs.audit.deadline import Deadline, StoppedError
from situs.audit.defences import DEFENCES, Defence, Gradients, NoDefence, Step, Together, create_defence
from situs.audit.run import FINDS, Card, run
from situs.audit.text.causal import causal_sentences, masked_words
from situs.audit.text.crafted import CRAFTED, craft_text, crafted_sentences, plan_of
from situs.audit.text.encoder import block_weights, encoder_sentences
from situs.audit.text.layers import ONE, qkv_weights, read_names
from situs.audit.text.recovered import UNNAMED, Read, Recovered, pick, score
from situs.audit.text.result import METRICS, NAME, TextAudit, TextFinding, finding_of
from situs.audit.text.rows import Matched, match_rows, named_words, place_weight
from situs.audit.text.victim import Sentence, TextVictim, is_tied, open_text_victim, text_gradients, word_weight
from situs.audit.victim import evidence
from situs.backbones.hf.text import DecoderBackbone, TextBackbone, TextEncoder
from situs.config import checks_arguments
from situs.errors import SitusError, counted, first_line, verb
from situs.files import read_lines
from situs.findings import ACTIVE, SERVERS, Fact, Finding, Remark
from situs.gate import parse_limit
from situs.models.data import AnyModel
from situs.results import Provenance

SENT, WITHHELD = "word gradient sent", "word gradient withheld"
"""The two rows of every text audit: whether the gradient of the word embedding is among what is sent."""

ABOUT = {
    SENT: "all gradients are sent, including that of the word embedding. If the head does not share the word "
    "embedding, the non-zero rows of this gradient show the words of the batch",
    WITHHELD: "the gradient of the word embedding is withheld, and all other gradients are sent",
}

TEXT_DEFENCES = ("bf16", "clip", "clip-batch", "fedavg", "fedavg-adam", "fp16", "int8", "noise", "none")
"""The defences for language models; the others concern positions of patches, or batches and dropout."""

UPLOAD_DEFENCES = (*TEXT_DEFENCES, "exclude")
"""What a client may have done to a captured upload."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


COUNT, CLASSES = 12, 2
"""The default numbers of sentences, and of classes for a model without a classifier."""


def first_lines(texts: str | Path, count: int | None, batch: int, usual: int = COUNT) -> list[str]:
    """The first `count` sentences of a file in whole batches; None: about `usual`, or as many as there are."""
    lines = read_lines(Path(texts), "texts")
    have = counted(len(lines), "sentences")
    if count is None:
        if len(lines) < batch:
            raise SitusError(f"texts={texts}: has only {have}, but a batch needs {batch}", field=("texts", "batch"))
        return lines[: min(max(usual // batch, 1), len(lines) // batch) * batch]
    if count % batch:
        reason = f"{counted(count, 'sentences')} cannot be divided into batches of {batch}"
        raise SitusError(reason, field=("count", "batch"))
    if len(lines) < count:
        raise SitusError(f"texts={texts}: has only {have}, but count={count}; give a lower count", field="count")
    return lines[:count]


AWARE = {True: "MJP known", False: "MJP not known"}
"""Of a model trained with MJP: whether the attacker is informed, that is, knows MJP and its vector."""


class Row(NamedTuple):
    """One row: the defence, whether the word embedding's gradient is sent, and whether the attacker knows of hidden
    positions."""

    label: str
    defence: Defence
    sent: bool
    aware: bool


@checks_arguments()
def audit_texts(
    model: AnyModel,
    texts: str | Path,
    *,
    defences: Sequence[str | Defence] = ("none",),
    deadline: Deadline | None = None,
    keep: Callable[[TextAudit], Any] | None = None,
    facts: Mapping[str, Any] = NOTHING,
    upload: Any = None,
    sent: Sent | None = None,
    **options: Any,
) -> TextAudit:
    """Measures what gradients give away about sentences, with and without that of the word embedding.

    model: a folder of transformers with its tokeniser (BERT, GPT-2, Llama and its like). texts: a file with one
    sentence per line. defences: none, noise=σ, clip=C, clip-batch=C, fp16, bf16, int8, or several joined by "+".
    options: fields of `situs.audit.StepConfig`, and arguments of `open_model`. When the deadline's time is over, or on
    Ctrl-C, the audit so far is returned and says so. deadline: `situs.audit.Deadline(seconds=60)`. keep: called with
    the audit now and then while it grows. facts: further facts, by name, for its files.

    upload: attack captured uploads instead, as in `audit_gradients`, each of one batch; texts holds the sentences
    behind them, in their order. sent: what they are. defences: then what the client did; also exclude=PATTERN and
    fedavg=k:RATE.

    >>> audit = situs.audit_texts("bert", "texts.txt", count=1)
    >>> page = situs.publish(audit, "audit")
    """
    config, open_args = split_options(StepConfig, options)
    limit = None if config.fail_above is None else parse_limit(config.fail_above, METRICS)
    if sent is not None and upload is None:
        raise SitusError(
            f"sent={sent}: applies only to a captured upload, but none is given; give it with `upload`, or do not "
            "set `sent`",
            field=("sent", "upload"),
        )
    if upload is not None and config.server != StepConfig.server:
        reason = (
            f"server={config.server}: applies only if Situs computes the step. A captured upload was computed with the "
            "weights of the given model; remove this option"
        )
        raise SitusError(reason, field=("server", "upload"))
    chosen = _created(defences, TEXT_DEFENCES if upload is None else UPLOAD_DEFENCES)
    lines = [] if upload is not None else first_lines(texts, config.count, config.batch)
    victim = open_text_victim(model, classes=config.classes or CLASSES, seed=config.seed, **open_args)
    rows, captured, refused = _rows(chosen, hides=victim.method is not None), list[Captured](), None
    if upload is not None:
        captured = open_uploads(upload, victim.method or victim.backbone, chosen, sent)
        lines = first_lines(texts, len(captured) * config.batch, config.batch)
        whole = word_weight(victim.backbone) in captured[0].gradients
        stated = list(dict.fromkeys([*chosen, NoDefence()]))  # what is stated need not be true
        rows = [row for row in _rows(stated, hides=victim.method is not None) if row.sent is whole]
    if config.server == "active":
        victim, refused = _chosen(victim, config.batch)
    sentences = victim.coded(lines)
    most = victim.backbone.num_tokens
    full = sum(len(sentence) == most for sentence in sentences)
    filled = f"{counted(full, 'sentences')} {verb(full, 'fill')} the model's {most} tokens"
    cut = {"length": f"{filled}; longer sentences are cut there, and the rest is not audited"} if full else {}
    origin = {
        "model": victim.backbone.name,
        "texts": f"{len(lines)} of {Path(texts).name}",
        "learned": victim.task,
        "gradients": f"batch {config.batch}",
        **({"uploads": ", ".join(f"{one.name} ({one.sent})" for one in captured)} if captured else {}),
        "seed": config.seed,
        **evidence(victim.backbone),
        **facts,
    }
    start = TextAudit(
        [],
        victim.backbone.name,
        [f"sentence {number + 1}" for number in range(len(lines))],
        config.batch,
        about={row.label: _about(row) for row in rows},
        limit=limit,
        threat=SERVERS[config.server],
        notes={"what is learned": victim.task, **cut, **victim.notes},
        provenance=Provenance(origin, things="sentences"),
    )
    return run(Texts(victim, sentences, rows, config, start, refused, captured), deadline, keep)


def _chosen(victim: TextVictim, batch: int) -> tuple[TextVictim, str | None]:
    """The victim with weights that a server chose, without need of the word embedding's gradient; or as it is, and why
    no weights are chosen for it."""
    trained = {name for name, parameter in victim.backbone.named_parameters() if parameter.requires_grad}
    sent = trained - {word_weight(victim.backbone)}
    reason = plan_of(victim, sent, batch)
    return (victim, reason) if isinstance(reason, str) else (craft_text(victim, sent, batch), None)


def _created(defences: Sequence[str | Defence], known: Sequence[str]) -> list[Defence]:
    chosen = [create_defence(name) for name in dict.fromkeys(defences)]
    if not chosen:
        raise SitusError(field="defences", value="", allowed="one or more names")
    for part in (part for defence in chosen for part in _parts(defence)):
        if part.name not in known:
            allowed = ", ".join(name for name in DEFENCES if name in known)
            raise SitusError(field="defences", value=part.name, allowed=f"one of {allowed} for texts")
    return chosen


def _parts(defence: Defence) -> tuple[Defence, ...]:
    return defence.parts if isinstance(defence, Together) else (defence,)


def _before_noise(defence: Defence) -> Defence:
    """What is done to gradients before noise is added."""
    if isinstance(defence, Together):
        return replace(defence, parts=tuple(map(_before_noise, defence.parts)))
    return replace(defence, **{name: 0.0 for name in ("sigma", "multiplier") if hasattr(defence, name)})


def _rows(chosen: Sequence[Defence], *, hides: bool) -> list[Row]:
    """All rows. MJP is never reported without an informed attacker."""
    rows = product(chosen, (True, False) if hides else (None,), (True, False))
    return [Row(label_of(defence, sent, aware), defence, sent, bool(aware)) for defence, aware, sent in rows]


def label_of(defence: Defence, sent: bool, aware: bool | None) -> str:
    """The name of a row. aware: whether the attacker knows of hidden positions; None: none are hidden."""
    words = [*([] if defence.name == "none" else [defence.label]), *([] if aware is None else [AWARE[aware]])]
    return ", ".join([*words, SENT if sent else WITHHELD])


def _about(row: Row) -> str:
    about = "; ".join(part.about for part in _parts(row.defence))
    added = "" if row.defence.name == "none" else f"{about}; the attacker knows the settings of the defence. "
    if row.aware:
        added += (
            "The attacker knows that positions are hidden, and knows the vector that replaces the hidden positions. "
        )
    return f"{added}{ABOUT[SENT if row.sent else WITHHELD]}"


@dataclass
class Texts:
    """The scenario of sentences. start: the report without findings. refused: why an active server's attack does not
    apply. captured: uploads that were captured, instead of those computed here. shown: the words that a page needs, by
    id."""

    name: ClassVar[str] = "texts"

    victim: TextVictim
    sentences: Sequence[Sentence]
    rows: Sequence[Row]
    config: StepConfig
    start: TextAudit
    refused: str | None = None
    captured: Sequence[Captured] = ()
    shown: dict[int, str] = field(default_factory=dict)
    _sent: tuple[object, Gradients] | None = None
    _trials: list[_Trial] = field(default_factory=list)

    @staticmethod
    def cards() -> Iterator[Card]:
        needs = (
            "gradients of the first two blocks; the attacker knows the weights before the step, the "
            "tokeniser, the batch size and the noise"
        )
        difference = (
            "the attack also reads words from the rows of the word and position tables. For an encoder "
            "it solves for the sentences with the first block's attention, instead of searching"
        )
        yield Card(NAME, "texts", needs, FINDS, "DAGER (Petrov et al., NeurIPS 2024)", difference, "benchmarks/text.py")
        needs = (
            "gradients of the MLPs, of LoRA's products, of biases or of a classifier; the attacker knows the weights, "
            "because it chose them"
        )
        proves = "that each recovered sentence was in the batch. Another attack may still read more"
        paper = "Decepticons (Fowl et al., ICLR 2023, arXiv 2201.12675)"
        difference = (
            "one vector encodes a whole sentence, so the attack needs no clustering. The model checks "
            "the recovered sentences"
        )
        yield Card(CRAFTED, "texts", needs, proves, paper, difference, "benchmarks/active_text.py", ACTIVE)

    def planned(self) -> Iterator[TextFinding]:
        return (finding_of(row.label, len(self.sentences), attack=self.attack) for row in self.rows)

    @property
    def attack(self) -> str:
        """The name of the attack."""
        return CRAFTED if self.config.server == "active" else NAME

    def trials(self) -> Sequence[_Trial]:
        """One for each row; a row without the words' gradient follows the same row with it."""
        for row in self.rows:
            twin = None if row.sent or self.captured else self._trials[-1]
            tells = self.attack == NAME and not is_tied(self.victim.backbone)
            self._trials.append(_Trial(self, row, twin, tells))
        return self._trials

    def report(self, findings: Mapping[Hashable, Finding], stopped: str | None) -> TextAudit:
        known: Mapping[Hashable, Any] = findings
        rows = [known[self.attack, row.label] for row in self.rows]
        return replace(self.start, findings=rows, stopped=stopped, shown=dict(self.shown))

    def turns(self, trial: _Trial) -> int:
        """Batches that are still to be attacked, this one included; rows that repeat another take no time."""
        slow = [other for other in self._trials if other.twin is None or other.twin.tells]
        here = sum(self._trials.index(other) >= self._trials.index(trial) for other in slow)
        return max(here + (trial.total - trial.at - 1) * len(slow), 1)

    def labels(self, span: slice) -> list[int]:
        """A class for each sentence of a batch, where classes are learned."""
        classes = int(getattr(self.victim.backbone.model.config, "num_labels", 0))
        return [number % max(classes, 1) for number in range(span.start, span.stop)]

    def upload(self, row: Row, span: slice) -> Gradients:
        """What is sent; computed once for both rows of a defence."""
        if self.captured:
            return self.captured[span.start // self.config.batch].under(row.defence)[0]
        key = (row.defence, span.start)
        if self._sent is None or self._sent[0] != key:
            self._sent = None  # before the next is made: whole gradients fill any memory
            sent = text_gradients(
                self.victim,
                self.sentences[span],
                labels=self.labels(span),
                defence=row.defence,
                seed=self.config.seed + span.start,
            )
            self._sent = (key, sent)
        sent = self._sent[1]
        withheld = word_weight(self.victim.backbone)
        return sent if row.sent else {name: g for name, g in sent.items() if name != withheld}


@dataclass
class _Trial:
    """The attack on one row, batch by batch. twin: the same row with the words' gradient, where it is not sent here.

    tells: whether that gradient added something in the last batch. cut: the sentences of batches whose attack was
    stopped.
    """

    texts: Texts
    row: Row
    twin: _Trial | None
    tells: bool
    at: int = 0
    ended: bool = False
    cut: int = 0
    recovered: Recovered = field(default_factory=Recovered)
    reads: list[Read] = field(default_factory=list)
    facts: list[Mapping[str, Fact]] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    seconds: float | None = 0.0

    @property
    def total(self) -> int:
        return len(self.texts.sentences) // self.texts.config.batch

    def turn(self, deadline: Deadline, left: int) -> Iterator[TextFinding]:  # noqa: ARG002
        if self.texts.refused is not None:
            self.at = self.total
            yield self._refused([self.texts.refused])
            return
        deadline.begin(self.texts.turns(self))
        texts, batch = self.texts, self.texts.config.batch
        span = slice(self.at * batch, (self.at + 1) * batch)
        names, truth = texts.start.names[span], texts.sentences[span]
        deadline.say(f"{self.row.label}: gradients of the batch that starts with {names[0]}")
        try:
            with deadline.enforced():
                upload, begun = texts.upload(self.row, span), time.monotonic()
                if self.twin is None or self.twin.tells:
                    self.recovered = self._attack(upload, deadline)
                else:  # the same attack on the same numbers
                    self.recovered, self.seconds = self.twin.recovered, None
        except StoppedError:  # cut off without a result
            return
        self.at += 1
        refused = refusal(texts.victim.backbone, set(upload)) if texts.attack == NAME else None
        if refused and not (self.recovered.words or self.reads):
            yield self._refused([refused, self.recovered.reason or refused])
            return
        reads = self._picked(upload, span, score(names, truth, self.recovered), deadline)
        if self.recovered.reason and not all(read.whole for read in reads):
            self.gaps.append(self.recovered.reason)
        self.reads += reads
        self.facts.append(dict(self.recovered.facts))
        self.cut += batch if self.recovered.partial else 0
        self.seconds = None if self.seconds is None else self.seconds + time.monotonic() - begun
        ids = sorted({word for sentence in (*truth, *self.recovered.sentences) for word in sentence} - {UNNAMED})
        texts.shown |= dict(zip(ids, texts.victim.shown(ids), strict=True))
        yield self._finding()

    def _refused(self, reasons: Sequence[str]) -> TextFinding:
        remarks = [Remark("refused", reason) for reason in dict.fromkeys(reasons)]
        asked = len(self.texts.sentences)
        return finding_of(self.row.label, asked, "refused", remarks=remarks, attack=self.texts.attack)

    def _finding(self) -> TextFinding:
        """The finding of all batches so far."""
        asked, remarks = len(self.texts.sentences), [Remark("gap", reason) for reason in dict.fromkeys(self.gaps)]
        status = "done" if (whole := len(self.reads) - self.cut) == asked else "stopped"
        if status == "stopped":
            within = self.recovered.partial if self.total == 1 else None
            remarks.append(Remark("stopped", within or f"{whole} of {counted(asked, 'sentences')}"))
        facts, attack = [*self.facts], self.texts.attack
        return finding_of(self.row.label, asked, status, [*self.reads], remarks, facts, self.seconds, attack)

    def _attack(self, upload: Gradients, deadline: Deadline) -> Recovered:
        victim, (noise, steps) = self.texts.victim, self._noise()
        if self.texts.attack == CRAFTED:
            return crafted_sentences(
                victim, upload, self.texts.config.batch, noise=noise, steps=steps, deadline=deadline
            )
        recovered = find_sentences(
            victim.backbone,
            upload,
            self.texts.config.batch,
            noise=noise,
            steps=steps,
            hidden=victim.tokeniser.mask_token_id if victim.task == "masked words" else None,
            unknown=victim.unknown if self.row.aware else None,
            deadline=deadline,
            step=self.row.defence.step(Step(self.texts.config.batch)),
        )
        exact = reads_embedding(victim.backbone, upload) and not (noise or steps)
        self.tells = exact or "matched" in recovered.facts or bool(named_words(victim.backbone, upload))
        return recovered

    def _picked(self, upload: Gradients, span: slice, reads: Sequence[Read], deadline: Deadline) -> list[Read]:
        """The reads; of sentences not recovered whole, whether an attacker picks them among candidates. Not under MJP,
        whose draws nobody knows, nor of captured uploads, whose labels and masked words nobody knows."""
        texts = self.texts
        if texts.victim.method is not None or texts.captured:
            return list(reads)
        sure = pick(
            texts.victim,
            upload,
            texts.sentences[span],
            [number for number, read in enumerate(reads) if not read.whole],
            labels=texts.labels(span),
            bound=_before_noise(self.row.defence),
            seed=texts.config.seed + span.start,
            deadline=deadline,
        )
        return [read._replace(picked=sure.get(number)) for number, read in enumerate(reads)]

    def _noise(self) -> tuple[float, bool]:
        """The deviation of the noise, and whether numbers come in even steps."""
        config, defence = self.texts.config, self.row.defence
        step = defence.step(Step(config.batch))
        rounding = max((upload.under(defence)[1] for upload in self.texts.captured), default=0.0)
        return max(defence.noise_level(step.batch), rounding), step.dtype == torch.int8


# ---------------------------------------------------------------------------------------------------------------------
# The attack `sentences` on one upload: which of its forms applies, and with which words.


def refusal(backbone: TextBackbone, sent: set[str]) -> str | None:
    """Why the attack does not apply to gradients of these names, which says nothing about privacy; None where it
    does."""
    if backbone.depth < 2:
        return "the attack tests sentences with the second block, but the model has only one block"
    if isinstance(backbone, DecoderBackbone) and backbone.num_classes and backbone.depth < 3:
        return (
            "the attack needs the second block. In this causal classifier, the second block is the last one, "
            "and its gradient does not separate the tokens"
        )
    needed = [name for depth in (1, 2) for name in qkv_weights(backbone, depth)]
    plain = needed[0] in sent  # beside LoRA's products alone, the other layers are not needed
    needed += block_weights(backbone) if isinstance(backbone, TextEncoder) and plain else []
    if lacking := [name for name in needed if not read_names(name, sent)]:
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
    step: Step = ONE,
) -> Recovered:
    """What an attacker who knows the weights and the size of the batch recovers from an upload: first by the spans of
    the blocks' gradients, which are exact, then, for what they leave open, by matching rows of words with rows of
    places.

    noise: its deviation, which the attacker knows. steps: whether numbers come in even steps (int8). hidden: the id of
    masked words. unknown: [D], the vector that MJP gives words instead of their position, for an informed attacker.
    step: the client's, with its local steps.
    """
    deadline = deadline or Deadline()
    try:
        recovered = _by_spans(backbone, upload, batch, noise, steps, hidden, unknown, deadline, step)
    except (np.linalg.LinAlgError, torch.linalg.LinAlgError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = f"the equations of the blocks' gradients cannot be solved: {first_line(error)}"
        recovered = Recovered(named_words(backbone, upload), reason=reason)
    if len(recovered.sentences) == batch and not any(UNNAMED in sentence for sentence in recovered.sentences):
        return recovered
    if word_weight(backbone) not in upload or deadline.over() or (step.adam and is_tied(backbone)):
        return recovered  # rows of a tied head under Adam are ratios of one size, whatever they hold
    deadline.say("comparing the rows of words with the rows of positions")
    rows = match_rows(backbone, upload, batch, steps=steps, deadline=deadline)
    return _joined(recovered, rows, batch, place_weight(backbone))


def _by_spans(
    backbone: TextBackbone,
    upload: Gradients,
    batch: int,
    noise: float,
    steps: bool,
    hidden: int | None,
    unknown: torch.Tensor | None,
    deadline: Deadline,
    step: Step,
) -> Recovered:
    """What the spans of the blocks' gradients tell, with the words that the embedding's gradient names."""
    words = usable_words(backbone, upload, noise or float(steps))  # rounding to even steps may make a row zero
    sure = named_words(backbone, upload)
    if reason := refusal(backbone, set(upload)):
        return Recovered(sure, reason=reason)
    if step.adam and step.local_steps > 1:
        return Recovered(
            sure, reason=f"the gradients of {step.local_steps} steps of Adam cannot be recovered: {RATIOS}"
        )
    if step.adam:
        step = replace(step, dtype=next(iter(upload.values())).dtype)
        upload = undone(upload)
        read = [read_names(weight, upload)[0] for depth in (1, 2) for weight in qkv_weights(backbone, depth)]
        if not all(Span.exists(upload[name], SPARE) for name in read):
            return Recovered(
                sure, reason=f"the gradient is so much larger than Adam's ε that rounding hides ε: {RATIOS}"
            )
    weights = [name for depth in (1, 2) for name in qkv_weights(backbone, depth)]
    names = [name for weight in weights for name in read_names(weight, upload)]
    even = steps or (noise > 0 and all(noise >= rounded_off(upload[name], upload[name].dtype) for name in names))
    if isinstance(backbone, DecoderBackbone):
        recovered = causal_sentences(backbone, upload, batch, words, deadline, even, step)
        return replace(recovered, words=recovered.words | sure)
    assert isinstance(backbone, TextEncoder)
    recovered = encoder_sentences(backbone, upload, batch, words, deadline, even, unknown, step)
    recovered = replace(recovered, words=recovered.words | sure)
    if hidden is None or any(
        UNNAMED in sentence for sentence in recovered.sentences
    ):  # what stands around it must be known
        return recovered
    named = masked_words(backbone, upload, recovered.sentences, hidden)
    return replace(
        recovered, sentences=tuple(named), words=recovered.words | {word for sentence in named for word in sentence}
    )


RATIOS = "each number of the upload is a gradient divided by its magnitude"
"""What an upload of Adam's steps is."""

KNOWN = 1e-3
"""The largest relative error of a gradient that counts as known from a step of Adam."""


def undone(upload: Gradients) -> Gradients:
    """The gradients g behind a first step of Adam, u = g / (|g| + ε); NaN where u is so near 1 that its rounding hides
    them, in each row that attacks leave out."""
    gradients = Gradients()
    for name, u in upload.items():
        left = 1 - u.double().abs()
        lost = left < torch.finfo(u.dtype).eps / 2 / KNOWN
        gradients[name] = (EPS * u.double() / left).masked_fill(lost, torch.nan)
    return gradients


def _joined(recovered: Recovered, rows: Matched, batch: int, table: str | None) -> Recovered:
    """What the spans tell, with what rows of words and places add. table: the position table's name, None without."""
    words = recovered.words | rows.words | {word for word, _, _ in rows.tokens}
    facts = {**recovered.facts, "matched": len(rows.tokens), "noise_of_rows": rows.noise}
    if rows.cut:
        words_of_rows = counted(len(rows.tokens), "words")
        matched = f"finding {words_of_rows} by their rows in the gradients of the word and position embeddings"
        recovered = replace(recovered, partial=recovered.partial or matched)
    if not rows.tables:
        lacks = "the model has no position table" if table is None else f"the gradient of {table} is not sent"
        return replace(
            recovered,
            words=words,
            facts=facts,
            reason=_also(recovered, f"{lacks}, so there are no rows that give the positions of words"),
        )
    if not rows.tokens:
        reason = f"no row of a word matches the row of a position: the noise of the rows is {rows.noise:.2g}"
        return replace(recovered, words=words, facts=facts, reason=_also(recovered, reason))
    if batch > 1:
        reason = (
            f"the rows of the word and position tables gave {counted(len(rows.tokens), 'words')} with positions; the "
            "attack did not test which words belong to the same sentence"
        )
        placed = frozenset((word, place) for word, place, _ in rows.tokens)
        return replace(recovered, words=words, placed=placed, facts=facts, reason=_also(recovered, reason))
    spans = next(iter(recovered.sentences), ())
    length = max(len(spans), rows.length)
    before, after = (one + (UNNAMED,) * (length - len(one)) for one in (spans, rows.sentence))
    sentence = tuple(old if old != UNNAMED else new for old, new in zip(before, after, strict=True))
    open_ = f"{sentence.count(UNNAMED)} of {length} positions have no likely word"
    reason = (
        f"the rows of the word and position tables gave {counted(len(rows.tokens), 'words')} with positions; {open_}"
    )
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
