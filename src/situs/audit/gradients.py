"""Audits of gradients: every attack against every defence on the same images, with verdict, tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch

from situs.audit.attacks.base import Attack, Refused, check_server
from situs.audit.attacks.matching import Matching, MatchingConfig
from situs.audit.cases import Case, ImageFinding, TestSet, certified_exposures
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Step
from situs.audit.engine import SHOWN, Client, Images, Leak
from situs.audit.oracle import consult
from situs.audit.run import run
from situs.audit.scores import LOWER_IS_CLOSER, Lpips, Mean, Scores, mean_of, means_of, measure_guesses
from situs.audit.sweep.ladder import Remedies
from situs.backbones.base import Backbone
from situs.errors import counted, verb
from situs.findings import HONEST, NO_NOISE, Finding
from situs.methods.base import Method
from situs.results import Cell, Summary, Table, Tone

# ---------------------------------------------------------------------------------------------------------------------
# Columns and cells of the tables and JSON files of image audits.


Cells = tuple[list[str], list[list[Cell]]]
"""Header and rows."""

COLUMNS = {
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "mse": "MSE",
    "fft2d": "FFT2D",
    "lpips": "LPIPS",
    "patch_psnr": "best-match PSNR, dB",
    "order_accuracy": "order",
    "reidentified": "re-identified",
}
"""metric -> the head of its column."""

PARTS = {
    "shown_psnr": "shown patches, PSNR, dB",
    "hidden_psnr": "hidden patches in the best order, PSNR, dB",
    "hidden_order": "hidden patches at their position",
}
"""The same of shown and hidden patches apart."""

REFUSED = "not attacked here"
"""The cell of an attack that does not apply, which says nothing about privacy."""

WORST = "PSNR of the most exposed image, dB"


def interval(mean: Mean | None) -> str | None:
    """A mean and its 95 % interval."""
    if mean is None or mean.low is None or mean.high is None:
        return alone(mean)
    return f"{mean.mean:.3g} [{mean.low:.3g}, {mean.high:.3g}]"


def alone(mean: Mean | None) -> str | None:
    """A mean; a tiny one as "< 1e-6"."""
    if mean is None:
        return None
    return "< 1e-6" if 0 < mean.mean < 1e-6 else f"{mean.mean:.3g}"


Show = Callable[[Mean | None], Cell]


def exact_of(pair: ImageFinding) -> str:
    """How many images were recovered exactly."""
    return f"{pair.exact} of {pair.count}" + ", stopped" * (pair.status == "stopped")


def mean_cells(scores: Mapping[str, Sequence[float] | None], columns: Sequence[str], show: Show) -> list[Cell]:
    """The means of these metrics."""
    means = means_of(scores)
    return [show(means.get(name)) for name in columns]


def measured(columns: Sequence[str], rows: Iterable[Finding]) -> tuple[str, ...]:
    """Those of the metrics that some row has: LPIPS needs a file."""
    rows = list(rows)
    return tuple(name for name in columns if any(row.scores.get(name) is not None for row in rows))


def unmeasured(rows: Iterable[Finding]) -> str:
    """A note that LPIPS is missing; else ""."""
    return "" if measured(("lpips",), rows) else " LPIPS was not measured, because no file with its weights was given."


def system_of(pair: ImageFinding) -> tuple[Cell, Cell]:
    """The least rank and the median condition of the systems solved; infinite below full rank.

    adaptive-mjp solves a system for images without hidden patches alone, so that some images may have none.
    """
    solved = [fact for fact in pair.facts if "rank" in fact]
    if not solved:
        return None, None
    ranks: list[Any] = [fact["rank"] for fact in solved]
    sizes: list[Any] = [fact["condition"] for fact in solved]
    middle = sorted(math.inf if size is None else size for size in sizes)[len(sizes) // 2]
    rank = f"{min(ranks)} of {solved[0]['unknowns']}"
    return rank, "∞" if middle == math.inf else f"{middle:.3g}"


def mean_numbers(scores: Mapping[str, Sequence[float] | None]) -> dict[str, Any]:
    """Means and intervals, as JSON holds them."""
    return {name: None if mean is None else mean._asdict() for name, mean in means_of(scores).items()}


def image_numbers(
    scores: Mapping[str, Sequence[float] | None], names: Sequence[str], facts: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Each image's scores and facts; of a stopped attack, of the images it attacked."""
    facts = [{}] * len(scores.get("psnr") or ()) if facts is None else facts
    return [
        {"image": image, **{name: None if values is None else values[i] for name, values in scores.items()}, **fact}
        for i, (image, fact) in enumerate(zip(names, facts, strict=False))
    ]


