"""An export loads with its own library alone: timm in a fresh interpreter that never sees Situs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_vit
from safetensors.torch import load_file, save_file
from tiny_texts import write_folder
from torch import Tensor, nn
from warm import warm

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.data.config import DataConfig
from situs.data.preparation import Preparation
from situs.data.text import TextConfig
from situs.data.tokeniser import Tokeniser
from situs.errors import SitusError
from situs.methods import MAE, MP3, MAEConfig, Method, MP3Config, Supervised, SupervisedConfig
from situs.methods.supervised import multi_label_loss
from situs.models import open_model
from situs.train.checkpoint import RunFolder
from situs.train.export import (
    POSITIONS,
    WEIGHTS,
    ModelProvenance,
    last_metrics,
    last_name,
    load_checkpoint,
    write_export,
)
from situs.train.step import Ema

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2}
VIT: dict[str, Any] = dict(name="vit_tiny_patch16_224", img_size=(16, 24), patch_size=4, model_args=SMALL)

CASES: dict[str, tuple[type[Method], dict[str, Any]]] = {
    "table": (Supervised, VIT | dict(num_classes=7, drop_path=0.1)),
    "one channel": (Supervised, VIT | dict(num_classes=7, in_chans=1)),
    "five channels": (Supervised, VIT | dict(num_classes=7, in_chans=5)),
    "relative": (Supervised, VIT | dict(num_classes=7, positions="relative")),
    "none": (Supervised, VIT | dict(num_classes=7, positions="none")),
    "sincos": (Supervised, VIT | dict(num_classes=7, positions="sincos")),
    "registers": (
        Supervised,
        dict(name="vit_base_patch16_reg4_gap_256", img_size=(64, 48), num_classes=3, model_args=SMALL),
    ),
    "distilled": (
        Supervised,
        dict(name="deit_tiny_distilled_patch16_224", img_size=(64, 48), num_classes=3, model_args=SMALL),
    ),
    "rotary": (
        Supervised,
        dict(name="vit_small_patch16_rope_224", img_size=(64, 48), num_classes=3, model_args=SMALL),
    ),
    "headless": (Supervised, VIT | dict(num_classes=0)),
    "resnet": (Supervised, dict(name="resnet18", num_classes=3, model_args={"channels": (8, 8, 16, 16)})),
    "swin": (
        Supervised,
        dict(name="swin_tiny_patch4_window7_224", img_size=(32, 32), num_classes=3,
             model_args={"depths": (1, 1), "embed_dim": 12, "num_heads": (1, 2), "window_size": 4}),
    ),
    "mae": (MAE, VIT),
    "mp3": (MP3, VIT),
    "mp3 relative": (MP3, VIT | dict(positions="relative")),
    "mp3 relative network": (MP3, dict(name="vit_relpos_small_patch16_224", img_size=(64, 48), model_args=SMALL)),
    "mp3 anchors": (MP3, VIT),
}  # fmt: skip
CONFIGS: dict[type[Method], Any] = {
    Supervised: SupervisedConfig(),
    MAE: MAEConfig(0.5, 16, 1, 2),
    MP3: MP3Config(0.5),
}

EXACT = 1e-10
"""The weights are float32 and the features are computed from them in float64 on both sides."""

LOADER = """
import sys, json
from safetensors.torch import load_file, save_file
import timm
found = {}
for name, (folder, images) in json.loads(sys.argv[2]).items():
    model = timm.create_model("local-dir:" + folder, pretrained=True).double().eval()
    x = load_file(images)["images"]
    tokens = model.forward_features(x)
    found[name + "/features"] = tokens.detach().contiguous()
    found[name + "/output"] = model(x).detach().contiguous()
    assert model.pretrained_cfg["input_size"][0] == x.shape[1], name
    size = timm.data.resolve_model_data_config(model)["input_size"][1:]
    assert name == "resnet" or tuple(size) == tuple(x.shape[2:]), name
