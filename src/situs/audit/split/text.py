"""Audits of split learning on text: what the server reads of the prompts whose states it receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, cast

import torch
from torch import Tensor

from situs.audit.deadline import Deadline
from situs.audit.run import Card, run
from situs.audit.split.prompts import (
    BFLOAT16,
    Columns,
    Known,
    Reading,
    find_columns,
    find_rows,
    read_prompt,
    states_at,
    study,
    under_noise,
)
from situs.audit.split.stage import counted_words, open_base
from situs.audit.text.recovered import UNNAMED, Read
from situs.audit.text.result import TextAudit, TextFinding, cells, finding_of, numbers_of, reasons, verdict_of
from situs.audit.text.victim import Sentence
from situs.audit.victim import evidence
from situs.backbones.base import Backbone
from situs.backbones.hf.text import TextBackbone, open_tokeniser
from situs.config import checks_arguments
from situs.data.sampler import epoch_order
from situs.data.tokeniser import tokeniser_files
from situs.errors import SitusError, counted
from situs.files import read_lines
from situs.findings import Fact, Finding, Remark
from situs.hub import local_folder
from situs.limits import check_value
from situs.locks.equivariance.sample import row_leak, row_refusal
from situs.locks.veil import PERMUTED, Veil, check_veil, noise_unit, parse_veils
from situs.models import open_model
from situs.models.data import AnyModel, opened
from situs.results import Provenance, Summary, Table, percent

PROMPTS = "prompts"
"""The attack."""

CURVE = ("none", *(f"noise={sigma}" for sigma in (0.01, 0.1, 0.5, 1, 2, 4, 8)))
"""The settings of a curve, the weakest first. Words differ in all channels, so they are read under more noise than
patches."""

ALLOWED = "none, noise=σ or curve (noise of several strengths), because the data are texts"
"""The defences of texts, for a reader."""

COUNT, PUBLIC, LONGEST = 24, 200, 128
"""The default numbers of attacked texts, of public texts from the same file, and of words in each."""

THREAT = {
    "who": "the server of split inference or training, honest but curious: it follows the protocol, and analyses all "
    "that it receives",
    "sees": "the hidden state of every word at the cut, separately for each text, and thus how many words a text has",
    "knows": "the model (if a base model is given: only this base, the model before fine-tuning), the "
    "tokeniser, the number of blocks that the client keeps, the defence and its strength, the number format of the "
    "states, and public texts of the same kind",
    "does not know": "the texts, the key of permuted columns, and the order of permuted rows",
    f"attack {PROMPTS}": "the attacker runs candidates for each word through the client's blocks, the likeliest "
    "first. A candidate is accepted if its hidden state equals the state that was sent, up to "
    "rounding and noise. The attack does not use the true texts",
    "not attacked here": "a server that knows no model close to the client's; recovering the key from the "
    "locked and the public blocks (see `situs audit lock`); words that the server's answer reveals",
}

REFUSED = (
    "if the rows (tokens) of a text are permuted, this audit attacks them only at depth 0. At other depths, the words "
    "may still be readable"
)
"""Why rows are not attacked behind blocks, which is no protection."""


class Row(NamedTuple):
    """One setting: how many blocks the client keeps, and what it does to the features."""

    depth: int
    veil: Veil

    def __str__(self) -> str:
        return f"depth {self.depth}" if str(self.veil) == "none" else f"depth {self.depth}, {self.veil}"

    @property
    def about(self) -> str:
        kept = "the embedding" if not self.depth else f"the embedding and {counted(self.depth, 'blocks')}"
        known = "the server knows the defence and its strength"
        hides = (
            "sends its states unprotected" if str(self.veil) == "none" else f"hides the states by {self.veil}; {known}"
        )
        return f"the client keeps {kept}, and {hides}"


def parse_depths(depths: Sequence[str | int], blocks: int) -> tuple[int, ...]:
    """Numbers of blocks that the client keeps. half, last: half of the blocks; all but the last."""
    named = {"half": blocks // 2, "last": blocks - 1}
    parsed = [named.get(str(depth), int(depth) if str(depth).isdecimal() else -1) for depth in depths]
    for depth, number in zip(depths, parsed, strict=True):
        if not 0 <= number < blocks:
            raise SitusError(field="depth", value=depth, allowed=f"half, last, or 0 to {blocks - 1}")
    if not parsed:
        raise SitusError(field="depth", value="", allowed=f"half, last, or 0 to {blocks - 1}")
    return tuple(dict.fromkeys(parsed))


def text_veils(defences: Sequence[str], permute: Sequence[str]) -> tuple[Veil, ...]:
    """As `parse_veils`. curve: none, and noise of several strengths."""
    for text in defences:
        if str(text).partition("=")[0] not in ("none", "noise", "curve"):
            raise SitusError(field="defences", value=str(text), allowed=ALLOWED)
    return parse_veils(defences, permute, CURVE)


class More(TypedDict, total=False):
    """base: the model before fine-tuning, which the server knows instead of the client's. wire: bf16: the states are
    rounded to it. longest: words of a text; the rest is not sent. device: where the model runs. keep: called with the
    audit now and then. facts: further facts, by name, for its files."""

    base: AnyModel
    wire: Literal["own", "bf16"]
    longest: int
    device: str
    keep: Callable[[PromptAudit], object]
    facts: Mapping[str, Any]


@checks_arguments("texts")
def audit_prompts(
    model: AnyModel,
    texts: str | Path,
    *,
    depth: Sequence[str | int] = ("0",),
    defences: Sequence[str] = ("none",),
    permute: Sequence[str] | None = None,
    count: int = COUNT,
    public: int = PUBLIC,
    seed: int = 0,
    deadline: Deadline | None = None,
    **more: Unpack[More],
) -> PromptAudit:
    """Measures what the server of split learning reads of texts, for each cut and each defence.

    model: a language model's folder with its tokeniser. texts: a file with one text per line. depth:
    how many blocks the client keeps: numbers, half, last (all but one). defences: none, noise=σ, curve. permute: rows,
    columns; by default all that the model supports. count, public: texts that are attacked, and others that the server
    has, chosen at random. more: see `More`.

    >>> audit = audit_prompts("gpt2", "texts.txt", depth=["0", "half"], count=8)  # doctest: +SKIP
    """
    wire, longest = more.get("wire", "own"), more.get("longest", LONGEST)
    for name, number, least in (("count", count, 1), ("public", public, 2), ("longest", longest, 2)):
        check_value(name, number, f">= {least}")
    named = isinstance(model, str | Path)
    where: dict[str, Any] = {"device": more["device"]} if "device" in more else {}
    source = opened(open_model(model, seed=seed, any_weights=True, **where) if named else model, seed)
    if not isinstance(source.backbone, TextBackbone):
        raise SitusError(f"{source.name}: takes no texts, but {Path(texts).name} contains texts", field="data")
    if permute is None:
        permute = [
            name
            for name in PERMUTED
            if name != "rows" or (row_refusal(source.backbone) or row_leak(source.backbone)) is None
        ]
    veils = text_veils(defences, permute)
    for veil in veils:
        check_veil(veil, source.backbone)
    depths = parse_depths(depth, source.backbone.depth)
    known = source if "base" not in more else open_base(more["base"], source, seed, _shape, any_weights=True)
    read_by = None if source.input is None else source.input.text.tokeniser
    with tokeniser_files(local_folder(str(read_by or model))) as folder:
        tokeniser = open_tokeniser(folder)
    lines = read_lines(Path(texts), "data")
    every = _coded(source.backbone, tokeniser, lines, longest)
    mixed = [every[number] for number in epoch_order(seed, 0, len(every)).tolist()]
    if len(mixed) < public + count:
        raise SitusError(
            f"{Path(texts).name}: has {counted(len(mixed), 'different texts')} of two or more words, but "
            f"{public + count} are needed: {public} public texts for the server, and {count} texts to attack",
            field=("public", "count"),
        )
    rows = [Row(number, veil) for number in depths for veil in veils]
    about = {
        "model": source.name, "texts": f"{count} of {Path(texts).name}", "public texts": public, "wire": wire,
        "longest": longest, "seed": seed, **evidence(source.backbone), **more.get("facts", {}),
    }  # fmt: skip
    if known is not source:
        about["the server knows"] = f"{known.name}, the model before fine-tuning"
    start = PromptAudit(
        [], source.name, [f"text {number + 1}" for number in range(count)], 1,
        rows=rows, about={str(row): row.about for row in rows}, provenance=Provenance(about, things="texts"),
    )  # fmt: skip
    unit = noise_unit(source) if any(veil.kind == "noise" for veil in veils) else 1.0
    attacked, others = mixed[public : public + count], mixed[:public]
    scenario = Prompts(
        source.backbone,
        cast(TextBackbone, known.backbone),
        tokeniser,
        attacked,
        others,
        rows,
        start,
        wire == "bf16",
        seed,
        unit,
    )
    return run(scenario, deadline, more.get("keep"))


def _shape(backbone: Backbone) -> str:
    kind = type(getattr(backbone, "inner", backbone.model)).__name__
    words = backbone.input.words
    return f"is a {kind} of {backbone.depth} blocks, {backbone.dim} channels and {words} words"


def _coded(backbone: TextBackbone, tokeniser: Any, lines: Sequence[str], longest: int) -> list[Sentence]:
    """The texts of two or more words of their own as ids, cut to the longest that is sent."""
    coded = tokeniser(list(lines), truncation=True, max_length=min(longest, backbone.num_tokens))["input_ids"]
    known = backbone.inner.get_input_embeddings().weight.shape[0]
    if (highest := max(map(max, filter(None, coded)), default=0)) >= known:
        raise SitusError(
            f"the tokeniser gives the token id {highest}, but the model's vocabulary has only {known} tokens",
            field="data",
        )
    fixed = sum(map(len, fixed_words(tokeniser)))
    return [*dict.fromkeys(tuple(ids) for ids in coded if len(ids) >= 2 + fixed)]  # no public text is attacked


def fixed_words(tokeniser: Any) -> tuple[Sentence, Sentence]:
    """The words that the tokeniser puts before and behind every text."""
    empty, one = (tuple(ids) for ids in tokeniser(["", "a"])["input_ids"])
    count = next((at for at, (x, y) in enumerate(zip(empty, one, strict=False)) if x != y), len(empty))
    return empty[:count], empty[count:]


@dataclass
class Prompts:
    """The scenario of split learning on text. public_model: what the server knows, usually `backbone`.

    start: the report without findings. rounded: whether numbers are sent in bf16. unit: of σ at depth 0, the one of
    generation; deeper, where nothing is generated, the unit is the standard deviation of the public texts' states.
    shown: the words that a page needs, by id."""

    name: ClassVar[str] = PROMPTS

    backbone: TextBackbone
    public_model: TextBackbone
    tokeniser: Any
    sentences: Sequence[Sentence]
    public: Sequence[Sentence]
    rows: Sequence[Row]
    start: PromptAudit
    rounded: bool
    seed: int
    unit: float
    shown: dict[int, str] = field(default_factory=dict)
    _known: dict[int, Known] = field(default_factory=dict)

    @staticmethod
    def cards() -> Iterator[Card]:
        needs = (
            "the hidden state of every word at the cut; public texts; the attacker knows the model and its tokeniser"
        )
        proves = "that each accepted word reproduces the state that was sent. The other words may still be readable"
        paper = "Hidden No More (Thomas et al., ICML 2025)"
        difference = (
            "the likeliest words for a hidden state are tried first. What is likely is learned on public text. There "
            "is no fixed threshold: a word is accepted if rounding and noise can explain the difference between its "
            "hidden state and the state that was sent. The order of permuted columns is found once for all texts"
        )
        yield Card(PROMPTS, Prompts.name, needs, proves, paper, difference)

    def planned(self) -> Iterator[TextFinding]:
        return (finding_of(str(row), len(self.sentences), attack=PROMPTS) for row in self.rows)

    def trials(self) -> Iterator[Finding | _Trial]:
        for row in self.rows:
            if row.veil.rows and row.depth:
                why = [Remark("refused", REFUSED)]
                yield finding_of(str(row), len(self.sentences), "refused", remarks=why, attack=PROMPTS)
            else:
                yield _Trial(self, row)

    def report(self, findings: Mapping[Hashable, Finding], stopped: str | None) -> PromptAudit:
        known: Mapping[Hashable, Any] = findings
        rows = [known[PROMPTS, str(row)] for row in self.rows]
        return replace(self.start, findings=rows, stopped=stopped, shown=dict(self.shown))

    def known(self, row: Row, deadline: Deadline) -> Known:
        """What the server knows of a row's states; all depths are studied in one pass."""
        if not self._known:
            deadline.say(f"states of {counted(len(self.public), 'public texts')}")
            depths = list(dict.fromkeys(one.depth for one in self.rows))
            self._known = study(self.public_model, self.public, depths, fixed_words(self.tokeniser), self.seed)
            if 0 in depths:
                self._known[0] = replace(self._known[0], scale=self.unit)
        plain = self._known[row.depth]
        wire = BFLOAT16 if self.rounded else 0.0
        sigma = row.veil.strength * plain.scale if row.veil.kind == "noise" else 0.0
        return under_noise(plain, sigma, wire)

    @torch.no_grad()
    def sent(self, row: Row, number: int, scale: float) -> Tensor:
        """What the client sends of a text, [N, D]."""
        device = next(self.backbone.parameters()).device
        ids = torch.tensor(self.sentences[number], device=device)[None]
        z = states_at(self.backbone, ids, [row.depth])[row.depth]
        count, width = z.shape[1:]
        order = counted_words(self.seed, 9)("columns", width).argsort(stable=True) if row.veil.columns else None
        drawn = row.veil.draw(counted_words(self.seed, row.depth, number), (1, count, width), 0, (count,))
        drawn = {name: value.to(device) for name, value in drawn.items()}
        hidden, _, _ = row.veil.apply(
            z, None, drawn, prefix=0, scale=scale, channels=None if order is None else (order, order.argsort())
        )
        return (hidden.to(torch.bfloat16).to(z.dtype) if self.rounded else hidden)[0]


