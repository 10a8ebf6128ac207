"""Ideas, never loops. A method is one file here and one line in `METHODS`."""

from __future__ import annotations

from typing import Any

from situs.backbones.base import Backbone
from situs.core.when import When
from situs.errors import unknown_name
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.detection import Detection, DetectionConfig
from situs.methods.droppos import DropPos, DropPosConfig
from situs.methods.language import Language, LanguageConfig
from situs.methods.mae import MAE, MAEConfig
from situs.methods.mjp import MJP, MJPConfig
from situs.methods.mp3 import MP3, MP3Config
from situs.methods.official import OfficialDropPos, OfficialDropPosConfig, OfficialMJP, OfficialMJPConfig
from situs.methods.offsets import Offsets, OffsetsConfig
from situs.methods.part import PART, PARTConfig
from situs.methods.registry import Registry
from situs.methods.segmentation import Segmentation, SegmentationConfig
from situs.methods.supervised import Supervised, SupervisedConfig

METHODS = Registry(
    {
        "detection": Detection,
        "droppos": DropPos,
        "droppos-official": OfficialDropPos,
        "language": Language,
        "mae": MAE,
        "mjp": MJP,
        "mjp-official": OfficialMJP,
        "mp3": MP3,
        "offsets": Offsets,
        "part": PART,
        "segmentation": Segmentation,
        "supervised": Supervised,
    },
    group="situs.methods",
)
"""Every method by name, plugins included. The command line, the contract tests and the benchmarks read this."""


def method_class(name: str) -> type[Method]:
    """A method by name: one of ours, or a third party's under the entry-point group `situs.methods`."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def create_method(name: str, backbone: Backbone, config: Any = None, classes: int = 0) -> Method:
    """A method over a backbone. config: an instance of the method's `Config`; None: its defaults.

    classes: their number, for a method with a classifier of its own (`Method.needs_targets`).
    """
    kind: Any = method_class(name)
    config = kind.Config() if config is None else config
    return kind(backbone, config, classes) if classifies(kind) else kind(backbone, config)


def classifies(kind: type[Method]) -> bool:
    """Whether a method has a classifier of its own instead of the backbone's head."""
    return bool(kind.needs_targets) and not {"label", "words"} & {*kind.needs_targets}


__all__ = [
    "MAE",
    "METHODS",
    "MJP",
    "MP3",
    "PART",
    "Batch",
    "Detection",
    "DetectionConfig",
    "Draws",
    "DropPos",
    "DropPosConfig",
    "Language",
    "LanguageConfig",
    "MAEConfig",
    "MJPConfig",
    "MP3Config",
    "Method",
    "OfficialDropPos",
    "OfficialDropPosConfig",
    "OfficialMJP",
    "OfficialMJPConfig",
    "Offsets",
    "OffsetsConfig",
    "Output",
    "PARTConfig",
    "Segmentation",
    "SegmentationConfig",
    "Supervised",
    "SupervisedConfig",
    "When",
    "classifies",
    "create_method",
    "method_class",
]