@dataclass(frozen=True)
class Fallback:
    """The search that an audit adds against a defence to which none of its closed forms applies.

    It runs on the first images and for some seconds: it can show a leak, and proves nothing where it shows none.
    """

    images: int = 4
    seconds: float = 120.0
    iterations: int = 300


FALLBACK = Fallback()

SCHEMA = "situs-audit-gradients/2"
"""The form of gradients.json, described by `docs/methods/gradients.schema.json`; a change that breaks a reader raises
its number."""


@dataclass(frozen=True)
class Audit(Leak):
    """Attacks × defences, by defence. baselines: scores of blind guesses. remedies: the result of a search for
    defences, for the page."""

    file: ClassVar[str] = "gradients"

    model: str
    step: Step
    baselines: dict[str, Scores]
    remedies: Remedies | None = field(default=None, kw_only=True)

    @property
    def tone(self) -> Tone:
        """Bad where an image came back whole, whatever the gate allows; good only where a whole audit passed a gate."""
        ruling, alone = self.ruling, super().tone
        if alone == "bad" or ruling is None or (ruling.passed and self.stopped is not None):
            return alone
        return ruling.tone

    def summary(self) -> Summary:
        """The verdict, the pairs and the reasons; below them what the gate says."""
        tables = []
        if self.attacked:
            things = self.provenance.things
            title = f"{self.model}, {self.provenance.facts.get('images', counted(len(self.names), things))}"
            tables.append(Table(title, *table(self, ("psnr", "ssim", "order_accuracy", "reidentified"))))
        if rows := reasons(self):
            tables.append(Table("Attacks that do not apply or are not exact", (), rows))
        ruling = self.ruling
        return Summary(verdict(self), tuple(tables), () if ruling is None else (ruling.sentence,))

    def numbers(self) -> dict[str, Any]:
        """Everything but the pictures: each image's numbers, means and intervals, and what the gate says."""
        ruling = self.ruling
        return {
            "schema": SCHEMA,
            "model": self.model,
            "threat": self.threat.name,
            "step": _step(self.step),
            "partial": self.stopped is not None,
            "stopped": self.stopped,
            "not_attacked": [{"attack": attack, "defence": defence} for attack, defence in self.undone],
            "verdict": verdict(self),
            "pairs": [_pair(pair, self.names) for pair in self.pairs],
            "baselines": {
                name: {"mean": mean_numbers(scores), "images": image_numbers(scores, self.names)}
                for name, scores in self.baselines.items()
            },
            "notes": dict(self.notes),
            "gate": None if ruling is None else ruling.to_json(),
        }


