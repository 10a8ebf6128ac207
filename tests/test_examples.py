"""Every example runs as it stands and does what its first line says; the shortest stays short."""

from __future__ import annotations

import ast
import copy
import runpy
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import pytest
import torch

from situs.config import from_dict
from situs.core.when import When
from situs.split.serving import make_server
from situs.split.transport.certificates import make_certificates, read_credentials
from situs.split.transport.serve import run_server
from situs.split.whole import merge
from situs.train.run import RunConfig

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


def code_lines(path: Path) -> set[int]:
    """The lines that hold code: no blanks, no comments, no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    nodes = [node for statement in body for node in ast.walk(statement)]
    spans = [(n.lineno, n.end_lineno or n.lineno) for n in nodes if isinstance(n, ast.expr | ast.stmt)]
    return {line for first, last in spans for line in range(first, last + 1)}


def test_every_example_opens_with_its_command() -> None:
    assert EXAMPLES, "no example found: this test looks in the wrong place"
    for path in EXAMPLES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert f"python examples/{path.name}" in text.splitlines()[0], path.name


def test_extra_loss_is_short_and_both_losses_fall(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in EXAMPLES if path.name == "extra_loss.py")
    assert len(code_lines(path)) <= 20
    torch.manual_seed(0)
    names = runpy.run_path(str(path))
    losses = torch.tensor(names["losses"])
    assert losses.shape == (20, 2)
    first, last = losses[:4].mean(0), losses[-4:].mean(0)
    assert (last < first).all()
    head = names["mp3"].position_head.weight
    assert head.grad is not None
    assert head.grad.abs().sum() > 0
    classifier = names["model"].model.head.weight
    assert classifier.grad.abs().sum() > 0
    assert capsys.readouterr().out.count("of which position") == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the engines' own
@pytest.mark.parametrize(("engine", "name"), [("accelerate", "trainer"), ("lightning", "lightning")])
def test_the_extra_loss_in_other_trainers_is_that_of_a_plain_loop(engine: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip(engine, reason=f"{engine} is not installed")
    names = runpy.run_path(str(next(path for path in EXAMPLES if path.name == f"extra_loss_{name}.py")))
    torch.manual_seed(0)
    model, images, labels = names["WithPositions"](), torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    plain = copy.deepcopy(model.mp3)
    start = {key: value.clone() for key, value in plain.state_dict().items()}
    names["train"](model, images, labels, str(tmp_path))
    assert [epoch for epoch, _ in model.seen] == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(model.seen[0][1] + model.seen[1][1] + model.seen[2][1] + model.seen[3][1]) == list(range(64))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    for epoch, chosen in model.seen:
        ids = torch.tensor(chosen)
        batch = names["Batch"](images[ids], ids)
        position = plain(batch, plain.draw(batch, When(seed=0, epoch=epoch))).loss
        loss = torch.nn.functional.cross_entropy(plain.backbone(images[ids]), labels[ids]) + 0.1 * position
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.mp3.state_dict()[key], value, atol=5e-5, rtol=0)  # steps are of 1e-3
    head = "position_head.weight"
    assert (plain.state_dict()[head] - start[head]).abs().max() > 1e-3


QUICK = {
    "pretrain_on_my_images": {"steps": 1, "labels": 64, "count": 16},
    "audit_my_model": {"count": 1},
    "lock_my_model": {"steps": 1, "count": 16},
    "use_the_features": {"steps": 1, "count": 40},
    "add_a_method": {"steps": 2},
}
"""The tutorials, and the arguments with which a test can wait for them."""


@pytest.fixture
def tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[dict[str, Any], str]]:
    """Runs a tutorial as a reader would; gives its names and what it printed."""

    def run(name: str, **given: int) -> tuple[dict[str, Any], str]:
        path = next(path for path in EXAMPLES if path.stem == name)
        words = [word for flag, value in given.items() for word in (f"--{flag}", str(value))]
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        monkeypatch.chdir(tmp_path)
        return runpy.run_path(str(path), run_name="__main__"), capsys.readouterr().out

    return run


def check_pretraining(names: dict[str, Any], said: str) -> None:
    assert said.count("test images, with") == 2
    assert "VisionTransformer loaded by timm" in said
    assert {each.name for each in names["args"].out.iterdir()} == {"mp3", "tuned", "scratch", "exported"}


def check_audit(names: dict[str, Any], said: str) -> None:
    assert "not passed" in said
    solved = next(line for line in said.splitlines() if line.split()[:2] == ["patchembed", "none"])
    assert f"{names['args'].count} of {names['args'].count}" in solved  # exact, and so no pass
    assert Path("audit/gradients.html").exists()


def check_lock(names: dict[str, Any], said: str) -> None:
    clear, _, opened = (line.partition(": ")[2] for line in said.splitlines() if "test images" in line)
    assert clear == opened
    assert "at most 0 bits" in said
    assert "100.0 % (64 of 64)" in said


def check_features(names: dict[str, Any], said: str) -> None:
    assert names["train"].features.shape == (names["args"].count, 64)
    assert "patches: (4, 16, 64) on the grid (4, 4)" in said
    assert Path("runs/features/images.names.csv").exists()


def check_method(names: dict[str, Any], said: str) -> None:
    assert len(names["losses"]) == names["args"].steps
    method, ids = names["method"], torch.tensor([5, 90])
    batch = names["Batch"](torch.zeros(2, 1, 28, 28), ids)
    other = names["Batch"](torch.zeros(2, 1, 28, 28), ids.flip(0))
    draws = [method.draw(each, When(seed=0, epoch=3))["forgotten"] for each in (batch, other)]
    assert torch.equal(draws[0], draws[1].flip(0))  # a sample's draws are its own
    assert method.unknown.grad.abs().sum() > 0


CHECKS = {
    "pretrain_on_my_images": check_pretraining,
    "audit_my_model": check_audit,
    "lock_my_model": check_lock,
    "use_the_features": check_features,
    "add_a_method": check_method,
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", QUICK)
def test_a_tutorial_runs(name: str, tutorial: Callable[..., tuple[dict[str, Any], str]]) -> None:
    CHECKS[name](*tutorial(name, **QUICK[name]))


@pytest.mark.slow
def test_the_tutorials_find_what_their_pages_say(
    tutorial: Callable[..., tuple[dict[str, Any], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, check in CHECKS.items():
        began = time.process_time()
        found[name] = tutorial(name)
        check(*found[name])
        with capsys.disabled():
            print(f"{name}: {time.process_time() - began:.1f} s of CPU time")
    places = found["pretrain_on_my_images"][0]["places"]
    assert places.accuracy[0.5] > 2 / places.places  # twice chance
    shares = [
        float(line.partition(": ")[2].split()[0])
        for line in found["lock_my_model"][1].splitlines()
        if "test images" in line
    ]
    assert shares[1] < shares[0] - 10
    assert float(found["use_the_features"][1].partition("classifier: ")[2].split()[0]) > 30
    losses = found["add_a_method"][0]["losses"]
    assert losses[-1] < losses[0] - 0.2


class Stub(types.ModuleType):
    """A module of another engine, as much of it as the examples use; the engines themselves are tried below."""

    def __init__(self, name: str, **members: object) -> None:
        super().__init__(name)
        self.__dict__.update(members)


class App:
    """Decorators that give the function back."""

    def train(self) -> object:
        return lambda function: function

    main = train


class Reply(NamedTuple):
    content: dict[str, Any]
    reply_to: object


def small(recipe: dict[str, Any]) -> None:
    """Two steps of a smaller model."""
    recipe["data"] |= {"batch": 4, "count": 8}
    recipe["backbone"] |= {"patch_size": 14, "model_args": {"embed_dim": 16, "depth": 1, "num_heads": 2}}


@contextmanager
def serving(recipe: dict[str, Any], certs: Path, out: Path) -> Iterator[str]:
    """The blocks of a recipe on a socket; gives the address."""
    said, done = Queue(), threading.Event()
    server = make_server(from_dict(RunConfig, recipe), out, device="cpu")
    given = (server, "127.0.0.1:0", read_credentials(certs, "server"))
    thread = threading.Thread(target=run_server, args=given, kwargs={"say": said.put, "stopped": done.is_set})
    thread.start()
    try:
        yield said.get(timeout=60).split()[2]
    finally:
        done.set()
        thread.join()


def test_the_client_of_the_flower_job_trains_by_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"RecordDict": dict, "MetricRecord": dict, "Context": object, "Message": Reply}
    monkeypatch.setitem(sys.modules, "flwr", Stub("flwr"))
    monkeypatch.setitem(sys.modules, "flwr.app", Stub("flwr.app", **same))
    monkeypatch.setitem(sys.modules, "flwr.clientapp", Stub("flwr.clientapp", ClientApp=App))
    monkeypatch.setitem(sys.modules, "flwr.serverapp", Stub("flwr.serverapp", ServerApp=App, Grid=object))
    names = runpy.run_path(str(next(path for path in EXAMPLES if path.name == "split_in_flower.py")))
    small(names["RECIPE"])
    make_certificates(tmp_path / "certs")
    own = {"data": "samples", "tls": str(tmp_path / "certs"), "out": str(tmp_path / "client")}
    with serving(names["RECIPE"], tmp_path / "certs", tmp_path / "server") as address:
        context = types.SimpleNamespace(node_config=own, run_config={"server": address})
        first, again = (names["train"]("asked", context) for _ in range(2))
    assert first.reply_to == "asked" and first.content["found"]["steps"] == 2
    assert again.content["found"]["steps"] == 2  # a run that is done is gone on with, and not begun again
    assert merge(tmp_path / "client", tmp_path / "server", tmp_path / "whole") == 2


def test_the_site_of_the_nvflare_job_trains_by_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, sent = [object(), None], []
    client = Stub("nvflare.client", init=lambda: None, get_site_name=lambda: "site-1", is_running=lambda: True,
                  receive=lambda: tasks.pop(0), send=sent.append, FLModel=lambda **given: given)  # fmt: skip
    monkeypatch.setitem(sys.modules, "nvflare", Stub("nvflare", client=client))
    monkeypatch.setitem(sys.modules, "nvflare.client", client)
    names = runpy.run_path(str(next(path for path in EXAMPLES if path.name == "split_in_nvflare.py")))
    small(names["RECIPE"])
    make_certificates(tmp_path / "certs", clients=("site-1",))
    with serving(names["RECIPE"], tmp_path / "certs", tmp_path / "server") as address:
        names["site"](address, str(tmp_path / "certs"), str(tmp_path / "clients"))
    assert [each["metrics"]["steps"] for each in sent] == [2]
    assert merge(tmp_path / "clients" / "site-1", tmp_path / "server", tmp_path / "whole") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "said"), [("flwr", "'steps': 20"), ("nvflare", "site-2 keeps checkpoints, classes.json, config.json")]
)
def test_the_engines_themselves_run_the_job(engine: str, said: str) -> None:
    pytest.importorskip(engine)
    name = {"flwr": "split_in_flower.py", "nvflare": "split_in_nvflare.py"}[engine]
    words = [sys.executable, str(next(path for path in EXAMPLES if path.name == name))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=True)
    assert said in done.stdout
