"""From the file to the jobs: variables, scales, names, order."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from situs.config import from_dict
from situs.errors import SitusError
from situs.studies.form import Study
from situs.studies.plan import cell_of, check_configs, data_of, needs, planned, point_of, put

FILE: dict[str, Any] = {
    "title": "t",
    "shows": "s",
    "data": {"first": "f", "second": "s"},
    "jobs": {
        "pre-{eta}": {
            "verb": "pretrain",
            "preset": "samples-mp3",
            "each": {"eta": [0.25, 0.5]},
            "change": {"method": {"mask_ratio": "{eta}"}, "train": {"epochs": 7}},
        },
        "tuned-{eta}": {
            "verb": "finetune",
            "after": "pre-{eta}",
            "each": {"eta": [0.25, 0.5]},
            "options": {"positions": "none"},
        },
        "look": {"verb": "evaluate probe", "after": "tuned-0.5", "options": {"after": "{pre-0.5}", "seed": "{seed}"}},
    },
    "curves": [
        {
            "x": "η",
            "y": "top-1",
            "lines": [{"name": "MP3", "at": [0.25, 0.5], "job": "tuned-{x}", "figure": "val_top1"}],
        }
    ],
    "scales": {
        "quick": [{"verb": "pretrain", "change": {"train": {"epochs": 1}}}, {"jobs": ["*-0.25"], "leave_out": True}]
    },
}


def study(**changes: Any) -> Study:
    return from_dict(Study, {**deepcopy(FILE), **changes})


def test_variables_make_a_job_a_value_and_keep_their_types() -> None:
    jobs = planned(study())
    assert [*jobs] == ["pre-0.25", "pre-0.5", "tuned-0.25", "tuned-0.5", "look"]
    assert jobs["pre-0.25"].change["method"]["mask_ratio"] == 0.25
    assert jobs["tuned-0.5"].models == ("pre-0.5",)
    assert needs(jobs["look"]) == ("tuned-0.5", "pre-0.5")
    assert put({"a": ["{n}", "x{n}y"]}, {"n": 2.0}) == {"a": [2.0, "x2y"]}
    check_configs(jobs)


def test_a_job_starts_from_a_checkpoint_of_another() -> None:
    """The job that wrote it comes first, also where the path goes on behind its name."""
    job = {"verb": "finetune", "model": "{pre-0.5}/checkpoints/step-00000{steps}000", "each": {"steps": [1, 5]}}
    jobs = planned(study(jobs={"from-{steps}": job, **FILE["jobs"]}))
    assert jobs["from-5"].model == "{pre-0.5}/checkpoints/step-000005000"
    assert needs(jobs["from-5"]) == ("pre-0.5",)
    with pytest.raises(SitusError, match=r"jobs\.from-1.after: unknown job 'pre-7'"):
        planned(study(jobs={"from-{steps}": {**job, "model": "{pre-7}/checkpoints/x"}, **FILE["jobs"]}))


def test_a_scale_is_laid_over_and_leaves_out_what_rests_on_what_it_leaves_out() -> None:
    jobs = planned(study(), "quick")
    assert [*jobs] == ["pre-0.5", "tuned-0.5", "look"]
    assert jobs["pre-0.5"].change == {"method": {"mask_ratio": 0.5}, "train": {"epochs": 1}}
    assert planned(study())["pre-0.5"].change["train"]["epochs"] == 7
    with pytest.raises(SitusError, match="unknown scale 'huge'; choose one of: paper, quick"):
        planned(study(), "huge")
    with pytest.raises(SitusError, match=r"scales.tiny\[0\]: matches no job"):
        planned(study(scales={"tiny": [{"jobs": ["nosuch"]}]}), "tiny")
    with pytest.raises(SitusError, match=r"scales.tiny\[0\] for jobs.look: verb='.*': does not train; "):
        planned(study(scales={"tiny": [{"jobs": ["look"], "change": {"train": {"epochs": 1}}}]}), "tiny")


def test_which_data_a_job_reads() -> None:
    jobs = planned(study(jobs={**FILE["jobs"], "other": {"verb": "info", "after": "look"}}))
    assert data_of(study(), jobs["look"]) == ("first",)
    assert data_of(study(), jobs["other"]) == ()
    listed = replace(jobs["look"], options={"more": ["{data.second}"]})
    assert data_of(study(), listed) == ("first", "second")
    for options, data in (({"kind": "vectors"}, ()), ({"kind": "all"}, ("first",)), ({}, ("first",))):
        places = replace(jobs["look"], verb="evaluate position", options=options)
        assert data_of(study(), places) == data  # vectors are compared without images


def test_jobs_and_data_that_a_list_names_are_needed_too() -> None:
    among = {"verb": "evaluate accuracy", "after": "tuned-0.5", "options": {"more": ["{look}", "{seed}", 3]}}
    assert needs(planned(study(jobs={**FILE["jobs"], "among": among}))["among"]) == ("tuned-0.5", "look")


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"verb": "finetune", "after": "nosuch"}, "jobs.x.after: unknown job 'nosuch'; choose one of: look"),
        ({"verb": "finetune", "after": "x"}, "jobs.x.after: these jobs wait for each other: x -> x"),
        ({"verb": "pretrain", "each": {"n": 1}}, "jobs.x.each.n=1: must be a list"),
        ({"verb": "pretrain", "each": {"n": []}}, r"each.n=\[\]: must have at least one value"),
        ({"verb": "pretrain", "each": {"n": [1]}}, "jobs.x.each.n: the job's name must contain {n}"),
        ({"verb": "evaluate probe", "after": "look", "options": {"data2": "{data.third}"}}, "unknown data set 'third'"),
    ],
)
def test_names_that_do_not_fit_are_sentences(job: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        planned(study(jobs={**FILE["jobs"], "x": job}))


@pytest.mark.parametrize(
    ("name", "job", "said"),
    [
        ("a b", {"verb": "pretrain"}, "jobs.a b: 'a b' must contain only letters, digits and . _ + = -"),
        ("x-{n}", {"verb": "pretrain", "each": {"n": ["1/2"]}}, "jobs.x-{n}: 'x-1/2' must contain only letters"),
        ("x-{n}", {"verb": "pretrain", "each": {"n": [1, 1.0]}}, "jobs.x-{n}: two jobs have the name 'x-1'"),
        ("x-{n}", {"verb": "finetune", "after": "{n}", "each": {"n": [""]}}, "after: finetune needs a model"),
    ],
)
def test_each_name_is_that_of_one_job(name: str, job: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=rf"^{re.escape(said)}") as error:
        planned(study(jobs={**FILE["jobs"], name: job}))
    assert str(error.value.field).startswith(f"jobs.{name}")


def test_a_circle_is_shown() -> None:
    jobs = {"a": {"verb": "finetune", "after": "b"}, "b": {"verb": "finetune", "after": "c"}}
    with pytest.raises(SitusError, match="wait for each other: a -> b -> c -> a"):
        planned(study(jobs={**FILE["jobs"], **jobs, "c": {"verb": "finetune", "after": "a"}}))
    with pytest.raises(SitusError, match=r"jobs\.a\.after: these .*: b -> c -> b$"):  # without the way there
        planned(study(jobs={**FILE["jobs"], **jobs, "c": {"verb": "finetune", "after": "b"}}))


def test_cells_and_points_need_a_job_and_a_figure() -> None:
    table = {"columns": [{"name": "c"}], "rows": [{"name": "r", "job": "look"}]}
    with pytest.raises(SitusError, match=r"tables\[0\].rows\[0\], c: .*'look'.*figure"):
        planned(study(tables=[table]))
    with pytest.raises(SitusError, match=r"tables\[0\].rows\[0\], c: unknown job 'nosuch'"):
        planned(study(tables=[{**table, "rows": [{"name": "r", "job": "nosuch", "figure": "f"}]}]))
    with pytest.raises(SitusError, match=r"tables\[0\].rows\[0\], c: figure='loss\[x\]': \[x\] must be"):
        planned(study(tables=[{**table, "rows": [{"name": "r", "job": "look", "figure": "loss[x]"}]}]))
    with pytest.raises(SitusError, match=r"pictures\[0\].job: unknown job 'nosuch'"):
        planned(study(pictures=[{"job": "nosuch"}]))
    for line, said in (
        ({"job": "tuned-{x}", "at": [0.25, 0.75], "figure": "f"}, "unknown job 'tuned-0.75'"),
        ({"job": ["look", "pre-0.5"], "at": [1, 2], "figure": ["f", "g[x]"]}, r"figure='g\[x\]': \[x\] must be"),
        ({"job": "look", "at": [1]}, "names the job 'look', but not which "),
    ):
        with pytest.raises(SitusError, match=rf"^curves\[0\].lines\[0\]: {said}"):
            planned(study(curves=[{"x": "x", "y": "y", "lines": [{"name": "l", **line}]}]))
    line = {"name": "l", "job": "look", "figure": "a[*].b", "over": "a[*"}
    with pytest.raises(SitusError, match=r"curves\[0\].lines\[0\].over: figure='a\[\*': must be a path in"):
        planned(study(curves=[{"x": "x", "y": "y", "lines": [line]}]))
    assert point_of(study().curves[0].lines[0], 1) == ("tuned-0.5", "val_top1")


def test_a_row_goes_before_its_column() -> None:
    columns = [{"name": "a", "job": "look", "figure": "x"}, {"name": "b", "figure": "y"}]
    rows = [{"name": "r"}, {"name": "s", "job": ["", "tuned-0.5"], "figure": "z"}, {"name": "t", "job": "tuned-0.5"}]
    (table,) = study(tables=[{"columns": columns, "rows": rows}]).tables
    cells = [[cell_of(table, row, index) for index in (0, 1)] for row in table.rows]
    assert cells == [
        [("look", "x"), ("", "y")],
        [("", "z"), ("tuned-0.5", "z")],
        [("tuned-0.5", "x"), ("tuned-0.5", "y")],
    ]


def test_a_fine_tuning_without_a_method_learns_classes() -> None:
    change = {"method": {"mask_ratio": 0.5}}  # of MP3, which a pretraining has by default
    check_configs(planned(study(jobs={**FILE["jobs"], "x": {"verb": "pretrain", "change": change}})))
    for verb in ("finetune", "split train"):
        job = {"verb": verb, "after": "look", "change": change}
        with pytest.raises(SitusError, match=r"jobs\.x\.change: method\.mask_ratio: unknown key"):
            check_configs(planned(study(jobs={**FILE["jobs"], "x": job})))


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"verb": "pretrain", "preset": "nosuch"}, "jobs.x.preset: unknown preset 'nosuch'"),
        ({"verb": "pretrain", "change": {"optim": {"lrr": 1}}}, "jobs.x.change: optim.lrr: unknown key, perhaps lr"),
        ({"verb": "pretrain", "preset": "samples-mp3", "change": {"method": {"mask_ratio": 2}}}, "method.mask_ratio=2"),
    ],
)
def test_a_training_that_has_no_config_is_a_sentence(job: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        check_configs(planned(study(jobs={**FILE["jobs"], "x": job})))