def attack_gradients(
    model: Backbone | Method,
    test: TestSet,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    *,
    step: Step | None = None,
    search: MatchingConfig | None = None,
    lpips: Lpips | None = None,
    deadline: Deadline | None = None,
    keep: Callable[[Audit], None] | None = None,
    bounded: bool = False,
    **fields: Any,
) -> Audit:
    """Every attack on what a model's step sends under every defence; deadline and keep: see `run`.

    model: a backbone, trained as each defence says, or a run's own method. search: how matching searches where no
    closed form applies; None for no such search. bounded: whether what a gate needs to pass is tried too (`consult`).
    fields: of the `Audit`; where its threat is an honest server, attacks that choose the weights are refused.
    """
    step = step or Step()
    check_server(attacks, fields.get("threat", HONEST))
    backbone = model if isinstance(model, Backbone) else model.backbone
    about = {defence.label: defence.described for defence in defences}
    guesses: dict[str, Scores] = {}

    def make(findings: list[ImageFinding], stopped: str | None) -> Audit:
        if not guesses and any(finding.attacked for finding in findings):
            guesses.update(measure_guesses(test.real(), backbone, lpips, test.normalisation))
        against_blind = [_exposed(finding.against(guesses, test.names), test) for finding in findings]
        shown = (against_blind, test.names, test.real()[:SHOWN].clone())
        return Audit(*shown, backbone.name, step, guesses, about=about, stopped=stopped, **fields)

    def consulted(audit: Audit, deadline: Deadline) -> Iterator[ImageFinding]:
        return consult(model, test, audit.findings, audit.baselines, step, deadline)

    cases = _cases(model, test, attacks, defences, step, search)
    return run(Images(cases, test, make, step, lpips), deadline, keep, bounds=consulted if bounded else None)


def _exposed(finding: ImageFinding, test: TestSet) -> ImageFinding:
    """The finding with what is certified of captured uploads."""
    return replace(finding, exposures=[*finding.exposures, *certified_exposures(finding, test)])


