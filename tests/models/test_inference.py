from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from situs.models.inference import evaluating
from situs.train.step import Ema


def test_modes_and_gradients_come_back_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    ema = Ema(model, 0.9)
    mean = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    seen = []

    def look_and_fail() -> None:
        with evaluating(model, print, ema=ema):
            seen.append((model.training, torch.is_grad_enabled(), torch.equal(model[0].weight, mean)))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        look_and_fail()
    assert seen == [(False, False, True)]
    assert torch.is_grad_enabled()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert torch.equal(model[0].weight, mean + 1.0)


@pytest.mark.slow
def test_a_probe_of_a_sharded_method_sees_it_whole_and_leaves_it_sharded(tmp_path: Path) -> None:
    """Two gloo ranks: FSDP gathers weights only in the method's own forward, which a probe goes round."""
    script = Path(__file__).with_name("probe_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["sharded"] == found["alone"]
        assert found["alone"].keys() == {"knn_accuracy", "position_accuracy_test"}
        assert found["same"]
        assert found["count"] > 20
