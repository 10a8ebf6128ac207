"""Presets are found by name, laid over what they extend, and open with a header."""

from __future__ import annotations

from pathlib import Path

import pytest

import situs.presets
from situs.errors import SitusError
from situs.presets import load_preset, preset_header, preset_names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "_cifar.toml").write_text("batch = 8\n[optim]\nlr = 0.1\nclip = 1.0\n")
    (tmp_path / "cifar-mp3.toml").write_text(
        '# situs pretrain …\n#\n# 71 %\n\n# body\nextends = "_cifar"\n[optim]\nlr = 0.2\n'
    )
    (tmp_path / "loop.toml").write_text('extends = "pool"\n')
    (tmp_path / "pool.toml").write_text('extends = "loop"\n')
    (tmp_path / "notes.txt").write_text("not a preset")
    monkeypatch.setattr(situs.presets, "folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_names_layers_and_header() -> None:
    assert preset_names() == ["cifar-mp3", "loop", "pool"]
    assert load_preset("cifar-mp3") == {"batch": 8, "optim": {"lr": 0.2, "clip": 1.0}}
    assert preset_header("cifar-mp3") == "situs pretrain …\n\n71 %"


@pytest.mark.usefixtures("folder")
def test_unknown_and_circular_presets_are_sentences() -> None:
    with pytest.raises(SitusError, match="unknown preset 'nosuch'; choose one of: cifar-mp3, loop, pool"):
        load_preset("nosuch")
    with pytest.raises(SitusError, match="'loop' extends itself: loop -> pool -> loop"):
        load_preset("loop")


def test_every_preset_of_the_package_loads_and_has_a_header() -> None:
    for name in preset_names():
        assert load_preset(name), name
        assert preset_header(name), name


def test_the_package_names_its_presets_in_the_error() -> None:
    with pytest.raises(SitusError, match="unknown preset 'nosuch'"):
        load_preset("nosuch")
