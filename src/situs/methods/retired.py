"""Settings of earlier versions that config files may still have: the value that is accepted, and what replaces any
other."""

from __future__ import annotations

from typing import Any

from situs.config import ANY

_PIXELS = "the method mae predicts pixels"
_DROPPOS = "the method droppos-official follows the published code"
_MJP = "the method mjp-official follows the published code"

RETIRED: dict[str, dict[str, tuple[Any, str]]] = {
    "mp3": {
        "cls": ("always", "CLS is always in the context"),
        "window": (0, "use the method offsets, which has a window"),
    },
    "droppos": {
        "mae_weight": (0.0, _PIXELS),
        "mae_depth": (ANY, ""),
        "epochs": (ANY, ""),  # the run's number of epochs is used
        "sigma_schedule": ("step", _DROPPOS),
        "distance": ("euclidean", _DROPPOS),
        "target_grid": (None, _DROPPOS),
        "target_norm": ("rows", _DROPPOS),
        "floor_counts": (False, _DROPPOS),
        "weights_over": ("sample", _DROPPOS),
    },
    "mae": {
        "floor_counts": (False, "N - int(γN) patches are kept"),
        "normalise": (True, "each target patch is normalised"),
    },
    "mjp": {
        "dal_depth": (3, _MJP),
        "dal_mean": (False, _MJP),
        "dal_normalise": (False, "targets are rows and columns, counted from 0"),
        "dal_components": (2, "there are two"),
        "dal_fit": (True, _MJP),
        "dal_warmup": (0, _MJP),
        "dal_final": (None, _MJP),
        "start_epoch": (0, _MJP),
        "chance": (1.0, _MJP),
        "draw_per": ("sample", _MJP),
        "rule": ("paper", _MJP),
        "unknown_std": (0.02, _MJP),
        "table_std": (None, _MJP),
        "decay_positions": (False, _MJP),
        "epochs": (ANY, ""),
    },
}
"""By the method's name."""
