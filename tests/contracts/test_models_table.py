"""The seven kinds of MODEL × every verb that takes one: each works, or is refused for a reason that lies in the model.

docs/models.md shows the same table; it is made from `TABLE`, and a test compares the two.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from situs.cli.main import main

KINDS = ("run", "export", "locked", "weights", "name", "hf", "own")
SHAPE = ["--img-size", "8", "--patch-size", "4", "--model-args.depth", "2", "--model-args.embed_dim", "16"]
SHAPE += ["--model-args.num_heads", "2", "--model-args.num_classes", "3"]
NAME = "vit_tiny_patch16_224"
CLASSES = {"dark": 60, "light": 190, "middle": 125}
TINY_DETECTION = {
    "name": "detection",
    "width": 8,
    "hidden": 8,
    "anchor": 1.0,
    "proposals": 8,
    "anchors": 16,
    "regions": 8,
}

OWN = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(32, 3))

    def forward(self, x):
        return self.body(x)
"""


class World(NamedTuple):
    """The folder of it all; data, runs and folders by their names in it."""

    base: Path

    def source(self, kind: str) -> str:
        """What names the model of a kind."""
        base = self.base
        named = {"weights": f"{NAME}={base / 'w.pt'}", "name": NAME, "own": f"{base / 'table_net.py'}:Net"}
        return named.get(kind, str(base / kind))

    def flags(self, kind: str) -> list[str]:
        """The flags that the kind needs."""
        return {
            "locked": ["--key", str(self.base / "owner.key")],
            "weights": SHAPE,
            "name": [*SHAPE, "--weights", "random"],
            "own": ["--img-size", "8"],
        }.get(kind, [])


def tables_of(base: Path) -> dict[str, Any]:
    """The config of a run over the images."""
    return {
        "method": {"name": "supervised"},
        "backbone": {
            "name": NAME,
            "patch_size": 4,
            "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2},
        },
        "data": {"path": str(base / "data"), "img_size": 8, "batch": 12, "workers": 0},
        "optim": {"lr": 1e-2, "warmup_epochs": 0},
        "train": {"epochs": 1, "precision": "fp32"},
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    import numpy as np
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification

    from situs.config import from_dict
    from situs.locks.key import new_key
    from situs.locks.locking import lock
    from situs.models.export import export_run
    from situs.train.run import RunConfig, load_run, train_run

    base, chance = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    for split, each in (("train", 8), ("val", 5)):
        for name, grey in CLASSES.items():
            (base / "data" / split / name).mkdir(parents=True)
            for number in range(each):
                pixels = np.clip(chance.normal(grey, 30, (8, 8, 3)), 0, 255).astype("uint8")
                Image.fromarray(pixels).save(base / "data" / split / name / f"{number}.png")
    tables = tables_of(base)
    train_run(from_dict(RunConfig, tables), out=base / "run", device="cpu")
    export_run(base / "run", base / "export")
    lock(base / "export", new_key(base / "owner.key"), base / "locked")
    torch.save(load_run(base / "run").method.backbone.model.state_dict(), base / "w.pt")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    named = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: n for n, name in enumerate(CLASSES)}}
    ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, **named)).save_pretrained(base / "hf")
    (base / "table_net.py").write_text(OWN)
    return World(base)


@pytest.fixture(scope="module")
def trained(world: World) -> World:
    """With the run that only some verbs take: of MP3."""
    from situs.config import from_dict
    from situs.train.run import RunConfig, train_run

    base, tables = world.base, tables_of(world.base)
    train_run(from_dict(RunConfig, {**tables, "method": {"name": "mp3"}}), out=base / "mp3", device="cpu")
    return world


