"""Every example runs as it stands and does what its first line says; the shortest stays short."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import pytest
import torch

from situs.config import from_dict
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
