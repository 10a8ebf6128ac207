"""Audits of gradients from a model of words and a file of sentences: what Python users and the command line call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from situs.audit.client import DTYPES
from situs.audit.deadline import Deadline
from situs.audit.defences import DEFENCES, Defence, Gradients, Step, create_defence
from situs.audit.evidence import evidence
from situs.audit.text.attack import find_sentences, reads_embedding, refusal
from situs.audit.text.found import UNNAMED, Found, Read, pick, score
from situs.audit.text.result import Row, TextAudit, parse_text_limit
from situs.audit.text.rows import named_words
from situs.audit.text.victim import Sentence, TextVictim, is_tied, open_text_victim, text_gradients, word_weight
from situs.config import Checked
from situs.errors import SitusError, counted, verb
from situs.files import read_lines
from situs.limits import Count
from situs.progress import tracked
from situs.results import Provenance

SENT, WITHHELD = "word gradient sent", "word gradient withheld"
"""The two rows of every text audit: whether the gradient of the word embedding is among what is sent."""

ABOUT = {
    SENT: "the gradient of the word embedding is sent with all others; where the head does not share its weight, the "
    "rows that are not zero are the words of the batch",
    WITHHELD: "the gradient of the word embedding stays with the client, and all others are sent",
}

TEXT_DEFENCES = ("bf16", "clip", "clip-batch", "fp16", "int8", "noise", "none")
"""The defences that a client of a model of words may have; the others are about places of patches."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TextConfig(Checked):
    """Which sentences, how the audited step is made, and what a gate allows."""

    count: Count | None = None
    """Sentences: the first of the file; by default 12, or as many as there are, in whole batches."""

    classes: Count = 2
    """Of an encoder that comes without a head."""

    batch: Count = 1
    """Sentences in the audited step."""

    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """The type gradients are sent in."""

    fail_above: str | None = None
    """A gate, as tokens=0.2. Exit status 3: some sentence is above; 4: not judged, which is no pass."""

    seed: int = 0
    """Of a new head, of masked words and of noise."""


COUNT = 12
"""Sentences of an audit, where nothing is said."""


