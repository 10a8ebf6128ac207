"""What only a GPU can show of clips: the same features as on the CPU, made without once waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from situs.core.random import normal
from situs.data.audio import AudioAugment, AudioConfig
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.modalities.audio import AudioPipeline, NoiseBank
from situs.data.sources.base import Source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of its search for waits
]

AUGMENT = AugmentConfig(label_smoothing=0.1, audio=AudioAugment())


class Hums(Source):
    things = "clips"

    def __init__(self) -> None:
        super().__init__("hums", ("a", "b"), 1, strict=False)

    def __len__(self) -> int:
        return 64

    def read(self, index: int) -> dict[str, Any]:
        time = torch.arange(16_000) / 16_000
        return {"wave": 0.3 * torch.sin(2 * torch.pi * (150 + 40 * index) * time), "label": index % 2}


@pytest.fixture
def allowed_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def loader(device: str) -> Loader:
    data = DataConfig(kind="audio", channels=1, batch=16, audio=AudioConfig())
    made = make_loader(data, AUGMENT, device, source=Hums())
    noise = 0.1 * normal(0, 0, torch.arange(1), "hum", (64_000,))[0]
    assert isinstance(made.pipeline, AudioPipeline)
    made.pipeline.bank = NoiseBank(noise, torch.tensor([0]), torch.tensor([64_000])).to(torch.device(device))
    return made


@pytest.mark.usefixtures("allowed_tf32")
def test_the_features_are_those_of_the_cpu() -> None:
    here, there = loader("cpu"), loader("cuda")
    for one, two in zip(here.iterate(3), there.iterate(3), strict=True):
        assert torch.equal(one.ids, two.ids.cpu()) and torch.equal(one.targets["label"], two.targets["label"].cpu())
        torch.testing.assert_close(two.inputs.cpu(), one.inputs, rtol=0, atol=5e-3)  # decibels; TF32 errs by .1


def test_nothing_waits_for_the_device() -> None:
    made = loader("cuda")
    stream: Any = made.stream
    held = stream.resident.values
    ids = torch.arange(32, device="cuda")
    batch = made.pipeline.finish(
        {"wave": held["wave"][ids], "label": held["label"][ids]}, ids, made.pipeline.noise(ids, 0)
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        for epoch in range(1, 3):
            noise = made.pipeline.noise(ids, epoch)
            batch = made.pipeline.finish({"wave": held["wave"][ids], "label": held["label"][ids]}, ids, noise)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.inputs.shape == (32, 1, 40, 98)
