"""The Flower mod: in real messages and in Flower's simulation."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounds import build

from situs.engines.flower import GuardMod
from situs.errors import SitusError

ROOT = Path(__file__).parents[2]
INSTALLED = importlib.util.find_spec("flwr") is not None
needs_flower = pytest.mark.skipif(not INSTALLED, reason="flwr is not installed")
quietly = pytest.mark.filterwarnings("ignore")  # what flwr's own imports deprecate


@pytest.mark.skipif(INSTALLED, reason="flwr is installed")
def test_without_flower_it_says_which_extra() -> None:
    with pytest.raises(SitusError, match=r"pip install situs\[flower\]"):
        GuardMod(build)(None, None, lambda *_: None)


def python(*words: str, **given: Any) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], check=False, env=environment, capture_output=True, text=True, timeout=900, **given
    )


@needs_flower
@quietly
@pytest.mark.slow
def test_the_example_withholds_what_leaks_and_lets_noise_go(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="flwr[simulation] is not installed")
    done = python(str(ROOT / "examples" / "flower_guard.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = done.stdout + done.stderr
    assert len(re.findall("the upload is above .* withheld after", printed)) == 6
    assert len(re.findall("the upload is inconclusive, not a pass .* sent after", printed)) == 6
    assert printed.count("Received 0 results and 2 failures") == printed.count("Received 2 results and 0 failures") == 3


CAPTURE = """
import sys
import numpy as np
import flower_guard as example
from flwr.simulation import run_simulation

folder = sys.argv[1]

def capture(message, context, call_next):
    reply = call_next(message, context)
    rounds = len(context.state.config_records)
    for name, part in (("before", message), ("up", reply)):
        arrays = part.content["arrays"].to_numpy_ndarrays()
        np.savez(f"{folder}/{name}-{context.node_config['partition-id']}-{rounds}.npz", *arrays)
    context.state[f"round{rounds}"] = example.ConfigRecord({})
    return reply

if __name__ == "__main__":
    app = example.make_client(0.0, capture)
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1, "include_dashboard": False}}
    run_simulation(example.make_server(), app, num_supernodes=2, backend_config=resources)
"""


@needs_flower
@quietly
@pytest.mark.slow
def test_uploads_captured_from_a_simulation_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 clients, 3 rounds of FedAvg: each upload beside the weights of its round, and a truncated one."""
    pytest.importorskip("ray", reason="flwr[simulation] is not installed")
    monkeypatch.syspath_prepend(ROOT / "examples")
    from flower_guard import build as example_build

    import situs

    (tmp_path / "capture.py").write_text(CAPTURE)
    done = python(str(tmp_path / "capture.py"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    uploads = sorted(tmp_path.glob("up-*.npz"))
    assert len(uploads) == 6
    for upload in uploads:
        module = example_build()
        with np.load(str(upload).replace("up-", "before-")) as before:
            arrays = [torch.from_numpy(before[key]) for key in before.files]
        module.load_state_dict(dict(zip(module.state_dict(), arrays, strict=True)))
        audit = situs.audit_gradients(module, upload=upload, attacks=["patchembed"], fail_above="blind")
        assert audit.ruling.status == 3 and audit.uploads[0].sent == "weights", audit
    upload.write_bytes(upload.read_bytes()[:5000])
    with pytest.raises(SitusError, match="damaged, truncated"):
        situs.audit_gradients(example_build(), upload=upload)
