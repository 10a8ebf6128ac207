from __future__ import annotations

import re
from pathlib import Path

import pytest
import timm
import torch
from builders import small_vit
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from situs.backbones import BackboneConfig, create_backbone
from situs.backbones.base import InputSpec
from situs.backbones.shapes import shapes_alone
from situs.backbones.weights import read_state_dict
from situs.cli.main import main
from situs.core.position import sincos
from situs.errors import SitusError

TINY = {"depth": 2, "embed_dim": 32, "num_heads": 4}


def tiny(**fields):
    return small_vit((16, 24), width=32, heads=4, **fields)


def test_the_contract_of_the_readme() -> None:
    with shapes_alone():
        b = create_backbone("vit_small_patch16_224", img_size=(160, 224))
    assert (b.grid, b.dim, type(b.model).__name__) == ((10, 14), 384, "VisionTransformer")
    assert b.num_tokens == 140 and b.num_prefix == 1 and b.depth == 12


def test_one_number_of_a_config_is_both_sides() -> None:
    shape = {"patch_size": 4, "model_args": {"depth": 1, "embed_dim": 32, "num_heads": 4}}
    for size in (16, (16, 16)):
        assert create_backbone(BackboneConfig("vit_tiny_patch16_224", img_size=size, **shape)).grid == (4, 4)


def test_a_config_and_keywords_make_the_same_model() -> None:
    torch.manual_seed(0)
    a = create_backbone(
        BackboneConfig("vit_tiny_patch16_224", (16, 24), 4, model_args={"depth": 2, "embed_dim": 32, "num_heads": 4})
    )
    torch.manual_seed(0)
    b = tiny()
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


FRAMES = {
    "img_size": (40, 98),
    "patch_size": (40, 1),
    "in_chans": 1,
    "num_classes": 12,
    "model_args": {
        "embed_dim": 32,
        "depth": 8,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "pos_drop_rate": 0.1,
        "proj_drop_rate": 0.1,
        "attn_drop_rate": 0.1,
    },
}
"""The transformer over frames of MP3's speech experiments: each of 98 frames of 40 coefficients is a token."""


