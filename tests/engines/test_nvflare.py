"""The NVFlare filter: in NVFlare's simulator, with weights and with differences."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from situs.engines import nvflare
from situs.engines.nvflare import GuardFilter
from situs.errors import SitusError

ROOT, APP = Path(__file__).parents[2], Path(__file__).parent / "nvflare_app"
INSTALLED = importlib.util.find_spec("nvflare") is not None


@pytest.mark.skipif(INSTALLED, reason="nvflare is installed")
def test_without_nvflare_it_says_which_extra() -> None:
    with pytest.raises(SitusError, match=r"pip install situs\[nvflare\]"):
        GuardFilter("net:build")


def test_weights_of_a_task_stay_as_they_came_if_the_client_trains_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SimpleNamespace(data_kind="WEIGHTS", data={"a": np.ones(3)})
    monkeypatch.setattr(nvflare, "DataKind", SimpleNamespace(WEIGHTS="WEIGHTS"))
    monkeypatch.setattr(nvflare, "from_shareable", lambda each: each)
    kept = nvflare._weights(task)
    task.data["a"] += 1
    assert kept is not None and kept["a"].tolist() == [1, 1, 1]


@pytest.mark.skipif(not INSTALLED, reason="nvflare is not installed")
@pytest.mark.slow
@pytest.mark.parametrize(("noise", "kind"), [("0", "FULL"), ("0.01", "DIFF")])
def test_the_simulator(noise: str, kind: str, tmp_path: Path) -> None:
    """What leaks never reaches the server, which ends the job; what is noisy goes on for all rounds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(APP / "job.py"), str(tmp_path), noise, kind]
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 900, "cwd": tmp_path}
    done = subprocess.run(words, check=False, **options)
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("log.txt")) + done.stdout + done.stderr
    if noise == "0":
        assert re.search(r"site-\d, step 0: the upload is above .* withheld after", logs)
        assert "TASK_RESULT_FILTER_ERROR" in logs and "Round 1 started" not in logs
    else:
        assert len(set(re.findall(r"site-\d, step \d: the upload is inconclusive, not a pass", logs))) == 4
        assert "TASK_RESULT_FILTER_ERROR" not in logs


@pytest.mark.skipif(not INSTALLED, reason="nvflare is not installed")
@pytest.mark.slow
def test_what_cannot_be_attacked_is_logged_and_withheld_if_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, a result without a DXO, weights whose task brought none. `every` counts uploads and not their parts."""
    from nvflare.apis.dxo import DXO, DataKind  # pyright: ignore[reportMissingImports]
    from nvflare.apis.fl_context import FLContext  # pyright: ignore[reportMissingImports]
    from nvflare.apis.shareable import Shareable  # pyright: ignore[reportMissingImports]

    monkeypatch.chdir(APP)
    monkeypatch.syspath_prepend(str(APP))
    context, lines, looks = FLContext(), list[str](), list[int]()
    monkeypatch.setattr(FLContext, "get_identity_name", lambda *_: "site-1")
    monkeypatch.setattr(GuardFilter, "log_warning", lambda _self, _context, line, *_: lines.append(line))
    weights = DXO(DataKind.WEIGHTS, data={"a": np.ones(3)})
    metrics = DXO(DataKind.METRICS, data={"loss": 1.0}).to_shareable()
    for act in ("stop", "strict"):
        guard = GuardFilter("net:build", act=act)
        monkeypatch.setattr(guard._guard, "look", lambda number, *_, **__: looks.append(number))
        for result in (metrics, Shareable({"free": b"text"}), weights.to_shareable()):
            if act == "strict":
                with pytest.raises(
                    SitusError, match="inconclusive \\(not a pass\\), because the audit does not attack"
                ):
                    guard.process(result, context)
            else:
                assert guard.process(result, context) is not None
        assert len(lines) == 3 and not looks
        lines.clear()
        guard._before, guard._number = {"a": np.zeros(3)}, 0
        both = DXO(DataKind.COLLECTION, data={"one": weights, "two": weights}).to_shareable()
        for _ in range(2):
            guard.process(both, context)
        assert looks == [0, 0, 1, 1] and not lines
        looks.clear()