@dataclass
class _Trial:
    """One row: a turn reads one text. columns: the order of channels, once it is solved."""

    scenario: Prompts
    row: Row
    at: int = 0
    ended: bool = False
    columns: Columns | None = None
    known: Known | None = None
    reads: list[Read] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    facts: list[Mapping[str, Fact]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return len(self.scenario.sentences)

    def turn(self, deadline: Deadline, left: int) -> Iterator[TextFinding]:  # noqa: ARG002
        scenario, row = self.scenario, self.row
        deadline.begin(1)  # texts in turn share the time; half a text is of little use
        if self.known is None:
            self.known = scenario.known(row, deadline)
        begun = time.monotonic()
        if row.veil.columns and self.columns is None:
            deadline.say(f"{row}: finding the order of the columns")
            every = [scenario.sent(row, number, self.known.scale) for number in range(self.total)]
            self.columns = find_columns(every, self.known, deadline, rows_moved=row.veil.rows)
        deadline.say(f"{row}: {scenario.start.names[self.at]}")
        seen = scenario.sent(row, self.at, self.known.scale)
        clear = seen if self.columns is None else seen[:, self.columns.clear]
        clear = clear[find_rows(clear, self.known)] if row.veil.rows else clear
        reading, truth = read_prompt(clear, self.known, deadline), scenario.sentences[self.at]
        if self.columns is not None and not self.columns.proved:
            unproved = reading.certificate._replace(fits=False, verdict="no text confirms the order of the columns")
            reading = reading._replace(certificate=unproved, proved=0)
        self.seconds += (taken := time.monotonic() - begun)
        before, after = self.known.fixed  # which everybody knows
        inner = slice(len(before), len(truth) - len(after))
        words, truth = reading.words[inner], truth[inner]
        known = {*words} - {UNNAMED}
        name = scenario.start.names[self.at]
        self.reads.append(Read(name, truth, words, tuple(word in known for word in truth)))
        self.readings.append(reading)
        sure = {"proved": reading.proved, "certain": reading.certain, "tried": reading.tried}
        order = {} if self.columns is None else {"columns_proved": int(self.columns.proved)}
        misfit = {"residual": reading.certificate.residual, "expected": reading.certificate.expected}
        self.facts.append({"seconds": round(taken, 3), **sure, **misfit, **order})
        ids = sorted({*truth, *known})
        scenario.shown |= dict(zip(ids, map(str, scenario.tokeniser.convert_ids_to_tokens(ids)), strict=True))
        self.at += 1
        yield self._finding()

    def _finding(self) -> TextFinding:
        """The finding of all texts so far."""
        remarks, asked = list[Remark](), self.total
        certificates = [reading.certificate for reading in self.readings]
        open_ends = [certificate.verdict for certificate in certificates if not certificate.holds]
        if open_ends:
            most = max(open_ends, key=open_ends.count) or "the search was stopped"
            remarks.append(
                Remark("gap", f"for {counted(len(open_ends), 'texts')}, not every word is proved right: {most}")
            )
        cut = sum(reading.cut is not None for reading in self.readings)
        status = "done" if (whole := len(self.reads) - cut) == asked else "stopped"
        if status == "stopped":
            remarks.append(Remark("stopped", f"{whole} of {counted(asked, 'texts')}"))
        finding = finding_of(str(self.row), asked, status, [*self.reads], remarks, [*self.facts], self.seconds, PROMPTS)
        return replace(finding, certificates=certificates)


HEADER = ("client sends", "words", "words right", "whole texts", "proved", "seconds a text")


def _read(finding: TextFinding) -> str:
    share = finding.shares["tokens"]
    return (
        f"{finding.defence}: the server reads {finding.whole} of {counted(finding.count, 'texts')} word for word, and "
        f"{percent(share) if share else 'none'} of all words."
    )


@dataclass(frozen=True)
class PromptAudit(TextAudit):
    """What a server reads of texts: a finding for each of `rows`."""

    file: ClassVar[str] = "split-audit"

    rows: Sequence[Row] = field(default=(), kw_only=True)

    @property
    def verdict(self) -> str:
        """What was read in each setting, and what that does not prove."""
        unread = "For words that this attack did not read, the result is inconclusive: another attack may read them."
        return verdict_of(self, _read, unread)

    def summary(self) -> Summary:
        """The verdict and a row for each setting; below them what the gate says."""
        title = f"{self.model}: what a server reads of {counted(len(self.names), 'texts')}"
        tables = [Table(title, HEADER, [_cells(finding) for finding in self.findings])]
        if rows := reasons(self):
            tables.append(
                Table(
                    "Texts that were not read, or whose reading is not proved, and why", (*HEADER[:1], "reason"), rows
                )
            )
        ruling = self.ruling
        return Summary(self.verdict, tuple(tables), () if ruling is None else (ruling.sentence,))

    def numbers(self) -> dict[str, Any]:
        """Every text's numbers; no words."""
        return {
            "attack": PROMPTS,
            "threat": self.threat.name,
            "threat_model": THREAT,
            "verdict": self.verdict,
            "stopped": self.stopped,
            "gate": None if self.ruling is None else self.ruling.to_json(),
            "settings": [numbers_of(finding) for finding in self.findings],
        }


def _cells(finding: TextFinding) -> list[Any]:
    """A row of the table."""
    if not finding.attacked:
        return [finding.defence, None, None, "not attacked", None, None]
    count, proved = finding.count, sum(certificate.holds for certificate in finding.certificates)
    each = None if finding.seconds is None else f"{finding.seconds / max(count, 1):.2f}"
    _, tokens, _, right, *_ = cells(finding)
    return [finding.defence, tokens, right, f"{finding.whole} of {count}", f"{proved} of {count}", each]
