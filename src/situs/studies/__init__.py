"""Tables and figures as studies: jobs, their order, seeds, and the paper's numbers beside ours.

    study_names   The studies that come with situs, one for each table or figure of the four papers.
    load_study    A study by its name or its TOML file, checked.
    run_study     Runs the unfinished jobs, resumes interrupted ones, and gives the table.
    read_study    The table of a study's folder; for a name or file, with the numbers measured earlier.

A study is one TOML file. Those of the papers are in `papers/`; a user's study has the same form. This example has every
key; most of them are optional:

    title = "MP3 on CIFAR-100, with positions and without"
    shows = "One sentence: what the table or figure shows."
    paper = "mp3"                        # mp3, droppos, mjp or st; left out in a study of your own
    place = "Table 3"                    # its number in the paper
    seeds = 3                            # the default number of seeds: 0, 1, 2
    note = "A note on the page: where the recipe differs from the paper's, and why."

    [data]                               # name -> what its path must contain; the first is the default of jobs
    cifar100 = "CIFAR-100 as parquet files or python batches"
    cars = "Stanford Cars, one folder per class"

    [jobs.mp3]                           # a job is one command, here: situs pretrain --preset cifar100-mp3 …
    verb = "pretrain"                    # one of `situs.studies.form.VERBS`
    preset = "cifar100-mp3"
    change.train.epochs = 2000           # fields of the run's config that override the preset
    change.data.batch = 256
    once = true                          # all seeds share one run of it: here one pretraining for every fine-tuning

    [jobs."tuned-{positions}"]           # a job for every value of its variables: tuned-learned, tuned-none
    each.positions = ["learned", "none"]
    verb = "finetune"
    after = "mp3"                        # it starts from this job's model
    preset = "cifar100-finetune"
    options.positions = "{positions}"    # arguments of the verb, by the names of its flags

    [jobs."shuffled-{positions}"]        # a measurement of a model; the study adds data and folder
    each.positions = ["learned", "none"]
    verb = "evaluate consistency"
    after = "tuned-{positions}"
    options.ratios = [0.15]

    [jobs.both]
    verb = "evaluate accuracy"
    after = ["tuned-learned", "tuned-none"]                 # several models, in order
    # model = "vit_base_patch16_224=pretrained"             # instead of after: a model that no job makes
    # data = "cars"                                         # another data set of the study
    # options.predictor = "{mp3}"                           # {JOB}: that job's model, {data.NAME}: a data set's path,
    #                                                       # {seed}: the seed

    [jobs.places]
    verb = "evaluate position"
    after = "mp3"

    [jobs.puzzles]
    verb = "evaluate reconstruct"
    after = "mp3"

    [[tables]]
    title = "Test accuracy"
    corner = "fine-tuned with"                              # the header of the rows' names
    columns = [
      { name = "top-1", figure = "val_top1" },              # the path of our number (`situs.studies.find`)
      { name = "consistency", figure = "rows[ratio=0.15,told=true].consistency", digits = 2, unit = "%" },
    ]
    # Of a column: unit (default "%": our shares are shown times 100; times = 1 for numbers that are no shares),
    # digits (decimals), reading (the error of a paper's number that was read from an axis).

    [[tables.rows]]
    name = "learned positions"
    paper = [84.0, ""]                                      # "" where the paper has no number
    job = ["tuned-learned", "shuffled-learned"]             # one per column, or one text for all; "" for none
    ours = [82.6, 64.3]                                     # measured earlier; [measured] says how

    [[tables.rows]]
    name = "another model"                                  # no job: the paper's numbers alone
    paper = [82.7, 64.3]

Where the rows are measures and the columns models, `figure`, `unit`, `digits`, `times` and `reading` belong to the row
and `job` to the column. A figure of the paper has lines with points on an axis:

    [[curves]]
    title = "Position accuracy"
    x = "masking ratio η"
    y = "patches put right"
    unit = "%"
    reading = 1.0                                           # read from the paper's axis, to one point
    lines = [
      { name = "MP3", at = [0, 0.5], paper = [83, 47], job = "places", figure = "accuracy[ratio={x}].accuracy" },
      # job = "tuned-{x}": a job for every point, tuned-0, tuned-0.5
      { name = "trained", job = "tuned-none", figure = "log.val_top1[*].value", over = "log.val_top1[*].epoch" },
    ]

    [[pictures]]                                            # a figure without numbers: pictures of a job
    job = "puzzles"
    title = "Puzzles that the model solves"
    file = "*"                                              # a pattern for the pictures' names

    [[scales.quick]]                                        # smaller sizes: changes of the jobs, applied in order
    verb = "pretrain"                                       # to jobs of this verb whose names match `jobs`
    change.train.epochs = 2
    [[scales.quick]]
    jobs = ["shuffled-*"]
    options.count = 500
    # leave_out = true                                      # or not run at this scale
    # preset = "cifar100-mjp"                               # or with another preset below the changes

    [cost]                                                  # GPU minutes for one seed, one job after the other
    minutes = { quick = 2, paper = 90 }
    measured = ["quick"]                                    # the others are estimates, marked with ~
    machine = "one H200"
    how = "the basis of the estimate"

    [measured]                                              # of the rows' `ours`
    date = "2026-11-16"
    machine = "one H200"
    seeds = 1
    # scale = "quick", note = "…"

    [[missing]]                                             # what cannot be run yet, and why
    package = "dense"
    why = "ViT-Adapter does not exist yet"
    columns = ["consistency"]                               # or rows; without both the whole study

The file without changes is the scale "paper". If only a part of a table can be run, [[missing]] names the other rows
or columns. If nothing can be run, the table has columns, the paper's numbers, no jobs, and a [[missing]] for the whole
study.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from situs.studies.plan import load_study as load_study
    from situs.studies.plan import study_names as study_names
    from situs.studies.reading import read_study as read_study
    from situs.studies.run import run_study as run_study

_HOMES = {
    "load_study": "plan",
    "study_names": "plan",
    "read_study": "reading",
    "run_study": "run",
}

__all__ = [*_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
