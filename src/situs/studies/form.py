"""The form of a study: frozen dataclasses for the keys of its TOML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from situs.config import Checked
from situs.errors import SitusError, unknown_name
from situs.limits import Count, Natural, NotNegative, Positive

PAPER = "paper"
"""The scale of the file itself: its jobs without changes."""

PAPERS = {
    "mp3": "Position Prediction as an Effective Pretraining Strategy",
    "droppos": "DropPos: Pre-Training Vision Transformers by Reconstructing Dropped Positions",
    "mjp": "Masked Jigsaw Puzzle: A Versatile Position Embedding for Vision Transformers",
    "st": "Permutation Equivariance of Transformers and Its Applications",
}
"""The papers whose tables and figures come with situs."""


class Verb(NamedTuple):
    """How the parts of a job become the words of a command. model: "word", the name of its flag, or "" for none.

    trains: it makes a run, which can be resumed, from a seed. data: whether it takes data. word: an option without a
    flag.
    partly: its numbers are valid even if its exit status says that some failed. bare: the model is optional. again:
    options that are repeated on resume. without: the value of `kind` that needs no data.
    """

    model: str = "word"
    trains: bool = False
    data: bool = True
    word: str = ""
    partly: bool = False
    bare: bool = False
    again: tuple[str, ...] = ()
    without: str = ""

    def reads(self, options: Mapping[str, Any]) -> bool:
        """Whether it takes data with these options."""
        return self.data and not (self.without and options.get("kind") == self.without)


VERBS = {
    "pretrain": Verb(model="", trains=True),
    "finetune": Verb(model="from", trains=True),
    "evaluate accuracy": Verb(),
    "evaluate attention": Verb(),
    "evaluate consistency": Verb(),
    "evaluate knn": Verb(),
    "evaluate position": Verb(without="vectors"),
    "evaluate probe": Verb(),
    "evaluate reconstruct": Verb(),
    "evaluate robustness": Verb(),
    "audit gradients": Verb(),
    "audit lock": Verb(),
    "audit split": Verb(),
    "audit texts": Verb(),
    "export": Verb(data=False),
    "keygen": Verb(model="", data=False),
    "info": Verb(data=False),
    "lock": Verb(data=False),
    "bench": Verb(model="", data=False, word="cases", partly=True),
    "split train": Verb(model="from", trains=True, bare=True, again=("server",)),
    "split infer": Verb(),
}
"""The verbs of jobs."""

EARLIER = {
    "analyze attention": ("evaluate attention", {}),
    "analyze correlation": ("evaluate attention", {"kind": "correlation"}),
    "analyze positions": ("evaluate position", {"kind": "vectors"}),
    "analyze reconstruct": ("evaluate reconstruct", {}),
    "audit positions": ("evaluate position", {"kind": "all"}),
    "bench step": ("bench", {}),
    "evaluate ensemble": ("evaluate accuracy", {}),
    "evaluate objects": ("evaluate accuracy", {}),
    "evaluate perplexity": ("evaluate accuracy", {}),
    "evaluate segments": ("evaluate accuracy", {}),
    "key new": ("keygen", {}),
    "verify": ("info", {"verify": True}),
}
"""A verb of earlier versions -> its present verb and further options."""

EARLIER_OPTIONS = {"attack": "attacks", "attacker": "attacks", "defence": "defences", "setting": "settings"}


def renewed(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job, or a change to jobs, of an earlier version, with the verbs and options of this one."""
    verb, more = EARLIER.get(job.get("verb", ""), (job.get("verb", ""), {}))
    options = {EARLIER_OPTIONS.get(name, name): value for name, value in job.get("options", {}).items()}
    if verb == "evaluate accuracy" and "pictures" in options:
        options["show"] = options.pop("pictures")
    data: dict[str, Any] = {}
    sentences = options.get("texts")
    if verb == "audit gradients" and isinstance(sentences, str) and sentences.startswith("{data."):
        verb, data = "audit texts", {"data": options.pop("texts")[len("{data.") : -1]}
    changed = ({"verb": verb} if verb else {}) | ({"options": options | more} if options or more else {})
    return {**job, **changed, **data}


Value = float | str
Ours = float | str | tuple[float, ...]
"""A number of a table; text where the paper has text (OOM), "" where it has nothing."""


