"""What all methods stand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit
from torch import nn

from situs.backbones import create_backbone
from situs.backbones.base import Features
from situs.backbones.timm.mlp import use_compiled_gelu
from situs.core.kernels import attention as few_keys
from situs.core.kernels import when
from situs.core.when import When
from situs.methods import MAE, MP3, Batch, DropPos
from situs.methods.heads import Decoder

SMALL = {"decoder_width": 32, "decoder_heads": 2}


@pytest.mark.parametrize(("kind", "settings"), [(MP3, {}), (DropPos, SMALL), (MAE, SMALL)])
def test_attention_over_few_keys_changes_nothing(kind: Any, settings: dict[str, Any], monkeypatch) -> None:
    """What a compiled step does on a GPU, by its formulas: the same loss, and the same gradients."""
    torch.manual_seed(0)
    method = kind(small_vit((16, 12)), kind.Config(**settings)).double()
    batch = Batch(torch.randn(3, 3, 16, 12, dtype=torch.float64), torch.arange(3))
    draws = method.draw(batch, When(seed=0, epoch=0))
    seen: list[int] = []
    made = []
    for _ in range(2):
        method.zero_grad()
        loss = method(batch, draws).loss
        loss.backward()
        made.append([loss.detach(), *(p.grad for p in method.parameters() if p.grad is not None)])
        monkeypatch.setattr(few_keys, "fits_kernel", lambda _, __, keys, ___: seen.append(keys) or True)
    assert seen
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize(
    ("kind", "settings"), [(MP3, {}), *(pytest.param(kind, SMALL, marks=pytest.mark.slow) for kind in (DropPos, MAE))]
)
def test_a_compiled_step_is_one_graph_with_kernels_of_our_own(
    kind: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        names.extend(str(node.target) for part in graphs for node in part.graph.nodes)
        return graph

    monkeypatch.setattr(when, "has_kernels", lambda _: True)
    torch.compiler.reset()
    torch.manual_seed(0)
    backbone = create_backbone(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, model_args={"depth": 1, "embed_dim": 32, "num_heads": 2}
    )
    method = kind(backbone, kind.Config(**settings))
    use_compiled_gelu(method)
    batch = Batch(torch.randn(2, 3, 32, 32), torch.arange(2))
    draws = method.draw(batch, When(seed=0, epoch=0))
    plain = method(batch, draws).loss
    with torch.autocast("cpu", torch.bfloat16):
        made = torch.compile(method, backend=backend, fullgraph=True)(batch, draws).loss
    counts = [sum(word in name for name in names) for word in ("attend", "mlp_gelu", "add_norm")]
    blocks = sum(isinstance(part, nn.LayerNorm) and name.endswith("norm1") for name, part in method.named_modules())
    assert counts[0] >= 1
    assert counts[1] >= blocks
    stacks = 1 if kind is MP3 else 2  # the last sum of each has no norm of a block behind it
    assert counts[2] >= 2 * blocks - stacks
    assert made.item() == pytest.approx(plain.item(), rel=0.02)


def test_a_decoder_that_something_listens_to_is_run_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, seen = Decoder(8, 8, 2, 2, 3), []
    features = Features(torch.randn(1, 1, 8), torch.randn(1, 3, 8))

    def joined(*_: object) -> torch.Tensor:
        raise AssertionError("joined")

    monkeypatch.setattr("situs.backbones.block.takes_kernels", lambda _: True)
    monkeypatch.setattr("situs.backbones.block.run_joined", joined)
    with pytest.raises(AssertionError, match="joined"):
        decoder(features)
    decoder.get_submodule("layers.1.mlp.1").register_forward_hook(lambda *_: seen.append(1))
    decoder(features)
    assert seen == [1]
