"""Fine-tuning: the run's backbone and weights, the positions asked for, and the images as the run saw them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from situs.config import from_dict, merge
from situs.errors import SitusError
from situs.measure.finetune import FinetuneConfig, data_as_seen, finetune_config
from situs.models.start import initialise, starting
from situs.progress import notes_to
from situs.train.assemble import Setup, make_eval_loader
from situs.train.checkpoint import RunFolder
from situs.train.run import RunConfig, load_run, make_method, train_run

BASE: dict[str, Any] = {
    "method": {"name": "mp3", "mask_ratio": 0.5},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "drop_path": 0.3,
        "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2},
    },
    "data": {"path": "samples", "img_size": 28, "channels": 1, "batch": 16, "mean": [0.3], "std": [0.4]},
    "optim": {"lr": 1e-2, "warmup_epochs": 0},
    "train": {"max_steps": 2, "precision": "fp32"},
}


def pretrain(out: Path, **tables: Any) -> Path:
    train_run(from_dict(RunConfig, merge(BASE, tables, {"method"})), out=out, device="cpu")
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("pretrained")
    mae = {"name": "mae", "mask_ratio": 0.5, "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
    return {
        "mp3": pretrain(base / "mp3"),
        "anchors": pretrain(base / "anchors", method={"anchor_ratio": 0.2}),
        "mae": pretrain(base / "mae", method=mae, backbone={"positions": "sincos"}),
    }


def tables(run: Path, **over: Any) -> FinetuneConfig:
    """As the command line lays them: the run's images, then the user's own."""
    return from_dict(FinetuneConfig, merge(data_as_seen(run), over, {"method"}))


def test_the_default_method_is_supervised_and_one_without_labels_is_refused(runs: dict[str, Path]) -> None:
    assert FinetuneConfig().method_name == "supervised"
    with pytest.raises(SitusError, match=r"^method=mae: fine-tuning needs a method that learns from labels"):
        finetune_config(tables(runs["mp3"], method={"name": "mae"}), runs["mp3"], None)


def test_a_folder_without_a_model_names_the_flag(tmp_path: Path) -> None:
    wrong = {tmp_path: "is neither a run nor a model", tmp_path / "none": "no such run, model folder or file"}
    for source, reason in wrong.items():
        with pytest.raises(SitusError, match=reason) as error:
            finetune_config(FinetuneConfig(), source, None)
        assert error.value.field == "source"


def test_the_images_are_the_runs_and_what_the_user_says_goes_before(runs: dict[str, Path]) -> None:
    data = tables(runs["mp3"], data={"batch": 4}).data
    assert (data.path, data.img_size, data.channels, data.mean, data.std) == ("samples", 28, 1, (0.3,), (0.4,))
    assert data.batch == 4
    assert tables(runs["mp3"]).data.batch == RunConfig().data.batch  # the recipe's own, not the pretraining's
    assert tables(runs["mp3"], data={"img_size": 14}).data.img_size == 14


def test_the_backbone_is_the_runs_and_drop_path_the_recipes(runs: dict[str, Path]) -> None:
    over = {"backbone": {"name": "vit_base_patch16_224", "drop_path": 0.1, "model_args": {"qkv_bias": False}}}
    made = finetune_config(tables(runs["mp3"], **over), runs["mp3"], None).backbone
    assert (made.name, made.patch_size, made.drop_path) == ("vit_tiny_patch16_224", 7, 0.1)
    assert made.model_args == {"depth": 2, "embed_dim": 16, "num_heads": 2, "qkv_bias": False}


@pytest.mark.parametrize(
    ("run", "asked", "positions", "kept"),
    [
        ("mp3", None, "learned", False),  # MP3 never used its table: a new one
        ("mp3", "sincos", "sincos", False),
        ("anchors", None, None, True),  # its anchors did
        ("mae", None, "sincos", True),
        ("mae", "learned", "learned", False),
    ],
)
def test_positions_are_kept_where_they_meant_something(
    run: str, asked: Any, positions: str | None, kept: bool, runs: dict[str, Path]
) -> None:
    made = finetune_config(tables(runs[run]), runs[run], asked)
    assert (made.backbone.positions, made.init_positions, made.init) == (positions, kept, str(runs[run]))


@pytest.mark.parametrize("positions", ["learned", "sincos", "relative", "none"])
def test_fine_tuning_runs_with_every_kind_of_position(positions: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    own = finetune_config(tables(runs["mp3"], data={"batch": 16}, train={"max_steps": 1}), runs["mp3"], positions)
    said: list[str] = []
    with notes_to(said.append):
        train_run(own, Setup(start=starting()), out=tmp_path / "ft", device="cpu")
    before = RunFolder.open(runs["mp3"], writer=False).latest()
    assert before is not None
    encoder = {n for n in before.tensors("model") if n.startswith("backbone.model.") and "pos_embed" not in n}
    assert said[1] == f"started from {runs['mp3']}: {len(encoder)} tensors"
    after = load_run(tmp_path / "ft")
    assert encoder <= set(after.method.state_dict())
    assert after.method.backbone(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_without_positions_the_first_features_are_those_of_the_pretrained_run(runs: dict[str, Path]) -> None:
    """Exactly: nothing but the head is new, and MP3 never saw a position."""
    own = finetune_config(tables(runs["mp3"], data={"batch": 16}), runs["mp3"], "none")
    method = make_method(own, ("a", "b"))
    assert own.init is not None
    initialise(method.backbone, own.init, positions=own.init_positions)
    images = next(iter(make_eval_loader(own))).inputs
    pretrained = load_run(runs["mp3"]).method.backbone
    with torch.no_grad():
        wanted = pretrained.encode(pretrained.embed(images), None)
        tuned = method.backbone.eval()
        found = tuned.encode(tuned.embed(images), tuned.positions())
    assert torch.equal(found.prefix, wanted.prefix)
    assert torch.equal(found.patches, wanted.patches)
    assert wanted.patches.std() > 0.1


def test_every_kind_of_model_is_a_beginning(runs: dict[str, Path], tmp_path: Path) -> None:
    """The first features of a fine-tuning are those of what it started from, bit for bit."""
    from situs.locks.folder import write_model
    from situs.locks.key import new_key
    from situs.locks.locking import lock
    from situs.locks.owner import unlocking
    from situs.models.start import finetune_source

    backbone = load_run(runs["mae"]).method.backbone
    (tmp_path / "plain").mkdir()
    write_model(backbone, tmp_path / "plain")
    key = new_key(tmp_path / "owner.key")
    lock(tmp_path / "plain", key, tmp_path / "locked")
    lock(tmp_path / "plain", key, tmp_path / "sealed", seal=True)
    torch.save(backbone.model.state_dict(), tmp_path / "w.pt")
    shape = {"img_size": 28, "patch_size": 7, **BASE["backbone"]["model_args"]}
    named = {"backbone": {"patch_size": 7, "model_args": BASE["backbone"]["model_args"]}, "data": {"img_size": 28}}
    named["data"] |= {"mean": [0.3], "std": [0.4]}
    cases: dict[str, dict[str, Any]] = {
        str(runs["mae"]): {},
        str(tmp_path / "plain"): {},
        str(tmp_path / "locked"): {},
        f"vit_tiny_patch16_224={tmp_path / 'w.pt'}": named,
    }
    x = torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        expected = backbone.encode(backbone.embed(x), backbone.positions()).patches
    assert finetune_source(tmp_path / "plain").backbone.model_args == {
        k: v for k, v in shape.items() if k != "img_size"
    }
    for source, over in cases.items():
        over = {**over, "data": {"path": "samples", "channels": 1, **over.get("data", {})}}
        config = finetune_config(tables(Path(source), **over), source, None)
        fresh = make_method(config, tuple("abc")).backbone.eval()
        unlock = unlocking(key) if source.endswith("locked") else None
        assert config.init is not None
        initialise(fresh, config.init, positions=config.init_positions, unlock=unlock)
        with torch.no_grad():
            assert torch.equal(fresh.encode(fresh.embed(x), fresh.positions()).patches, expected), source
    with pytest.raises(SitusError, match="its blocks stay scrambled without its key") as error:
        initialise(fresh, str(tmp_path / "locked"))
    assert error.value.field == "key"
    for source, said in (
        ("package.module:Net", "your own module; a run cannot start from"),
        (str(tmp_path / "sealed"), "is sealed"),
        ("vit_tiny_patch16_224=random", "nothing to start from"),
        ("vit_tiny_patch16_224", "needs its weights"),
    ):
        with pytest.raises(SitusError, match=said):
            finetune_source(source)
