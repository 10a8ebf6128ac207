"""Settings of earlier versions: their old default is read without a word, any other value is told what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.config import ANY, from_dict, to_dict
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.methods import METHODS
from situs.methods.retired import RETIRED
from situs.train.checkpoint import RunFolder, read_config
from situs.train.checkpoint.files import with_checksum
from situs.train.run import RunConfig

OLD: dict[str, dict[str, Any]] = {
    "mp3": {"cls": "always", "window": 0},
    "droppos": {
        "mae_weight": 0.0, "mae_depth": 8, "epochs": 800, "sigma_schedule": "step", "distance": "euclidean",
        "target_grid": None, "target_norm": "rows", "floor_counts": False, "weights_over": "sample",
    },
    "mae": {"floor_counts": False, "normalise": True},
    "mjp": {
        "dal_depth": 3, "dal_mean": False, "dal_normalise": False, "dal_components": 2, "dal_fit": True,
        "dal_warmup": 0, "dal_final": None, "start_epoch": 0, "chance": 1.0, "draw_per": "sample", "rule": "paper",
        "unknown_std": 0.02, "table_std": None, "decay_positions": False, "epochs": 300,
    },
}  # fmt: skip
"""What config files of earlier versions have, where nobody changed it."""


@pytest.mark.parametrize("name", RETIRED)
def test_the_config_of_an_earlier_version_is_read(name: str) -> None:
    assert OLD[name].keys() == RETIRED[name].keys()
    assert from_dict(RunConfig, {"method": {"name": name, **OLD[name]}}) == from_dict(
        RunConfig, {"method": {"name": name}}
    )


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in RETIRED.items() for field in fields])
def test_the_old_default_is_read_and_nothing_else(name: str, field: str) -> None:
    left, instead = RETIRED[name][field]
    assert field not in to_dict(METHODS[name].Config())
    plain = from_dict(RunConfig, {"method": {"name": name}})
    old = 800 if left is ANY else left
    assert from_dict(RunConfig, {"method": {"name": name, field: old}}) == plain
    other: Any = 17
    if left is ANY:
        assert from_dict(RunConfig, {"method": {"name": name, field: other}}) == plain
        return
    with pytest.raises(SitusError, match=f"method.{field}=17: is no longer a setting; {instead.split('(')[0]}"):
        from_dict(RunConfig, {"method": {"name": name, field: other}})


def test_settings_of_data_that_changed_no_result_are_read_whatever_they_were() -> None:
    assert from_dict(DataConfig, {"path": "x", "decode": "gpu", "resize": "worker"}) == DataConfig("x")


def test_a_run_that_has_one_goes_on_under_the_config_that_its_checkpoints_know(tmp_path: Path) -> None:
    config = from_dict(RunConfig, {"method": {"name": "mp3"}, "data": {"path": "samples"}})
    RunFolder.create(tmp_path / "run", config)
    file = tmp_path / "run" / "config.json"
    old = json.loads(file.read_text())
    old.pop("sha256")
    old["method"] |= {"cls": "always", "window": 0}
    file.write_text(with_checksum(old, "config.json"))
    run = RunFolder.open(tmp_path / "run", config)
    assert run.config == read_config(tmp_path / "run") == old
