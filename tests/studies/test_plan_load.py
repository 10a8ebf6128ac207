"""The studies that come with situs, and a user's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import situs.studies
from situs.errors import SitusError
from situs.studies.form import EARLIER, VERBS, renewed
from situs.studies.plan import load_study, study_names

NAME = re.compile(r"(mp3|droppos|mjp|st)-(table|figure)s?\d+")


@pytest.mark.parametrize("name", study_names())
def test_every_study_of_the_package_is_whole(name: str) -> None:
    study = load_study(name)
    if study.paper:
        assert NAME.fullmatch(name) and name.startswith(f"{study.paper}-"), name
        assert name == f"{study.paper}-{study.place.lower().replace(' ', '')}"
    assert study.shows.endswith(".") and not study.title.endswith(".")
    assert not study.runs or study.cost.minutes.keys() == {*study.scale_names()}, "minutes for every scale"


def test_they_are_in_the_papers_order() -> None:
    names = study_names()
    assert names.index("mjp-table4") < names.index("mp3-table3")


def test_a_name_that_is_none_gives_the_nearest_and_how_to_list_all() -> None:
    with pytest.raises(
        SitusError, match=r"unknown study 'mp3-tabel3', .*`situs study show`.* nearest: mp3-table3, "
    ) as told:
        load_study("mp3-tabel3")
    assert str(told.value).count("-table") <= 3
    with pytest.raises(
        SitusError, match=r"unknown study 'zzz', and no such folder or file; Situs has \d+ studies \(.*\)$"
    ):
        load_study("zzz")
    with pytest.raises(SitusError, match=r"nosuch\.toml: cannot be read"):
        load_study("nosuch.toml")


def test_the_example_of_every_key_is_a_study() -> None:
    """Every key that it explains is taken, and every job of it makes a config."""
    study = load_study(Path(__file__).parents[2] / "examples" / "study_keys.toml")
    assert [*study.jobs][:4] == ["mp3", "tuned-{positions}", "shuffled-{positions}", "both"]
    assert study.scale_names() == ("quick", "paper") and len(study.curves[0].lines) == 2


def test_a_file_of_any_name_is_a_study(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes((Path(__file__).parents[2] / "examples" / "study_keys.toml").read_bytes())
    assert load_study(tmp_path / "mine", configs=False) == load_study(
        Path(__file__).parents[2] / "examples" / "study_keys.toml", configs=False
    )


def test_a_mistake_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('title = "t"\nshows = "s"\ntables = []\nfoo = 1\n')
    with pytest.raises(SitusError, match=r"mine.toml: foo: unknown key"):
        load_study(file)


def test_a_mistake_of_a_job_names_it(tmp_path: Path) -> None:
    """Also where the sentence is of the verb alone."""
    study = '[jobs.b]\nverb = "VERB"\nafter = "c"\n[[tables]]\ncolumns = [{ name = "x" }]\nrows = [{ name = "y" }]\n'
    for verb, said in (("pretrain", "verb='pretrain': takes no model"), ("dance", "unknown verb 'dance'")):
        (tmp_path / "mine.toml").write_text('title = "t"\nshows = "s"\n' + study.replace("VERB", verb))
        with pytest.raises(SitusError, match=rf"mine\.toml: jobs\.b: {said}"):
            load_study(tmp_path / "mine.toml")


def test_the_configs_of_its_trainings_are_looked_at_where_they_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    study = 'title = "t"\nshows = "s"\n[jobs.a]\nverb = "pretrain"\nchange.optim.lrr = 1\n[[pictures]]\njob = "a"\n'
    file.write_text(study)
    assert [*load_study(file, configs=False).jobs] == ["a"]
    with pytest.raises(SitusError, match=r"mine\.toml: jobs\.a\.change: optim\.lrr: unknown key"):
        load_study(file)


@pytest.mark.parametrize("verb", EARLIER)
def test_a_study_of_an_earlier_version_is_read_in_the_words_of_this_one(verb: str) -> None:
    now, more = EARLIER[verb]
    assert now in VERBS and verb not in VERBS
    job = renewed({"verb": verb, "after": "a", "options": {"attack": ["april"], "count": 2}})
    assert job == {"verb": now, "after": "a", "options": {"attacks": ["april"], "count": 2, **more}}
    assert renewed(job) == job


def test_options_of_an_earlier_version_are_renamed() -> None:
    texts = {"verb": "audit gradients", "options": {"texts": "{data.lines}", "defence": "noise", "setting": ["a"]}}
    assert renewed(texts) == {
        "verb": "audit texts",
        "data": "lines",
        "options": {"defences": "noise", "settings": ["a"]},
    }
    assert renewed({"jobs": ["*"], "options": {"attacker": ["labels"]}})["options"] == {"attacks": ["labels"]}
    for verb, name in (("evaluate accuracy", "show"), ("evaluate objects", "show"), ("evaluate knn", "pictures")):
        assert renewed({"verb": verb, "options": {"pictures": 8}})["options"] == {name: 8}


def test_the_package_has_the_functions_that_it_lists() -> None:

    assert [getattr(situs.studies, name).__name__ for name in situs.studies.__all__] == situs.studies.__all__