def first_lines(texts: str | Path, count: int | None, batch: int, usual: int = COUNT) -> list[str]:
    """The first `count` sentences of a file in whole batches; None: about `usual`, or as many as there are."""
    lines = read_lines(Path(texts), "texts")
    held = f"texts={texts}: holds {counted(len(lines), 'sentences')}"
    if count is None:
        if len(lines) < batch:
            raise SitusError(f"{held}, and a batch is {batch}", field=("texts", "batch"))
        return lines[: min(max(usual // batch, 1), len(lines) // batch) * batch]
    if count % batch:
        said = f"{counted(count, 'sentences')} {verb(count, 'do')} not make whole batches of {batch}"
        raise SitusError(said, field=("count", "batch"))
    if len(lines) < count:
        raise SitusError(f"{held}, and {count} are asked for", field="count")
    return lines[:count]


AWARE = {True: "MJP known", False: "MJP not known"}
"""Of a model that hides places: whether the attacker knows that it does, and with which vector."""


class _Part(NamedTuple):
    """One row: what is done, whether the word embedding's gradient is sent, and whether the attacker knows of hidden
    places."""

    label: str
    defence: Defence
    sent: bool
    aware: bool


def audit_texts(
    model: Any,
    texts: str | Path,
    *,
    defences: Sequence[str | Defence] = ("none",),
    deadline: Deadline | None = None,
    keep: Callable[[TextAudit], Any] | None = None,
    facts: Mapping[str, Any] = NOTHING,
    **options: Any,
) -> TextAudit:
    """What a model's training gradients give away of sentences, with or without the words' own.

        audit = audit_texts("minilm/", "sentences.txt", batch=4, count=8)
        situs.pages.publish(audit, "audit")
        assert not audit.judge(tokens=0.2).passed

    model: a folder of transformers with its tokeniser (BERT, GPT-2, Llama and its like). texts: a file with one
    sentence a line. defences: none, noise=σ, clip=C, clip-batch=C, fp16, bf16, int8. options: fields of `TextConfig`,
    and what `open_model` is asked. When the deadline's time is over, or on Ctrl-C, what is there is returned and says
    so. keep: is given the audit after every batch. facts: more of them for its files.
    """
    names = {field.name for field in fields(TextConfig)}
    config = TextConfig(**{name: value for name, value in options.items() if name in names})
    limit = None if config.fail_above is None else parse_text_limit(config.fail_above)
    made = _made(defences)
    lines = first_lines(texts, config.count, config.batch)
    asked = {name: value for name, value in options.items() if name not in names}
    victim = open_text_victim(model, classes=config.classes, seed=config.seed, **asked)
    parts = _parts(made, hides=victim.method is not None)
    sentences = victim.coded(lines)
    most = victim.backbone.num_tokens
    full = sum(len(sentence) == most for sentence in sentences)
    said = f"{counted(full, 'sentences')} {verb(full, 'fill')} the model's {most} tokens"
    cut = {"length": f"{said}; what is longer is cut, and the rest is not in the step"} if full else {}
    origin = {
        "model": victim.backbone.name,
        "texts": f"{len(lines)} of {Path(texts).name}",
        "learned": victim.task,
        "gradients": f"{config.precision}, batch {config.batch}",
        "seed": config.seed,
        **evidence(victim.backbone),
        **facts,
    }
    start = TextAudit(
        victim.backbone.name,
        [Row(part.label) for part in parts],
        {part.label: _about(part) for part in parts},
        [f"sentence {number + 1}" for number in range(len(lines))],
        config.batch,
        {},
        limit=limit,
        notes={"what is learned": victim.task, **cut, **victim.notes},
        provenance=Provenance(origin),
    )
    return _Run(victim, sentences, parts, config, deadline or Deadline(), keep).go(start)


def _made(defences: Sequence[str | Defence]) -> list[Defence]:
    made = [create_defence(each) for each in dict.fromkeys(defences)]
    if not made:
        raise SitusError(field="defences", value="", allowed="one or more of them")
    for defence in made:
        if defence.name not in TEXT_DEFENCES:
            known = ", ".join(name for name in DEFENCES if name in TEXT_DEFENCES)
            raise SitusError(field="defences", value=defence.name, allowed=f"one of {known} for texts")
    return made


def _parts(made: Sequence[Defence], *, hides: bool) -> list[_Part]:
    """The rows: a defence is never reported without an attacker who knows it, and so with MJP."""
    rows = product(made, (True, False) if hides else (None,), (True, False))
    return [_Part(label_of(defence, sent, aware), defence, sent, bool(aware)) for defence, aware, sent in rows]


def label_of(defence: Defence, sent: bool, aware: bool | None) -> str:
    """What a row is called. aware: whether the attacker knows of hidden places; None: none are."""
    words = [*([] if defence.name == "none" else [defence.label]), *([] if aware is None else [AWARE[aware]])]
    return ", ".join([*words, SENT if sent else WITHHELD])


def _about(part: _Part) -> str:
    added = "" if part.defence.name == "none" else f"{part.defence.about}; the attacker knows its settings. "
    if part.aware:
        added += "The attacker knows that places are hidden, and their vector. "
    return f"{added}{ABOUT[SENT if part.sent else WITHHELD]}"


class _Run:
    """All rows on the first batch, then all on the second, until all is done or the time is over."""

    def __init__(
        self,
        victim: TextVictim,
        sentences: Sequence[Sentence],
        parts: Sequence[_Part],
        config: TextConfig,
        deadline: Deadline,
        keep: Callable[[TextAudit], Any] | None,
    ) -> None:
        self.victim, self.sentences, self.parts = victim, sentences, parts
        self.config, self.deadline, self.keep = config, deadline, keep
        self._held: tuple[Any, Gradients] | None = None
        self._last, self._read = Found(), not is_tied(victim.backbone)

    def go(self, audit: TextAudit) -> TextAudit:
        batch, count = self.config.batch, len(self.sentences) // self.config.batch
        try:
            for number in tracked(range(count), "batches"):
                span = slice(number * batch, (number + 1) * batch)
                for at, part in enumerate(tracked(self.parts, "")):
                    if self.deadline.spent():
                        return self._ended(audit)
                    left = sum(other.sent or self._read for other in self.parts)  # a twin takes no time
                    here = sum(other.sent or self._read for other in self.parts[at:])
                    self.deadline.begin(max((count - number - 1) * left + here, 1))
                    audit = self._add(audit, at, part, span)
                if self.keep is not None:
                    self.keep(audit)
            self.deadline.closed = True
        except KeyboardInterrupt:
            self.deadline.interrupt()
            self.deadline.closed = True
        return self._ended(audit)

    def _ended(self, audit: TextAudit) -> TextAudit:
        rows = [
            replace(
                row,
                status="stopped",
                partial=row.partial or f"{len(row.reads)} of {counted(len(audit.names), 'sentences')}",
            )
            if row.reads and (row.partial is not None or len(row.reads) < len(audit.names))
            else row
            for row in audit.rows
        ]
        cut = any(row.status in ("not_run", "stopped") for row in rows)
        audit = replace(audit, rows=rows, stopped=self.deadline.reason if cut else None)
        if self.keep is not None:
            self.keep(audit)
        return audit

    def _add(self, audit: TextAudit, at: int, part: _Part, span: slice) -> TextAudit:
        """The audit with one more batch of one row."""
        truth, before = self.sentences[span], audit.rows[at]
        labels = [number % max(self._classes(), 1) for number in range(span.start, span.stop)]
        self.deadline.say(f"{part.label}: gradients of {', '.join(audit.names[span][:1])} and the batch behind it")
        upload = self._upload(part, truth, labels, span.start)
        begun, twin = time.monotonic(), not part.sent and not self._read
        found = self._last if twin else self._find(part, upload)
        if part.sent:  # else the row without the word embedding's gradient is an attack on the same numbers
            exact = reads_embedding(self.victim.backbone, upload) and not any(self._noise(part))
            self._read = exact or "matched" in found.facts or bool(named_words(self.victim.backbone, upload))
        self._last = found
        if (said := refusal(self.victim.backbone, set(upload))) and not (found.words or before.reads):
            row = replace(before, status="refused", reasons=list(dict.fromkeys([said, found.reason or said])))
            return replace(audit, rows=[*audit.rows[:at], row, *audit.rows[at + 1 :]])
        reads = score(audit.names[span], truth, found)
        reads = self._picked(part, upload, truth, labels, span.start, reads)
        took = time.monotonic() - begun
        why = [found.reason] if found.reason and not all(read.whole for read in reads) else []
        row = replace(
            before,
            status="done",
            reads=[*before.reads, *reads],
            facts=[*before.facts, dict(found.facts)],
            reasons=[*before.reasons, *why],
            partial=before.partial or found.partial,
            seconds=None if twin or before.seconds is None else before.seconds + took,
        )
        ids = {word for sentence in (*truth, *found.sentences) for word in sentence} - {UNNAMED}
        shown = dict(zip(sorted(ids), self.victim.shown(sorted(ids)), strict=True))
        return replace(audit, rows=[*audit.rows[:at], row, *audit.rows[at + 1 :]], shown={**audit.shown, **shown})

    def _picked(
        self,
        part: _Part,
        upload: Gradients,
        truth: Sequence[Sentence],
        labels: Sequence[int],
        first: int,
        reads: Sequence[Read],
    ) -> list[Read]:
        """What was not found whole, with whether one who has candidates picks it. Of MJP nobody knows what is drawn."""
        if self.victim.method is not None:
            return list(reads)
        open_ = [number for number, read in enumerate(reads) if not read.whole]
        silent = {name: 0.0 for name in ("sigma", "multiplier") if hasattr(part.defence, name)}
        given = {"labels": labels, "bound": replace(part.defence, **silent), "seed": self.config.seed + first}
        sure = pick(self.victim, upload, truth, open_, deadline=self.deadline, **given)
        return [read._replace(picked=sure.get(number)) for number, read in enumerate(reads)]

    def _find(self, part: _Part, upload: Gradients) -> Found:
        hidden = self.victim.tokeniser.mask_token_id if self.victim.task == "masked words" else None
        unknown = self.victim.unknown if part.aware else None
        noise, steps = self._noise(part)
        given = {"noise": noise, "steps": steps, "hidden": hidden, "unknown": unknown, "deadline": self.deadline}
        return find_sentences(self.victim.backbone, upload, self.config.batch, **given)

    def _noise(self, part: _Part) -> tuple[float, bool]:
        """The deviation of the noise, and whether numbers come in even steps."""
        step = part.defence.step(Step(self.config.batch, dtype=DTYPES[self.config.precision]))
        return part.defence.noise_level(step.batch), step.dtype == torch.int8

    def _upload(self, part: _Part, truth: Sequence[Sentence], labels: Sequence[int], first: int) -> Gradients:
        """What is sent; made once for both rows of a defence."""
        key = (part.defence, first)
        if self._held is None or self._held[0] != key:
            self._held = None  # before the next is made: whole gradients fill any memory
            sent = text_gradients(
                self.victim,
                truth,
                labels=labels,
                defence=part.defence,
                dtype=DTYPES[self.config.precision],
                seed=self.config.seed + first,
            )
            self._held = (key, sent)
        sent = self._held[1]
        withheld = word_weight(self.victim.backbone)
        return sent if part.sent else {name: g for name, g in sent.items() if name != withheld}

    def _classes(self) -> int:
        return int(getattr(self.victim.backbone.model.config, "num_labels", 0))
