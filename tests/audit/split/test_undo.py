"""What arrived is put back: every row of every sample in its place, whatever the client did to hide it."""

from __future__ import annotations

import pytest
import torch
from sent import classifier, stage

from situs.audit.split.stage import Scene
from situs.audit.split.undo import put_back
from situs.audit.split.view import Setting
from situs.locks.features import parse_defence

STAGE = stage(private=10, old=classifier())


@pytest.mark.parametrize("drifted", [False, True])
@pytest.mark.parametrize("defence", ["none", "lowpass=0.6", "batch-shuffle=4", "batch-shuffle"])
@pytest.mark.parametrize("permute", [(), ("rows",), ("columns",), ("rows", "columns")])
def test_tokens_are_where_they_belong(defence: str, permute: tuple[str, ...], drifted: bool) -> None:
    setting = Setting(parse_defence(defence), "rows" in permute, "columns" in permute)
    scene = Scene.of(STAGE, setting)
    side = scene.old if drifted else scene.side
    assert side is not None
    found = put_back(scene, side, scene.view, drifted=drifted)
    assert set(found.scores.values()) <= {1}
    exchanged = "shuffle" in defence
    hidden = {"channels": bool("columns" in permute), "places": "rows" in permute or exchanged, "samples": exchanged}
    assert found.scores.keys() == {name for name, is_so in hidden.items() if is_so}
    truth = scene.view.truth
    sample, row = (each.flatten()[found.index] for each in (truth.sample, truth.row))
    assert torch.equal(row, torch.arange(1, 17).expand(10, 16))
    assert torch.equal(sample, sample[:, :1].expand(10, 16)) and len(sample[:, 0].unique()) == 10
    if "lowpass" not in defence:
        torch.testing.assert_close(found.tokens, STAGE.z[sample, row], rtol=0, atol=0)


def test_mistakes_are_counted() -> None:
    scene = Scene.of(STAGE, Setting(parse_defence("noise=3"), rows=True))
    assert 0 < put_back(scene, scene.side, scene.view).scores["places"] < 0.8
