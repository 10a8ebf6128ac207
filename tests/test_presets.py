"""Every recipe is a config that can be built, its header's command is that recipe, and its figures are the paper's."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from situs.backbones.shapes import shapes_alone
from situs.cli.main import verb_type
from situs.cli.parser.arguments import parse
from situs.config import choices_of, from_dict, to_dict
from situs.methods import METHODS
from situs.presets import load_preset, preset_header, preset_names
from situs.train.config import TrainConfig
from situs.train.run import RunConfig, make_method

NAMES = preset_names()
CLASSES = {
    "cifar100": 100,
    "tiny-imagenet": 200,
    "imagenet": 1000,
    "samples": 10,
    "speech": 12,
    "series": 6,
    "ade20k": 150,
    "coco": 80,
    "sst2": 2,
    "text": 2,
    "few-labels": 6,
}
TUNED = ("finetune", "upernet", "maskrcnn", "few-labels")
"""What the names of recipes say that start from another model."""


def recipe(name: str) -> RunConfig:
    return from_dict(RunConfig, load_preset(name), where=name)


def set_of(name: str) -> str:
    return max((each for each in CLASSES if name.startswith(each)), key=len)


def words(name: str) -> list[str]:
    """The header's command, from the verb on."""
    [line] = [line for line in preset_header(name).splitlines() if "--preset" in line]
    given = shlex.split(line)
    if given[0] == "torchrun":
        given = given[given.index("-m") + 1 :]
    assert given[0] == "situs", line
    return given[1:]


