"""The NVFlare filter: in NVFlare's simulator, with weights and with differences."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flare
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


@pytest.fixture
def filters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """situs.engines.nvflare over the few names of NVFlare that it uses, with or without NVFlare."""
    for name, names in flare.MODULES.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    spec = importlib.util.spec_from_file_location("situs.engines.nvflare_alone", nvflare.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WEIGHTS = {"a": [1.0, 2.0]}


def task_of(kind: str, data: Any) -> flare.Context:
    return flare.Context("site-1", flare.DXO(kind, data).to_shareable())


def test_the_settings_of_a_filter_are_those_of_its_guard(filters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare writes a job's config from the attributes of a component: each setting is one, under its own name."""
    made: list[Any] = []
    monkeypatch.setattr(filters, "UploadGuard", lambda *words, **options: made.append((words, options)))
    settings = {"act": "warn", "every": 4, "limit": "psnr=20", "attacks": ("patchembed",), "defence": "noise=1"}
    settings |= {"batch": 2, "seconds": 3.0}
    guard = filters.GuardFilter("net:build", **settings, options={"img_size": 28, "seconds": 9.0})
    attacks = {"attacks": ["patchembed"]}
    assert made == [(("net:build",), {**settings, **attacks, "img_size": 28})]
    stored = {name: value for name, value in vars(guard).items() if not name.startswith("_")}
    assert stored.pop("kinds") == (["WEIGHTS", "WEIGHT_DIFF"],) * 2  # those of NVFlare's own filter
    options = {"img_size": 28, "seconds": 9.0}
    assert stored == {"module": "net:build", **settings, **attacks, "options": options}


def test_an_upload_is_attacked_from_the_weights_of_its_own_task(filters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, looks, lines = filters.GuardFilter("net:build"), list[Any](), list[Any]()

    def look(number: int, before: Any, upload: Any, *, sent: Any, of: str, say: Any) -> str:
        looks.append((number, before, upload, sent, of))
        for level in (logging.INFO, logging.WARNING):
            say(level, "line")
        return ("below", "above")[number == 2]

    monkeypatch.setattr(guard._guard, "look", look)
    monkeypatch.setattr(guard._guard, "withholds", lambda look: look == "above")
    monkeypatch.setattr(guard, "log_info", lambda of, line: lines.append(("info", of.name, line)), raising=False)
    monkeypatch.setattr(guard, "log_warning", lambda of, line: lines.append(("warning", of.name, line)), raising=False)
    context = task_of("WEIGHTS", WEIGHTS)
    guard.handle_event("BEFORE_TASK_EXECUTION", context)
    guard.handle_event("AFTER_TASK_EXECUTION", task_of("WEIGHTS", {"b": [1.0]}))  # no new task
    failed = flare.Shareable(code="EXECUTION_EXCEPTION")
    assert guard.process(failed, context) is failed and not looks
    for kind, sent in (("WEIGHTS", None), ("WEIGHT_DIFF", "difference")):
        upload = flare.DXO(kind, {"a": [0.0, 0.0]}).to_shareable()
        assert guard.process(upload, context) is upload
        assert looks.pop() == (int(sent is not None), WEIGHTS, upload["dxo"].data, sent, "site-1") and not looks
    assert lines == [("info", "site-1", "line"), ("warning", "site-1", "line")] * 2
    with pytest.raises(filters.LeakError):
        guard.process(flare.DXO("WEIGHTS", WEIGHTS).to_shareable(), context)


@pytest.mark.parametrize("act", ["stop", "strict", "warn"])
def test_what_is_not_attacked_is_logged_and_withheld_if_strict(filters: Any, act: str) -> None:
    guard = filters.GuardFilter("net:build", act=act)
    looks, lines = list[int](), list[str]()
    guard._guard.look = lambda number, *_, **__: looks.append(number)
    guard.log_warning = lambda _, line: lines.append(line)
    metrics, weights = flare.DXO("METRICS", {"loss": 1.0}), flare.DXO("WEIGHTS", WEIGHTS)
    empty = flare.DXO("METRICS", {})
    cases = [
        (metrics, "data of the kind METRICS"),
        (flare.DXO("COLLECTION", [weights, flare.DXO("COLLECTION", {"deep": metrics})]), "data of the kind METRICS"),
        (None, "data of the kind unknown"),
    ]
    context = task_of("WEIGHTS", WEIGHTS)
    guard.handle_event("BEFORE_TASK_EXECUTION", context)

    def refused(dxo: Any, what: str) -> None:
        result = flare.Shareable() if dxo is None else dxo.to_shareable()
        line = f"site-1, step {guard._number}: inconclusive (not a pass), because the audit does not attack {what}"
        if act == "strict":
            with pytest.raises(SitusError, match=re.escape(line)):
                guard.process(result, context)
        else:
            assert guard.process(result, context) is result
        assert lines == [f"{line}; the upload is {'withheld' if act == 'strict' else 'sent'}"]
        lines.clear()

    for dxo, what in cases:
        refused(dxo, what)
    assert looks == ([] if act == "strict" else [1])  # the weights beside the metrics are
    guard.process(flare.DXO("COLLECTION", {"one": weights, "two": empty}).to_shareable(), context)
    assert len(looks) == (1 if act == "strict" else 2) and not lines
    for task in (task_of("WEIGHTS", {}), task_of("METRICS", {"loss": 1.0}), flare.Context("site-1", flare.Shareable())):
        guard.handle_event("BEFORE_TASK_EXECUTION", task)
        refused(weights, "weights if the task contained no initial weights")
    assert len(looks) == (1 if act == "strict" else 2)


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
