"""The facts that make an audit evidence: day and time, versions, and hashes of the audited model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from situs import __version__
from situs.train.checkpoint.files import digest


def evidence(model: nn.Module, weights: str | Path | None = None) -> dict[str, str | None]:
    """Facts by name: day and time, versions, and SHA-256 of the audited model.

    model: its parameters are hashed as they are in memory. weights: if that is a file, it is hashed too.
    """
    file = None if weights is None or not Path(weights).is_file() else Path(weights)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "situs": __version__,
        "torch": torch.__version__,
        "weights_sha256": weights_digest(model),
        "weights_file_sha256": None if file is None else digest(file),
    }


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers: of each, by name, its name, type, shape and bytes (little-endian)."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}\n".encode())
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