def test_every_set_has_the_methods_the_issue_names() -> None:
    for data in ("cifar100", "tiny-imagenet", "imagenet"):
        assert {f"{data}-{method}" for method in ("mp3", "mae", "supervised")} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_header_names_a_command_for_this_recipe_and_the_hardware(name: str) -> None:
    header = preset_header(name).splitlines()
    assert [line for line in header if line.startswith("Hardware: ")], header
    verb, *flags = words(name)
    assert flags[flags.index("--preset") + 1] == name
    assert "--out" in flags
    assert ("--from" in flags) == (verb == "finetune") == any(word in name for word in TUNED)
    assert parse(verb_type(verb), ["--preset", name], prog="situs").preset == name
    many = "GPUs" in "".join(line for line in header if line.startswith("Hardware"))
    assert many == any("torchrun" in line for line in header)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_strict_complete_and_can_be_built(name: str) -> None:
    config = recipe(name)
    assert from_dict(RunConfig, to_dict(config)) == config
    named = {"segmentation": "upernet", "detection": "maskrcnn"}.get(config.method_name, config.method_name)
    named = "few-labels" if name == "few-labels" else named
    assert ("finetune" if "finetune" in name else named) in name
    label = "label" in METHODS[config.method_name].needs_targets
    assert not label or config.method_name.startswith(("supervised", "mjp"))
    assert config.train.epochs != TrainConfig().epochs or "epochs" in load_preset(name)["train"]
    if config.data.kind in ("text", "series") or name == "few-labels":  # the model or the data says the size
        return
    with shapes_alone():
        method = make_method(config, tuple(map(str, range(CLASSES[set_of(name)]))))
    height, width = config.data.size
    high, wide = method.backbone.model.patch_embed.patch_size
    assert method.backbone.grid == (height // high, width // wide)
    if "label" in METHODS[config.method_name].needs_targets:
        assert method.backbone.model.num_classes == CLASSES[set_of(name)]


def test_segmentation_is_the_recipe_of_maes_evaluation() -> None:
    config = recipe("ade20k-upernet")
    fields(config.method, width=512, auxiliary_weight=0.4, auxiliary_width=256)
    fields(config.data, target="mask", img_size=512, batch=16)
    assert (config.data.masks.first, config.data.masks.void) == (1, (0,))
    fields(config.augment, crop="scaled", scales=[0.5, 2.0], flip=0.5)
    fields(config.optim, lr=1e-4, weight_decay=0.05, layer_decay=0.65, schedule="linear", warmup_steps=1500)
    assert (config.train.max_steps, config.backbone.drop_path) == (160_000, 0.1)


def test_detection_is_vitdets_recipe() -> None:
    config = recipe("coco-maskrcnn")
    fields(config.method, width=256, hidden=1024, anchor=8.0, anchors=256, regions=512, proposals=1000, detections=100)
    fields(config.data, target="objects", img_size=1024, batch=64)
    fields(config.augment, crop="fitted", scales=[0.1, 2.0], flip=0.5)
    fields(config.optim, lr=1e-4, weight_decay=0.1, layer_decay=0.7, schedule="steps", warmup_steps=250)
    assert (config.train.epochs, config.backbone.drop_path, config.backbone.name) == (100, 0.1, "vit_base_patch16_224")


def test_few_labels_train_the_head_on_every_class_equally_often() -> None:
    config = recipe("few-labels")
    assert (config.data.balanced, config.tuning.parts, config.train.epochs) == (True, "head", 30)
    assert (config.optim.lr, config.optim.base_lr) == (None, None)  # by the number of updates


@pytest.mark.parametrize("name", [name for name in NAMES if name != "few-labels"])
def test_every_other_recipe_names_its_rate_its_batch_and_its_length(name: str) -> None:
    """So that no default can change what a paper's numbers were measured with."""
    config, tables = recipe(name), load_preset(name)
    assert config.optim.lr is not None or config.optim.base_lr is not None
    assert config.data.batch is not None
    assert {"epochs", "max_steps"} & tables["train"].keys()


def test_sentences_are_learned_by_berts_recipe() -> None:
    config = recipe("sst2-finetune")
    fields(config.optim, lr=5e-5, weight_decay=0.01, schedule="linear", clip=1.0)
    assert (config.train.epochs, config.data.batch, config.method.label_smoothing) == (3, 32, 0.0)
    assert (config.data.kind, config.data.text.longest) == ("text", 128)


# --- MP3: SPEC §2 -------------------------------------------------------------------------------------------

MP3_RECIPES = {"cifar100-mp3": (0.5, None), "tiny-imagenet-mp3": (0.8, 512), "imagenet-mp3": (0.75, 2048)}
"""name -> (η, batch). On CIFAR-100 ours is larger than the paper's 256, which its header says."""


@pytest.mark.parametrize("name", MP3_RECIPES)
def test_mp3_is_the_papers(name: str) -> None:
    ratio, batch = MP3_RECIPES[name]
    config = recipe(name)
    assert (config.method.mask_ratio, config.method.anchor_ratio) == (ratio, 0.0)
    if batch is None:
        assert "batch 256 there" in preset_header(name)
    else:
        assert config.data.batch == batch
    augment = config.augment
    # DeiT's recipe without these:
    assert (augment.mixup, augment.cutmix, augment.erasing, augment.repeated, augment.label_smoothing) == (
        0,
        0,
        0,
        1,
        0,
    )
    assert (augment.crop, augment.operations) == ("resized", 2)
    assert config.backbone.drop_path == 0.1
    assert (config.optim.base_lr, config.optim.lr_reference, config.optim.weight_decay) == (5e-4, 512, 0.05)


@pytest.mark.parametrize("name", ["cifar100-supervised", "tiny-imagenet-supervised", "imagenet-supervised"])
def test_supervised_is_deits(name: str) -> None:
    config = recipe(name)
    augment = config.augment
    assert (augment.mixup, augment.cutmix, augment.erasing, augment.label_smoothing) == (0.8, 1.0, 0.25, 0.1)
    assert config.train.epochs == (300 if name.startswith("imagenet") else 400)
    assert config.backbone.drop_path == 0.1


def test_the_models_and_sizes_are_the_papers() -> None:
    for data, size, patch, model in (
        ("cifar100", 32, 4, "vit_small_patch16_224"),
        ("tiny-imagenet", 64, 8, "vit_base_patch16_224"),
        ("imagenet", 224, None, "vit_base_patch16_224"),
    ):
        for method in ("mp3", "mae", "supervised"):
            config = recipe(f"{data}-{method}")
            assert (config.data.img_size, config.backbone.patch_size, config.backbone.name) == (size, patch, model)


# --- DropPos: SPEC §3, MJP: SPEC §4 -------------------------------------------------------------------------


def fields(config: Any, **expected: Any) -> None:
    found = to_dict(config)
    assert {name: found[name] for name in expected} == expected


def test_droppos_is_the_papers() -> None:
    config = recipe("imagenet-droppos")
    fields(
        config.method, mask_ratio=0.75, position_mask_ratio=0.75, decoder_width=512, decoder_depth=2, decoder_heads=16
    )
    fields(config.optim, betas=[0.9, 0.95], base_lr=1.5e-4, lr_reference=256, weight_decay=0.05, warmup_epochs=10.0)
    fields(config.augment, crop="resized", operations=0, mixup=0.0, cutmix=0.0, erasing=0.0)
    assert config.backbone.positions == "sincos"
    official = recipe("imagenet-droppos-official")
    fields(official.optim, clip=5.0, clip_mode="parameter")
    assert (official.method_name, official.train.epochs) == ("droppos-official", 800)

    tuned = recipe("imagenet-droppos-finetune")
    fields(tuned.optim, base_lr=1e-3, lr_reference=256, layer_decay=0.8)
    fields(tuned.augment, operations=2, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    assert (tuned.data.batch, tuned.train.epochs, tuned.backbone.drop_path) == (1024, 100, 0.1)
    assert tuned.backbone.model_args == {"global_pool": "avg"}


def test_mjp_is_the_papers() -> None:
    official = recipe("imagenet-mjp-official")
    fields(official.method, start_epoch=20, chance=0.5, dal_final=0.005, dal_warmup=20)
    assert (official.method_name, official.train.epochs) == ("mjp-official", 300)
    assert official.backbone.drop_path == 0.0
    paper = recipe("imagenet-mjp")
    assert paper.method_name == "mjp"
    assert paper.method.dal_weight == official.method.dal_weight == 0.01
    assert paper.backbone.name == "deit_small_patch16_224"


def test_the_choice_of_a_method_can_be_changed_on_top_of_a_recipe() -> None:
    assert set(choices_of(RunConfig)) == {"method"}
    words = ["--preset", "cifar100-mp3", "--method", "supervised"]
    changed = parse(verb_type("pretrain"), words, prog="situs").config
    assert changed.method_name == "supervised"
    assert changed.data.img_size == 32
