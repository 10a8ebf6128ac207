"""The verbs that attack: `situs audit …`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from cyclopts import Parameter

from situs.audit import (
    ATTACKS,
    AuditConfig,
    Deadline,
    audit_gradients,
    audit_settings,
    create_attack,
    find_defences,
    trace_defences,
    trace_texts,
)
from situs.audit.client import StepConfig
from situs.audit.deadline import first_ctrl_c
from situs.audit.scores.exposure import METRICS
from situs.audit.settings import Comparison
from situs.audit.split.attackers import ATTACKS as SPLIT_ATTACKS
from situs.audit.split.audit import DEFENCES, PERMUTED, PUBLIC, SAMPLES
from situs.audit.sweep.ladder import CostConfig
from situs.audit.text.audit import audit_texts, first_lines
from situs.cli.model_args import OUT, ImageArgs, ModelArgs, asked_of, check_folder, open_from
from situs.cli.parser.arguments import configured
from situs.cli.parser.flags import POSITIONAL, flags_of
from situs.cli.progress import remark
from situs.cli.result import INTERRUPTED, asked, present
from situs.errors import SitusError
from situs.files import write_result
from situs.gate import ABOVE, NOT_JUDGED, junit, parse_limit
from situs.limits import Count
from situs.locks.attacks import LockAuditConfig
from situs.models.open import is_run
from situs.pages import publish, write_numbers

if TYPE_CHECKING:
    from situs.audit.gradients import Audit
    from situs.audit.text.result import TextAudit


def command_of(verb: str, args: Any) -> str:
    """The command with every flag that is not its default; of paths the last part, since a page tells no folders."""
    places, words = ["situs", *verb.split()], []
    for flag in flags_of(type(args)):
        value = getattr(args, flag.fields[0])
        if flag.positional:
            places += [_word(each) for each in (value if isinstance(value, tuple) else (value,))]
        elif value == flag.default:
            continue
        elif isinstance(value, bool):
            words.append(flag.name if value else f"--no-{flag.name[2:]}")
        elif isinstance(value, dict):
            words += [word for key, held in value.items() for word in (f"{flag.name}.{key}", json.dumps(held))]
        else:
            words += [flag.name, ",".join(map(str, value)) if isinstance(value, tuple) else _word(value)]
    return shlex.join([*places, *words])


def _word(value: Any) -> str:
    """A word of the command, without folders: of a path, of NAME=FILE and of file.py:Name the last part."""
    text = str(value)
    name, equals, file = text.partition("=")
    if equals and not Path(text).exists():
        return f"{name}={_word(file)}"
    place, colon, name = text.rpartition(":")
    if colon and place.endswith(".py"):
        return f"{Path(place).name}:{name}"
    is_path = isinstance(value, Path) or (isinstance(value, str) and (Path(text).is_absolute() or Path(text).exists()))
    return Path(text).resolve().name if is_path else text


def _asked(verb: str, args: Gradients | Sweep | Texts, deadline: Deadline) -> dict[str, Any]:
    """What the flags ask of an audit, by its arguments."""
    config = StepConfig if isinstance(args, Texts) else AuditConfig
    return {
        **{field.name: getattr(args, field.name) for field in fields(config)},
        **asked_of(args.model, args),
        "facts": {"command": command_of(f"audit {verb}", args)},
        "deadline": deadline,
        "keep": lambda result: write_numbers(result, args.out) if args.out else None,
    }


def _check_images(args: Gradients | Sweep) -> None:
    """Refuses what would only show when the audit is over."""
    if args.data is None and not is_run(args.model):
        raise SitusError("data: give the images to attack", field="data")
    for name in args.attacks:
        create_attack(name)  # refused if nobody knows it


def _finish(found: Audit | TextAudit | Comparison, args: Gradients | Texts, deadline: Deadline) -> int:
    """Prints, writes, and gives the exit status: whether the gate is passed."""
    ruling = None if isinstance(found, Comparison) else found.ruling
    if args.junit is not None and ruling is not None and not isinstance(found, Comparison):
        verb = "gradients" if isinstance(args, Gradients) else "texts"
        file = junit(f"situs audit {verb} {found.model}", ruling, found.provenance.facts, found.lines)
        write_result(args.junit, file, field="junit")
    present(found if args.pictures else found.without_pictures(), args.out)
    status = 0 if ruling is None else ruling.status
    return INTERRUPTED if deadline.interrupted and status != ABOVE else status


@dataclass(frozen=True, kw_only=True)
class GateArgs(ModelArgs):
    """What audits of gradients share: how long, and what a gate writes."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """For all attacks together, in even shares, from the first on."""

    junit: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """What the gate says as JUnit XML; inconclusive is an error."""

    pictures: bool = True
    """Show the samples; the page is then private."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For the numbers (.json) and the page (.html); none: not written."""

    def check_gate(self, gate: str | None, result: str) -> None:
        """Refuses a gate's file without a gate, and what cannot be written."""
        if self.junit is not None and gate is None:
            said = f"junit={self.junit}: holds what a gate says, and there is none"
            raise SitusError(said, field=("junit", "fail_above"))
        if self.junit is not None and (self.junit.is_dir() or self.junit.parent.is_file()):
            raise SitusError(field="junit", value=self.junit, allowed="a file that can be written")
        check_folder(self.out, result)


