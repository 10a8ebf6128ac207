"""A method of another package, found by its entry point: in Python, and through every verb of the command line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
from torch import nn

import situs
from situs.backbones import create_backbone
from situs.cli.main import main
from situs.config import Choice
from situs.core.when import When
from situs.errors import SitusError
from situs.files import load_code
from situs.methods import METHODS, Batch, MAEConfig, Output, create_method, method_class
from situs.methods.mp3 import MP3, MP3Config
from situs.methods.registry import Registry
from situs.train.checkpoint import RunFolder
from situs.train.run import load_run

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

    def draw(self, batch, when):
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
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
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
    tuned = small.replace("--backbone.name vit_tiny_patch16_224", "")
    lines = {
        "pretrain": f"pretrain --method shade --method.power 1.5 {small} --steps 2 --out {run}",
        "resume": f"pretrain --resume {run} --steps 3 --device cpu",
        "knn": f"evaluate knn {run} --count 20 --train-count 30 --k 3 --device cpu --out {tmp_path}/knn",
        "finetune": f"finetune --from {run} {tuned} --steps 1 --validate-every 0 --out {tmp_path}/ft",
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
    known = "broken, detection, droppos, droppos-official, language, mae, mjp, mjp-official, mp3, offsets, part, "
    known += "segmentation, shade, supervised"
    assert f"unknown method 'nosuch'; choose one of: {known} (--method)\n" in complaints
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
    monkeypatch.setattr("situs.plugins.entry_points", lambda *, group: points if group == "their.methods" else [])
    registry = Registry({"mp3": MP3}, "their.methods")
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
    with pytest.raises(SitusError, match=r"method 'text' .* is not a subclass of situs\.methods\.Method"):
        registry["text"]
    with pytest.raises(KeyError):
        registry["nosuch"]


def test_a_method_needs_a_config_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = type("Bare", (MP3,), {"Config": None})
    monkeypatch.setattr("situs.plugins.entry_points", lambda **_: [Fake("bare", bare)])
    with pytest.raises(SitusError, match="has no dataclass Config"):
        Registry({}, "their.methods")["bare"]
    with pytest.raises(SitusError, match=r"OtherConfig: .*give the config of one of these: mp3"):
        Choice({"mp3": MP3}, "mp3").name_of(OtherConfig())


def test_ours_have_each_a_config_of_their_own() -> None:
    configs = [kind.Config for kind in METHODS.values()]
    assert len(set(configs)) == len(configs)
    assert Choice(METHODS, "mp3").name_of(MAEConfig()) == "mae"
    assert method_class("mp3") is MP3
    with pytest.raises(SitusError, match="unknown method 'nosuch'; choose one of: "):
        create_method("nosuch", None)  # pyright: ignore[reportArgumentType]


OWN = '''
"""Two methods in a file of a user's own."""
from situs.methods import MP3, Method, Output

{shade}

class Calm(Method):
    """Nothing but a forward: no settings, one loss."""

    def draw(self, batch, when):
        return {{}}

    def forward(self, batch, draws):
        return Output(self.backbone.encode(self.backbone.embed(batch.inputs), None).patches.square().mean())


class Louder(MP3):
    """MP3 with twice its loss, and with MP3's own settings."""

    def forward(self, batch, draws):
        found = super().forward(batch, draws)
        return found._replace(loss=2 * found.loss)
'''

SMALL: dict[str, Any] = {
    "data": {"path": "samples", "img_size": 28, "channels": 1, "batch": 16},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    },
    "optim": {"warmup_epochs": 0},
    "device": "cpu",
    "quiet": True,
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with methods, beside nothing else; METHODS forgets them afterwards."""
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "own_methods.py"
    file.write_text(OWN.format(shade=PACKAGE))
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)
    return file


def forget() -> None:
    """As another process would find it."""
    for name in [name for name in METHODS._classes if ":" in name]:
        del METHODS._classes[name]
    sys.modules.pop("own_methods", None)


def test_a_class_of_a_file_goes_through_the_verbs(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(
        "[backbone]\npatch_size = 7\nmodel_args = {depth = 1, embed_dim = 16, num_heads = 2}\n"
    )
    run = tmp_path / "run"
    small = "--config tiny.toml --data samples --data.img-size 28 --data.channels 1 --backbone vit_tiny_patch16_224"
    more = "--device cpu --batch 16 --optim.warmup-epochs 0"
    line = f"pretrain --method own_methods.py:Shade --method.power 1.5 {small} {more} --steps 2 --out {run}"
    assert main(line.split()) == 0
    wanted = {"name": f"{own.resolve()}:Shade", "power": 1.5}
    assert json.loads((run / "config.json").read_text())["method"] == wanted
    forget()
    monkeypatch.chdir("/")  # the file is found again from anywhere
    assert main(f"pretrain --resume {run} --steps 3 --device cpu".split()) == 0
    assert type(load_run(run).method).__name__ == "Shade"


def test_classes_as_methods(own: Path, tmp_path: Path) -> None:
    module = load_code(f"{own}:Calm").__module__
    calm, louder = (getattr(sys.modules[module], name) for name in ("Calm", "Louder"))
    run = situs.pretrain(**SMALL, method=calm, steps=1, out=tmp_path / "calm")
    assert type(load_run(run).method).__name__ == "Calm"
    loud = situs.pretrain(**SMALL, method={"name": louder, "mask_ratio": 0.5}, steps=1, out=tmp_path / "loud")
    plain = situs.pretrain(**SMALL, method={"name": MP3, "mask_ratio": 0.5}, steps=1, out=tmp_path / "plain")
    names = [json.loads((each / "config.json").read_text())["method"]["name"] for each in (run, loud, plain)]
    assert names == [f"{own.resolve()}:Calm", f"{own.resolve()}:Louder", "mp3"]
    losses = [RunFolder.open(each, writer=False).records()[-1]["loss"] for each in (loud, plain)]
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-6)
    assert MP3.Config is MP3Config
    refused: list[tuple[Any, str]] = [
        (dict, "is not a subclass of situs.methods.Method"),
        ("nowhere.py:Calm", "there is no file"),
    ]
    for given, said in refused:
        with pytest.raises(SitusError, match=said):
            situs.pretrain(**SMALL, method=given, steps=1, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["mp3", "droppos", "mae", "mjp", "supervised"])
def test_a_module_of_timm_is_taken_as_it_is(name: str) -> None:
    """The module itself is trained: same parameters, same mode, and the loss of the same module wrapped by hand."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 3,
    }
    module: Any = timm.create_model("vit_tiny_patch16_224", **shape)
    kind: Any = METHODS[name]
    small = {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2} if name in ("mae", "droppos") else None
    config = None if small is None else kind.Config(**small)
    made = []
    for backbone in (module, create_backbone(module)):
        torch.manual_seed(1)
        made.append(kind(backbone, config))
    assert {*module.parameters()} <= {*made[0].parameters()}
    assert made[0].config == (config or kind.Config())
    batch = Batch(torch.randn(4, 3, 16, 16), torch.arange(4), {"label": torch.tensor([0, 1, 2, 0])})
    losses = [method(batch, method.draw(batch, When(seed=0, epoch=0))).loss for method in made]
    assert torch.equal(*losses)
    losses[0].backward()
    assert module.patch_embed.proj.weight.grad is not None
    with pytest.raises(SitusError, match="its class Linear is not among the classes that Situs supports"):
        kind(nn.Linear(2, 2))
    assert Output(losses[0]) == (losses[0], {}, {})
