"""What is said of an upload that has no equations to solve: gradients of zeros, or of numbers that are none.

A classifier that is sure, or one of zeros, sends zeros behind it; so does a type too coarse for small gradients. That
is one upload and no defence: the next one may hold the image.
"""

from __future__ import annotations

from torch import Tensor

from situs.audit.attacks.base import FAILED, Fact, known_numbers
from situs.audit.attacks.tokens.block import Block
from situs.audit.defences import Gradients


def grey(block: Block, images: int) -> Tensor:
    """Patches [B, N, K] of which nothing is known."""
    return block.weight.new_zeros(images, block.places, block.weight.shape[1])


def unsolved(block: Block, upload: Gradients, free: int) -> dict[str, Fact]:
    """The facts of an upload whose equations broke down. free: directions that were counted to be open."""
    lost = [name for name in block.names if name in upload and not known_numbers(upload[name]).nan_to_num().any()]
    return {
        "open_directions": free,
        "residual": None,
        "expected_residual": 1.0,
        "fits": False,
        "proof": None,
        "verdict": f"the gradient of {lost[0]} came as zeros, or as numbers that are none: there is nothing to solve "
        "with in this upload, and nothing is known of another"
        if lost
        else FAILED,
    }