assert not [m for m in sys.modules if m.startswith("situs")]
save_file(found, sys.argv[1])
"""


def make(case: str) -> Method:
    torch.manual_seed(0)
    kind, fields = CASES[case]
    config = MP3Config(0.5, anchor_ratio=0.2) if "anchors" in case else CONFIGS[kind]
    method: Method = kind(create_backbone(**fields), config)  # type: ignore[call-arg]
    for name, parameter in method.named_parameters():
        if parameter.dim() <= 2 or "pos_embed" in name or "token" in name:  # all of them must matter
            nn.init.normal_(parameter, std=0.2)
    return method.eval()


def images(backbone: Backbone) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, backbone.input.channels, *(backbone.input.shape or (64, 64)), dtype=torch.float64)


def expected(method: Method) -> Tensor:
    """The features that the method trained, in timm's own shape."""
    backbone, x = method.backbone, images(method.backbone)
    if "tokens" in backbone.refusals:
        return backbone.model.forward_features(x)
    places = backbone.positions() if method.sees_positions else None
    features = backbone.encode(backbone.embed(x), places)
    if backbone.out_grid != backbone.grid:
        return features.patches.unflatten(1, backbone.out_grid)
    return torch.cat([features.prefix, features.patches], dim=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Method, Tensor, Tensor]]:
    """Every case written, and read by one interpreter that has timm and no Situs: folder, method, features, output."""
    base = tmp_path_factory.mktemp("exports")
    methods = {case: make(case) for case in CASES}
    asked = {}
    for number, (case, method) in enumerate(methods.items()):
        folder, file = base / str(number), base / f"{number}.safetensors"
        write_export(method, folder, ModelProvenance("test", classes=[f"class {i}" for i in range(7)]))
        save_file({"images": images(method.backbone)}, file)
        asked[case] = (str(folder), str(file))
    out = base / "found.safetensors"
    status, _, complaints = warm("-c", LOADER, out, json.dumps(asked))
    assert status == 0, complaints
    found = load_file(out)
    return {
        case: (Path(asked[case][0]), method.double(), found[f"{case}/features"], found[f"{case}/output"])
        for case, method in methods.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_timm_alone_gives_the_same_features(case: str, exported: dict[str, Any]) -> None:
    _, method, features, output = exported[case]
    with torch.no_grad():
        torch.testing.assert_close(features, expected(method), rtol=EXACT, atol=EXACT)
        if "label" in method.needs_targets:
            torch.testing.assert_close(output, method.backbone(images(method.backbone)), rtol=EXACT, atol=EXACT)
        else:
            assert output.shape == (2, method.backbone.dim)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_holds_no_pickle_and_no_path(case: str, exported: dict[str, Any]) -> None:
    folder, *_ = exported[case]
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    for file in folder.iterdir():
        assert str(folder.parent) not in file.read_bytes().decode("utf-8", "ignore")
    config = json.loads((folder / "config.json").read_text())
    assert "drop_path_rate" not in config["model_args"]
    assert not {"license", "url", "hf_hub_id", "tag"} & config["pretrained_cfg"].keys()


@pytest.mark.parametrize("case", CASES)
def test_situs_reads_it_too(case: str, exported: dict[str, Any]) -> None:
    folder, method, features, _ = exported[case]
    backbone = create_backbone(folder).double().eval()
    assert backbone.grid == method.backbone.grid
    with torch.no_grad():
        again = backbone.model.forward_features(images(method.backbone))
    torch.testing.assert_close(again, features, rtol=EXACT, atol=EXACT)
    assert backbone.source["architecture"] == method.backbone.source["architecture"]


def test_what_was_not_trained_is_said_and_left_out(exported: dict[str, Any]) -> None:
    folder, method, *_ = exported["mp3"]
    state = load_file(folder / WEIGHTS)
    assert not [name for name in state if name.startswith(("head", "position_head"))]
    assert not state["pos_embed"][:, 1:].any()
    torch.testing.assert_close(state["pos_embed"][:, 0], method.backbone.model.pos_embed[:, 0].detach().float())
    card = (folder / "README.md").read_text()
    assert "trained without positions. Its position table was not trained" in card
    assert "no classifier" in card
    assert method.backbone.model.pos_embed[:, 1:].any()  # the method itself is untouched
    trained, *_ = exported["mp3 anchors"]
    assert load_file(trained / WEIGHTS)["pos_embed"][:, 1:].any()
    assert "without positions" not in (trained / "README.md").read_text()


def test_rotation_cannot_be_taken_out_and_the_card_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = small_vit((64, 48), name="vit_small_patch16_rope_224", width=32, patch_size=None)
    found = write_export(MP3(backbone, MP3Config(0.5)), tmp_path / "x", ModelProvenance("mp3"))
    assert "still applies the rotation, because an export can set only weights" in found.notes[0]
    assert found.notes[0] in (tmp_path / "x" / "README.md").read_text()


def test_a_rotation_that_remains_beside_the_table_is_not_called_harmless(tmp_path: Path) -> None:
    backbone = small_vit((56, 56), name="eva02_tiny_patch14_224", width=32, patch_size=None)
    erased, remains = write_export(MP3(backbone, MP3Config(0.5)), tmp_path / "x", ModelProvenance("mp3")).notes[:2]
    assert "position table was not trained" in erased and "forward pass of the library gives" not in erased
    assert "forward pass does not give the trained features" in remains


def test_our_own_table_is_saved_beside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, fields = CASES["swin"]
    method = Supervised(create_backbone(**fields, positions="learned"), SupervisedConfig()).eval()
    found = write_export(method, tmp_path / "x", ModelProvenance("supervised"))
    assert POSITIONS in found.notes[0]
    assert load_file(tmp_path / "x" / POSITIONS).keys() == {"table"}
    assert "table" not in load_file(tmp_path / "x" / WEIGHTS)
    back = create_backbone(tmp_path / "x").eval()
    x = images(method.backbone).float()
    torch.testing.assert_close(back(x), method.backbone(x))


def test_transformers_gets_its_own_layout(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8,
                       patch_size=4, num_labels=3, architectures=["ViTForImageClassification"])  # fmt: skip
    method = Supervised(create_backbone(config), SupervisedConfig()).eval()
    write_export(method, tmp_path / "x", ModelProvenance("supervised"))
    x = torch.randn(2, 3, 8, 8)
    model = ViTForImageClassification.from_pretrained(tmp_path / "x").eval()
    torch.testing.assert_close(model(x).logits, method.backbone(x), rtol=1e-6, atol=1e-6)
    assert "ViTForImageClassification.from_pretrained" in (tmp_path / "x" / "README.md").read_text()
    assert not [file for file in (tmp_path / "x").iterdir() if file.suffix not in (".json", ".md", ".safetensors")]


def test_a_spectrogram_model_is_not_said_to_take_images(tmp_path: Path) -> None:
    from transformers import ASTConfig, ASTForAudioClassification

    torch.manual_seed(0)
    config = ASTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=4,
                       num_mel_bins=8, max_length=12, frequency_stride=4, time_stride=4)  # fmt: skip
    method = Supervised(create_backbone(config, num_classes=3), SupervisedConfig()).eval()
    write_export(method, tmp_path / "x", ModelProvenance("supervised", classes=("a", "b", "c")))
    assert not (tmp_path / "x" / "preprocessor_config.json").exists()
    model, x = ASTForAudioClassification.from_pretrained(tmp_path / "x").eval(), torch.randn(2, 1, 8, 12)
    torch.testing.assert_close(model(x[:, 0].mT).logits, method.backbone(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(create_backbone(tmp_path / "x").eval()(x), method.backbone(x))


def test_transformers_is_told_that_an_image_has_any_number_of_classes(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8,
                       patch_size=4, num_labels=3, architectures=["ViTForImageClassification"])  # fmt: skip
    method = Supervised(create_backbone(config), SupervisedConfig()).eval()
    told = ModelProvenance(
        "supervised", prepared=Preparation(DataConfig(img_size=8, multi_label=True)), classes=("a", "b", "c")
    )
    write_export(method, tmp_path / "x", told)
    model, x = ViTForImageClassification.from_pretrained(tmp_path / "x").eval(), torch.randn(2, 3, 8, 8)
    labels = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8)
    theirs = model(x, labels=labels.float()).loss  # which it takes from its config
    ours, _ = multi_label_loss(method.backbone(x), labels, 0.0)
    torch.testing.assert_close(theirs, ours)
    opened = open_model(tmp_path / "x")
    assert opened.multi_label and opened.classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("kind", "method", "own", "exported"),
    [
        ("gpt2 classes", "supervised", 7, 0),  # transformers finds a sentence's last token by the tokeniser's
        ("gpt2", "language", 7, 7),
        ("gpt2", "language", None, 0),
        ("bert", "supervised", 7, 7),
    ],
)
def test_sentences_are_padded_as_transformers_must_know(
    kind: str, method: str, own: int | None, exported: int, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "made", kind, width=8, pad_token_id=own)
    assert Tokeniser(str(folder)).pad == 0
    backbone = create_backbone(folder, num_classes=None if method == "language" else 3)
    prepared = Preparation(DataConfig(kind="text", text=TextConfig(tokeniser=str(folder))))
    made = small_method(method, backbone, 3 if method == "supervised" else 0)
    write_export(made, tmp_path / "x", ModelProvenance(method, prepared=prepared))
    assert json.loads((tmp_path / "x" / "config.json").read_text())["pad_token_id"] == exported


