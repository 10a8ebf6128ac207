"""Verbs that attack: `situs audit …`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from situs.audit import (
    ATTACKS,
    AuditConfig,
    Deadline,
    audit_gradients,
    audit_settings,
    create_attack,
    create_defence,
    find_defences,
    trace_defences,
    trace_texts,
)
from situs.audit.captured import Sent
from situs.audit.client import StepConfig
from situs.audit.deadline import first_ctrl_c
from situs.audit.public import TABLE_ATTACKED
from situs.audit.scores import METRICS
from situs.audit.settings import Comparison
from situs.audit.split.attackers import ATTACKS as SPLIT_ATTACKS
from situs.audit.split.text import LONGEST, PromptAudit, audit_prompts
from situs.audit.sweep.ladder import CostConfig
from situs.audit.text.audit import audit_texts, first_lines
from situs.audit.text.result import METRICS as TEXT_METRICS
from situs.cli.model_args import OUT, ImageArgs, ModelArgs, check_folder, open_from, opening_arguments, read_key
from situs.cli.parser.arguments import configured
from situs.cli.parser.flags import POSITIONAL, flags_of
from situs.cli.result import INTERRUPTED, options_of, present
from situs.cli.shell import remark
from situs.errors import SitusError
from situs.files import write_result
from situs.gate import ABOVE, NOT_JUDGED, junit, parse_limit
from situs.limits import Count
from situs.locks.attacks import LockAuditConfig
from situs.models.open import is_run
from situs.pages import publish, write_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from situs.audit.gradients import Audit
    from situs.audit.split.result import SplitAudit
    from situs.audit.text.result import TextAudit


def command_of(verb: str, args: Any) -> str:
    """The command with all flags that differ from their defaults; of a path only the last part, since pages name no
    folders."""
    arguments, options = ["situs", *verb.split()], []
    for flag in flags_of(type(args)):
        value = getattr(args, flag.fields[0])
        if flag.positional:
            arguments += [_word(item) for item in (value if isinstance(value, tuple) else (value,))]
        elif value == flag.default:
            continue
        elif isinstance(value, bool):
            options.append(flag.name if value else f"--no-{flag.name[2:]}")
        elif isinstance(value, dict):
            options += [word for key, item in value.items() for word in (f"{flag.name}.{key}", json.dumps(item))]
        else:
            options += [flag.name, ",".join(map(str, value)) if isinstance(value, tuple) else _word(value)]
    return shlex.join([*arguments, *options])


def _word(value: Any) -> str:
    """A word of the command without folders, also in NAME=FILE and file.py:Name."""
    text = str(value)
    name, equals, file = text.partition("=")
    if equals and not Path(text).exists():
        return f"{name}={_word(file)}"
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{Path(file).name}:{name}"
    is_path = isinstance(value, Path) or (isinstance(value, str) and (Path(text).is_absolute() or Path(text).exists()))
    return Path(text).resolve().name if is_path else text


def _options(verb: str, args: Gradients | Sweep | Texts, deadline: Deadline) -> dict[str, Any]:
    """The flags as arguments of an audit."""
    config = StepConfig if isinstance(args, Texts) else AuditConfig
    return {
        **{field.name: getattr(args, field.name) for field in fields(config)},
        **opening_arguments(args.model, args),
        "facts": {"command": command_of(f"audit {verb}", args)},
        "deadline": deadline,
        "keep": lambda result: write_numbers(result, args.out) if args.out else None,
    }


def _check_flags(args: Gradients | Sweep) -> None:
    """Refuses missing images, unknown names and a wrong limit before anything is announced or opened."""
    if args.data is None and not (isinstance(args, Gradients) and args.upload) and not is_run(args.model):
        raise SitusError("data: give the images to attack", field="data")
    for name in args.attacks or ():
        create_attack(name)
    for name in () if args.defences == ("auto",) else args.defences:
        create_defence(name)
    if args.fail_above is not None:
        parse_limit(args.fail_above, METRICS)


def _finish(audit: Audit | TextAudit | Comparison, args: Gradients | Texts, deadline: Deadline) -> int:
    """Prints and writes the audit, and gives the exit status of its gate."""
    ruling = None if isinstance(audit, Comparison) else audit.ruling
    if args.junit is not None and ruling is not None and not isinstance(audit, Comparison):
        verb = "gradients" if isinstance(args, Gradients) else "texts"
        file = junit(f"situs audit {verb} {audit.model}", ruling, audit.provenance.facts, audit.lines)
        write_result(args.junit, file, field="junit")
    present(audit if args.pictures else audit.without_pictures(), args.out)
    status = 0 if ruling is None else ruling.status
    return INTERRUPTED if deadline.interrupted and status != ABOVE else status


@dataclass(frozen=True, kw_only=True)
class GateArgs(ModelArgs):
    """Flags of the audits with a gate."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """Time limit for all attacks together. Each attack gets an equal share."""

    junit: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """JUnit XML file for the gate's verdict. An inconclusive verdict counts as an error."""

    pictures: bool = True
    """Show the attacked samples in the HTML file. Do not publish this file."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for the results (JSON and HTML). With --out none, no files are written."""

    def check_gate(self, gate: str | None, result: str) -> None:
        """Refuses --junit without a gate, and paths that cannot be written."""
        if self.junit is not None and gate is None:
            reason = f"junit={self.junit}: applies only with a gate; set a gate with fail_above"
            raise SitusError(reason, field=("junit", "fail_above"))
        if self.junit is not None and (self.junit.is_dir() or self.junit.parent.is_file()):
            raise SitusError(field="junit", value=self.junit, allowed="a file that can be written")
        check_folder(self.out, result)


