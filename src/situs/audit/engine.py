"""Images under attack: the scenario, what a client sends for them, and each attacker's trial.

What a model sends is made once for all attacks on it, for a group of uploads, and forgotten before the next: whole
gradients of many images fill any memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from situs.audit.attacks import ATTACKS
from situs.audit.attacks.base import Knowledge, Ready, Recovery, Refused, certificate_of
from situs.audit.captured import WeightRounding
from situs.audit.cases import Case, ImageFinding, TestSet
from situs.audit.client import check_inputs, least_likely, names_sent, upload_of
from situs.audit.deadline import Deadline, StoppedError
from situs.audit.defences import Defence, Gradients, Step, Together, blurred, method_of
from situs.audit.run import Card
from situs.audit.scores import (
    METRICS,
    Lpips,
    Scores,
    closer,
    denormalise,
    extend,
    facts_of,
    measure,
    measure_parts,
    pictures_of,
)
from situs.audit.stem import pictures_fed, reading_stem, recorded
from situs.errors import counted
from situs.findings import ACTIVE, HONEST, Certificate, Certificates, Fact, Finding, Kind, Metric, Remark, doubt_of
from situs.gate import BLIND, Report
from situs.methods.base import Batch, Method
from situs.methods.measured import HidesPlaces
from situs.results import Tone

GROUP = 8
"""The most uploads in memory at a time: as many as a search takes at once."""

GROUP_BYTES = 2**30
"""The most bytes of uploads in memory at a time; a single upload may be larger."""

SHOWN = 8
"""Recovered pictures of a case that a report keeps."""


@dataclass(frozen=True)
class Images:
    """The scenario of images: cases on a test set. make: (findings, what stopped them) -> the report."""

    name: ClassVar[str] = "images"

    cases: Sequence[Case]
    test: TestSet
    make: Callable[[list[ImageFinding], str | None], Any]
    step: Step = field(default_factory=Step)
    lpips: Lpips | None = None

    @staticmethod
    def cards() -> Iterator[Card]:
        for kind in ATTACKS.values():
            needs = "; ".join(filter(None, (kind.needs, f"knows {kind.knows}")))
            about = (needs, kind.proof(), kind.paper, kind.difference, kind.measured, ACTIVE if kind.active else HONEST)
            yield Card(kind.name, Images.name, *about)

    def planned(self) -> Iterator[ImageFinding]:
        return (case.finding("not_run") for case in self.cases if not case.fallback)

    def trials(self) -> Iterator[ImageFinding | _Trial]:
        return trials_of(self.cases, self.test, self.step, self.lpips)

    def report(self, findings: Mapping[Hashable, Finding], stopped: str | None) -> Any:
        known: Mapping[Hashable, Any] = findings
        return self.make([known[case] for case in self.cases if case in known], stopped)


@dataclass
class _UploadGroup:
    """The uploads that all trials on one client share: computed once, and freed before those of the next.

    size: how many at a time. holds: the client and the numbers of the uploads in it."""

    size: int = 1
    uploads: list[Gradients] = field(default_factory=list)
    holds: tuple[int, range] | None = None

    def get(self, trial: _Trial, deadline: Deadline, left: int) -> list[Gradients]:
        """Those of the trial's next turn; fewer, or none, where the time is over."""
        span, client = range(trial.at, min(trial.at + self.size, trial.total)), trial.client
        if self.holds == (id(client), span) and self.uploads:
            return self.uploads
        self.holds = id(client), span
        self.uploads.clear()  # the list is shared: the old ones are freed before the first new one is computed
        deadline.begin(left)  # many local steps take no more than an attack's share
        with suppress(StoppedError), deadline.enforced():
            for upload in span:
                if self.uploads and deadline.spent():
                    break
                deadline.say(f"{client.case.defence.label}: gradients of batch {upload + 1} of {trial.total}")
                self.uploads.append(client.upload(upload, deadline.over))
        return self.uploads