def words(verb: str, kind: str, world: World, out: Path) -> list[str]:
    """The command line of a cell of the table."""
    model, flags, data = world.source(kind), world.flags(kind), ["--data", str(world.base / "data")]
    if kind == "run" and verb in ("evaluate position", "evaluate reconstruct"):
        model = str(world.base / "mp3")
    quick = ["--device", "cpu", "--batch", "12", "--data.workers", "0", "--steps", "1", "--optim.warmup-epochs", "0"]
    begun = [*data, *quick, "--out", str(out)]
    cpu, end = ["--device", "cpu"], ["--out", str(out), "--device", "cpu"]
    lines: dict[str, list[str]] = {
        "info": [model, *flags],
        "info --verify": [model, *flags, "--steps", "1", *cpu],
        "predict": [model, *flags, *data, "--out", str(out / "p.csv"), *cpu],
        "features": [model, *flags, *data, "--out", str(out / "f.npz"), *cpu],
        "evaluate probe": [model, *flags, *data, "--kind", "class", *end],
        "evaluate robustness": [model, *flags, *data, "--corruptions", "fog", "--severities", "1", *end],
        "evaluate knn": [model, *flags, *data, "--k", "2", *end],
        "evaluate position --kind vectors": [model, *flags, "--folds", "2", *end],
        "audit gradients": [model, *flags, "--data", str(world.base / "data"), "--count", "1", "--defences", "none",
                            "--attacks", "patchembed", "--no-pictures", *end],
        "audit sweep": [model, *flags, *data, "--count", "1", "--over", "precision", "--attacks", "patchembed", *end],
        "audit split": [model, *flags, *data, "--split", "train", "--count", "4", "--public", "20",
                        "--defences", "none", "--attacks", "order,linkage", *end],
        "evaluate position --kind all": [model, *flags, *data, "--no-equivariance", "--ratios", "0.5", *end],
        "finetune --from": ["--from", model, *(f.replace("--model-args", "--backbone.model-args")
                            .replace("--patch-size", "--backbone.patch-size").replace("--img-size", "--data.img-size")
                            for f in flags if kind != "own" and f not in ("--weights", "random"))],
        "adapt": [model + "=random" * (kind == "name"), *(f for f in flags if f not in ("--weights", "random")), *data,
                  "--batch", "12", "--minutes", "0.001", *end],
        "play": [model, *flags, *data, "--out", str(out / "play.html"), "--count", "4"],
        "export": [model, "--out", str(out / "x")],
        "lock": [model, *(flags if kind != "locked" else []), "--key", str(world.base / "owner.key"),
                 "--out", str(out / "x")],
    }  # fmt: skip
    if verb == "finetune --from":
        given = lines[verb]
        if kind == "name":
            given[1] += "=random"
        drop = [n for n, word in enumerate(given) if word == "--backbone.model-args.num_classes"]
        for n in reversed(drop):
            del given[n : n + 2]
        return ["finetune", *given, *begun]
    return [*verb.split(), *lines.get(verb, [model, *flags, *data, *end])]


VERBS = (
    "info", "info --verify", "predict", "features", "evaluate accuracy", "evaluate knn", "evaluate probe",
    "evaluate consistency", "evaluate robustness", "evaluate position", "evaluate position --kind vectors",
    "evaluate position --kind all", "evaluate attention", "evaluate attention --kind correlation",
    "evaluate reconstruct", "audit gradients", "audit sweep", "audit split", "play",
    "finetune --from", "adapt", "export", "lock",
)  # fmt: skip

UNTRAINED, WHOLE = "no trained classifier", "runs only as a whole"
UNPLAIN = "only plain ViTs of timm can be converted"
NO_HEAD = "(no run, so it has no|not a run, and only a run has (its|a)) position head"
REFUSED: dict[str, dict[str, str]] = {
    "predict": {"name": UNTRAINED},
    "features": {"own": WHOLE},
    "evaluate accuracy": {"name": UNTRAINED},
    "evaluate consistency": {"name": UNTRAINED, "own": WHOLE},
    "evaluate knn": {"own": WHOLE},
    "evaluate position": dict.fromkeys(KINDS[1:], NO_HEAD),
    "evaluate probe": {"own": WHOLE},
    "evaluate robustness": {"name": UNTRAINED},
    "evaluate attention": {"own": WHOLE},
    "evaluate attention --kind correlation": {"own": WHOLE},
    "evaluate position --kind vectors": {"own": WHOLE},
    "evaluate reconstruct": dict.fromkeys(KINDS[1:], NO_HEAD),
    "evaluate position --kind all": {"own": WHOLE},
    "audit split": {"own": WHOLE},
    "play": {"name": "or a trained classifier", "hf": UNPLAIN, "own": UNPLAIN},
    "finetune --from": {"name": "random weights", "own": "a run cannot start from"},
    "adapt": {"name": "random weights", "own": "a run cannot start from"},
    "export": {
        **dict.fromkeys(("export", "hf"), "already a model folder"),
        "locked": "unlock it first",
        **dict.fromkeys(("weights", "name"), "model name needs no export"),
        "own": "no library can load",
    },
    "lock": {"locked": "locked already", "own": "cannot be rebuilt from a config"},
}
"""verb -> kind -> the reason; what is not here works."""