def test_the_papers_model_over_frames_has_its_size() -> None:
    b = create_backbone("vit_tiny_patch16_224", positions="sincos", **FRAMES)
    block = 3 * (32 * 32 + 32) + (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 4 * 32
    assert block == 8544
    trained = sum(p.numel() for p in b.parameters() if p.requires_grad)
    assert trained == (40 * 32 + 32) + 32 + 8 * block + 64 + (32 * 12 + 12) == 70_156  # about 70 K in the paper
    assert (b.grid, b.num_tokens, b.num_prefix, b.depth, b.dim) == ((1, 98), 98, 1, 8, 32)
    assert b.input == InputSpec((40, 98), 1, (40, 1)) and b.patch_values == 40
    assert torch.equal(b.positions().table, sincos((98,), 32))
    assert b.positions().table.unique(dim=0).shape[0] == 98  # no channel is spent on a side of one place


@pytest.mark.parametrize("kind", ["learned", "sincos", "none", "relative"])
@torch.no_grad()
def test_a_frame_is_projected_alone_and_the_model_is_timms(kind: str) -> None:
    torch.manual_seed(0)
    b = create_backbone("vit_tiny_patch16_224", positions=kind, **FRAMES).double().eval()
    clips = torch.randn(2, 1, 40, 98, dtype=torch.float64)
    weight, bias = b.model.patch_embed.proj.weight.view(32, 40), b.model.patch_embed.proj.bias
    assert torch.allclose(b.embed(clips), clips[:, 0].mT @ weight.T + bias, atol=1e-12)
    assert torch.allclose(b(clips), b.model(clips), atol=1e-12)


@torch.no_grad()
def test_the_dropout_of_every_sublayer_is_run() -> None:
    """With one kind on at a time, two passes differ in training and agree in evaluation."""
    shape = {"embed_dim": 32, "depth": 1, "num_heads": 4, "mlp_ratio": 2.0}
    clips = torch.randn(1, 1, 40, 98)
    for rate in ("pos_drop_rate", "proj_drop_rate", "attn_drop_rate"):
        b = create_backbone("vit_tiny_patch16_224", **FRAMES | {"model_args": {**shape, rate: 0.1}})
        features = [b.encode(b.embed(clips), b.positions()).patches for _ in range(2)]
        assert not torch.equal(*features), rate
        b.eval()
        features = [b.encode(b.embed(clips), b.positions()).patches for _ in range(2)]
        assert torch.equal(*features), rate


def test_spectrogram_patches_are_a_rectangular_grid_of_one_channel() -> None:
    """AST's form: 128 log-mels by 96 frames in patches of 16 by 16."""
    shape = {"embed_dim": 32, "depth": 1, "num_heads": 4}
    b = create_backbone("vit_tiny_patch16_224", img_size=(128, 96), in_chans=1, model_args=shape, positions="sincos")
    assert (b.grid, b.input) == ((8, 6), InputSpec((128, 96), 1, (16, 16)))
    assert torch.equal(b.positions().table, sincos((8, 6), 32))
    b = b.double().eval()
    spectrograms = torch.randn(2, 1, 128, 96, dtype=torch.float64)
    assert torch.allclose(b(spectrograms), b.model(spectrograms), atol=1e-12)


def test_sincos_positions_are_fixed_and_load_in_timm() -> None:
    b = tiny(positions="sincos")
    assert torch.equal(b.positions().table, sincos((4, 6), 32))
    assert not b.model.pos_embed.requires_grad
    assert (b.model.pos_embed[:, 0] == 0).all()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_learned_sincos_positions_start_as_the_fixed_ones_and_train(name: str) -> None:
    args = {"depths": (1, 1, 1, 1), "embed_dim": 24} if "swin" in name else {"depth": 1}
    fixed, learned = (
        create_backbone(name, img_size=32, model_args=args, positions=kind) for kind in ("sincos", "learned_sincos")
    )
    assert torch.equal(fixed.positions().table, learned.positions().table)
    assert not fixed.positions().table.requires_grad and learned.positions().table.requires_grad


def test_no_positions_is_timms_own_model_without_a_table() -> None:
    b = tiny(positions="none").double().eval()
    assert b.positions().kinds == () and b.model.pos_embed is None
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    tokens = b.embed(x)
    order = torch.randperm(b.num_tokens)
    assert torch.allclose(b.encode(tokens[:, order], None).prefix, b.encode(tokens, None).prefix, atol=1e-12)


def test_relative_positions_start_from_the_same_function_as_none() -> None:
    """The relative form is timm's relative-position class with zero bias: a ViT's weights fit and give its features."""
    torch.manual_seed(0)
    vit = tiny(positions="none").double().eval()
    relative = tiny(positions="relative").double().eval()
    assert type(relative.model).__name__ == "VisionTransformerRelPos"
    missing, extra = relative.model.load_state_dict(vit.model.state_dict(), strict=False)
    assert not extra and all(key.endswith("relative_position_bias_table") for key in missing)
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    assert torch.allclose(relative(x), vit(x), atol=1e-12)
    again = timm.create_model(relative.source["architecture"], **relative.source["model_args"])
    assert again.state_dict().keys() == relative.model.state_dict().keys()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (dict(name="nosuchmodel"), "neither a timm model nor a folder"),
        (dict(name="vit_smal_patch16_224"), "did you mean vit_small_patch16_224"),
        (dict(name="vit_tiny_patch16_224", img_size=(225, 224)), "img_size=225x224: must be a multiple"),
        (dict(name="vit_tiny_patch16_224", patch_size=5), "must be a multiple of the patch size 5x5"),
        (dict(name="resnet50", patch_size=4), "convolutional"),
        (dict(name="vit_tiny_patch16_224", drop_path=1.5), "drop_path=1.5"),
        (
            dict(name="vit_tiny_patch16_224", positions="relative", model_args={"reg_tokens": 2}),
            "needs a plain ViT",
        ),
        (dict(name="eva02_tiny_patch14_224", positions="sincos"), "no position table"),
        (dict(name="eva02_tiny_patch14_224", positions="none"), "positions='none': .* cannot be built without pos"),
        (dict(name="eva02_tiny_patch14_224", positions="relative"), "relative positions; use a plain ViT$"),
        (dict(name="swin_tiny_patch4_window7_224", positions="relative"), "windows; choose learned or sincos$"),
        (dict(name="swin_tiny_patch4_window7_224", positions="none"), "^positions='none': swin.* cannot be built with"),
        (dict(name="beit_base_patch16_224", model_args={"use_abs_pos_emb": True}), "use_abs_pos_emb must be False"),
        (dict(name="beit_base_patch16_224", model_args={"use_rel_pos_bias": False}), "use_rel_pos_bias must be True"),
        (dict(name="vit_tiny_patch16_224", nonsense=1), "nonsense"),
        (dict(name="vit_tiny_patch16_224", model_args={"nonsense": 1}), "nonsense"),
        (dict(name="efficientnet_b0"), "EfficientNet"),
        (dict(name="vit_base_patch16_rpn_224", model_args={"depth": 1}), None),
        (dict(name="vit_tiny_patch16_224", model_args={"patch_drop_rate": 0.5}), "patch_drop_rate"),
        (dict(name="vit_tiny_patch16_224", weights="nowhere.safetensors"), "no such file"),
    ],
)
def test_mistakes_are_sentences(fields, sentence) -> None:
    if sentence is None:
        assert create_backbone(**fields).num_tokens
        return
    with shapes_alone(), pytest.raises(SitusError, match=sentence) as caught:
        create_backbone(**fields)
    assert "\n" not in str(caught.value)


