"""LPIPS only from a verified file: refused otherwise; with it, a distance that is zero for equals and symmetric."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from situs.audit.scores import Lpips
from situs.errors import SitusError

SHAPES = {"0": (64, 3, 11), "3": (192, 64, 5), "6": (384, 192, 3), "8": (256, 384, 3), "10": (256, 256, 3)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Random weights of the right shapes, with their own sha256: for the arithmetic, not for a figure."""
    torch.manual_seed(0)
    state = {}
    for index, (name, (out, channels, side)) in enumerate(SHAPES.items()):
        state[f"features.{name}.weight"] = 0.05 * torch.randn(out, channels, side, side)
        state[f"features.{name}.bias"] = 0.1 * torch.randn(out)
        state[f"lin{index}.weight"] = torch.rand(1, out, 1, 1)
    path = tmp_path_factory.mktemp("lpips") / "weights.safetensors"
    save_file(state, path)
    return path, sha256(path.read_bytes()).hexdigest()


def reference(state: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """AlexNet as torchvision lays it out, tapped after each ReLU."""
    from torchvision.models import alexnet

    net = alexnet(weights=None).features.eval()
    net.load_state_dict({k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")})
    shift = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
    a, b = ((2 * image - 1 - shift) / scale for image in (x, y))
    total, level = torch.zeros(len(x)), 0
    for number, layer in enumerate(net):
        a, b = layer(a), layer(b)
        if number in (1, 4, 7, 9, 11):
            difference = (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square()
            total = total + (difference * state[f"lin{level}.weight"]).sum(dim=1).mean(dim=(1, 2))
            level += 1
    return total


@torch.no_grad()
def test_against_torchvisions_alexnet(weights: tuple[Path, str]) -> None:
    measure = Lpips(*weights)
    x, y = torch.rand(2, 2, 3, 64, 80)
    torch.testing.assert_close(measure(x, y), reference(measure.weights, x, y), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(measure(x, y), measure(y, x))
    assert measure(x, x).tolist() == [0.0, 0.0]


def test_only_a_verified_file(weights: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(SitusError, match="sha256 must be 567f8e3fab61abcb"):
        Lpips(weights[0])
    with pytest.raises(SitusError, match="no such file"):
        Lpips(tmp_path / "absent.safetensors")


def test_what_it_cannot_measure(weights: tuple[Path, str]) -> None:
    measure = Lpips(*weights)
    with pytest.raises(SitusError, match="3 channels"):
        measure(torch.rand(1, 1, 64, 64), torch.rand(1, 1, 64, 64))
    with pytest.raises(SitusError, match="32 pixels"):
        measure(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16))


@pytest.mark.shared_data
def test_the_published_weights(shared_data: Path) -> None:
    measure = Lpips(shared_data / "weights" / "lpips_alexnet.safetensors")
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    near, far = (x + 0.02).clamp(0, 1), torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert measure(x, x).item() == 0.0
    assert 0 < measure(x, near).item() < measure(x, far).item()
    torch.testing.assert_close(measure(x, far), measure(far, x))