@dataclass(frozen=True, kw_only=True)
class Gradients(GateArgs, AuditConfig):
    """Measure what gradients reveal about images. --fail-above sets a gate for CI.

    For example: situs audit gradients runs/ft --data samples --count 2
    """

    topics: ClassVar = GateArgs.topics | {
        "matching": ("labels", "distance", "iterations"),
        "advanced": ("loss", "lpips", "predictor", "search_seconds", "settings", "classes", "sent", "split"),
    }

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images to attack, in any format that training reads. Default: the images of the training run."""

    upload: Annotated[tuple[Path, ...], Parameter(metavar="FILE,…")] = ()
    """Captured uploads to attack (.safetensors, .pt or .npz). Give their images (if known) with --data."""

    sent: Annotated[Sent | None, Parameter(metavar="KIND")] = None
    """Content of the --upload files: gradient, difference (weights before - after) or weights. Default: detected by
    Situs."""

    attacks: Annotated[tuple[str, ...] | None, Parameter(metavar="NAME,…")] = None
    """Attacks, comma-separated. Default: patchembed,tokens,patchembed-prior. With --settings, april is added. With
    --server active, the default is all attacks that craft weights. Slow: matching, april-optimisation, adaptive-mjp."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("auto",)
    """Defences, comma-separated, such as noise=1e-4. "auto" stands for none,noise,clip,no-pe-gradient. If the run used
    DP-SGD, "auto" also adds this DP-SGD. With --fail-above, "auto" is only this DP-SGD, or "none" without DP-SGD. With
    --upload, "auto" is "none". A run trained with MJP shuffles patches even with "none"."""

    settings: Annotated[tuple[str, ...], Parameter(metavar="a,b,c")] = ()
    """Settings of Table 5 in MJP's paper. a: attack the original image, and compare the result with the original. b:
    attack the shuffled image, and compare the result with the shuffled image. c: attack the shuffled image, and compare
    the result with the original. In each setting, some attackers know that MJP is used, and others do not. Set γ, the
    fraction of shuffled patches, with --defences mjp=γ."""

    def run(self) -> int:
        """The exit status says whether the gate is passed."""
        _check_flags(self)
        if self.settings and self.upload:
            raise SitusError(
                "settings: cannot be used with captured uploads; remove `settings` or `upload`",
                field=("settings", "upload"),
            )
        unknown = "upload" if self.upload and self.data is None else "gradients"
        self.check_gate(self.fail_above, "settings" if self.settings else unknown)

        def say(line: str) -> None:
            is_long = self.settings or self.fail_above or any(ATTACKS[name].slow for name in self.attacks or ())
            if is_long or sys.stderr.isatty():
                remark(line)

        deadline = Deadline(say, self.time_limit)
        options: dict[str, Any] = _options("gradients", self, deadline) | {
            "attacks": self.attacks,
            "defences": self.defences,
        }
        with first_ctrl_c(deadline):
            if self.settings:
                options["attacks"] = TABLE_ATTACKED if self.attacks is None else self.attacks
                return _finish(audit_settings(self.model, self.data, self.settings, **options), self, deadline)
            captured = {"upload": self.upload or None, "sent": self.sent}
            return _finish(audit_gradients(self.model, self.data, **options, **captured), self, deadline)


