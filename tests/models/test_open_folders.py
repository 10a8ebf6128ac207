"""What an evaluation opens: folders in half precision, folders of others, and a model without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from builders import small_vit
from safetensors.torch import save_file

from situs.backbones import create_backbone
from situs.data.config import DataConfig
from situs.methods import Supervised, SupervisedConfig
from situs.models import Model, open_model
from situs.train.export import ModelProvenance, write_export


def halve(file: Path) -> None:
    """The same safetensors file in half precision, as many publish theirs."""
    from safetensors.torch import load_file

    save_file({name: value.half() for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


@torch.no_grad()
def test_weights_in_half_precision_are_evaluated_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = small_vit(depth=1, num_classes=3).eval()
    write_export(Supervised(backbone, SupervisedConfig()), tmp_path / "export", ModelProvenance(method="supervised"))
    halve(tmp_path / "export" / "model.safetensors")
    subject = open_model(str(tmp_path / "export"))
    assert {weight.dtype for weight in subject.backbone.parameters()} == {torch.float32}
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(subject.backbone(x), backbone.eval()(x), rtol=0, atol=1e-2)


@torch.no_grad()
def test_a_folder_that_transformers_wrote_in_half_precision(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)
    model = transformers.ViTForImageClassification(config).eval()
    x = torch.randn(2, 3, 16, 16)
    expected = model(x).logits
    model.half().save_pretrained(tmp_path)
    subject = open_model(str(tmp_path))
    assert {weight.dtype for weight in subject.backbone.parameters()} == {torch.float32}
    torch.testing.assert_close(subject.backbone(x), expected, rtol=0, atol=1e-2)
    assert subject.classifier and subject.classes is None  # LABEL_0 is no class's name


PREPARED = {
    "resized": ('{"size": {"height": 16, "width": 16}, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}', 1.0),
    "cut": ('{"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}', 0.8),
    "not cut": ('{"size": {"shortest_edge": 20}, "crop_size": {"height": 16}, "do_center_crop": false}', 1.0),
    "old": ('{"size": 16, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}', 1.0),
}


@pytest.mark.parametrize("kind", PREPARED)
def test_images_are_prepared_as_the_folder_says(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, id2label={0: "cat", 1: "dog"})
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    told, share = PREPARED[kind]
    (tmp_path / "preprocessor_config.json").write_text(told)
    subject = open_model(str(tmp_path))
    assert (subject.data.size, subject.data.crop_share, subject.classes) == ((16, 16), share, ("cat", "dog"))
    if "image_mean" in told:
        assert subject.data.normalisation == ((0.1, 0.2, 0.3), (1, 1, 1))
    else:
        assert subject.data.normalisation == DataConfig().normalisation


def test_a_model_without_weights_is_on_the_cpu() -> None:
    backbone = create_backbone(timm.create_model("test_vit"))
    for part in backbone.model.modules():
        part._parameters.clear()
    subject = Model("bare", backbone, True, True, DataConfig(), None, {})
    assert subject.device == torch.device("cpu")
