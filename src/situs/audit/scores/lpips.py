"""LPIPS v0.1 with AlexNet (Zhang et al., CVPR 2018), from a weight file whose sha256 is known; else there is none.

A distance on random features is no LPIPS, so nothing here works without the file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from situs.errors import SitusError

ALEXNET_SHA256 = "567f8e3fab61abcb606d978f4ee466da7b2efd5152c6b1bf1a018a33a71186a0"
"""Of a safetensors file with `features.*` and `lin0…4.weight`, checked against the published reference pair."""

_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)


# AlexNet's convolutions: name, stride, padding, and whether the input is first pooled.
_LAYERS = (
    ("features.0", 4, 2, False),
    ("features.3", 1, 2, True),
    ("features.6", 1, 1, True),
    ("features.8", 1, 1, False),
    ("features.10", 1, 1, False),
)


class Lpips:
    """`Lpips(path)(found, real)` -> distances [n] of images [n, 3, H, W] in [0, 1]."""

    def __init__(self, path: str | Path, sha256: str = ALEXNET_SHA256) -> None:
        path = Path(path).expanduser()
        if not path.is_file():
            raise SitusError(f"lpips={path}: no such file", field="lpips")
        data = path.read_bytes()
        got = hashlib.sha256(data).hexdigest()
        if got != sha256:
            reason = f"lpips={path}: its sha256 is {got[:16]}… and not {sha256[:16]}…, so it is not used"
            raise SitusError(reason, field="lpips")
        self.weights = load(data)

    def check(self, images: Tensor) -> None:
        """Refuses images [n, C, H, W] that it cannot measure."""
        if images.shape[1] != 3 or min(images.shape[-2:]) < 32:
            reason = f"LPIPS takes images of 3 channels and of 32 pixels and more, not {list(images.shape[1:])}"
            raise SitusError(reason, field="lpips")

    @torch.no_grad()
    def __call__(self, recovered: Tensor, real: Tensor) -> Tensor:
        self.check(real)
        total = torch.zeros(real.shape[0], device=real.device)
        for index, (a, b) in enumerate(zip(self._features(recovered), self._features(real), strict=True)):
            weight = self.weights[f"lin{index}.weight"].to(real.device)
            total = total + F.conv2d((_unit(a) - _unit(b)).square(), weight).mean(dim=(1, 2, 3))
        return total

    def _features(self, images: Tensor) -> list[Tensor]:
        shift, scale = (torch.tensor(part, device=images.device).view(1, 3, 1, 1) for part in (_SHIFT, _SCALE))
        x = (2 * images.float() - 1 - shift) / scale
        features = []
        for name, stride, padding, pool in _LAYERS:
            x = F.max_pool2d(x, 3, 2) if pool else x
            weight, bias = (self.weights[f"{name}.{part}"].to(x.device) for part in ("weight", "bias"))
            x = F.relu(F.conv2d(x, weight, bias, stride, padding))
            features.append(x)
        return features


def _unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=1, keepdim=True) + 1e-10)