@dataclass(frozen=True, kw_only=True)
class Texts(GateArgs, StepConfig):
    """Measure what gradients reveal about texts. --fail-above sets a gate for CI.

    The gate limits one of four fractions. words: words of the most exposed sentence that are recovered at any position.
    tokens: those recovered at the right position. sentences: sentences recovered completely. picked: sentences
    recovered completely, or identified among versions with one word changed.

    For example: situs audit texts bert/ --data sentences.txt --count 4
    """

    texts: Annotated[Path, Parameter(name="--data", metavar="FILE")]
    """File with one sentence per line."""

    upload: Annotated[tuple[Path, ...], Parameter(metavar="FILE,…")] = ()
    """Captured uploads to attack (.safetensors, .pt or .npz). Give the sentences of the uploads with --data, in the
    same order."""

    sent: Annotated[Sent | None, Parameter(metavar="KIND")] = None
    """Content of the --upload files: gradient, difference (weights before - after) or weights. Default: detected by
    Situs."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("none",)
    """Defences, comma-separated, such as noise=1e-4 or clip=0.5. With --upload, name the defence that the client
    used."""

    def run(self) -> int:
        """The exit status says whether the gate is passed."""
        for name in self.defences:
            create_defence(name)
        if self.fail_above is not None:
            parse_limit(self.fail_above, TEXT_METRICS)
        self.check_gate(self.fail_above, "texts")
        deadline = Deadline(remark, self.time_limit)
        options: dict[str, Any] = _options("texts", self, deadline) | {"defences": self.defences}
        options |= {"upload": self.upload or None, "sent": self.sent}
        options = {name: value for name, value in options.items() if value is not None}  # such as the size of images
        with first_ctrl_c(deadline):
            return _finish(audit_texts(self.model, self.texts, **options), self, deadline)


COSTS = tuple(field.name for field in fields(CostConfig))
"""Flags for the privacy cost of a defence."""

COUNT = 4
"""Default number of images or sentences of a curve."""

OVER = ("noise", "precision", "fedavg")
"""Default curves of images."""


@dataclass(frozen=True, kw_only=True)
class Sweep(ModelArgs, CostConfig, AuditConfig):
    """Measure how strong a defence must be. Curves show what attacks recover at each strength of the defence.

    With --find, search each defence for the weakest setting that keeps every attack below a limit. The attackers know
    the defence.

    For example: situs audit sweep runs/ft --data samples --over noise --count 2
    """

    topics: ClassVar = ModelArgs.topics | {
        "matching": ("labels", "distance", "iterations"),
        "costs": COSTS,
        "advanced": ("loss", "lpips", "predictor", "search_seconds", "classes", "server"),
    }

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images to attack, in any format that training reads. For a language model: a .txt file with one sentence per
    line."""

    curve: Annotated[tuple[str, ...] | None, Parameter(name="--over", metavar="NAME,…")] = None
    """Defences to test at several strengths, comma-separated: noise, clip (with noise, as in DP-SGD) or precision. For
    images, also fedavg (local steps) or dropout. Default: noise,precision,fedavg for images, and noise,precision for
    texts."""

    fail_above: Annotated[str | None, Parameter(name="--find", metavar="METRIC=NUMBER")] = None
    """Instead of drawing curves, search each defence for the weakest setting that keeps every attack below this limit,
    such as psnr=20."""

    attacks: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("patchembed", "tokens", "patchembed-prior")
    """Attacks, comma-separated. A curve shows the best attack at each strength of the defence."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("auto",)
    """Further defences of fixed strength, comma-separated. Each of them gets one curve per defence in --over.
    "auto" stands for none,no-pe-gradient."""

    count: Count | None = None
    """Number of images or sentences to attack, from the start of the data. Default: 4, or 12 with --find."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """Time limit for all attacks together. Each attack gets an equal share."""

    pictures: bool = True
    """With --find: show the attacked samples in the HTML file. Do not publish this file."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for the results (JSON and HTML). With --out none, no files are written."""

    def run(self) -> int:
        texts = self.data is not None and Path(self.data).suffix == ".txt"
        find = self.fail_above is not None
        for name in self._unused(texts, find):
            if getattr(self, name) != getattr(Sweep, name):
                mode = "with --find" if find else "for curves of sentences" if texts else "for curves"
                raise SitusError(f"{name}: has no effect {mode}; leave it out", field=name)
        if not texts:
            _check_flags(self)
        check_folder(self.out, *(("gradients", "defences") if find else ("curve",)))
        deadline = Deadline(remark, self.time_limit)
        if find:
            return self._find(deadline)
        options = _options("sweep", self, deadline)
        del options["fail_above"]
        if self.curve is not None:
            options["over"] = self.curve
        with first_ctrl_c(deadline):
            if texts:
                assert self.data is not None
                names = {field.name for field in fields(StepConfig)}
                names |= {"unlock", "device", "facts", "deadline", "keep", "over"}
                options = {name: value for name, value in options.items() if name in names and value is not None}
                options["count"] = len(first_lines(self.data, self.count, self.batch, COUNT))
                present(trace_texts(self.model, self.data, **options), self.out)
            else:
                options = {"over": OVER, **options, "attacks": self.attacks, "count": self.count or COUNT}
                if self.defences != ("auto",):
                    options["beside"] = self.defences
                present(trace_defences(self.model, self.data, **options), self.out)
        return INTERRUPTED if deadline.interrupted else 0

    def _unused(self, texts: bool, find: bool) -> tuple[str, ...]:
        """Flags without effect in this mode."""
        if find:
            return ("curve", "defences")
        images = ("defences", "attacks", "split", "weights", "img_size", "patch_size", "labels")
        return (*COSTS, "pictures", *(images if texts else ()))

    def _find(self, deadline: Deadline) -> int:
        """Audits what is sent today, in a tenth of the time, then searches for defences; one page shows both.

        The exit status is 0 if a setting is found, otherwise that of "inconclusive".
        """
        assert self.fail_above is not None
        costs = {name: getattr(self, name) for name in COSTS}
        first = Deadline(deadline.say, None if self.time_limit is None else self.time_limit / 10, whole=deadline)
        options: dict[str, Any] = {**_options("sweep", self, deadline), "attacks": self.attacks}
        with first_ctrl_c(deadline):
            today = audit_gradients(self.model, self.data, **{**options, "deadline": first})
            today, deadline.closed = today if self.pictures else today.without_pictures(), True
            if self.out is not None:
                publish(today, self.out)  # kept even if the search is stopped
            deadline.closed = False
            try:
                del options["fail_above"]
                remedies = find_defences(self.model, self.data, self.fail_above, **costs, **options)
            except KeyboardInterrupt:  # before the first trial; after it, a stopped search returns its trials
                deadline.closed = True
                remark("stopped by Ctrl-C before any defence was tried, so the results contain no defence")
                present(today, self.out)
                return INTERRUPTED
            deadline.closed = True
            page = None if self.out is None else publish(replace(today, remedies=remedies), self.out)
            present(remedies, self.out)
        if page is not None:
            print(page)
        return INTERRUPTED if deadline.interrupted else 0 if remedies.with_setting else NOT_JUDGED


