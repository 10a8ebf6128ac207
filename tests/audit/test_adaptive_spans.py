"""Row spaces: inputs of the first block's layers against autograd's gradients, noise that is what it is said to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from situs.audit.adaptive_spans import FORWARD, FirstBlock, Span, first_linears
from situs.audit.stem import require_stem
from situs.audit.threat import MaskedJigsaw, victim_gradients
from situs.backbones import create_backbone
from situs.core.tokens import patchify

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 4}


def victim(name: str = "vit_tiny_patch16_224", **fields: Any) -> Any:
    torch.manual_seed(0)
    given = {"img_size": 32, "patch_size": 8, "num_classes": 5, "model_args": SMALL, **fields}
    return create_backbone(name, **given).eval().double()


def scene(backbone: Any, ratio: float = 0.3) -> tuple[Any, torch.Tensor, torch.Tensor, FirstBlock]:
    """MJP's method, x̃'s patches [N, K], the mask, and the block as the attacker has it."""
    defence, stem = MaskedJigsaw(ratio), require_stem(backbone)
    x = torch.randn(1, backbone.in_chans, *backbone.img_size, dtype=torch.float64)
    upload = victim_gradients(backbone, x, torch.tensor([2]), defence=defence, dtype=torch.float64)
    method: Any = defence.method(backbone)
    draws = method.draw(torch.tensor([0]), seed=0, epoch=0)
    patches = patchify(x, stem.patch_size)[0][draws["index"][0]]
    mask = draws["mask"][0]
    return method, patches, mask, FirstBlock(backbone, stem, upload, mask, method.unknown.detach())


def test_noise_of_known_size_is_found_and_explains_the_residual() -> None:
    """Tokens of very different strength: the residual of each is what `variance` says."""
    chance = torch.Generator().manual_seed(0)
    h = torch.randn(12, 60, generator=chance, dtype=torch.float64)
    delta = torch.randn(90, 12, generator=chance, dtype=torch.float64) * torch.logspace(0, -3, 12).double()
    clean = delta @ h
    sizes = clean.square().mean(1, keepdim=True).sqrt()
    ratios = []
    for _ in range(20):
        g = clean + 1e-6 * sizes * torch.randn(90, 60, generator=chance, dtype=torch.float64)
        span = Span(g, 12)
        assert float(span.noise / span.column.square().mean().sqrt()) == pytest.approx(1e-6, rel=0.2)
        ratios.append(span.residual(h).square().mean(-1) / span.variance(h, 0.0))
    mean = torch.stack(ratios).mean(0)
    strong = span.variance(h, 0.0) < 2 * FORWARD**2 * (h * span.column).square().mean(-1)
    assert ((mean > 0.6) & (mean < 1.6) | strong).all()
    assert (mean[strong] < 1.6).all()


@pytest.mark.parametrize(
    ("name", "fields"),
    [("vit_tiny_patch16_224", {}), ("deit_tiny_distilled_patch16_224", {}), ("vit_small_patch14_reg4_dinov2", {})],
)
def test_the_true_image_passes_and_another_does_not(name: str, fields: dict[str, Any]) -> None:
    backbone = victim(name, **fields)
    _, patches, mask, block = scene(backbone)
    assert mask.any()
    assert len(block.spans) == len(first_linears(backbone)) == 4
    for inputs in block.inputs(patches).values():
        assert inputs.shape[0] == 16
    assert float(block.fit(block.inputs(patches)).max()) < 3
    moved = patches.clone()
    moved[5] += 0.1 * torch.randn(192, dtype=torch.float64)
    fit = block.fit(block.inputs(moved))
    assert float(fit[5]) > 1e3
    assert block.error(block.inputs(moved)) > block.error(block.inputs(patches)) + 1


def test_inputs_are_what_the_models_own_layers_get() -> None:
    backbone = victim()
    method, patches, mask, block = scene(backbone)
    seen: dict[str, torch.Tensor] = {}
    for name in ("attn.proj", "mlp.fc1", "mlp.fc2"):
        layer = backbone.model.blocks[0].get_submodule(name)
        layer.register_forward_hook(lambda _, args, __, name=name: seen.__setitem__(name, args[0][0, 1:]))
    tokens = backbone.embed(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    tokens = (patches @ block.weight.T + block.bias).unsqueeze(0) + 0 * tokens
    with torch.no_grad():
        backbone.encode(tokens, backbone.positions().forget(mask, method.unknown))
    found = block.inputs(patches)
    for name, inputs in seen.items():
        torch.testing.assert_close(found[f"model.blocks.0.{name}.weight"], inputs)


def test_queries_look_at_the_image_and_are_not_looked_at() -> None:
    _, patches, _, block = scene(victim())
    alone = block.inputs(patches, (patches[3:5], block.table[3:5]))
    for name, inputs in block.inputs(patches).items():
        torch.testing.assert_close(alone[name], inputs[3:5])
    crowd = block.inputs(patches, (torch.cat([patches[3:5], 9 * patches]), torch.cat([block.table[3:5], block.table])))
    for name, inputs in alone.items():
        torch.testing.assert_close(crowd[name][:2], inputs)


def test_a_full_row_space_says_nothing_and_is_left_out() -> None:
    backbone = victim(model_args={**SMALL, "embed_dim": 16})
    _, _, _, block = scene(backbone)
    assert block.spans == {}  # 17 tokens fill 16 channels, and fc2's gradient has but 16 rows
    assert not Span.exists(torch.zeros(30, 30), 5)
    assert not Span.exists(torch.full((30, 30), torch.inf), 5)