@dataclass
class Client:
    """What all cases on one upload share: the model as it is trained, and the gradients that attacks read of it."""

    case: Case
    test: TestSet
    step: Step
    wanted: set[str] | None = field(default_factory=set)
    """Names that some attack reads; None where one reads all."""

    def __post_init__(self) -> None:
        case = self.case
        self.plain_step, self.step = self.step, case.defence.step(self.step)
        self.method: Method = method_of(case.defence, case.model, self.step.seed)
        self.sent = names_sent(self.method, case.defence)
        self.captured = () if case.hardest else self.test.captured
        if self.captured:
            first, withheld = self.captured[0].gradients, case.defence.withheld(case.backbone)
            self.sent = {name: g.numel() for name, g in first.items() if name not in withheld}
            coarse = next((g.dtype for g in first.values() if g.dtype != torch.float32), None)
            self.step = self.step if coarse is None else replace(self.step, dtype=coarse)
        self.pixels = self.test.inputs("original" if isinstance(self.method, HidesPlaces) else case.trained_on)
        self.labels = least_likely(self.method, self.pixels) if case.hardest else self.test.labels
        self.stem = None if self.test.galleries else reading_stem(case.backbone)
        self.fed: dict[int, Tensor] = {}
        """By image, what the patch embedding was fed as a picture [C, H, W], where that is not the image."""

    def known(self, informed: bool, first: int = 0, count: int = 1) -> Knowledge:
        """What an attacker knows of `count` uploads from number `first` on."""
        step, (height, width) = self.step, self.pixels.shape[2:]
        labels = self.labels.view(-1, step.batch)[first : first + count] if step.labels_known else None
        plain = Knowledge(
            step=Step(step.batch, step.local_steps, step.dtype),
            labels=labels,
            size=(height, width),
            normalisation=self.test.normalisation if self.test.stored else None,
            first=first,
            public=self.test.public,
        )
        return replace(plain, defence=self.defence, step=step, method=self.method) if informed else plain

    @property
    def defence(self) -> Defence:
        """The defence as stated, with the rounding of captured weights."""
        rounding = max((upload.under(self.case.defence)[1] for upload in self.captured), default=0.0)
        return Together((self.case.defence, WeightRounding(rounding))) if rounding else self.case.defence

    def upload(self, number: int, stop: Callable[[], bool] = lambda: False) -> Gradients:
        """The gradients of one batch that some attack reads, as they are sent; see `upload_of`."""
        span = slice(number * self.step.batch, (number + 1) * self.step.batch)
        x, y = self.pixels[span], self.labels[span]
        check_inputs(x, y)
        ids = torch.arange(span.start, span.stop, device=x.device)
        with recorded(self.case.backbone, self.stem) as inputs:
            if not self.captured:
                sent = upload_of(self.method, Batch(x, ids, {"label": y}), self.step, self.case.defence, stop)
            else:
                sent, _ = self.captured[number].under(self.case.defence)
                sent = {name: g for name, g in sent.items() if name in self.sent}
                if self.stem is not None:
                    with torch.no_grad():
                        self.case.backbone(x)
        # A method that shuffles patches by itself is compared as its setting says.
        shuffled = isinstance(self.method, HidesPlaces) or self.case.trained_on != "original"
        fed = None if shuffled else pictures_fed(self.case.backbone, self.stem, inputs, x)
        if fed is not None:
            self.fed |= dict(zip(ids.tolist(), denormalise(fed, *self.test.normalisation), strict=True))
        return {name: g for name, g in sent.items() if self.wanted is None or name in self.wanted}

    @property
    def size(self) -> int:
        """Bytes of an upload."""
        return 4 * sum(count for name, count in self.sent.items() if self.wanted is None or name in self.wanted)