@dataclass(frozen=True)
class Job(Checked):
    """One command. If its name contains `{variables}` of `each`, there is one job for every value."""

    verb: str
    """One of `VERBS`: pretrain, finetune, evaluate accuracy, …"""

    after: str | tuple[str, ...] = ()
    """The job whose model the verb takes. For several models: a list of jobs, in order."""

    model: str = ""
    """Use this instead of `after` for a model that no job makes (a folder, NAME=FILE or NAME=pretrained), or for a
    checkpoint of another job ({JOB}/checkpoints/step-00001000)."""

    preset: str = ""
    """For a training: the preset that `change` modifies."""

    change: dict[str, Any] = field(default_factory=dict)
    """For a training: fields of the run's config that override the preset, as in a preset's TOML file."""

    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the verb, by the names of its flags: positions = "learned", ratios = [0.15], time_limit = 60."""

    data: str = ""
    """Name of one of the study's data sets. Default: the first."""

    each: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Variables and their values. There is one job for every combination."""

    once: bool = False
    """Whether the job runs only with the first seed, and all seeds use its result. An example is one pretraining for
    many fine-tunings."""

    @property
    def models(self) -> tuple[str, ...]:
        """`after` as a list."""
        return (self.after,) if isinstance(self.after, str) else self.after

    def check(self) -> None:
        if self.verb not in VERBS:
            raise unknown_name("verb", self.verb, VERBS, field="verb")
        how = VERBS[self.verb]
        if (self.preset or self.change) and not how.trains:
            raise SitusError(
                f"verb={self.verb!r}: does not train; 'preset' and 'change' apply only to verbs that train",
                field="preset",
            )
        if self.after and self.model:
            raise SitusError("after and model: give only one of them", field=("after", "model"))
        if how.model and not how.bare and not self.after and not self.model:
            raise SitusError(
                f"after: {self.verb} needs a model; set 'after' (the job that trains the model) or 'model'",
                field="after",
            )
        if not how.model and (self.after or self.model):
            raise SitusError(f"verb={self.verb!r}: takes no model", field="after")
        for name, values in self.each.items():
            if not values:
                raise SitusError(f"each.{name}=[]: must have at least one value", field=f"each.{name}")
        for name in ("data", "out", "seed", "resume", "preset", "config", "from"):
            if name in self.options and not (name == "seed" and not how.trains):
                raise SitusError(f"options.{name}: is set by the study itself; leave it out", field=f"options.{name}")


@dataclass(frozen=True)
class Column(Checked):
    """A column of a table. Its figure, job and unit are the defaults of the cells below."""

    name: str
    unit: str = "%"
    """Unit of the numbers. With %, our ratios are shown times 100."""

    job: str = ""
    figure: str = ""
    """Path of our number in the job's output (`situs.studies.find`)."""

    digits: Natural = 1
    """Decimals."""

    times: Positive | None = None
    """Factor of our number. Default: 100 if the unit is %, otherwise 1."""

    reading: NotNegative = 0.0
    """Possible error of the paper's number, if somebody read the number off a plot. Use 0 for a printed number."""


@dataclass(frozen=True)
class Row(Checked):
    """A row of a table. A list has one entry per column. A single text applies to all columns."""

    name: str
    paper: tuple[Value, ...] = ()
    job: str | tuple[str, ...] = ""
    """The job that fills the cell, or "" if no job does (the paper cites other work)."""

    figure: str | tuple[str, ...] = ""
    unit: str | None = None
    digits: Natural | None = None
    times: Positive | None = None
    reading: NotNegative | None = None
    ours: tuple[Ours, ...] = ()
    """Our earlier numbers: a number, a list with one number per seed, or "". `[measured]` gives date and machine."""


def _check_apart(kind: str, entries: Sequence[Any]) -> None:
    """Refuses two entries of one name: the numbers of the second would replace those of the first."""
    names: set[str] = set()
    for index, entry in enumerate(entries):
        if entry.name in names:
            raise SitusError(
                field=f"{kind}[{index}].name", value=entry.name, allowed="different from the names before it"
            )
        names.add(entry.name)


@dataclass(frozen=True)
class Table(Checked):
    """The paper's table: its columns, its rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    corner: str = ""
    """Header above the names of the rows."""

    def check(self) -> None:
        _check_apart("rows", self.rows)
        _check_apart("columns", self.columns)
        for index, row in enumerate(self.rows):
            for name in ("paper", "ours", "job", "figure"):
                value = getattr(row, name)
                if isinstance(value, tuple) and value and len(value) != len(self.columns):
                    where = f"rows[{index}].{name}"
                    raise SitusError(
                        f"{where}: has {len(value)} entries, but the number of columns is {len(self.columns)}",
                        field=where,
                    )


@dataclass(frozen=True)
class Line(Checked):
    """A line of a figure: numbers at the points `at`, or two lists from the job's output."""

    name: str
    at: tuple[float, ...] = ()
    """x of every point. It replaces `{x}` in `job` and `figure`."""

    paper: tuple[Value, ...] = ()
    job: str | tuple[str, ...] = ""
    figure: str | tuple[str, ...] = ""
    over: str = ""
    """Without `at`: path of the list of x values in the job's output. It is as long as the list at `figure`."""

    ours: tuple[Ours, ...] = ()

    def check(self) -> None:
        for name in ("paper", "ours", "job", "figure"):
            value = getattr(self, name)
            if isinstance(value, tuple) and value and len(value) != len(self.at):
                raise SitusError(f"{name}: has {len(value)} entries, but 'at' has {len(self.at)}", field=name)
        if self.job and bool(self.at) == bool(self.over):
            raise SitusError(
                "at, over: set either 'at' (the x values) or 'over' (the path of the x values in the job's output)",
                field="at",
            )


