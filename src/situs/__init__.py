"""Situs: position in transformers. Learn from it, measure what it gives away, use the freedom it leaves.

The names below are the public face. They load on first use (PEP 562), so `import situs` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from situs.backbones import create_backbone as create_backbone
    from situs.backbones.base import Backbone as Backbone
    from situs.backbones.base import Features as Features
    from situs.backbones.base import Stream as Stream
    from situs.core.jigsaw import jigsaw_images as jigsaw_images
    from situs.core.masking import block_mask as block_mask
    from situs.core.masking import block_noise_shape as block_noise_shape
    from situs.core.masking import jigsaw as jigsaw
    from situs.core.masking import random_subset as random_subset
    from situs.core.permutation import compose as compose
    from situs.core.permutation import invert as invert
    from situs.core.permutation import permute_axis as permute_axis
    from situs.core.permutation import permute_columns as permute_columns
    from situs.core.permutation import permute_rows as permute_rows
    from situs.core.permutation import random_permutation as random_permutation
    from situs.core.position import Positions as Positions
    from situs.core.position import relative_index as relative_index
    from situs.core.position import sincos as sincos
    from situs.core.position import smoothed_targets as smoothed_targets
    from situs.core.random import uniform as uniform
    from situs.core.tokens import patchify as patchify
    from situs.core.tokens import unpatchify as unpatchify
    from situs.errors import SitusError as SitusError
    from situs.methods import METHODS as METHODS
    from situs.methods import create_method as create_method
    from situs.methods.base import Batch as Batch
    from situs.methods.base import Method as Method
    from situs.train.run import load_run as load_run

# Where each public name lives. A new one is a line here and a line above.
_HOMES = {
    "load_run": "situs.train.run",
    "jigsaw_images": "situs.core.jigsaw",
    "create_method": "situs.methods",
    "Method": "situs.methods.base",
    "METHODS": "situs.methods",
    "Batch": "situs.methods.base",
    "Backbone": "situs.backbones.base",
    "Features": "situs.backbones.base",
    "Positions": "situs.core.position",
    "SitusError": "situs.errors",
    "Stream": "situs.backbones.base",
    "block_mask": "situs.core.masking",
    "block_noise_shape": "situs.core.masking",
    "compose": "situs.core.permutation",
    "create_backbone": "situs.backbones",
    "invert": "situs.core.permutation",
    "jigsaw": "situs.core.masking",
    "patchify": "situs.core.tokens",
    "permute_axis": "situs.core.permutation",
    "permute_columns": "situs.core.permutation",
    "permute_rows": "situs.core.permutation",
    "random_permutation": "situs.core.permutation",
    "random_subset": "situs.core.masking",
    "relative_index": "situs.core.position",
    "sincos": "situs.core.position",
    "smoothed_targets": "situs.core.position",
    "uniform": "situs.core.random",
    "unpatchify": "situs.core.tokens",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'situs' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
