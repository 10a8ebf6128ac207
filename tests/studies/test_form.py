"""What a study's file may hold: every mistake is one sentence with the key."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from situs.cli.main import verb_type
from situs.cli.parser.flags import flags_of
from situs.config import from_dict
from situs.errors import SitusError
from situs.studies.form import PAPERS, VERBS, Study

WHOLE: dict[str, Any] = {
    "title": "t",
    "shows": "s",
    "data": {"small": "any"},
    "jobs": {"a": {"verb": "pretrain"}, "b": {"verb": "evaluate accuracy", "after": "a"}},
    "tables": [{"columns": [{"name": "top-1", "figure": "top1"}], "rows": [{"name": "r", "paper": [1.0], "job": "b"}]}],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """WHOLE with one value put at "jobs.a.verb" or "tables.0.rows.0.paper"."""
    tables = deepcopy(WHOLE)
    *above, last = path.split(".")
    held: Any = tables
    for key in above:
        held = held[int(key)] if isinstance(held, list) else held.setdefault(key, {})
    held[last] = value
    return tables


def test_a_whole_study_is_taken() -> None:
    study = from_dict(Study, WHOLE)
    assert study.jobs["b"].models == ("a",) and study.jobs["a"].models == ()
    assert study.scale_names() == ("paper",) and study.runs


def test_only_what_is_missing_as_a_whole_keeps_a_study_from_running() -> None:
    for part, runs in (({}, False), ({"columns": ["top-1"]}, True), ({"rows": ["r"]}, True)):
        missing = [{"package": "dense", "why": "w", **part}]
        study = from_dict(Study, changed("missing", missing))
        assert (study.runs, study.missing[0].whole) == (runs, not runs)
        if not runs:
            assert not from_dict(Study, {**changed("missing", missing), "jobs": {}, "tables": WHOLE["tables"]}).runs
        else:
            with pytest.raises(SitusError, match="jobs: a study without jobs needs"):
                from_dict(Study, {**changed("missing", missing), "jobs": {}})


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("jobs.a.verbb", "x", "jobs.a.verbb: unknown key, perhaps verb"),
        ("jobs.a.verb", "train", "unknown verb 'train'; choose one of: audit "),
        ("jobs.b.preset", "cifar100-mp3", "verb='evaluate accuracy': does not train; "),
        ("jobs.b.after", "", "after: evaluate accuracy needs a model"),
        ("jobs.a.after", "b", "verb='pretrain': takes no model"),
        ("jobs.b.model", "vit=pretrained", "after and model: give only one of them"),
        ("jobs.b.options", {"out": "x"}, "options.out: is set by the study itself"),
        ("jobs.a.options", {"seed": 1}, "options.seed: is set by the study itself"),
        ("jobs.b.data", "large", "unknown data set 'large'; choose one of: small"),
        ("tables.0.rows.0.paper", [1.0, 2.0], r"rows\[0\].paper: has 2 entries, but the number of columns is 1"),
        ("tables.0.rows.0.ours", [1.0], "measured: must give"),
        ("tables", [], "tables: a study needs a table"),
        ("jobs", {}, "jobs: a study without jobs needs"),
        ("tables.0.rows.0.job", ["b", "b"], r"rows\[0\].job: has 2 entries, but the number of columns is 1"),
        ("jobs", {}, r"needs an entry \[\[missing\]\] \(without rows and columns\)"),
        ("scales", {"quick": [{"verb": "train"}]}, "unknown verb 'train'"),
        ("cost", {"minutes": {"quick": 3}}, "unknown scale 'quick'; choose one of: paper"),
        ("cost", {"measured": ["quick"]}, "unknown scale 'quick'; choose one of: paper"),
        ("measured", {"date": "d", "machine": "m", "scale": "quick"}, "unknown scale 'quick'; choose one of: paper"),
        ("missing", [{"package": "dense", "why": "w", "rows": ["s"]}], "unknown name 's'; choose one of: r"),
        ("missing", [{"package": "dense", "why": "w", "columns": ["AP"]}], "unknown name 'AP'; choose one of: top-1"),
        ("curves", [{"x": "x", "y": "y", "lines": [{"name": "l", "job": "b"}]}], "set either 'at' .* or 'over'"),
        (
            "curves",
            [{"x": "x", "y": "y", "lines": [{"name": "l", "job": "b", "at": [1], "over": "x"}]}],
            "set either 'at' .* or 'over'",
        ),
        ("curves", [{"x": "x", "y": "y", "lines": [{"name": "l", "at": [1], "ours": [1]}]}], "measured: must give"),
        (
            "curves",
            [{"x": "x", "y": "y", "lines": [{"name": "l", "at": [1], "paper": [1, 2]}]}],
            "2 entries, but 'at' has 1",
        ),
        ("paper", "resnet", "paper='resnet': must be one of"),
        ("tables.0.rows", [{"name": "r"}] * 2, r"tables\[0\].rows\[1\].name='r': must be different"),
        ("tables.0.columns", [{"name": "c"}] * 2, r"columns\[1\].name='c': must be different"),
        ("curves", [{"x": "x", "y": "y", "lines": [{"name": "l"}] * 2}], r"lines\[1\].name='l': must be different"),
    ],
)
def test_a_mistake_is_a_sentence(path: str, value: Any, said: str) -> None:
    with pytest.raises(SitusError, match=said):
        from_dict(Study, changed(path, value))


def test_every_verb_of_a_job_is_one_of_the_command_line() -> None:
    from situs.cli.main import VERBS as KNOWN

    assert VERBS.keys() <= KNOWN.keys()
    assert len(PAPERS) == 4


def test_what_a_file_leaves_out() -> None:
    """Percent with one digit, printed in the paper and read off no plot; three seeds or one as the study says."""
    curves = [{"x": "x", "y": "y", "lines": [{"name": "l", "at": [1], "job": "b", "figure": "f"}]}]
    study = from_dict(Study, {**WHOLE, "curves": curves})
    (column,), (row,) = study.tables[0].columns, study.tables[0].rows
    assert (column.unit, column.digits, column.times, column.reading, column.job) == ("%", 1, None, 0.0, "")
    assert (row.unit, row.digits, row.times, row.reading, row.ours) == (None, None, None, None, ())
    (curve,) = study.curves
    assert (curve.unit, curve.digits, curve.reading, curve.title) == ("%", 1, 0.0, "")


@pytest.mark.parametrize("verb", VERBS)
def test_a_job_takes_what_its_verb_has_a_flag_for(verb: str) -> None:
    how, flags = VERBS[verb], flags_of(verb_type(verb))
    names, words = {flag.name for flag in flags}, [flag.fields[0] for flag in flags if flag.positional]
    assert how.data == ("--data" in names) and how.trains == ({"--resume", "--seed"} <= names)
    assert words == ([how.word] if how.word else words[:1] * (how.model == "word")) and how.model in (
        "",
        "word",
        "from",
    )
    assert bool(words) == bool(how.word or how.model == "word") and (how.model == "from") == ("--from" in names)
    assert {f"--{name}" for name in how.again} <= names and bool(how.without) <= ("--kind" in names)