@dataclass(frozen=True, kw_only=True)
class Gradients(GateArgs, AuditConfig):
    """What a model's gradients give away of your images: attacks against defences, a page, a gate for CI.

    For example: situs audit gradients runs/ft --data samples --count 2
    """

    topics: ClassVar = GateArgs.topics | {
        "matching": ("labels", "distance", "iterations", "restarts"),
        "seldom": ("loss", "lpips", "predictor", "search_seconds", "settings", "classes"),
    }

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images to attack, as training reads them; by default a run's own."""

    attacks: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = (
        "patchembed",
        "april",
        "tokens",
        "patchembed-prior",
    )
    """Comma-separated; matching, april-optimisation, adaptive-mjp take minutes, tokens where it must search."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("auto",)
    """Comma-separated: noise=1e-4, clip=0.5, mjp=0.27 …; for a run of MJP none is its own method. auto:
    none,noise,clip,no-pe-gradient, for a gate none; of a DP run its own."""

    settings: Annotated[tuple[str, ...], Parameter(metavar="a,b,c")] = ()
    """Table 5 of MJP, by an informed and an uninformed attacker: attack the original image, compare with it (a);
    attack the shuffled one, compare with it (b) or with the original (c); γ by --defences mjp=γ."""

    def run(self) -> int:
        """The status says whether the gate is passed."""
        self.check_gate(self.fail_above, "settings" if self.settings else "gradients")
        _check_images(self)

        def say(line: str) -> None:
            loud = self.settings or self.fail_above or any(ATTACKS[name].slow for name in self.attacks)
            if loud or sys.stderr.isatty():
                remark(line)

        deadline = Deadline(say, self.time_limit)
        words: dict[str, Any] = _asked("gradients", self, deadline) | {
            "attacks": self.attacks,
            "defences": self.defences,
        }
        with first_ctrl_c(deadline):
            if self.settings:
                return _finish(audit_settings(self.model, self.data, self.settings, **words), self, deadline)
            return _finish(audit_gradients(self.model, self.data, **words), self, deadline)


@dataclass(frozen=True, kw_only=True)
class Texts(GateArgs, StepConfig):
    """What the gradients of a model of words give away of sentences: attacks against defences, a page, a gate for CI.

    Gates: words, tokens, sentences, picked (shares).

    For example (bert: the folder of a model of words; texts.txt: sentences of yours):
    situs audit texts bert --data texts.txt --count 4
    """

    texts: Annotated[Path, Parameter(name="--data", metavar="FILE")]
    """Sentences to attack, one a line."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("none",)
    """Comma-separated: none, noise=1e-4, clip=0.5, …"""

    def run(self) -> int:
        """The status says whether the gate is passed."""
        self.check_gate(self.fail_above, "texts")
        deadline = Deadline(remark, self.time_limit)
        words = _asked("texts", self, deadline) | {"defences": self.defences}
        with first_ctrl_c(deadline):
            return _finish(audit_texts(self.model, self.texts, **_of_words(words)), self, deadline)


