"""A Hugging Face model through the command line: pretrained, fine-tuned, evaluated, exported, started from its export.

transformers' own classes, loaded from the exports in float64, are the reference for every number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from situs.backbones import create_backbone
from situs.backbones.base import Backbone, join
from situs.cli.main import main
from situs.config import from_dict, merge
from situs.core.position import resample_table, sincos
from situs.errors import SitusError
from situs.measure.finetune import FinetuneConfig, data_as_seen, finetune_config
from situs.models import open_model
from situs.models.model import check_classifier
from situs.models.start import initialise
from situs.train.run import RunConfig, load_run, make_method, train_run

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES: dict[str, Any] = {"image_size": 28, "patch_size": 7, "num_channels": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTModel", {"intermediate_size": 24}),
    "vit_classes": ("ViTForImageClassification", {"intermediate_size": 24, "num_labels": 3}),
    "dinov2": ("Dinov2Model", {"mlp_ratio": 2}),
    "dinov2_swiglu": ("Dinov2ForImageClassification", {"mlp_ratio": 2, "use_swiglu_ffn": True}),
    "registers": ("Dinov2WithRegistersModel", {"mlp_ratio": 2, "num_register_tokens": 3}),
}
KINDS = ["learned", "sincos", "learned_sincos", "none"]
FEW = ["--device", "cpu", "--count", "200"]
QUICK = ["--device", "cpu", "--batch", "16", "--steps", "2", "--optim.warmup-epochs", "0"]


def make_folder(path: Path, name: str, **entries: Any) -> Path:
    """A folder as transformers writes it, all weights random."""
    kind = getattr(transformers, MODELS[name][0])
    torch.manual_seed(3)
    model = kind(kind.config_class(**{**SIZES, **IMAGES, **MODELS[name][1], **entries}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def situs(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def data(size: int = 28) -> list[object]:
    return ["--data", "samples", "--data.img-size", size, "--data.channels", 1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, undrawing: Callable[[pytest.MonkeyPatch], None]) -> Path:
    """A folder with a ViT and what the command line makes of it, by two methods."""
    base = tmp_path_factory.mktemp("hf")
    model = make_folder(base / "vit", "vit")
    decoders = {"droppos": ["--method.decoder-width", 16, "--method.decoder-heads", 2], "mp3": []}
    for method, flags in decoders.items():
        words = ["--method", method, *flags, "--backbone.name", model]
        situs("pretrain", *words, *data(), *QUICK, "--out", base / method)
        situs("finetune", "--from", base / method, *QUICK, "--validate-every", 0, "--out", base / f"ft-{method}")
        with pytest.MonkeyPatch.context() as patch:
            undrawing(patch)
            situs("evaluate", "accuracy", base / f"ft-{method}", *FEW, "--out", base / "look")
        situs("export", base / f"ft-{method}", "--out", base / f"export-{method}")
        situs("export", base / method, "--out", base / f"bare-{method}")
    return base


def pictures(backbone: Backbone) -> Tensor:
    torch.manual_seed(5)
    assert backbone.input.shape is not None
    return torch.randn(3, backbone.input.channels, *backbone.input.shape, dtype=torch.float64)


@torch.no_grad()
def features(backbone: Backbone, *, places: bool = True) -> Tensor:
    backbone = backbone.double().eval()
    return join(backbone.encode(backbone.embed(pictures(backbone)), backbone.positions() if places else None))


def started(run: Path, positions: Any = None, **over: Any) -> Backbone:
    """The backbone with which `situs finetune` begins."""
    config = from_dict(FinetuneConfig, merge(data_as_seen(run), over, {"method"}))
    config = finetune_config(config, run, positions)
    method = make_method(config, tuple("abcde"))
    assert config.init is not None
    initialise(method.backbone, config.init, positions=config.init_positions)
    return method.backbone


def own(folder: Path, kind: str) -> Any:
    """The export as transformers alone reads it."""
    model, found = getattr(transformers, kind).from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    return model.double().eval()


def test_fine_tuning_starts_from_the_pretrained_features(world: Path) -> None:
    pretrained = load_run(world / "droppos").method.backbone
    begun = started(world / "droppos")
    assert begun.name == "ViTForImageClassification"
    assert torch.equal(features(begun), features(pretrained))
    without = features(load_run(world / "mp3").method.backbone, places=False)  # MP3 sees no places
    for kind in (None, *KINDS):
        begun = started(world / "mp3", kind)
        torch.testing.assert_close(features(begun, places=False), without, rtol=0, atol=1e-6)
        assert torch.allclose(features(begun), without, rtol=0, atol=1e-6) is (kind == "none")


@pytest.mark.parametrize("method", ["droppos", "mp3"])
@torch.no_grad()
def test_the_exports_give_the_runs_numbers_in_transformers(world: Path, method: str) -> None:
    run = load_run(world / f"ft-{method}").method.backbone.double()
    x = pictures(run)
    model = own(world / f"export-{method}", "ViTForImageClassification")
    assert (model(x).logits - run(x)).abs().max() < 1e-12
    assert tuple(model.config.id2label[number] for number in range(10)) == load_run(world / f"ft-{method}").classes
    bare, found = transformers.ViTModel.from_pretrained(
        world / f"bare-{method}", add_pooling_layer=False, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    expected = features(load_run(world / method).method.backbone, places=method == "droppos")
    assert (bare.double().eval()(x).last_hidden_state - expected).abs().max() < 1e-12


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", ["droppos", "mp3"])
@pytest.mark.usefixtures("undrawn")
def test_an_export_is_evaluated_as_the_run_was(world: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, export = open_model(str(world / f"ft-{method}")), open_model(str(world / f"export-{method}"))
    assert export.classifier and export.classes == run.classes
    assert export.data.normalisation == run.data.normalisation
    assert (export.data.size, export.data.crop_share) == (run.data.size, run.data.crop_share)
    assert export.facts["method"] == "supervised"
    capsys.readouterr()
    figures = []
    for each in (f"ft-{method}", f"export-{method}"):
        situs("evaluate", "accuracy", world / each, "--data", "samples", *FEW, "--out", world / "look")
        figures.append(capsys.readouterr().out.splitlines()[2].split()[1:])
    assert figures[0] == figures[1]
    bare = open_model(str(world / f"bare-{method}"))
    with pytest.raises(SitusError, match="has no trained classifier"):
        check_classifier(bare)
    assert bare.positions is (method == "droppos")
    picked = transformers.AutoImageProcessor.from_pretrained(world / f"export-{method}")
    assert (tuple(picked.image_mean), tuple(picked.image_std)) == run.data.normalisation


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "source",
    ["export-droppos", "bare-mp3", "droppos", "vit"]
    + [pytest.param(each, marks=pytest.mark.slow) for each in ("bare-droppos", "export-mp3")],
)
def test_weights_are_started_from(world: Path, source: str, tmp_path: Path, capsys: Any) -> None:
    """An export, a run and the folder itself, into a classifier and into a bare model, before any step."""
    words = ["--backbone.name", world / "vit" / "config.json", "--init", world / source, *data(), *QUICK]
    lazy = ["--optim.lr", 1e-30, "--optim.weight-decay", 0]
    situs("pretrain", "--method", "supervised", *words, *lazy, "--out", tmp_path / "classes")
    said = capsys.readouterr().out
    assert f"started from {world / source}: {40 if source.startswith('export') else 38} tensors" in said
    situs("pretrain", "--method", "mp3", *words, *lazy, "--out", tmp_path / "bare")
    expected = features(
        load_run(world / "droppos").method.backbone if source == "droppos" else create_backbone(world / source)
    )
    for made in ("classes", "bare"):
        assert torch.equal(features(load_run(tmp_path / made).method.backbone), expected), made


def pretrain(path: Path, folder: Path, method: str = "mp3", img_size: Any = 28, **backbone: Any) -> Path:
    tables = {
        "method": {"name": method},
        "backbone": {"name": str(folder), **backbone},
        "data": {"path": "samples", "img_size": img_size, "channels": 1, "batch": 8},
        "optim": {"warmup_epochs": 0},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    train_run(from_dict(RunConfig, tables), out=path, device="cpu")
    return path


WIDE = (28, 42)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_classes", WIDE),
        pytest.param("dinov2", 28, marks=pytest.mark.slow),
        pytest.param("dinov2_swiglu", WIDE, marks=pytest.mark.slow),
        pytest.param("registers", WIDE, marks=pytest.mark.slow),
    ],
)
def test_every_image_model_goes_through(name: str, size: Any, tmp_path: Path) -> None:
    """Also on a rectangle, where DINOv2 keeps a square table: fine-tuned, exported, started from the export."""
    folder = make_folder(tmp_path / "model", name)
    run = pretrain(tmp_path / "mp3", folder, img_size=size)
    without = features(load_run(run).method.backbone, places=False)
    torch.testing.assert_close(features(started(run), places=False), without, rtol=0, atol=1e-6)
    situs("export", run, "--out", tmp_path / "bare")
    bare = getattr(transformers, MODELS[name][0].replace("ForImageClassification", "Model"))
    arguments = {"add_pooling_layer": False} if name.startswith("vit") else {}
    model = bare.from_pretrained(tmp_path / "bare", **arguments).double().eval()
    x = pictures(load_run(run).method.backbone)
    with torch.no_grad():
        assert (model(x).last_hidden_state - without).abs().max() < 1e-12
    tuned = tmp_path / "ft"
    situs("finetune", "--from", run, *QUICK, "--out", tuned, "--validate-every", 0)
    situs("export", tuned, "--out", tmp_path / "export")
    trained = load_run(tuned).method.backbone.double()
    classifier = own(tmp_path / "export", trained.name)
    with torch.no_grad():
        assert (classifier(x).logits - trained(x)).abs().max() < 1e-12
    assert open_model(str(tmp_path / "export")).data.size == (size if size == WIDE else (28, 28))
    fresh = make_method(load_run(tuned).config, tuple("abcdefghij")).backbone
    said = initialise(fresh, str(tmp_path / "export"))
    assert torch.equal(features(fresh), features(trained)) and len(said) == 1


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["vit", "dinov2", "registers"])
def test_positions_of_ones_choice_stand_in_the_models_own_table(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", name)
    table = create_backbone(folder).model.base_model.embeddings.position_embeddings.detach().clone()
    for kind in KINDS:
        backbone = create_backbone(folder, positions=kind)
        parameter: nn.Parameter = backbone.model.base_model.embeddings.position_embeddings
        assert parameter.shape == table.shape and not torch.equal(parameter, table)
        assert parameter.requires_grad is kind.startswith("learned")
        assert backbone.positions().kinds == (() if kind == "none" else ("table",))
        if kind == "learned":
            assert 0.01 < parameter.std() < 0.03
        else:
            expected = torch.zeros(16, 16) if kind == "none" else sincos((4, 4), 16)
            assert torch.equal(parameter[0, 1:], expected) and not parameter[0, 0].any()
        # What the model's own forward computes is what Situs computes, whatever the kind.
        backbone = backbone.double().eval()
        x = pictures(backbone)
        with torch.no_grad():
            reference = backbone.model.base_model(x).last_hidden_state
            assert (features(backbone) - reference).abs().max() < 1e-12
            if kind == "none":
                order = torch.randperm(16)
                moved = backbone.encode(backbone.embed(x)[:, order], backbone.positions()).patches
                assert (moved - features(backbone)[:, backbone.num_prefix :][:, order]).abs().max() < 1e-12


def test_positions_are_refused_for_a_reason_in_the_model(tmp_path: Path) -> None:
    vit, dinov2 = (make_folder(tmp_path / name, name) for name in ("vit", "dinov2"))
    with pytest.raises(SitusError, match=r"ViTModel has no relative bias"):
        create_backbone(vit, positions="relative")
    for kind in ("sincos", "learned_sincos"):
        with pytest.raises(SitusError, match=f"'{kind}': .*4x6 patches.*square position table of Dinov2Model"):
            create_backbone(dinov2, positions=kind, img_size=(28, 42))
    assert create_backbone(vit, positions="sincos", img_size=(28, 42)).positions().table.shape == (24, 16)
    bert = transformers.BertConfig(**SIZES, intermediate_size=24, vocab_size=9, max_position_embeddings=8)
    with pytest.raises(SitusError, match="'learned': BertModel is a text model and keeps its own positions") as stop:
        create_backbone(bert, positions="learned")
    assert stop.value.field == "positions"
    with pytest.raises(SitusError, match="positions=none: applies only to a new model"):
        create_backbone(transformers.ViTModel.from_pretrained(vit), positions="none")
    with pytest.raises(SitusError, match=r"^drop_path=0.1: .*models of the library transformers have no drop rate"):
        create_backbone(vit, drop_path=0.1)


@pytest.mark.parametrize("name", ["vit", pytest.param("dinov2", marks=pytest.mark.slow)])
def test_another_size_has_the_table_resampled(name: str, tmp_path: Path) -> None:
    run = pretrain(tmp_path / "droppos", make_folder(tmp_path / "model", name), "droppos")
    given = load_run(run).method.backbone.positions().table
    begun = started(run, data={"img_size": 42})
    table = begun.positions().table
    assert begun.grid == (6, 6) and table.shape == (36, 16)
    assert torch.equal(table, resample_table(given.detach(), (4, 4), (6, 6)))
    wide = started(run, data={"img_size": [28, 42]})
    if name == "dinov2":  # the square stays the model's parameter, and transformers resamples it
        assert torch.equal(wide.model.base_model.embeddings.position_embeddings[0, 1:], given)
    else:
        assert torch.equal(wide.positions().table, resample_table(given.detach(), (4, 4), (4, 6)))
