from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from situs.backbones import create_backbone
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.locks.folder import (
    INDEX,
    WHOLE,
    all_specs,
    header_of,
    names_in_file,
    new_folder,
    structure_of,
    weight_files,
    write_model,
)
from situs.locks.shards import Spec
from situs.models import Model, open_model


def test_weight_files_are_the_whole_or_the_indexed(tmp_path):
    with pytest.raises(SitusError, match="holds neither"):
        weight_files(tmp_path)
    (tmp_path / WHOLE).touch()
    assert weight_files(tmp_path) == [WHOLE]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}))
    with pytest.raises(SitusError, match=r"1\.safetensors is missing"):
        weight_files(tmp_path)
    for name in "12":
        (tmp_path / f"{name}.safetensors").touch()
    assert weight_files(tmp_path) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}',
     '{"weight_map": {"a": "x.bin"}}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": []}}', "[" * 100_000],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(SitusError, match="index"):
        weight_files(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    one, two = {"a": torch.zeros(2), "b": torch.ones(3)}, {"c": torch.zeros(1), "a": torch.zeros(2)}
    for name, state in (("1.safetensors", one), ("2.safetensors", two)):
        save_file(state, tmp_path / name)
    headers = {name: header_of(tmp_path, name) for name in ("1.safetensors", "2.safetensors")}
    with pytest.raises(SitusError, match=f"{tmp_path}: a is in two of its weight files"):
        all_specs(headers, tmp_path)
    first = all_specs({"1.safetensors": headers["1.safetensors"]}, tmp_path)
    assert first == {"a": Spec("a", "F32", (2,)), "b": Spec("b", "F32", (3,))}


@pytest.mark.parametrize("name", ["vit", "swin", "llama", "hf_vit"])
def test_structure_has_the_shapes_and_no_memory(model_folder, name):
    backbone, real = structure_of(model_folder(name)), create_backbone(model_folder(name))
    state = backbone.model.state_dict()
    assert all(tensor.is_meta for tensor in backbone.model.parameters())
    assert {each: tensor.shape for each, tensor in state.items()} == {
        each: tensor.shape for each, tensor in real.model.state_dict().items()
    }


def test_names_in_file_want_one_tensor_of_the_right_shape(model_folder):
    backbone = structure_of(model_folder("bert"))
    own = {name: tuple(value.shape) for name, value in backbone.model.state_dict().items()}
    specs = {name: Spec(name, "F32", shape) for name, shape in own.items()}
    assert names_in_file(backbone, specs) == {name: name for name in own}
    norm = "bert.encoder.layer.0.output.LayerNorm.weight"
    old = norm.removeprefix("bert.").replace("weight", "gamma")
    bare = {key: spec for key, spec in specs.items() if key != norm} | {old: Spec(old, "F32", own[norm])}
    assert names_in_file(backbone, bare)[norm] == old
    with pytest.raises(SitusError, match="both"):
        names_in_file(backbone, specs | {old: Spec(old, "F32", own[norm])})
    wrong = specs | {norm: Spec(norm, "F32", (5,))}
    assert norm not in names_in_file(backbone, wrong)


def test_a_module_that_cannot_be_made_again_is_not_written(tmp_path):
    backbone = create_backbone("vit_tiny_patch16_224", img_size=16, patch_size=8, model_args=dict(depth=1))
    backbone.source = {}
    with pytest.raises(SitusError, match="given as a PyTorch module"):
        write_model(backbone, tmp_path)
    swin = create_backbone(
        "swin_tiny_patch4_window7_224", img_size=32, positions="learned", model_args=dict(depths=(1, 1), embed_dim=12)
    )
    with pytest.raises(SitusError, match="position table is not part of the wrapped model"):
        write_model(swin, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_timm_loads_what_is_written(model_folder):
    timm = pytest.importorskip("timm")
    model = timm.create_model(f"local-dir:{model_folder('vit')}", pretrained=True).eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), create_backbone(model_folder("vit")).eval()(x))


@pytest.mark.parametrize("name", ["hf_vit", "bert"])
def test_images_and_words_are_prepared_by_the_files_of_transformers_alone(model_folder, name):
    assert "situs" not in json.loads((model_folder(name) / "config.json").read_text())


def test_a_model_of_sound_tells_how_its_clips_are_prepared(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    patches = dict(patch_size=2, frequency_stride=2, time_stride=2, num_mel_bins=40, max_length=98)
    config = transformers.ASTConfig(**sizes, **patches, num_labels=3)
    backbone = create_backbone(transformers.ASTForAudioClassification(config))
    sound = DataConfig(kind="audio", channels=1, img_size=(40, 98))
    write_model(Model("m", backbone, input=sound, classes=("a", "b", "c")), tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())["situs"]
    again = open_model(tmp_path)
    assert told and again.samples.modality.things == "clips"
    x = torch.randn(1, 1, 40, 98)
    assert torch.equal(again.backbone(x), backbone.eval()(x))
    assert not (tmp_path / "preprocessor_config.json").exists()


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"

    def interrupted() -> None:
        with new_folder(out) as aside:
            (aside / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "deep").iterdir()) == []
    with new_folder(out) as aside:
        (aside / "file").write_text("x")
        assert not out.exists()
    assert (out / "file").read_text() == "x"
    with pytest.raises(SitusError, match="exists already"), new_folder(out):
        pass
    with pytest.raises(SitusError, match="could not be written"), new_folder(out / "file" / "below"):
        pass
