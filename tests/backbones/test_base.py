"""The interface's own parts: padding that nobody sees, taps at every depth, positions for another grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_swin, small_vit
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from situs.backbones import Backbone, create_backbone
from situs.core.selection import Context, Selection
from situs.core.tokens import fill
from situs.errors import SitusError

TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "mean": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "max": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "max", "fc_norm": False}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "relative": ("vit_relpos_small_patch16_224", {}),
    "eva": ("eva02_tiny_patch14_224", {}),
    "unturned": ("eva02_tiny_patch14_224", {"use_rot_pos_emb": False}),
    "mixed": ("vit_small_patch16_rope_mixed_224", {}),
}


def timm_model(name: str, size: tuple[int, int] = (8, 12)) -> Backbone:
    torch.manual_seed(0)
    architecture, more = TIMM[name]
    made = small_vit(size, name=architecture, width=24, num_classes=5, model_args=more).eval()
    return made if name == "mixed" else made.double()  # timm's mixed rotation is made in float32 alone


def hf_model(kind: str) -> Backbone:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    if kind == "bert":
        config = transformers.BertConfig(**small, vocab_size=40, max_position_embeddings=9)
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=40, n_positions=9)
    else:
        classes = {"hf_vit": transformers.ViTConfig, "dinov2": transformers.Dinov2Config}
        config = classes[kind](**small, image_size=12, patch_size=4)
    return create_backbone(config).double().eval()


def inputs(backbone: Backbone, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if "images" in backbone.refusals:
        return torch.randint(40, (count, backbone.num_tokens), generator=generator)
    assert backbone.input.shape is not None
    return torch.randn(count, 3, *backbone.input.shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", [*(name for name in TIMM if name != "mixed"), "hf_vit", "dinov2", "bert", "gpt2"])
@torch.no_grad()
def test_padding_is_seen_by_nobody(name: str) -> None:
    """Whatever stands in the padding, the others are the same bits; and the same as if it were not there."""
    backbone = timm_model(name) if name in TIMM else hf_model(name)
    tokens = backbone.embed(inputs(backbone))
    count = tokens.shape[1]
    lengths = torch.tensor([count, count - 2, 2])
    mask = torch.arange(count) < lengths[:, None]
    other = torch.where(mask[..., None], tokens, torch.randn(tokens.shape, dtype=torch.float64) * 50)
    one, two = (backbone.encode(x, backbone.positions(), mask=mask) for x in (tokens, other))
    assert torch.equal(one.prefix, two.prefix)
    assert torch.equal(one.patches[mask], two.patches[mask])
    if "context" not in backbone.refusals:  # a causal model looks ahead nowhere
        unmasked = backbone.encode(tokens, backbone.positions()).patches
        assert (one.patches[1, :2] - unmasked[1, :2]).abs().max() > 1e-9
    for row, length in enumerate(lengths.tolist()):
        places = backbone.positions().take(torch.arange(length))
        alone = backbone.encode(tokens[row : row + 1, :length], places)
        assert torch.allclose(alone.patches[0], one.patches[row, :length], atol=1e-12)
        assert torch.allclose(alone.prefix[0], one.prefix[row], atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "mean", "max", "registers", "eva", "hf_vit", "dinov2"])
@torch.no_grad()
def test_a_head_reads_real_patches_alone(name: str) -> None:
    backbone = timm_model(name) if name in TIMM else hf_model(name)
    x = inputs(backbone, 2)
    count, length = backbone.num_tokens, 3
    mask = torch.arange(count) < torch.tensor([[count], [length]])
    logits = backbone(x, mask)
    assert torch.allclose(logits[0], backbone(x)[0], atol=1e-12)
    places = backbone.positions().take(torch.arange(length))
    alone = backbone.head(backbone.encode(backbone.embed(x)[1:, :length], places))
    assert torch.allclose(logits[1], alone[0], atol=1e-12)
    assert (logits[1] - backbone(x)[1]).abs().max() > 1e-7


def test_filled_padding_is_the_mean_of_the_others() -> None:
    patches, mask = torch.randn(4, 5, 3, dtype=torch.float64), torch.rand(4, 5) < 0.6
    mask[:, 0] = True
    found = fill(patches, mask)
    for row in range(4):
        real = torch.stack([patches[row, n] for n in range(5) if mask[row, n]])
        assert torch.allclose(found[row].mean(0), real.mean(0), atol=1e-14)
        assert torch.equal(found[row].amax(0), real.amax(0))
        assert torch.equal(found[row][mask[row]], real)


@pytest.mark.parametrize("name", ["vit", "registers", "relative", "eva", "hf_vit", "bert", "gpt2"])
@torch.no_grad()
def test_taps_see_every_depth(name: str) -> None:
    backbone = timm_model(name) if name in TIMM else hf_model(name)
    stream = backbone.assemble(backbone.embed(inputs(backbone)), backbone.positions())
    seen: list[tuple[int, Tensor]] = []
    last = backbone.run_layers(stream, None, (lambda number, z: seen.append((number, z)),))
    assert [number for number, _ in seen] == [1, 2]
    assert torch.equal(seen[-1][1], last)
    assert torch.equal(last, backbone.blocks(stream).z)
    assert not torch.allclose(seen[0][1], last)


@pytest.mark.parametrize("grid", [(4, 5), (1, 2), (2, 3)])
@pytest.mark.parametrize("name", ["vit", "registers", "eva", "unturned", "mixed"])
def test_positions_of_another_grid_are_timms(name: str, grid: tuple[int, int]) -> None:
    """The table is timm's own resampling; a rotation is that of timm's own model made for that grid."""
    backbone, other = timm_model(name), timm_model(name, (4 * grid[0], 4 * grid[1]))
    places = backbone.positions(grid)
    if places.table is not None:
        table = backbone.positions().table
        assert table is not None
        wanted = resample_abs_pos_embed(table[None], list(grid), list(backbone.grid), num_prefix_tokens=0)[0]
        assert torch.equal(places.table, wanted)
        assert places.table.requires_grad
    if places.rotary is not None:
        other.model.load_state_dict(
            {k: v for k, v in backbone.model.state_dict().items() if k != "pos_embed"}, strict=False
        )
        wanted = other.positions().rotary
        assert wanted is not None
        assert torch.equal(places.rotary, wanted)


@pytest.mark.parametrize("name", ["hf_vit", "dinov2"])
@torch.no_grad()
def test_positions_of_another_grid_are_transformers_own(name: str) -> None:
    backbone = hf_model(name)
    images = torch.randn(2, 3, 20, 8, dtype=torch.float64)
    more = {"interpolate_pos_encoding": True} if name == "hf_vit" else {}
    wanted = backbone.model(pixel_values=images, **more).last_hidden_state
    convolution = backbone.model.embeddings.patch_embeddings.projection
    tokens = convolution(images).flatten(2).transpose(1, 2)
    found = backbone.encode(tokens, backbone.positions((5, 2)))
    assert torch.allclose(found.patches, wanted[:, 1:], atol=1e-12)
    assert torch.allclose(found.prefix, wanted[:, :1], atol=1e-12)


def test_positions_of_another_grid_are_refused_where_they_cannot_be() -> None:
    for backbone in (timm_model("relative"), small_swin()):
        assert backbone.positions(backbone.grid).kinds == backbone.positions().kinds
        with pytest.raises(SitusError, match="no positions for a grid of 5x7") as caught:
            backbone.positions((5, 7))
        assert "\n" not in str(caught.value)
    bert = hf_model("bert")
    assert bert.positions((4,)).table is not None
    with pytest.raises(SitusError, match="no positions for a grid of 10: it has only 9 positions"):
        bert.positions((10,))


@pytest.mark.parametrize("name", ["vit", "registers", "eva", "hf_vit"])
@torch.no_grad()
def test_a_wide_stream_is_float32_from_block_to_block_and_nearer_to_float32(name: str) -> None:
    """Under autocast, with timm's own forward beside it: its blocks are given float32 too."""
    backbone = (timm_model(name) if name in TIMM else hf_model(name)).float().eval()
    images = inputs(backbone, 16).float()
    exact = backbone.encode(backbone.embed(images), backbone.positions()).patches
    away, kinds = {}, {}
    for wide in (False, True):
        backbone.float32_residual = wide
        with torch.autocast("cpu", torch.bfloat16):
            stream, seen = backbone.assemble(backbone.embed(images), backbone.positions()), []
            z = backbone.run_layers(stream, None, [lambda _, z, seen=seen: seen.append(z.dtype)])
        kinds[wide] = {stream.z.dtype, *seen}
        away[wide] = float((backbone.finish(replace(stream, z=z.float())).patches - exact).norm() / exact.norm())
    assert kinds[True] == {torch.float32}
    assert torch.bfloat16 in kinds[False]
    assert away[True] < 0.95 * away[False], away
    assert backbone.assemble(backbone.embed(images.double()).double(), None).z.dtype == torch.float64
    if name in TIMM:
        given: list[torch.dtype] = []
        hook = backbone.model.blocks[1].register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            backbone.model(images)
        hook.remove()
        assert given == [torch.float32]


