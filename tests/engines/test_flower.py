"""The Flower mod: in real messages and in Flower's simulation."""

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

import numpy as np
import pytest
import torch
from rounds import build, step

from situs.engines.flower import KEPT, GuardMod
from situs.errors import SitusError

ROOT = Path(__file__).parents[2]
INSTALLED = importlib.util.find_spec("flwr") is not None
needs_flower = pytest.mark.skipif(not INSTALLED, reason="flwr is not installed")
quietly = pytest.mark.filterwarnings("ignore")  # what flwr's own imports deprecate


@pytest.mark.skipif(INSTALLED, reason="flwr is installed")
def test_without_flower_it_says_which_extra() -> None:
    with pytest.raises(SitusError, match=r"pip install situs\[flower\]"):
        GuardMod(build)(None, None, lambda *_: None)


MOD_FAILED_PRECONDITION = 6
"""Of flwr.common.constant.ErrorCode."""


class Part:
    """One array of a message."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def numpy(self) -> np.ndarray:
        return self.value.numpy()


def message_of(kind: str, weights: dict[str, torch.Tensor] | None) -> Any:
    """What the mod reads of a message."""
    records = {} if weights is None else {"arrays": {name: Part(value) for name, value in weights.items()}}
    content = SimpleNamespace(array_records=records)
    return SimpleNamespace(metadata=SimpleNamespace(message_type=kind), content=content, has_error=lambda: False)


@pytest.fixture
def as_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three names of flwr.app, with or without it."""

    def made(error: Any, reply_to: Any) -> Any:
        return SimpleNamespace(error=error)

    app = SimpleNamespace(ConfigRecord=dict, Error=lambda code, reason: (code, reason), Message=made)
    monkeypatch.setitem(sys.modules, "flwr", SimpleNamespace(app=app))
    monkeypatch.setitem(sys.modules, "flwr.app", app)


@pytest.mark.usefixtures("as_flower")
def test_a_client_that_empties_the_message_is_attacked_all_the_same() -> None:
    """As `to_torch_state_dict(keep_input=False)` does: without the round's weights nothing would be recovered."""
    module = build()
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.3)
    before, after = step(module)

    def train(message: Any, _: Any) -> Any:
        for record in message.content.array_records.values():
            record.clear()
        return message_of("train", after)

    context = SimpleNamespace(state={}, node_id=7)
    sent = GuardMod(build, attacks=["patchembed"])(message_of("train", before), context, train)
    assert sent.error[0] == MOD_FAILED_PRECONDITION and context.state[KEPT] == {"uploads": 1}
    warns, reply = GuardMod(build, attacks=["patchembed"], act="warn"), message_of("train", after)
    assert warns(message_of("train", before), context, lambda *_: reply) is reply


@pytest.mark.usefixtures("as_flower")
def test_each_upload_is_looked_at_with_its_number_and_with_the_images_of_its_own_step() -> None:
    mod, context = GuardMod(build), SimpleNamespace(state={}, node_id=7)
    seen: list[Any] = []

    class Guard:
        act = "stop"

        def look(self, number: int, before: Any, upload: Any, *, images: Any, of: str) -> Any:
            seen.append((number, sorted(before) == sorted(upload), images, of))
            return (None, "below", "above")[number] if number < 3 else None

        def withholds(self, look: str) -> bool:
            return look == "above"

    mod.guard = Guard()  # pyright: ignore[reportAttributeAccessIssue]
    images = torch.ones(2, 3, 8, 8, requires_grad=True)
    before, after = step(build())
    sent = []
    for number in range(3):
        reply = message_of("train.my_step", after)

        def train(*_: Any, number: int = number, reply: Any = reply) -> Any:
            if number == 1:
                mod.saw(images)
            return reply

        sent.append(mod(message_of("train.my_step", before), context, train) is reply)
    assert sent == [True, True, False]
    assert [(number, whole, of) for number, whole, _, of in seen] == [(n, True, "node 7") for n in range(3)]
    shown = [each for _, _, each, _ in seen]
    assert shown[0] is None and shown[2] is None  # those of another step prove nothing
    assert torch.equal(shown[1], images) and not shown[1].requires_grad
    failed = SimpleNamespace(has_error=lambda: True)
    assert mod(message_of("train", before), context, lambda *_: failed) is failed
    empty = message_of("train", None)
    assert mod(message_of("train", before), context, lambda *_: empty) is empty
    assert len(seen) == 3 and context.state[KEPT] == {"uploads": 4}


@pytest.mark.usefixtures("as_flower")
def test_two_records_of_the_same_names_are_an_error_unless_it_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    context, lines = SimpleNamespace(state={}, node_id=7), list[str]()
    monkeypatch.setattr(logging.getLogger("situs.engines"), "warning", lambda text, *of: lines.append(text % of))
    before, after = (message_of("train", weights) for weights in step(build()))
    after.content.array_records["variates"] = after.content.array_records["arrays"]
    with pytest.raises(SitusError, match="the same name"):
        GuardMod(build)(before, context, lambda *_: after)
    assert GuardMod(build, act="warn")(before, context, lambda *_: after) is after
    assert len(lines) == 1 and "inconclusive, not a pass" in lines[0]


@pytest.mark.usefixtures("as_flower")
def test_arrays_in_other_replies_are_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    context, weights, lines = SimpleNamespace(state={}, node_id=7), dict(build().state_dict()), list[str]()
    monkeypatch.setattr(logging.getLogger("situs.engines"), "warning", lambda text, *of: lines.append(text % of))
    for act, withheld in (("stop", False), ("warn", False), ("strict", True)):
        guard = GuardMod(build, act=act)
        for arrays, said in ((weights, True), (None, False), ({}, False)):
            lines.clear()
            reply = message_of("get_parameters", arrays)
            sent = guard(message_of("get_parameters", None), context, lambda *_, reply=reply: reply)
            assert (sent is not reply) is (withheld and said)
            assert [line for line in lines if "does not attack arrays in a reply to get_parameters" in line] == lines
            assert len(lines) == said


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
