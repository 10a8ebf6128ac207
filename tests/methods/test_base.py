"""What all methods stand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit
from hypothesis import given
from hypothesis import strategies as st

from situs.core import attention as few_keys
from situs.core import gelu
from situs.errors import SitusError
from situs.methods import MAE, MP3, Batch, DropPos
from situs.methods.base import epoch_share
from situs.methods.heads import DecoderBlock


@given(st.integers(1, 1000), st.data())
def test_the_share_of_a_run_is_that_of_its_whole_epochs(epochs: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 50))
    epoch = data.draw(st.integers(0, epochs - 1))
    step = data.draw(st.integers(0, steps - 1))
    progress = (epoch * steps + step) / (epochs * steps)
    assert epoch_share(epochs, epoch, progress) == epoch / epochs
    assert epoch_share(epochs, epoch, 0.0) == epoch / epochs  # not known


@pytest.mark.parametrize(
    ("epochs", "epoch", "progress"),
    [
        (10, 10, 0.0),  # a run of 10 epochs has no epoch 10
        (10, 10, 1.0),
        (10, 11, 0.0),
        (10, 2, 0.5),  # half through at epoch 2: a run of 4 or 5
        (10, 6, 0.5),
        (100, 3, 3 / 50),
    ],
)
def test_a_run_of_another_length_is_refused(epochs: int, epoch: int, progress: float) -> None:
    with pytest.raises(SitusError, match=f"method.epochs={epochs}: must be the run's own number; its epoch {epoch} "):
        epoch_share(epochs, epoch, progress)


SMALL = {"decoder_width": 32, "decoder_heads": 4}


@pytest.mark.parametrize(("kind", "settings"), [(MP3, {}), (DropPos, SMALL), (MAE, SMALL)])
def test_attention_over_few_keys_changes_nothing(kind: Any, settings: dict[str, Any], monkeypatch) -> None:
    """What a compiled step does on a GPU, by its formulas: the same loss, and the same gradients."""
    torch.manual_seed(0)
    method = kind(small_vit((16, 12)), kind.Config(**settings)).double()
    batch = Batch(torch.randn(3, 3, 16, 12, dtype=torch.float64), torch.arange(3))
    draws = method.draw(batch, seed=0, epoch=0)
    seen: list[int] = []
    made = []
    for _ in range(2):
        method.zero_grad()
        loss = method(batch, draws).loss
        loss.backward()
        made.append([loss.detach(), *(p.grad for p in method.parameters() if p.grad is not None)])
        monkeypatch.setattr(few_keys, "suits", lambda _, __, keys, ___: seen.append(keys) or True)
    assert seen
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(*made, strict=True))


def test_a_compiled_decoder_adds_its_bias_in_the_kernel_of_its_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    monkeypatch.setattr(gelu, "serves", lambda _: True)
    torch.compiler.reset()
    block, x = DecoderBlock(16, 2, 4.0), torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        made, plain = torch.compile(block, backend=backend, fullgraph=True)(x), block(x)
    assert any("bias_gelu" in name for name in names)
    assert torch.allclose(made, plain, rtol=0, atol=0.02)