@pytest.mark.parametrize("pair", [None, "second"])
def test_a_tokeniser_of_pairs_gives_which_sentence_an_id_is_of(pair: str | None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made", "bert", width=8)
    prepared = Preparation(DataConfig(kind="text", text=TextConfig(tokeniser=str(folder), pair=pair)))
    made = small_method("supervised", create_backbone(folder, num_classes=3), 3)
    write_export(made, tmp_path / "x", ModelProvenance("supervised", prepared=prepared))
    before, after = (json.loads((place / "tokenizer_config.json").read_text()) for place in (folder, tmp_path / "x"))
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if pair else {}
    assert after == before | names


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_an_export_says_what_it_never_learned_and_anybody_may_read_it(share: float, tmp_path: Path) -> None:
    recipe = {"data": {"held_out": share}}
    write_export(make("table"), tmp_path / "x", ModelProvenance("supervised", recipe=recipe))
    situs = json.loads((tmp_path / "x" / "config.json").read_text())["situs"]
    assert situs.get("held_out") == (share or None) and "settings" not in situs
    assert (situs["method"], situs["positions"]) == ("supervised", True)
    assert (tmp_path / "x" / WEIGHTS).stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_card_tells_the_story_without_paths(tmp_path: Path) -> None:
    recipe = {"data": {"path": str(tmp_path / "sets" / "cifar100"), "size": [16, 24]}, "train": {"epochs": 3}}
    data = str(tmp_path / "sets" / "cifar100")
    seen = DataConfig(img_size=(16, 24), mean=(0.5, 0.25, 0.125), std=(1.0, 2.0, 3.0), crop_share=0.875)
    provenance = ModelProvenance("supervised", data, recipe, {"top1": 0.51234}, step=1200, ema=True,
                                 prepared=Preparation(seen), classes=list("abcdefg"))  # fmt: skip
    write_export(make("table"), tmp_path / "x", provenance)
    card = (tmp_path / "x" / "README.md").read_text()
    assert str(tmp_path) not in card
    for part in ("vit_tiny_patch16_224", "Data: cifar100", "1,200", "moving average (EMA)", "| top1 | 0.5123 |",
                 '"epochs": 3', "[0.5, 0.25, 0.125]", "local-dir:", "3 channels, 16 × 24"):  # fmt: skip
        assert part in card
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    described = config["pretrained_cfg"]
    assert (described["mean"], described["std"]) == ([0.5, 0.25, 0.125], [1.0, 2.0, 3.0])
    assert (described["crop_pct"], config["label_names"]) == (0.875, list("abcdefg"))
    assert [last_name(text) for text in ("a/b/", "C:\\d\\e", "plain", "/")] == ["b", "e", "plain", "/"]


def test_the_last_numbers_are_the_newest_of_each_kind() -> None:
    records = [
        {"step": 10, "epoch": 1.0, "loss": 3.0, "lr": 1e-3},
        {"step": 10, "epoch": 1.0, "val_top1": 0.4},
        {"step": 20, "epoch": 2.0, "loss": 2.0, "gradient_norm": None},
        {"step": 30, "epoch": 3.0, "loss": 1.0},
    ]
    assert last_metrics(records, 20) == {"loss": 2.0, "val_top1": 0.4}


def test_a_target_is_refused_or_replaced(tmp_path: Path) -> None:
    method, target = make("table"), tmp_path / "x"
    target.mkdir()
    write_export(method, target, ModelProvenance("one"))  # an empty folder is free
    with pytest.raises(SitusError, match="set force to replace the export"):
        write_export(method, target, ModelProvenance("two"))
    assert "trained with the method one" in (target / "README.md").read_text()
    (tmp_path / ".x.old").mkdir()
    (tmp_path / ".x.old" / "README.md").write_text("left by a process that was killed")
    write_export(method, target, ModelProvenance("two"), force=True)
    assert "trained with the method two" in (target / "README.md").read_text()
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    with pytest.raises(SitusError, match="contains no export, so it is not replaced"):
        write_export(method, other, ModelProvenance("two"), force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(SitusError, match="is a file"):
        write_export(method, tmp_path / "file", ModelProvenance("two"), force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "precious", "x"]


def test_a_full_disk_leaves_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, target = make("table"), tmp_path / "x"
    write_export(method, target, ModelProvenance("one"))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("situs.train.export._save", full)
    with pytest.raises(SitusError, match=r"could not be written: .*No space left"):
        write_export(method, target, ModelProvenance("two"), force=True)
    assert "trained with the method one" in (target / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_module_wrapped_by_hand_is_refused(tmp_path: Path) -> None:
    method = make("table")
    bare = Supervised(create_backbone(method.backbone.model), SupervisedConfig())
    with pytest.raises(SitusError, match="does not know the constructor of the wrapped module"):
        write_export(bare, tmp_path / "x", ModelProvenance("supervised"))
    assert list(tmp_path.iterdir()) == []


def test_weights_or_their_mean_come_from_a_checkpoint(tmp_path: Path) -> None:
    method = make("table")
    ema = Ema(method, 0.9)
    mean = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(1.0)
    last = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    run = RunFolder.create(tmp_path / "run", {})
    run.save(1, {"model": method.state_dict(), "ema": ema.mean}, {}, keep=2)
    checkpoint = run.latest()
    assert checkpoint is not None
    for wish, used, values in ((None, True, mean), (True, True, mean), (False, False, last)):
        fresh = make("table")
        assert load_checkpoint(fresh, checkpoint, ema=wish) is used
        assert all(torch.equal(values[name], tensor) for name, tensor in fresh.state_dict().items())
    run.save(2, {"model": method.state_dict()}, {}, keep=2)
    checkpoint = run.latest()
    assert checkpoint is not None
    assert load_checkpoint(make("table"), checkpoint) is False
    with pytest.raises(SitusError, match="has no moving average of the weights"):
        load_checkpoint(make("table"), checkpoint, ema=True)
    with pytest.raises(SitusError, match="does not fit"):
        load_checkpoint(make("none"), checkpoint)