@dataclass(frozen=True)
class Curves(Checked):
    """The paper's figure: lines over one axis."""

    x: str
    y: str
    lines: tuple[Line, ...]
    title: str = ""
    unit: str = "%"
    digits: Natural = 1
    times: Positive | None = None
    reading: NotNegative = 0.0
    """Possible error of the paper's numbers, which somebody read off a plot."""

    scale: Literal["linear", "log"] = "linear"
    """Scale of the x axis."""

    def check(self) -> None:
        _check_apart("lines", self.lines)


@dataclass(frozen=True)
class Picture(Checked):
    """Pictures that a job drew. Files whose names match become a figure of the study."""

    job: str
    title: str = ""
    file: str = "*"
    """A pattern for the picture's name: "*", "*-puzzles"."""


@dataclass(frozen=True)
class Change(Checked):
    """What a smaller scale changes in some jobs."""

    jobs: tuple[str, ...] = ("*",)
    """Names or patterns of jobs, after `each`."""

    verb: str = ""
    """Only jobs of this verb."""

    preset: str = ""
    """Another preset that the changes modify."""

    change: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    leave_out: bool = False
    """Whether to leave out these jobs at this scale. Their cells stay empty."""

    def check(self) -> None:
        if self.verb and self.verb not in VERBS:
            raise unknown_name("verb", self.verb, VERBS, field="verb")


@dataclass(frozen=True)
class Cost(Checked):
    """GPU minutes of all jobs for one seed, one after the other."""

    minutes: dict[str, NotNegative] = field(default_factory=dict)
    """Name of a scale -> its GPU minutes."""

    measured: tuple[str, ...] = ()
    """The scales whose minutes were measured. The minutes of other scales are estimates."""

    machine: str = "one H200"
    how: str = ""
    """The basis of the estimate."""


@dataclass(frozen=True)
class Missing(Checked):
    """What cannot be run yet, and why. Without rows and columns, this applies to the whole study."""

    package: str
    """What is needed: "speech", "dense", "text", or a data set's name."""

    why: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether nothing of the study can be run."""
        return not self.rows and not self.columns


@dataclass(frozen=True)
class Measured(Checked):
    """How the numbers `ours` in the file were measured."""

    date: str
    machine: str
    scale: str = PAPER
    seeds: Count = 1
    note: str = ""


@dataclass(frozen=True)
class Study(Checked):
    """A table or a figure: its jobs, their data, and the cells they fill."""

    title: str
    shows: str
    """What the table or figure shows, one sentence."""

    paper: Literal["", "mp3", "droppos", "mjp", "st"] = ""
    place: str = ""
    """Its number in the paper: "Table 3", "Figure 6"."""

    data: dict[str, str] = field(default_factory=dict)
    """Name of a data set -> what its path must contain."""

    seeds: Count = 1
    jobs: dict[str, Job] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    curves: tuple[Curves, ...] = ()
    pictures: tuple[Picture, ...] = ()
    scales: dict[str, tuple[Change, ...]] = field(default_factory=dict)
    """Smaller sizes: name -> changes of the jobs, applied in order. The scale "paper" makes no changes."""

    cost: Cost = field(default_factory=Cost)
    missing: tuple[Missing, ...] = ()
    measured: Measured | None = None
    note: str = ""
    """A note for the page: how the recipe differs from the paper's, and why."""

    @property
    def runs(self) -> bool:
        """Whether anything of it can be run."""
        return bool(self.jobs) and not any(missing.whole for missing in self.missing)

    def scale_names(self) -> tuple[str, ...]:
        """The scales it can be run at."""
        return (*dict.fromkeys((*self.scales, PAPER)),)

    def check(self) -> None:
        if not (self.tables or self.curves or self.pictures):
            raise SitusError("tables: a study needs a table, curves or pictures", field="tables")
        if not self.jobs and not any(missing.whole for missing in self.missing):
            reason = "needs an entry [[missing]] (without rows and columns) that says why it cannot be run"
            raise SitusError(f"jobs: a study without jobs {reason}", field="jobs")
        for name in (*self.cost.minutes, *self.cost.measured, *([self.measured.scale] if self.measured else ())):
            if name not in self.scale_names():
                raise unknown_name("scale", name, self.scale_names(), field="cost")
        rows = [row for table in self.tables for row in table.rows]
        if any(entry.ours for entry in (*rows, *self._lines())) and self.measured is None:
            raise SitusError(
                "measured: must give the date and the machine of the measured numbers, because some table rows or "
                "curves have such numbers (under their key 'ours')",
                field="measured",
            )
        names = {entry.name for entry in (*rows, *self._lines())}
        columns = {column.name for table in self.tables for column in table.columns}
        for index, entry in enumerate(self.missing):
            for kind, names_given, known in (("rows", entry.rows, names), ("columns", entry.columns, columns)):
                for name in names_given:
                    if name not in known:
                        raise unknown_name("name", name, known, field=f"missing[{index}].{kind}")
        for name, job in self.jobs.items():
            if job.data and job.data not in self.data:
                raise unknown_name("data set", job.data, self.data, field=f"jobs.{name}.data")

    def _lines(self) -> Iterator[Line]:
        return (line for curves in self.curves for line in curves.lines)
