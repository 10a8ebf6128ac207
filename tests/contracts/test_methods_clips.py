"""Every method learns from clips as it does from images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit

from situs.core.when import When
from situs.methods import METHODS, Batch, create_method

SMALL: dict[str, dict[str, Any]] = {
    "mae": {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1},
    "droppos": {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1},
}


@pytest.mark.parametrize("patch", [(8, 1), (4, 3)])
@pytest.mark.parametrize("name", ["mp3", "part", "droppos", "mae", "mjp", "supervised"])
def test_every_method_learns_from_clips(name: str, patch: tuple[int, int]) -> None:
    """One channel, frames in a row or squares of a spectrogram: a loss, and a gradient for the embedding."""
    torch.manual_seed(0)
    positions = "learned" if name == "mjp" else "sincos"
    classes = 3 if "label" in METHODS[name].needs_targets else 0
    backbone = small_vit((8, 12), patch_size=patch, in_chans=1, positions=positions, depth=1, num_classes=classes)  # type: ignore[arg-type]
    method = create_method(name, backbone, METHODS[name].Config(**SMALL.get(name, {})))
    batch = Batch(torch.randn(3, 1, 8, 12), torch.arange(3), {"label": torch.arange(3)})
    loss = method(batch, method.draw(batch, When(seed=0, epoch=0))).loss
    loss.backward()
    assert 0.1 < float(loss.detach()) < 40  # of offsets in patches, squared, about (12 - 1)² / 6
    assert float(backbone.model.patch_embed.proj.weight.grad.abs().sum()) > 0
