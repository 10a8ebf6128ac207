"""Operations of a step against what the architecture says they are, product by product."""

from __future__ import annotations

import pytest
import torch

from situs.bench.cases import StepConfig, make_cases
from situs.bench.measure import make_method, method_flops

SIDE, CHANNELS, CLASSES, WIDTH, DEPTH, BATCH = 4, 2, 7, 12, 3, 5
HEIGHT, LENGTH = 3, 2  # patches


def by_hand(context: int | None, *, bare: bool = False) -> int:
    """Forward and backward of a ViT with one CLS token; context: how many patches MP3 shows as keys; bare: no head."""
    patches = HEIGHT * LENGTH
    queries, keys = patches + 1, (patches if context is None else context) + 1
    embed = 2 * patches * (SIDE * SIDE * CHANNELS) * WIDTH
    projections = 2 * queries * WIDTH * WIDTH + 2 * keys * WIDTH * 2 * WIDTH + 2 * queries * WIDTH * WIDTH
    attention = 2 * queries * keys * WIDTH + 2 * queries * keys * WIDTH
    mlp = 2 * queries * WIDTH * 4 * WIDTH * 2
    head = 2 * WIDTH * CLASSES if context is None else 2 * patches * WIDTH * patches
    head = 0 if bare else head
    forward = embed + DEPTH * (projections + attention + mlp) + head
    # Backward: two products for each of the forward's, but none for the gradient of the images.
    return BATCH * (3 * forward - embed)


@pytest.mark.parametrize(
    ("word", "context"), [("supervised", None), ("mp3:mask_ratio=0.5", 3), ("mp3:0.9", 1), ("backbone", None)]
)
def test_a_small_vit_has_the_operations_of_its_formula(word: str, context: int | None) -> None:
    config = StepConfig(
        models=("vit_tiny_patch16_224",), batches=(BATCH,), img_size=(HEIGHT * SIDE, LENGTH * SIDE), patch_size=SIDE,
        in_chans=CHANNELS, num_classes=CLASSES, model_args={"embed_dim": WIDTH, "depth": DEPTH, "num_heads": 3},
    )  # fmt: skip
    [case] = make_cases([word], config)
    method = make_method(case)
    assert method_flops(method, case, torch.device("cpu")) == by_hand(context, bare=word == "backbone")
    assert all(parameter.grad is None for parameter in method.parameters())