SHORT = {
    UNTRAINED: "has no trained classifier",
    WHOLE: "runs only as a whole",
    UNPLAIN: "is not a plain ViT of timm",
    "or a trained classifier": "has no trained classifier",
    NO_HEAD: "has no position head",
    "random weights": "has no weights to start from",
    "a run cannot start from": "cannot be rebuilt from a config",
    "already a model folder": "is already a model folder",
    "unlock it first": "must be opened with `unlock` instead",
    "model name needs no export": "can be loaded by its library already",
    "no library can load": "cannot be rebuilt from a config",
    "locked already": "is locked already",
    "cannot be rebuilt from a config": "cannot be rebuilt from a config",
}
"""The reasons as docs/models.md has them."""


NAMES = {
    "export": "an export",
    "locked": "a locked folder with its key",
    "weights": "NAME=FILE",
    "name": "a name with random weights",
    "hf": "Hugging Face",
    "own": "your own module",
}


def rows() -> list[str]:
    """The table in Markdown: what is refused, of which kinds, by which verbs."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for verb in VERBS:
        for kind, reason in REFUSED.get(verb, {}).items():
            verbs.setdefault((SHORT[reason], kind), []).append(f"`{verb}`")
    kinds: dict[tuple[str, str], list[str]] = {}
    for (reason, kind), refusing in verbs.items():
        kinds.setdefault((reason, ", ".join(refusing)), []).append(NAMES[kind])
    lines = ["| verbs | refuse | because the model |", "|---|---|---|"]
    for (reason, refusing), refused in kinds.items():
        every = len(refused) == len(NAMES)
        lines.append(f"| {refusing} | {'all but a run' if every else ', '.join(refused)} | {reason} |")
    return lines


def test_the_docs_show_this_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    shown = text.partition("\n## ")[0]  # tables of its sections are others
    assert [line for line in shown.splitlines() if line.startswith("|")] == rows()


def test_a_verb_that_takes_a_model_is_in_the_table() -> None:
    """Every verb whose arguments hold a model, whatever it calls it."""
    from situs.cli.main import VERBS as ALL
    from situs.cli.main import verb_type

    listed = {verb.partition(" --")[0] for verb in VERBS} | {"audit texts"}  # which reads words
    for verb in ALL:
        args = verb_type(verb)
        fields = getattr(args, "__dataclass_fields__", {})
        if {"model", "models"} & fields.keys():
            assert verb in listed, verb


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_the_table_through_the_command_line(
    verb: str, trained: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        capsys.readouterr()
        status = main(words(verb, kind, trained, tmp_path / kind / "out"))
        said = capsys.readouterr().err
        reason = REFUSED.get(verb, {}).get(kind)
        if reason is None:
            assert status == 0, (verb, kind, said)
        else:
            assert status == 2, (verb, kind)
            assert re.search(reason, said) and said.count("\n") == 1, (verb, kind, said)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_lacks_is_told_by_the_model_itself(
    kind: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same reasons without the command line: each guard is asked with the opened model."""
    from situs.backbones.attention_maps import check_attention_maps
    from situs.errors import SitusError
    from situs.locks.key import load_key
    from situs.locks.owner import unlocking
    from situs.models import open_model
    from situs.models.export import export_run
    from situs.models.model import check_classifier, puzzle_method
    from situs.models.start import finetune_source

    monkeypatch.setattr(sys, "path", list(sys.path))
    shape = {"img_size": 8, "patch_size": 4}
    tiny = {"depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
    asked: dict[str, Any] = {
        "locked": {"unlock": unlocking(load_key(world.base / "owner.key"))},
        "weights": {**shape, "model_args": tiny},
        "name": {**shape, "model_args": tiny, "weights": "random"},
        "own": {"img_size": 8},
    }
    source = world.source(kind)
    model = open_model(source, **asked.get(kind, {}))
    assert model.backbone(torch.zeros(1, 3, 8, 8)).shape == (1, 3)
    begun = f"{source}=random" if kind == "name" else source
    asks: dict[str, Any] = {
        "evaluate accuracy": lambda: check_classifier(model),
        "evaluate attention": lambda: check_attention_maps(model.backbone),
        "evaluate attention --kind correlation": lambda: model.backbone.require("tokens"),
        "evaluate position": lambda: kind == "run" or puzzle_method(model),
        "finetune --from": lambda: finetune_source(begun),
        "export": lambda: kind == "run" or export_run(source, world.base / "never"),
    }
    for verb, ask in asks.items():
        reason = REFUSED.get(verb, {}).get(kind)
        if reason is None:
            ask()
        else:
            with pytest.raises(SitusError, match=reason):
                ask()
