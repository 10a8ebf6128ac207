"""A method of another package, found by its entry point: in Python, and through every verb of the command line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from situs.cli.main import main
from situs.config import Choice
from situs.errors import SitusError
from situs.methods import METHODS, MAEConfig, create_method, method_class
from situs.methods.mp3 import MP3, MP3Config
from situs.methods.registry import Registry

PACKAGE = '''
"""Shade: tell how bright each patch is. A method that Situs does not know."""
from dataclasses import dataclass
from typing import ClassVar
from torch import nn
from situs.methods import Draws, Method, Output


@dataclass(frozen=True)
class ShadeConfig:
    """Shade's own settings."""

    power: float = 2.0
    """Of the error."""


class Shade(Method):
    """Brightness from tokens."""

    Config: ClassVar = ShadeConfig

    def __init__(self, backbone, config):
        super().__init__(backbone)
        self.config = config
        self.guess = nn.Linear(backbone.out_dim, 1)

    def draw(self, batch, *, seed, epoch, progress=0.0):
        return {}

    def forward(self, batch, draws):
        tokens = self.backbone.embed(batch.inputs)
        found = self.guess(self.backbone.encode(tokens, self.backbone.positions()).patches)
        truth = batch.inputs.mean((1, 2, 3))[:, None, None]
        loss = (found - truth).abs().pow(self.config.power).mean()
        return Output(loss, {"error": loss.detach()}, {})
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages with their dist-info on the path, as pip leaves them, of which one cannot be imported."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "shade_method.py").write_text(PACKAGE)
    (folder / "broken_method.py").write_text("raise RuntimeError('built for another machine')\n")
    for name, target in (("shade", "shade_method:Shade"), ("broken", "broken_method:Broken")):
        info = folder / f"{name}_method-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-method\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[situs.methods]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(METHODS, "_loaded", {})
    monkeypatch.setattr(METHODS, "_points", None)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("installed")
def test_another_package_s_method_goes_through_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pretrain, resume, evaluate, fine-tune by name, beside a package that is broken."""
    (tmp_path / "tiny.toml").write_text(
        "[backbone]\npatch_size = 7\nmodel_args = {depth = 1, embed_dim = 16, num_heads = 2}\n"
    )
    run, small = tmp_path / "run", (
        f"--config {tmp_path}/tiny.toml --data samples --data.img-size 28 --data.channels 1 --backbone.name "
        "vit_tiny_patch16_224 --device cpu --batch 16 --optim.warmup-epochs 0"
    )  # fmt: skip
    lines = {
        "pretrain": f"pretrain --method shade --method.power 1.5 {small} --steps 2 --out {run}",
        "resume": f"pretrain --resume {run} --steps 3 --device cpu",
        "knn": f"evaluate knn {run} --count 20 --train-count 30 --k 3 --device cpu --out {tmp_path}/knn",
        "finetune": f"finetune --from {run} {small} --steps 1 --validate-every 0 --out {tmp_path}/ft",
        "info": "info vit_tiny_patch16_224",
        "broken": f"pretrain --method broken {small} --out {tmp_path}/no",
        "unknown": f"pretrain --method nosuch {small} --out {tmp_path}/no",
    }
    statuses, said, complaints = {}, {}, ""
    for name, line in lines.items():
        statuses[name] = main(line.split())
        said[name], more = capsys.readouterr()
        complaints += more
    assert {name: status for name, status in statuses.items() if status} == {"broken": 2, "unknown": 2}, complaints
    assert "shade on vit_tiny_patch16_224" in said["pretrain"]
    assert json.loads((run / "config.json").read_text())["method"] == {"name": "shade", "power": 1.5}
    assert "done: 3 steps" in said["resume"]
    assert (tmp_path / "knn" / "knn.json").is_file()
    told = re.sub(r"[\s│]+", " ", said["info"])
    assert "shade yes Shade: tell how bright each patch is." in told
    assert "broken no method 'broken' (broken_method:Broken of broken-method) cannot be imported" in told
    assert "Traceback" not in complaints
    assert (
        "method 'broken' (broken_method:Broken of broken-method) cannot be imported: RuntimeError: built" in complaints
    )
    known = "broken, detection, droppos, language, mae, mjp, mp3, segmentation, shade, supervised"
    assert f"unknown method 'nosuch'; choose one of: {known}\n" in complaints
    assert not (tmp_path / "no").exists()


class Fake:
    """An entry point."""

    dist = None

    def __init__(self, name: str, target: object) -> None:
        self.name, self.target, self.loads = name, target, 0
        self.value = f"package:{name}"

    def load(self) -> object:
        self.loads += 1
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


@dataclass(frozen=True)
class OtherConfig:
    """Another package's."""


class Other(MP3):
    """Another package's method."""

    Config: ClassVar[type] = OtherConfig


def test_nothing_is_imported_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Fake("other", Other), Fake("bad", ImportError("no")), Fake("mp3", Other), Fake("text", "text")]
    monkeypatch.setattr("situs.methods.registry.entry_points", lambda *, group: points if group == "g" else [])
    registry = Registry({"mp3": MP3}, "g")
    assert list(registry) == ["mp3", "bad", "other", "text"]
    assert len(registry) == 4
    assert "bad" in registry
    assert "nosuch" not in registry
    chosen = Choice(registry, "mp3")
    assert chosen.name_of(MP3Config()) == "mp3"
    assert registry["mp3"] is MP3  # ours, whatever another calls its own
    assert [point.loads for point in points] == [0, 0, 0, 0]
    assert registry["other"] is registry["other"] is Other
    assert chosen.name_of(OtherConfig()) == "other"  # although "bad" comes before it by name
    assert [point.loads for point in points] == [1, 0, 0, 0]
    with pytest.raises(
        SitusError, match=r"^method 'bad' \(package:bad of another package\) cannot be imported: Import"
    ):
        registry["bad"]
    with pytest.raises(SitusError, match=r"method 'text' .* is no subclass of situs\.methods\.Method"):
        registry["text"]
    with pytest.raises(KeyError):
        registry["nosuch"]


def test_a_method_needs_a_config_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = type("Bare", (MP3,), {"Config": None})
    monkeypatch.setattr("situs.methods.registry.entry_points", lambda **_: [Fake("bare", bare)])
    with pytest.raises(SitusError, match="has no dataclass Config"):
        Registry({}, "g")["bare"]
    with pytest.raises(SitusError, match="OtherConfig: is the config of none of mp3"):
        Choice({"mp3": MP3}, "mp3").name_of(OtherConfig())


def test_ours_have_each_a_config_of_their_own() -> None:
    configs = [kind.Config for kind in METHODS.own.values()]
    assert len(set(configs)) == len(configs)
    assert Choice(METHODS, "mp3").name_of(MAEConfig()) == "mae"
    assert method_class("mp3") is MP3
    with pytest.raises(SitusError, match="unknown method 'nosuch'; choose one of: "):
        create_method("nosuch", None)  # pyright: ignore[reportArgumentType]