def conclude(
    case: Case,
    scores: Scores,
    facts: Sequence[dict[str, Fact]],
    reasons: Mapping[Kind, str],
    noise: float,
    control: Callable[[], Certificates] | None,
    shown: Tensor | None = None,
) -> ImageFinding:
    """The finding of a case, with its remarks, certificates and any doubt about them.

    reasons: by kind of remark, "" for none. noise, control: see `doubt_of`.
    """
    remarks = [Remark(kind, text) for kind, text in reasons.items() if text]
    closed, status = case.attack.closed_form, "stopped" if reasons.get("stopped") else "done"
    certificates = [certificate_of(fact) for fact in facts] if closed else []
    finding = case.finding(
        status,
        range(len(facts)),
        scores=scores,
        certificates=certificates,
        remarks=remarks,
        facts=list(facts),
        shown=shown,
    )
    try:
        doubt = doubt_of(finding.caveat, certificates, noise, control) if closed else None
    except StoppedError:
        doubt = "the time ended before the control run (the same attack without noise) was finished"
    return finding if doubt is None else replace(finding, remarks=[*remarks, Remark("doubt", doubt)])


@dataclass
class _Trial:
    """One attacker on one client: its cases share what it recovers, and differ in what that is compared with.

    at: uploads attacked so far. taken: seconds. noise: the least deviation of noise over them, as far as it exceeds
    rounding. cut_off: enforces the time limit of the audit.
    """

    cases: list[Case]
    client: Client
    ready: Ready
    lpips: Lpips | None
    group: _UploadGroup
    at: int = 0
    taken: float = 0.0
    noise: float = math.inf
    partial: str | None = None
    facts: list[dict[str, Fact]] = field(default_factory=list)
    scores: dict[int, Scores] = field(default_factory=dict)
    pictures: list[Tensor] = field(default_factory=list)
    control: list[Certificate] | None = None
    cut_off: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def seconds(self) -> float | None:
        """How long the next turn may take; None without a limit."""
        left = None if self.ready.seconds is None else max(0.0, self.ready.seconds - self.taken)
        return min((limit for limit in (self.cases[0].seconds, left) if limit is not None), default=None)

    @property
    def ended(self) -> bool:
        """Whether there is no further turn: a case whose time is limited has one."""
        return self.cases[0].seconds is not None or self.seconds == 0.0

    @property
    def images(self) -> int:
        """How many images are to be attacked."""
        batch, most = self.client.step.batch, self.cases[0].images
        everything = len(self.client.test)
        return everything if most is None else min(everything, max(batch, most // batch * batch))

    @property
    def total(self) -> int:
        """How many uploads these make."""
        return self.images // self.client.step.batch

    def turn(self, deadline: Deadline, left: int) -> Iterator[ImageFinding]:
        """Attacks the next group of uploads; where there is none yet, it gets another turn if time is left."""
        if uploads := self.group.get(self, deadline, left):
            deadline.begin(left, self.seconds)
            with suppress(StoppedError):  # cut off without a result
                yield from self.attack(uploads, self.at, deadline)
            self.taken += deadline.taken

    def attack(self, sent: Sequence[Gradients], first: int, deadline: Deadline) -> Iterator[ImageFinding]:
        """Recovers the images behind the uploads from number `first` on, and gives each case's finding so far."""
        case, test, batch = self.cases[0], self.client.test, self.client.step.batch
        if case.fallback and not first:
            deadline.say(f"{case.defence.label}: {case.fallback}")
        of = f"{case.name}: " if case.name else ""  # a gradient audit has one model, and does not name it
        through = f"batches {first + 1} to {first + len(sent)}" if len(sent) > 1 else f"batch {first + 1}"
        deadline.say(f"{of}{case.attack.name} against {case.defence.label}: {through}")
        known = self.client.known(case.informed, first, len(sent))
        with deadline.enforced():
            recovery = case.attack.recover(case.backbone, [known.read(upload) for upload in sent], known, deadline)
        self.cut_off = deadline.enforced
        self.noise = min(self.noise, known.noise_beyond_rounding(sent, self.ready.reads))
        self.at, self.partial = first + len(recovery.facts), recovery.partial or self.partial
        here = slice(first * batch, self.at * batch)
        if not test.referenced:
            yield from self._unreferenced(recovery, here)
            return
        self.facts += facts_of(recovery, self.client.labels[here], batch)
        for number, case in enumerate(self.cases):
            real = test.real(case.compared_with)
            pictures = pictures_of(recovery, real[here], batch, test.normalisation).nan_to_num(0.0, 0.0, 0.0)
            scores = measure(pictures, real, case.backbone, self.lpips, here.start)
            inside = range(*here.indices(len(real)))
            if fed := {image: picture for image, picture in self.client.fed.items() if image in inside}:
                shown = real.clone()
                shown[list(fed)] = torch.stack(list(fed.values()))
                pictures = pictures_of(recovery, shown[here], batch, test.normalisation).nan_to_num(0.0, 0.0, 0.0)
                scores = closer(scores, measure(pictures, shown, case.backbone, self.lpips, here.start))
            pictures = pictures.clamp(0, 1)
            if case.trained_on != "original" and test.mask is not None:
                scores |= measure_parts(pictures, real[here], test.mask[here], case.backbone)
            extend(self.scores.setdefault(number, {}), scores)
            if number == 0 and here.start < SHOWN:
                self.pictures.append(pictures[: SHOWN - here.start].clone())
            yield self.finding(number)

    def _unreferenced(self, recovery: Recovery, here: slice) -> Iterator[ImageFinding]:
        """The findings so far where no image is known: pictures and certificates without scores."""
        test, batch = self.client.test, self.client.step.batch
        facts = facts_of(replace(recovery, labels=None), self.client.labels[here], batch)
        for number, guess in enumerate([] if recovery.labels is None else recovery.labels.tolist()):
            for fact in facts[number * batch : (number + 1) * batch]:
                fact["labels_inferred"] = ", ".join(map(str, guess))
        self.facts += facts
        if here.start < SHOWN:
            blank = test.real()[here]
            pictures = pictures_of(recovery, blank, batch, test.normalisation).nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
            self.pictures.append(pictures[: SHOWN - here.start].clone())
        for number in range(len(self.cases)):
            self.scores.setdefault(number, {})
            yield self.finding(number)

    def finding(self, number: int) -> ImageFinding:
        """One case's finding so far."""
        case, step = self.cases[number], self.client.step
        bound = "" if not case.informed or case.attack.separates_hidden else blurred(self.client.method)
        spoiled = case.attack.spoiled(self.client.known(case.informed), self.noise)
        count, wanted = len(self.facts), self.images
        fewer = None if count == wanted else f"{count} of {counted(wanted, 'images')}"
        partial = ", ".join(filter(None, (self.partial, fewer)))
        clean = case.defence.noiseless == case.defence and step.dtype == torch.float32
        clean = clean or not self.client.test.referenced
        captured = self.client.captured
        caveats = dict.fromkeys(upload.caveat(case.defence, step.batch) for upload in captured)
        return conclude(
            case,
            {name: None if values is None else list(values) for name, values in self.scores[number].items()},
            self.facts,
            {
                "fallback": case.fallback,
                "inexact": "; ".join(filter(None, (self.ready.caveat, spoiled, *caveats))),
                "lower_bound": bound,
                "stopped": partial,
            },
            self.noise,
            None if clean else self._control,
            torch.cat(self.pictures),
        )

    def _control(self) -> list[Certificate]:
        """The certificates of the same attack on the first upload without noise and in float32."""
        if self.control is None:
            case, step = self.cases[0], replace(self.client.plain_step, dtype=torch.float32, dropout=0.0)
            noiseless = replace(case, defence=case.defence.noiseless)
            client = Client(noiseless, replace(self.client.test, captured=()), step, self.client.wanted)
            # Bytes are not read: it is about the equations.
            known = replace(client.known(case.informed), normalisation=None)
            deadline = Deadline()
            with self.cut_off():
                recovery = case.attack.recover(case.backbone, [known.read(client.upload(0))], known, deadline)
            if deadline.interrupted:  # of an attack that keeps what it has
                raise KeyboardInterrupt
            self.control = recovery.certificates
        return self.control


def trials_of(
    cases: Sequence[Case], test: TestSet, step: Step | None = None, lpips: Lpips | None = None
) -> Iterator[ImageFinding | _Trial]:
    """Refusals, then trials: one for all cases that share a recovery. Clients note which gradients will be read.

    A fallback is planned from there on: if it is never reached, it is reported as not run.
    """
    step, group = step or Step(), _UploadGroup()
    test.whole_batches(step.batch)
    clients: list[Client] = []
    trials: list[_Trial] = []
    for case in cases:
        shared = [trial for trial in trials if case.same_recovery(trial.cases[0])]
        if shared:
            shared[0].cases.append(case)
            continue
        if impossible := case.defence.refuses(case.backbone):
            if not case.fallback:  # a reason that lies in the model alone comes first
                ready = case.attack.prepare(case.backbone, dict(case.backbone.named_parameters()), Knowledge())
                reason = ready.reason if isinstance(ready, Refused) else impossible
                yield case.refused(reason)
            continue
        client = next((client for client in clients if case.same_upload(client.case)), None)
        size = case.defence.step(step).batch
        if len(test) % size:
            if not case.fallback:
                whole = f"{counted(len(test), test.things)} cannot be divided into batches of {size}"
                yield case.refused(f"{whole}, so the client sends nothing")
            continue
        if client is None:
            clients.append(client := Client(case, test, step))
        closed = (trial.cases[0].attack.closed_form for trial in trials if trial.client is client)
        if case.fallback and any(closed):
            continue
        ready = case.attack.prepare(case.backbone, client.sent, client.known(case.informed))
        if isinstance(ready, Refused):
            yield case.refused(ready.reason)
            continue
        client.wanted = None if client.wanted is None or ready.reads is None else client.wanted | {*ready.reads}
        trials.append(_Trial([case], client, ready, lpips, group))
    largest = max((trial.client.size for trial in trials), default=0)
    group.size = max(1, min(GROUP, GROUP_BYTES // max(1, largest)))
    yield from (trial.cases[0].finding("not_run") for trial in trials if trial.cases[0].fallback)
    yield from trials


# --- the report of every audit of images -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Leak(Report):
    """The findings of an audit of images. names: of all images; images: the first originals, [m, C, H, W] in [0, 1]."""

    metrics: ClassVar[Mapping[str, Metric]] = METRICS

    findings: Sequence[ImageFinding]
    names: Sequence[str]
    images: Tensor

    @property
    def pairs(self) -> list[ImageFinding]:
        """Findings of attacks that were started or refused."""
        return [finding for finding in self.findings if finding.status != "not_run"]

    @property
    def attacked(self) -> list[ImageFinding]:
        """Findings of attacks that ran; a bound is told the images, and is no attack."""
        return [finding for finding in self.findings if finding.attacked and not finding.bound]

    def line(self, pair: ImageFinding) -> str:
        """What an attack recovered, in a few words: its most exposed image by the gate's metric."""
        metric = "aligned_psnr" if self.limit in (None, BLIND) else self.limit.metric
        values = pair.scores.get(metric)
        if not values:
            return f"{metric} is not defined"
        return f"the most exposed of {counted(pair.count, 'images')} has {metric} {max(values):.4g}"

    def lines(self, defence: str) -> list[str]:
        """For each attack on a defence what it recovered, or why there is nothing."""
        late = [attack for attack, other in self.undone if other == defence]
        lines = [f"{attack}: not run, because the audit was stopped first" for attack in late]
        for pair in (pair for pair in self.pairs if pair.defence == defence):
            refusal = f"not attacked here: {pair.why('refused')}"
            lines.append(f"{pair.attack}: {self.line(pair) if pair.attacked else refusal}")
        return lines

    @property
    def tone(self) -> Tone:
        """Bad where an image came back whole; never good: that others did not come back proves nothing."""
        return "bad" if any(pair.exact for pair in self.attacked) else "unsure"

    @property
    def private(self) -> bool:
        return any(finding.shown is not None for finding in self.findings)

    def without_pictures(self) -> Self:
        """The same without originals and recovered pictures: its page may then be shown to everyone."""
        return replace(
            self, findings=[replace(finding, shown=None) for finding in self.findings], images=self.images[:0]
        )