def _cases(
    model: Backbone | Method,
    test: TestSet,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    step: Step,
    search: MatchingConfig | None,
) -> list[Case]:
    """All attacks against a defence and its fallback, then those against the next."""
    cases, count, weights = list[Case](), len(test), dict[Hashable, Backbone | Method]()
    for defence in defences:
        for attack in attacks:
            case = Case("", model, defence, attack, batch=step.batch)
            cases.append(replace(case, model=_written(case, test, step, weights)) if attack.active else case)
        if search is not None:
            few = min(count, max(step.batch, FALLBACK.images // step.batch * step.batch))
            matching = Matching(replace(search, iterations=FALLBACK.iterations))
            reason = (
                f"no closed form applies, so the attack `{matching.name}` runs instead on {few} of "
                f"{counted(count, 'images')} ({FALLBACK.iterations} iterations, at most "
                f"{FALLBACK.seconds:g} s)"
            )
            limits = {"images": few, "seconds": FALLBACK.seconds, "batch": step.batch}
            cases.append(Case("", model, defence, matching, fallback=reason, **limits))
    return cases


def _written(case: Case, test: TestSet, step: Step, weights: dict[Hashable, Backbone | Method]) -> Backbone | Method:
    """A copy of the model with the weights that the attack chooses; the model itself where the attack does not apply.

    weights: copies written so far, since most defences have the same.
    """
    if case.defence.refuses(case.backbone) or len(test) % case.defence.step(step).batch:
        return case.model
    client = Client(case, test, step)
    known = client.known(informed=True)
    if isinstance(case.attack.prepare(case.backbone, client.sent, known), Refused):
        return case.model
    key = (case.attack, frozenset(client.sent), client.step.batch)
    if key not in weights:
        model = deepcopy(case.model)
        with torch.no_grad():
            case.attack.write(model if isinstance(model, Backbone) else model.backbone, client.sent, known)
        weights[key] = model
    return weights[key]


# --- what follows from an audit ------------------------------------------------------------------------------


def verdict(audit: Audit) -> str:
    """For each defence what the strongest attack recovered, and what blind guesses reach, for a reader who is no
    expert."""
    sentences = [f"{name}: {sentence}" for name, sentence in findings(audit).items()]
    return " ".join(filter(None, [audit.threat.assumed, opening(audit), *sentences]))


def opening(audit: Leak) -> str:
    """A warning where nothing was attacked, or not all; else ""."""
    if not audit.attacked:
        if audit.undone:
            return (
                f"The audit was stopped by {audit.stopped} before any attack had a result, so this page says nothing "
                "about privacy."
            )
        return (
            "No attack of this audit applies to the gradients of this model; the reasons are listed below. This "
            "does not prove privacy. If this audit did not try the attack `matching`, try it: it applies to almost "
            "every model."
        )
    return "" if audit.stopped is None else f"A partial result: stopped by {audit.stopped}."


def findings(audit: Audit) -> dict[str, str]:
    """Defence -> what the strongest attack recovered; last, what blind guesses reach. Empty where nothing was
    attacked."""
    if not audit.attacked:
        return {}
    sentences = {}
    for defence in audit.about:
        tried = [pair for pair in audit.attacked if pair.defence == defence]
        left = any(other == defence for _, other in audit.undone)
        best = max(tried, key=strength, default=None)
        why = "the audit was stopped first" if left else "no attack of this audit applies"
        refused = f"not attacked, because {why}."
        sentences[defence] = refused if best is None else _finding(best, audit.step, audit.provenance.things)
    guesses = [f"{name} {mean_of(s['psnr'] or [0.0]).mean:.1f} dB" for name, s in audit.baselines.items()]
    return {**sentences, "Without any gradient": f"{', '.join(guesses)}."}


def steps_of(pair: ImageFinding, step: Step) -> str:
    """ "one step" or "3 local steps"."""
    step = pair.case.defence.step(step)
    return "one step" if step.local_steps == 1 else f"{step.local_steps} local steps"


def strength(pair: ImageFinding) -> tuple[int, float, float]:
    """The key by which attacks are ranked: images recovered exactly, then the most exposed image, then the mean."""
    return pair.exact + pair.others, pair.worst_psnr, pair.mean_psnr


def others_of(pair: ImageFinding, things: str) -> str:
    """That the attacker has other images than those of the data."""
    was, are = verb(pair.others, "were"), verb(pair.others, "are")
    other = f"{counted(pair.others, things)} {was} recovered byte for byte, but {are} not in the data"
    return f"{other}; to compare them, prepare the data as the client did"


def seen(pair: ImageFinding) -> str:
    """ "mean PSNR 13.1 dB, most exposed image 15.0 dB, 2 of 3 re-identified"."""
    figures = f"mean PSNR {pair.mean_psnr:.1f} dB, most exposed image {pair.worst_psnr:.1f} dB"
    known = pair.scores.get("reidentified")
    return figures if known is None else f"{figures}, {sum(known):.0f} of {pair.count} re-identified"


def _finding(best: ImageFinding, step: Step, things: str) -> str:
    lower, stopped = best.why("lower_bound") is not None, best.why("stopped")
    sentence = "at least " * lower
    sentence += f"{best.exact} of {counted(best.count, things)} recovered exactly from {steps_of(best, step)}"
    sentence += f", {best.to_the_byte} of them with the exact byte of every pixel" if best.to_the_byte else ""
    sentence += f"; {others_of(best, things)}" if best.others else ""
    open_end = "; a lower bound, see below" * lower
    open_end += "" if stopped is None else f"; stopped after {stopped}"
    return f"{sentence} (best attack {best.attack}, {seen(best)}{open_end})."


# --- tables and the file --------------------------------------------------------------------------------------------


def table(audit: Audit, columns: Sequence[str] = tuple(COLUMNS), show: Show = interval) -> Cells:
    """A row for each attack × defence and baseline: exact, highest PSNR, metrics, rank, condition.

    show: a mean. A bound was asked about a few images, of which finding them again says nothing.
    """
    rows: list[list[Cell]] = []
    for pair in audit.pairs:
        if pair.status == "refused":
            rows.append([pair.attack, pair.defence, REFUSED, *[None] * (len(columns) + 3)])
        else:
            scores = {**pair.scores, "reidentified": None} if pair.bound else pair.scores
            cells = [exact_of(pair), f"{pair.worst_psnr:.3g}", *mean_cells(scores, columns, show), *system_of(pair)]
            rows.append([_named(pair), pair.defence, *cells])
    for guess, scores in audit.baselines.items():
        best = f"{max(scores['psnr'] or [0.0]):.3g}"
        rows.append(["baseline", guess, None, best, *mean_cells(scores, columns, show), None, None])
    header = ["attack", "defence", "exact", WORST, *(COLUMNS[name] for name in columns), "rank of G", "condition of G"]
    return header, rows


def _named(pair: ImageFinding) -> str:
    """The attack's name; an oracle that is told the images is marked as a bound."""
    return f"{pair.attack} (a bound computed from the image)" if pair.bound else pair.attack


def grid(audit: Audit) -> Cells:
    """Attacks down, defences across: PSNR of the mean and of the most exposed image, and how many were exact."""
    attacks = dict.fromkeys([*map(_named, audit.pairs), *(attack for attack, _ in audit.undone)])
    cells: dict[tuple[str, str], str] = dict.fromkeys(audit.undone, "not attacked")
    for pair in audit.pairs:
        psnr = means_of(pair.scores).get("psnr")
        cell = f"mean {alone(psnr)}, most exposed {pair.worst_psnr:.3g}; exact {exact_of(pair)}"
        cells[_named(pair), pair.defence] = REFUSED if psnr is None else cell
    rows: list[list[Cell]] = [[attack, *(cells.get((attack, name)) for name in audit.about)] for attack in attacks]
    return ["attack", *audit.about], rows


def reasons(audit: Leak) -> list[tuple[str, str]]:
    """(attack against defences, why it does not apply or is not exact), one row for all defences with one reason."""
    defences_of: dict[tuple[str, str], list[str]] = {}
    for pair in audit.pairs:
        unsure, stopped = pair.why("doubt"), pair.why("stopped")
        plain = unsure == NO_NOISE and pair.exact == pair.count  # it has every image
        doubt = None if pair.caveat or unsure is None or plain else f"proves nothing: {unsure}"
        verdicts = [str(fact.get("verdict") or "") for fact in pair.facts]
        verdicts = [text for text in verdicts if doubt is None or text != unsure]  # said once
        cut = stopped and f"stopped after {stopped}"
        for reason in dict.fromkeys([pair.why("refused"), cut, pair.caveat, *verdicts, doubt]):
            if reason:
                defences_of.setdefault((pair.attack, reason), []).append(pair.defence)
    every = len(audit.about) > 2
    names = {
        key: "every defence" if every and set(defences) == set(audit.about) else " | ".join(defences)
        for key, defences in defences_of.items()
    }
    return [(f"{attack} against {names[attack, reason]}", reason) for attack, reason in defences_of]


def _step(step: Step) -> dict[str, Any]:
    """How the step was made: what every step has, and what else is not as usual."""
    always, usual = ("batch", "local_steps", "dtype", "seed", "labels_known"), asdict(Step())
    values = {**asdict(step), "dtype": str(step.dtype).removeprefix("torch."), "when": usual["when"]}
    chosen = {name: value for name, value in values.items() if name in always or value != usual[name]}
    return {**chosen, "epoch": step.when.epoch}


def _pair(pair: ImageFinding, names: Sequence[str]) -> dict[str, Any]:
    if not pair.attacked:
        return pair.to_json()
    return {
        **pair.to_json(),
        "exact": pair.exact,
        # Of the most exposed image, which a gate judges.
        "worst": {
            name: values and (min(values) if name in LOWER_IS_CLOSER else max(values))
            for name, values in pair.scores.items()
        },
        "mean": mean_numbers(pair.scores),
        "images": image_numbers(pair.scores, [names[i] for i in pair.numbers], pair.facts or None),
    }