IMAGES_ONLY, TEXTS_ONLY = ("attacks", "batch", "split", "held_out"), ("depth", "wire", "longest")
"""Flags of `audit split` that only images, or only texts, have."""


@dataclass(frozen=True, kw_only=True)
class Split(ImageArgs):
    """Measure what an untrusted server in split learning can learn about the samples.

    By default, each defence is tested without permutation, with permuted rows (tokens), with permuted columns
    (channels), and with both. The default flags reproduce Table 6 of Xu et al. (arXiv 2304.07735). To attack a language
    model, set --data to a .txt file. --depth then sets how many blocks run on the client, for example --data texts.txt
    --depth 0,half,last.

    For example: situs audit split runs/ft --defences none,noise=0.5 --count 100
    """

    topics: ClassVar = ImageArgs.topics | {"advanced": ("held_out", "split", "seed"), "texts": TEXTS_ONLY}

    count: Annotated[int | None, Parameter(metavar="SAMPLES")] = None
    """Number of samples to attack, chosen at random. Default: 64 images or 24 texts. The attack no-embedding needs at
    least 100 images."""

    batch: int = 64
    """Images per batch."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="DEFENCE,…")] = ()
    """Defences, comma-separated: none, noise=σ (noise whose standard deviation is σ times that of the tokens),
    lowpass=r (keep the lowest fraction r of the frequencies), or batch-shuffle=B (shuffle tokens among B samples).
    "curve" stands for each defence at several strengths. Default: none (for images also
    noise=0.2,lowpass=0.3,batch-shuffle=8)."""

    permute: Annotated[tuple[str, ...], Parameter(metavar="rows,columns")] = ()
    """Test each defence also with permuted tokens (rows), channels (columns), or both. Default: both (for texts: those
    that the model supports)."""

    attacks: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = tuple(SPLIT_ATTACKS)
    """Attacks, comma-separated."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """The model before fine-tuning, for the attack old-embedding (images). On texts, the attacker knows this model
    instead of the fine-tuned one."""

    public: Annotated[int | None, Parameter(metavar="SAMPLES")] = None
    """Number of other samples of the set that the attacker has. Default: 300 images or 200 texts."""

    depth: Annotated[tuple[str, ...], Parameter(metavar="NUMBER|half|last,…")] = ("0",)
    """Depths to attack, comma-separated. A depth is the number of blocks that run on the client, "half" (half of all
    blocks) or "last" (all blocks except the last one)."""

    wire: Literal["own", "bf16"] = "own"
    """Number format of the sent features: own (as the model computes them) or bf16 (bfloat16)."""

    longest: int = LONGEST
    """Largest number of tokens per text. Longer texts are truncated at the end."""

    pictures: bool = True
    """Show images and reconstructions in the HTML file. Do not publish this file."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """Time limit, checked between attacks. At the limit or on Ctrl-C, Situs writes the results so far. A stopped audit
    cannot be resumed."""

    def run(self) -> int:
        """Audits, prints the verdict and the table, and writes the page; after Ctrl-C, of the results so far."""
        from situs.audit.split.audit import audit_split
        from situs.pages import write_numbers

        def keep(result: SplitAudit | PromptAudit) -> None:
            if self.out is not None:
                write_numbers(result, self.out)

        texts = self.data is not None and Path(self.data).suffix == ".txt"
        for name in IMAGES_ONLY if texts else TEXTS_ONLY:
            if getattr(self, name) != getattr(Split, name):
                raise SitusError(f"{name}: is not used for {'texts' if texts else 'images'}; leave it out", field=name)
        if texts:
            return self._texts(keep)
        options = {name: value for name, value in options_of(self).items() if name not in (*TEXTS_ONLY, "time_limit")}
        options = {name: value for name, value in options.items() if value not in (None, ())}
        deadline = Deadline(lambda line: remark(f"situs: {line}"), self.time_limit)
        with first_ctrl_c(deadline):
            present(audit_split(open_from(self), deadline=deadline, keep=keep, **options), self.out)
        return INTERRUPTED if deadline.interrupted else 0

    def _texts(self, keep: Callable[[PromptAudit], None]) -> int:
        """The same for a language model."""
        assert self.data is not None
        check_folder(self.out, "split-audit")
        options = {name: getattr(self, name) for name in ("depth", "wire", "longest", "seed")}
        asked = ("count", "public", "defences", "permute", "device", "base")
        options |= {name: getattr(self, name) for name in asked if getattr(self, name) not in (None, ())}
        deadline = Deadline(lambda line: remark(f"situs: {line}"), self.time_limit)
        facts = {"command": command_of("audit split", self)}
        with first_ctrl_c(deadline):
            audit = audit_prompts(self.model, self.data, deadline=deadline, keep=keep, facts=facts, **options)
            present(audit if self.pictures else audit.without_pictures(), self.out)
        return INTERRUPTED if deadline.interrupted else 0


@dataclass(frozen=True)
class Lock:
    """Attack a locked model without its key, and measure how much security remains.

    A lock is obfuscation, not encryption. An attacker with the original model can compute the key from the weights of
    the original and the locked model. Even without the original model, a few images similar to the training images can
    be enough to find most of the key. To simulate an attacker with a fine-tuned version of the original model, use
    --attacks drifted-base --base ORIGINAL --drift 0.3,1,3: Situs then adds noise of three strengths to the weights of
    ORIGINAL.

    For example: situs audit lock locked --key owner.key --base exported
    """

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The locked folder (the output of situs lock)."""

    attacker: Annotated[tuple[str, ...], Parameter(name="--attacks", metavar="NAME,…")] = ()
    """Attacks, comma-separated: no-base, images, activations, public-base, drifted-base, labels. The names say what the
    attacker has (base: the original model). Default: no-base. With --images or --texts, the default is
    "no-base,images". With --base, public-base is added to the default."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """The model that the attacker has: a training run, an export, a model folder, or a timm model name with
    --weights."""

    weights: Annotated[str | None, Parameter(metavar="FILE")] = None
    """Weight file, if --base is a timm model name."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Key of the owner, used only to score the attacks. The key is not needed if --base is the original model."""

    images: Annotated[str | None, Parameter(metavar="PATH")] = None
    """For the attacks "images" and "activations": unlabelled images that are similar to the training images of the
    model."""

    texts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """For the attacks "images" and "activations" on a language model: a file with one unlabelled text per line."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled data set. The attack "labels" uses the training split. The accuracy before and after each attack is
    measured on the validation split."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for audit.json and audit.html. With --out none, no files are written."""

    config: LockAuditConfig = configured(LockAuditConfig)
    """Settings of the attackers: how much data they have, and how long they train."""

    def run(self) -> None:
        """Runs the attacks, prints the table and the strength, writes the page."""
        from situs.locks import audit_lock

        check_folder(self.out, "audit")
        names = (field.name for field in fields(self) if field.name not in ("locked", "out"))
        options = {name: getattr(self, name) for name in names}
        options["key"] = None if self.key is None else read_key(self.key)
        present(audit_lock(self.locked, **options), self.out)
