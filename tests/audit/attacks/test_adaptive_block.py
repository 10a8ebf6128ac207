"""The first block taken apart: every piece against hooks in the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit

from situs.audit.attacks.adaptive import FirstBlock, first_block
from situs.audit.attacks.tokens.block import first_matrices, read_block
from situs.audit.client import victim_gradients
from situs.audit.defences import MaskedJigsaw, Step
from situs.audit.stem import require_stem
from situs.backbones import create_backbone
from situs.core.tokens import patchify
from situs.core.when import When
from situs.data.batch import Batch


def victim(name: str = "vit_tiny_patch16_224", **fields: Any) -> Any:
    torch.manual_seed(0)
    given = {"img_size": 32, "width": 48, "heads": 4, "patch_size": 8, "num_classes": 5, **fields}
    return biased(small_vit(name=name, **given).eval().double())


def biased(backbone: Any) -> Any:
    """Biases as after training: at 0, where models begin, much that is wrong would go unseen."""
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return backbone


def hugging_face() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    return biased(create_backbone(config, num_classes=5).eval().double())


def scene(backbone: Any, ratio: float = 0.3) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """MJP's method, x̃'s patches [N, K], the mask, and the block as the attacker has it."""
    defence, stem = MaskedJigsaw(ratio), require_stem(backbone)
    x = torch.randn(1, backbone.input.channels, *backbone.input.shape, dtype=torch.float64)
    upload = victim_gradients(backbone, x, torch.tensor([1]), step=Step(dtype=torch.float64), defence=defence)
    method: Any = defence.method(backbone)
    draws = method.draw(Batch(torch.zeros(1), torch.tensor([0])), When(seed=0, epoch=0))
    patches = patchify(x, stem.patch_size)[0][draws["index"][0]]
    mask = draws["mask"][0]
    return method, patches, mask, first_block(read_block(backbone), stem, upload, mask, method.unknown.detach())


MODELS = {
    "ViT": (victim, ("blocks.0.attn.proj", "blocks.0.norm2", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")),
    "DeiT": (
        lambda: victim("deit_tiny_distilled_patch16_224"),
        ("blocks.0.attn.proj", "blocks.0.norm2", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"),
    ),
    "registers, LayerScale": (
        lambda: victim("vit_small_patch14_reg4_dinov2"),
        ("blocks.0.attn.proj", "blocks.0.norm2", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"),
    ),
    "Hugging Face": (hugging_face, None),
}


@pytest.mark.parametrize("name", [name for name, (_, layers) in MODELS.items() if layers])
def test_pieces_are_what_the_models_own_layers_get(name: str) -> None:
    make, layers = MODELS[name]
    backbone = make()
    method, patches, mask, block = scene(backbone)
    assert isinstance(block, FirstBlock)
    seen: list[torch.Tensor] = []
    for layer in layers:
        module = backbone.model.get_submodule(layer)
        module.register_forward_hook(lambda _, args, __: seen.append(args[0][0, backbone.num_prefix :]))
    tokens = (patches @ block.plain.weight.T + block.plain.run.bias).unsqueeze(0)
    with torch.no_grad():
        backbone.encode(tokens, backbone.positions().forget(mask, method.unknown))
        o, m, h, a = seen[:4]
        torch.testing.assert_close(block.middle(patches), m)
        torch.testing.assert_close(block.embed(patches) + o @ block.plain.into + block.plain.shift, m)
        torch.testing.assert_close(block.plain.late(m), a)
        torch.testing.assert_close(block.plain.late(m.view(4, 4, -1)), a.view(4, 4, -1))
    for span, inputs in ((block.proj, o), (block.fc1, h), (block.fc2, a)):
        assert float((span.residual(inputs) / span.expected(inputs)).max()) < 3
        assert float(span.residual(inputs + 0.1 * torch.randn_like(inputs)).min()) > 1e-3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "Hugging Face")) for name in MODELS]
)
def test_the_true_image_fits_and_another_does_not(name: str) -> None:
    backbone = MODELS[name][0]()
    _, patches, mask, block = scene(backbone)
    assert mask.any()
    assert isinstance(block, FirstBlock)
    with torch.no_grad():
        late = block.plain.late(block.middle(patches))
        assert late.shape[0] == 16
        assert float((block.fc2.residual(late) / block.fc2.expected(late)).max()) < 3
        wrong = block.plain.late(block.middle(patches + 0.1 * torch.randn_like(patches)))
        assert float((block.fc2.residual(wrong) / block.fc2.expected(wrong)).min()) > 100


def test_what_is_missing_is_said() -> None:
    backbone = victim(width=16)
    _, _, _, block = scene(backbone)
    assert "tokens (17)" in str(block)
    backbone = victim()
    stem = require_stem(backbone)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    upload = victim_gradients(backbone, x, torch.tensor([1]), step=Step(dtype=torch.float64))
    missing = first_matrices(backbone)[-1]
    del upload[missing]
    mask = torch.zeros(16, dtype=torch.bool)
    block = first_block(read_block(backbone), stem, upload, mask, torch.zeros(48, dtype=torch.float64))
    assert missing in str(block)


def test_a_block_of_another_form_is_told_apart() -> None:
    """A norm behind attention: what it gives is not simply added to the tokens."""
    backbone = victim()
    backbone.model.blocks[0].ls1 = torch.nn.LayerNorm(48).double()
    _, _, _, block = scene(backbone)
    assert "not simply added" in str(block)
