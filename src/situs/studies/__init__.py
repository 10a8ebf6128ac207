"""Tables and figures as studies: jobs, what each waits for, seeds, and the paper's numbers beside ours.

    study_names   The studies that come with situs, one a table or figure of the four papers.
    load_study    A study by its name or its TOML file, checked.
    run_study     Runs what is not done yet, resumes what was cut, and gives the table as it stands.
    read_study    The table of a study's folder as it stands; of a name alone, with what was measured before.

A study is one TOML file. Those of the papers lie in `papers/`; a user's own is written in the same form. This one holds
every key, most of which may be left out:

    title = "MP3 on CIFAR-100, with positions and without"
    shows = "One sentence: what the table or figure shows."
    paper = "mp3"                        # mp3, droppos, mjp or st; left out in a study of your own
    place = "Table 3"                    # where it stands in the paper
    seeds = 3                            # how often every job is run, unless asked otherwise: seeds 0, 1, 2
    note = "What a reader of the page must know: where the recipe is not the paper's, and why."

    [data]                               # name -> what has to lie there; the first is that of jobs which name none
    cifar100 = "CIFAR-100 as parquet files or python batches"
    cars = "Stanford Cars, a folder a class"

    [jobs.mp3]                           # a job is one command, here: situs pretrain --preset cifar100-mp3 …
    verb = "pretrain"                    # one of `situs.studies.form.VERBS`
    preset = "cifar100-mp3"
    change.train.epochs = 2000           # fields of the run's config, laid over the preset, as a preset's own file
    change.data.batch = 256
    once = true                          # all seeds share one run of it: here one pretraining for every fine-tuning

    [jobs."tuned-{positions}"]           # a job for every value of its variables: tuned-learned, tuned-none
    each.positions = ["learned", "none"]
    verb = "finetune"
    after = "mp3"                        # it starts from this job's model, and so when that is done
    preset = "cifar100-finetune"
    options.positions = "{positions}"    # arguments of the verb, by the names of its flags

    [jobs."shuffled-{positions}"]        # a measurement of a model; the study gives it data and folder
    each.positions = ["learned", "none"]
    verb = "evaluate consistency"
    after = "tuned-{positions}"
    options.ratios = [0.15]

    [jobs.both]
    verb = "evaluate accuracy"
    after = ["tuned-learned", "tuned-none"]                 # several models, in order
    # model = "vit_base_patch16_224=pretrained"             # instead of after: a model that no job makes
    # data = "cars"                                         # another of the data sets
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
    corner = "fine-tuned with"                              # what stands over the rows' names
    columns = [
      { name = "top-1", figure = "val_top1" },              # where ours is found (`situs.studies.find`)
      { name = "consistency", figure = "rows[ratio=0.15,told=true].consistency", digits = 2, unit = "%" },
    ]
    # Of a column: unit ("%" by default: a share of ours is shown times 100; times = 1 for a number that is none),
    # digits behind the point, reading (how far the paper's number may be off, which was read from an axis).

    [[tables.rows]]
    name = "learned positions"
    paper = [84.0, ""]                                      # "" where the paper has no number
    job = ["tuned-learned", "shuffled-learned"]             # one a column, or one text for all; "" fills nothing
    ours = [82.6, 64.3]                                     # what was measured before; [measured] says how

    [[tables.rows]]
    name = "somebody else's model"                          # no job: the paper's numbers alone
    paper = [82.7, 64.3]

Where the rows are measures and the columns models, `figure`, `unit`, `digits`, `times` and `reading` stand in the row
and `job` in the column. A figure of the paper is the same with points on an axis:

    [[curves]]
    title = "Position accuracy"
    x = "masking ratio η"
    y = "patches put right"
    unit = "%"
    reading = 1.0                                           # read from the paper's axis: right to a point
    lines = [
      { name = "MP3", at = [0, 0.5], paper = [83, 47], job = "places", figure = "accuracy[ratio={x}].accuracy" },
      # job = "tuned-{x}" where there is a job for every point: tuned-0, tuned-0.5
      { name = "trained", job = "tuned-none", figure = "log.val_top1[*].value", over = "log.val_top1[*].epoch" },
    ]

    [[pictures]]                                            # a figure without numbers: what a job has drawn
    job = "puzzles"
    title = "Puzzles that the model solves"
    file = "*"                                              # a pattern for the pictures' names

    [[scales.quick]]                                        # smaller sizes: changes laid over the jobs, in turn
    verb = "pretrain"                                       # of all jobs of this verb, and whose names fit `jobs`
    change.train.epochs = 2
    [[scales.quick]]
    jobs = ["shuffled-*"]
    options.count = 500
    # leave_out = true                                      # or not run at all at this scale
    # preset = "cifar100-mjp"                               # or with another recipe below the changes

    [cost]                                                  # GPU minutes for one seed, all jobs in turn
    minutes = { quick = 2, paper = 90 }
    measured = ["quick"]                                    # the others are estimated, and shown so
    machine = "one H200"
    how = "what the estimate stands on"

    [measured]                                              # of the rows' `ours`
    date = "2026-11-16"
    machine = "one H200"
    seeds = 1
    # scale = "quick", note = "…"

    [[missing]]                                             # what cannot be run yet, and why
    package = "dense"
    why = "ViT-Adapter is not there yet"
    columns = ["consistency"]                               # or rows; without both the whole study

The file as it stands is the scale "paper". A table that can be run in part says in [[missing]] which rows or columns
wait; one that cannot be run at all has its columns and the paper's numbers, no jobs, and a [[missing]] for all of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from situs.studies.load import load_study as load_study
    from situs.studies.load import study_names as study_names
    from situs.studies.reading import read_study as read_study
    from situs.studies.run import run_study as run_study

_HOMES = {
    "load_study": "load",
    "study_names": "load",
    "read_study": "reading",
    "run_study": "run",
}

__all__ = [*_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