def test_what_a_model_does_not_have_is_refused_by_its_name() -> None:
    vit, bert = timm_model("vit"), hf_model("bert")
    stream = vit.assemble(vit.embed(inputs(vit)), None)
    past = hf_model("gpt2").new_past()
    for ask in (vit.new_past, lambda: vit.extend(stream, past)):
        with pytest.raises(SitusError) as caught:
            ask()
        assert str(caught.value) == f"{vit.name} cannot continue a sequence: its tokens also attend to later tokens"
    assert vit.patch_values == 48
    with pytest.raises(SitusError, match=r"^BertModel has no patches of pixels: it takes text, or "):
        _ = bert.patch_values


def test_a_network_without_tokens_says_so_whatever_is_asked_of_it() -> None:
    resnet = create_backbone("test_resnet")
    images, mask = torch.randn(1, 3, 32, 32), torch.ones(1, 4, dtype=torch.bool)
    asked = [lambda: resnet.embed(images), resnet.positions, lambda: resnet(images, mask), resnet.levels]
    for ask in asked:
        with pytest.raises(SitusError) as caught:
            ask()
        assert str(caught.value) == (
            "test_resnet does not support running on a sequence of tokens: patches, frames or words: it is a "
            "convolutional network and has no tokens"
        )


def test_a_swin_refuses_padding_and_a_context() -> None:
    swin = small_swin()
    images = torch.randn(2, 3, 32, 32)
    mask = torch.ones(2, swin.num_tokens, dtype=torch.bool)
    with pytest.raises(SitusError, match=r"takes images, so a padding mask does not apply$"):
        swin.encode(swin.embed(images), swin.positions(), mask=mask)
    with pytest.raises(SitusError, match=r"does not support attending to a chosen subset .*every token of the grid"):
        swin.encode_at(images, Selection(torch.arange(4).expand(2, -1)), Context(2, None))


@pytest.mark.parametrize(("kind", "words"), [("hf_vit", "CLS token"), ("gpt2", "mean of the patches")])
@torch.no_grad()
def test_what_stands_before_the_last_layer_is_named(kind: str, words: str) -> None:
    backbone = hf_model(kind)
    assert backbone.head_input == words
    features = backbone.encode(backbone.embed(inputs(backbone)), backbone.positions())
    pooled = backbone.pooled(features)
    parts = features.prefix if kind == "hf_vit" else features.patches
    torch.testing.assert_close(pooled, torch.stack([sample.sum(0) / len(sample) for sample in parts]))