def _of_words(words: dict[str, Any]) -> dict[str, Any]:
    """What is asked for alone: a model of words takes no size of images."""
    return {name: value for name, value in words.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Sweep(ModelArgs, CostConfig, AuditConfig):
    """The strength of a defence at which attacks on gradients stop: curves of what comes back of images or sentences.

    With --find instead: the weakest setting of each defence that keeps a limit, against attackers who know it.

    For example: situs audit sweep runs/ft --data samples --over noise --count 2
    """

    topics: ClassVar = ModelArgs.topics | {
        "matching": ("labels", "distance", "iterations", "restarts"),
        "costs": tuple(each.name for each in fields(CostConfig)),
        "seldom": ("loss", "lpips", "predictor", "search_seconds", "classes"),
    }

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images to attack, as training reads them; for a model of words a .txt file of sentences, one a line."""

    curve: Annotated[tuple[str, ...] | None, Parameter(name="--over", metavar="NAME,…")] = None
    """Comma-separated: noise, clip (with noise, as DP-SGD), precision, fedavg, dropout; of sentences noise, clip,
    precision. By default noise, precision and, of images, fedavg."""

    fail_above: Annotated[str | None, Parameter(name="--find", metavar="METRIC=NUMBER")] = None
    """Find the weakest setting of each defence that keeps this, as psnr=20, in the place of curves."""

    attacks: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("patchembed", "tokens", "patchembed-prior")
    """Comma-separated; of each point the one that got most is shown."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("auto",)
    """What else is done, a line each; by default none and no-pe-gradient."""

    count: Count | None = None
    """Images or sentences: the first that can be read; by default 4, with --find 12."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """For all attacks together, in even shares, from the first on."""

    pictures: bool = True
    """Show the samples, with --find; the page is then private."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For the numbers (.json), the page (.html) and its figures; none: not written."""

    def run(self) -> int:
        texts = self.data is not None and Path(self.data).suffix == ".txt"
        find = self.fail_above is not None
        for name in self._idle(texts, find):
            if getattr(self, name) != getattr(Sweep, name):
                kind = "--find" if find else "curves of sentences" if texts else "curves"
                raise SitusError(f"{name}: has no part in {kind}; leave it out", field=name)
        if not texts:
            _check_images(self)
        check_folder(self.out, *(("gradients", "defences") if find else ("curve",)))
        deadline = Deadline(remark, self.time_limit)
        if find:
            return self._find(deadline)
        words = _asked("sweep", self, deadline)
        del words["fail_above"]
        if self.curve is not None:
            words["over"] = self.curve
        with first_ctrl_c(deadline):
            if texts:
                assert self.data is not None
                names = {each.name for each in fields(StepConfig)} | {"unlock", "device", "facts", "deadline", "keep"}
                words = {name: words[name] for name in words if name in names | {"over"} and words[name] is not None}
                words["count"] = len(first_lines(self.data, self.count, self.batch, COUNT))
                present(trace_texts(self.model, self.data, **words), self.out)
            else:
                beside = {} if self.defences == ("auto",) else {"beside": self.defences}
                asked: dict[str, Any] = {"over": OVER, **words, "attacks": self.attacks, "count": self.count or COUNT}
                present(trace_defences(self.model, self.data, **beside, **asked), self.out)
        return INTERRUPTED if deadline.interrupted else 0

    def _idle(self, texts: bool, find: bool) -> tuple[str, ...]:
        """Flags that have no part in what is asked for."""
        costs = tuple(each.name for each in fields(CostConfig))
        if find:
            return ("curve", "defences")
        images = ("defences", "attacks", "split", "weights", "img_size", "patch_size", "labels")
        return (*costs, "pictures", *(images if texts else ()))

    def _find(self, deadline: Deadline) -> int:
        """Audits what is sent today, within a tenth of the time, then looks for defences: both on the audit's page.

        The status is 0 where some setting is named, and that of "inconclusive" where none is.
        """
        assert self.fail_above is not None
        parse_limit(self.fail_above, METRICS, "fail_above")
        costs = {each.name: getattr(self, each.name) for each in fields(CostConfig)}
        first = Deadline(deadline.say, None if self.time_limit is None else self.time_limit / 10, whole=deadline)
        words: dict[str, Any] = {**_asked("sweep", self, deadline), "attacks": self.attacks}
        today_words: dict[str, Any] = {**words, "deadline": first}
        with first_ctrl_c(deadline):
            today = audit_gradients(self.model, self.data, **today_words)
            today, deadline.closed = today if self.pictures else today.without_pictures(), True
            if self.out is not None:
                publish(today, self.out)  # whatever comes of the search
            deadline.closed = False
            try:
                del words["fail_above"]
                found = find_defences(self.model, self.data, self.fail_above, **costs, **words)
            except KeyboardInterrupt:  # before its first trial: it keeps what it has tried
                deadline.closed = True
                remark("stopped by Ctrl-C before any defence was tried: this is what is sent today")
                present(today, self.out)
                return INTERRUPTED
            deadline.closed = True
            page = None if self.out is None else publish(replace(today, remedies=found), self.out)
            present(found, self.out)
        if page is not None:
            print(page)
        return INTERRUPTED if deadline.interrupted else 0 if found.found else NOT_JUDGED


COUNT = 4
"""Images or sentences of a curve, where nothing is said."""

OVER = ("noise", "precision", "fedavg")
"""Curves that are drawn where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Split(ImageArgs):
    """What an untrusted server of split learning learns of the samples: every defence and permutation, every attacker.

    For example: situs audit split runs/ft --defences none,noise=0.5 --count 100

    Each defence is tried alone and with rows, columns and both permuted. An attack that was not tried is no protection.
    As it stands it gives the fourth paper's Table 6; `--defences curve` draws what each strength hides and costs.
    """

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = SAMPLES
    """So many images, drawn at random, are attacked; the attacker without an embedding needs 100."""

    batch: int = 64
    """Images at a time."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="DEFENCE,…")] = DEFENCES
    """none, noise=σ (a multiple of the tokens' deviation), lowpass=r (share of frequencies), batch-shuffle=B; curve:
    each of them at several strengths."""

    permute: Annotated[tuple[str, ...], Parameter(metavar="rows,columns")] = PERMUTED
    """Permutations that every defence is also tried with."""

    attacks: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = tuple(SPLIT_ATTACKS)
    """Which attackers are tried."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """The model before fine-tuning, for the attacker who knows its embedding alone."""

    public: Annotated[int, Parameter(metavar="IMAGES")] = PUBLIC
    """So many further images are the attacker's own."""

    pictures: bool = True
    """Show the images and what was made of them; the page is then private."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """Looked at between attackers: what is finished by then is shown and written, as on Ctrl-C. The same command then
    starts anew."""

    def run(self) -> int:
        """Audits, prints the verdict and the table, and writes the page, also of what was finished before a Ctrl-C."""
        from situs.audit.split.audit import audit_split
        from situs.audit.split.result import SplitAudit
        from situs.pages import write_numbers

        def keep(result: SplitAudit) -> None:
            if self.out is not None:
                write_numbers(result, self.out)

        given = asked(self)
        deadline = Deadline(lambda line: remark(f"situs: {line}"), given.pop("time_limit"))
        with first_ctrl_c(deadline):
            found = audit_split(open_from(self), deadline=deadline, keep=keep, **given)
            present(found, self.out)
        return INTERRUPTED if deadline.interrupted else 0


@dataclass(frozen=True)
class Lock:
    """Attack a locked model as somebody without its key would, and say what is left of the lock.

    For example: situs audit lock locked --key owner.key --base exported

    With what the attacker may have: situs audit lock locked/ --attacks drifted-base --base MODEL --drift 0.3,1,3

    A lock is obfuscation, not encryption: who has the model it was made from reads the key off its weights, and who has
    a few images may come near it without.
    """

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The locked folder (situs lock)."""

    attacker: Annotated[tuple[str, ...], Parameter(name="--attacks", metavar="NAME,…")] = ()
    """no-base, images, activations, public-base, drifted-base or labels; comma-separated. By default
    no-base, images where there are --images or --texts, and public-base where there is a --base."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """What the attacker has: a run, an export or model folder, or a timm name with --weights."""

    weights: Annotated[str | None, Parameter(metavar="FILE")] = None
    """The weights of a --base that is a timm name."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's key, to judge the attacks by; not needed where --base is the very model that was locked."""

    images: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Unlabelled images for the attackers `images` and `activations`: any that look like those it was made for."""

    texts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The same for a model of words: a file with a text on each line; the locked folder brings the tokeniser."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled images or sentences: for the attacker `labels`, and to measure accuracy before and after each attack."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For audit.json and audit.html; none: not written."""

    config: LockAuditConfig = configured(LockAuditConfig)
    """How much the attackers have, and for how long they try."""

    def run(self) -> None:
        """Runs the attacks, prints the table and the strength, writes the page."""
        from situs.cli.passphrase import read_key
        from situs.locks import audit_lock

        check_folder(self.out, "audit")
        asked = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("locked", "out")}
        asked["key"] = None if self.key is None else read_key(self.key)
        present(audit_lock(self.locked, **asked), self.out)