def test_images_of_another_shape_are_refused() -> None:
    with pytest.raises(SitusError, match=r" \[B, 3, 16, 24\], not \[2, 3, 16, 16\]"):
        tiny().embed(torch.zeros(2, 3, 16, 16))


REFUSED = {
    "crossvit_tiny_240": "its class CrossVit is not among",
    "gemma4_vit_167m_enc": "its class Gemma4Vit",
    "hiera_tiny_224": "its class Hiera is not among",
    "mvitv2_tiny": "its class MultiScaleVit is not among",
    "pvt_v2_b0": "its class PyramidVisionTransformerV2 is not among",
    "sam2_hiera_tiny": "its class HieraDet is not among",
    "tiny_vit_5m_224": "its class TinyVit is not among",
    "vit_base_mci_224": "HybridEmbed of this model also uses",
    "vit_tiny_r_s16_p8_224": "HybridEmbed of this model also uses",
    "vitamin_small_224": "HybridEmbed of this model also uses",
    "volo_d1_224": "its class VOLO is not among",
}
"""timm name -> why it is refused; tests/contracts/test_timm_names.py opens every name."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_or_a_stem_we_do_not_run_is_refused_in_a_sentence(name: str) -> None:
    # timm's Gemma4 reads numbers off tensors while it is made, which torch 2.9 refuses on "meta".
    device, less = ("cpu", {"depth": 1}) if name.startswith("gemma4") else ("meta", {})
    with torch.device(device), pytest.raises(SitusError, match=REFUSED[name]) as caught:
        create_backbone(name, model_args=less)
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pvt_v2_b0", "vit_tiny_r_s16_p8_224"])
def test_info_prints_that_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", name]) == 2
    said = capsys.readouterr()
    assert (
        said.err.startswith(f"situs: {name}: ")
        and REFUSED[name] in said.err
        and said.err.count("\n") == 1
        and not said.out
    )


def test_a_refused_class_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are never made: the largest of these models would not fit."""
    devices = []
    make = timm.create_model

    def spy(*args, **kwargs):
        model = make(*args, **kwargs)
        devices.append(next(model.parameters()).device.type)
        return model

    monkeypatch.setattr(timm, "create_model", spy)
    with pytest.raises(SitusError, match="its class Cait is not among"):
        create_backbone("cait_xxs24_224", model_args={"depth": 1})
    assert devices == ["meta"]
    assert create_backbone("resnest14d").num_tokens == 0  # made in another module, of a class that is known
    assert devices == ["meta", "meta", "cpu"]


def test_a_model_that_cannot_be_made_is_a_sentence() -> None:
    for name in ("vit_tiny_patch16_224", "beit_base_patch16_224"):
        with pytest.raises(SitusError, match=f"^{name} cannot be made with .*zero") as caught:
            create_backbone(name, model_args={"num_heads": 0})
        assert "\n" not in str(caught.value)


