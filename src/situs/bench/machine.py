"""The machine of a measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = "situs", "torch", "triton", "timm"


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Device, system and versions, by name."""
    facts: dict[str, Any] = {"kind": device.type, "device": _name(device)}
    facts |= {"cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()}
    facts |= {"threads": torch.get_num_threads(), "system": f"{platform.system()} {platform.machine()}"}
    facts |= {"python": platform.python_version(), "cuda": torch.version.cuda if device.type == "cuda" else None}
    return facts | {name: _version(name) for name in PACKAGES}


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
