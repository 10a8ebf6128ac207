"""The model alone, as its own library loads it, with a card that says what it is."""

from situs.train.export.card import ModelProvenance, last_metrics, last_name
from situs.train.export.write import (
    MULTI_LABEL,
    PARTS,
    POSITIONS,
    PREPARED,
    TRAINING_ONLY,
    Export,
    new_folder,
    timm_config,
    write_export,
)

__all__ = [
    "MULTI_LABEL",
    "PARTS",
    "POSITIONS",
    "PREPARED",
    "TRAINING_ONLY",
    "Export",
    "ModelProvenance",
    "last_metrics",
    "last_name",
    "new_folder",
    "timm_config",
    "write_export",
]