@pytest.mark.thin(2)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so once
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("vit_tiny_patch16_224", TINY),
        ("vit_small_patch16_rope_224", TINY),
        ("vit_relpos_small_patch16_224", TINY),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16}),
        ("test_resnet", {}),
    ],
)
@torch.no_grad()
def test_a_model_in_half_precision_takes_any_floats(name: str, args: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    size = None if "resnet" in name else 64
    whole = create_backbone(name, img_size=size, model_args=args).eval()
    x = torch.randn(2, 3, 64, 64)
    expected = whole(x)
    half = create_backbone(whole.model.to(dtype))  # the module itself, as somebody built it
    found = half(x)
    assert found.dtype == dtype
    assert torch.equal(found, half(x.to(dtype)))
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
    with pytest.raises(SitusError, match=r"images must be normalised floats, not torch.uint8$"):
        half(torch.zeros(2, 3, 64, 64, dtype=torch.uint8))


def test_a_module_that_is_built_takes_no_arguments() -> None:
    module = timm.create_model("vit_tiny_patch16_224", **TINY)
    assert create_backbone(module).model is module
    for fields in (dict(positions="none"), dict(num_classes=3), dict(img_size=32), dict(drop_path=0.1)):
        name, value = next(iter(fields.items()))
        said = f"{name}={(32, 32) if name == 'img_size' else value}: applies only to a new model"
        with pytest.raises(SitusError, match=f"^{re.escape(said)}"):
            create_backbone(module, **fields)


def test_an_unknown_attention_is_refused_by_name() -> None:
    with pytest.raises(SitusError, match="ParallelScalingBlock is not among"):
        create_backbone("vit_base_patch16_xp_224", img_size=32, model_args={"depth": 1})


def test_weights_round_trip_through_each_format(tmp_path: Path) -> None:
    source = tiny(num_classes=7)
    state = {k: v.clone() for k, v in source.model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    torch.save({"model": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, tmp_path / "published.pth")
    for path in (tmp_path / "model.safetensors", tmp_path / "published.pth", tmp_path):
        loaded = tiny(num_classes=7, weights=path)
        assert all(torch.equal(loaded.model.state_dict()[k], v) for k, v in state.items())


def test_weights_of_another_grid_are_resampled_and_another_head_is_left(tmp_path: Path) -> None:
    source = small_vit(32, width=32, heads=4, num_classes=5)
    save_file(source.model.state_dict(), tmp_path / "square.safetensors")
    loaded = tiny(num_classes=9, weights=tmp_path / "square.safetensors")
    assert loaded.model.head.out_features == 9
    assert torch.equal(loaded.model.pos_embed[:, 0], source.model.pos_embed[:, 0])
    assert torch.equal(loaded.model.blocks[1].mlp.fc1.weight, source.model.blocks[1].mlp.fc1.weight)


def test_weights_that_do_not_fit_name_the_keys_and_change_nothing(tmp_path: Path) -> None:
    other = tiny(depth=3)
    save_file(other.model.state_dict(), tmp_path / "deeper.safetensors")
    with pytest.raises(SitusError, match=r"12 tensors not in the model \(first: blocks.2"):
        tiny(weights=tmp_path / "deeper.safetensors")


def test_a_file_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"model": _Evil(str(marker))}, tmp_path / "evil.pth")
    with pytest.raises(SitusError, match=r"is not a torch file that can be loaded without running code from it$"):
        read_state_dict(tmp_path / "evil.pth")
    assert not marker.exists()


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_torch_file_that_holds_no_weights_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    for content, sentence in (
        ([torch.zeros(2)], "contains a list instead of named tensors"),
        (
            {"epoch": 3},
            "has no tensors under model_ema, state_dict_ema, model, state_dict, teacher or at its top level",
        ),
        ({"model": {"epoch": 3}, "weight": torch.zeros(2)}, "has no tensors under model_ema"),
    ):
        torch.save(content, path)
        with pytest.raises(SitusError) as caught:
            read_state_dict(path)
        assert str(caught.value).startswith(f"weights={path}: {sentence}") and caught.value.field == "weights"


def test_of_several_states_in_a_file_the_averaged_one_is_read(tmp_path: Path) -> None:
    states = {
        name: {"weight": torch.full((2,), float(n))} for n, name in enumerate(("state_dict", "model", "model_ema"))
    }
    torch.save(states, tmp_path / "published.pth")
    assert read_state_dict(tmp_path / "published.pth")["weight"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("damage", [b"", b"not a file", b"\xff" * 64])
def test_a_broken_safetensors_file_is_a_sentence(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(damage)
    with pytest.raises(SitusError, match="not a readable safetensors file"):
        read_state_dict(tmp_path / "broken.safetensors")


def test_a_context_saves_the_flops_it_should() -> None:
    """η = .75 on ViT-B/16: q, attention-out and MLP for all 197 tokens, k and v for 50, attention 197 x 50."""
    with shapes_alone():
        b = create_backbone("vit_base_patch16_224", num_classes=0)
        tokens = torch.empty(1, b.num_tokens, b.dim)
    counts = {}
    for context in (None, 49):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            b.encode(tokens, None, context=context)
        counts[context] = counter.get_total_flops()
    full = 12 * (2 * 197 * 12 * 768**2 + 4 * 197 * 197 * 768)
    some = 12 * (2 * (197 * 10 + 50 * 2) * 768**2 + 4 * 197 * 50 * 768)
    assert counts == {None: full, 49: some}


def test_a_kind_of_position_that_is_none_is_refused_with_the_choices() -> None:
    with pytest.raises(SitusError) as caught:
        tiny(positions="relativ")
    assert (caught.value.field, caught.value.value) == ("positions", "relativ")
    assert "'learned', 'sincos', 'learned_sincos', 'relative', 'none'" in caught.value.allowed
