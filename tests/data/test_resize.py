"""Crops of many sizes brought to one, against torch's own antialiased resize of each."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities.image import ImagePipeline
from situs.data.resize import pack, resize_packed, resized
from situs.data.sampler import draw_ids
from situs.data.sources.base import TensorSource
from situs.errors import SitusError

SIDES = [(30, 40), (64, 20), (11, 13), (90, 90), (280, 390), (12, 16), (1, 5)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def photographs(channels: int, device: str = "cpu") -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    made = [torch.randint(0, 256, (channels, *side), dtype=torch.uint8, generator=chance) for side in SIDES]
    made[3] = (made[3] > 127).to(torch.uint8) * 255  # overshoots between the two directions
    return [image.to(device) for image in made]


def each(images: list[torch.Tensor], size: tuple[int, int], mode: str) -> torch.Tensor:
    return torch.cat(
        [F.interpolate(image[None].cpu().contiguous(), size, mode=mode, antialias=True) for image in images]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("channels", "size"), [(3, (12, 16)), (1, (33, 9)), (4, (224, 224))])
def test_they_are_torchs_to_the_bit(channels: int, size: tuple[int, int], mode: str, device: str) -> None:
    whole = photographs(channels, device)
    wanted = each(whole, size, mode)
    flat, sides = pack([image.cpu() for image in whole])
    assert len(flat) == sum(image.numel() for image in whole)
    assert torch.equal(resize_packed(flat.to(device), sides, size, mode).cpu(), wanted)


def test_one_is_torchs_whatever_its_strides_and_torchvision_does(monkeypatch: pytest.MonkeyPatch) -> None:
    native = "torchvision.transforms.v2.functional._geometry._do_native_uint8_resize_on_cpu"
    monkeypatch.setattr(native, lambda *_: False)  # as it is for bilinear on some CPUs
    image = photographs(3)[4]
    turned = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for cut in (image, turned, image[:, 3:77, 5:99], turned[:, 3:77, 5:99]):
        for mode in ("bicubic", "bilinear"):
            assert torch.equal(resized(cut, (20, 30), mode), each([cut], (20, 30), mode)[0])
    wide = image.float() / 255
    assert torch.equal(resized(wide, (20, 30), "bilinear"), each([wide], (20, 30), "bilinear")[0])


def by_table(base: torch.Tensor, table: torch.Tensor, channels: int, size: tuple[int, int], radius: int) -> Any:
    """In place of the kernels: where the table says that a crop's pixels lie."""
    start = base.storage_offset()
    found = [base.as_strided((channels, h, w), (c, y, x), start + at) for at, y, x, c, h, w in table.tolist()]
    return each(found, size, {1: "bilinear", 2: "bicubic"}[radius])


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_the_kernels_are_told_where_each_crop_lies(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("situs.data.resize.has_kernels", lambda _: True)
    monkeypatch.setitem(sys.modules, "situs.data.resize_kernel", SimpleNamespace(launch=by_table))
    many = torch.randint(0, 256, (3, 2, 30, 40), dtype=torch.uint8)
    cuts = [many[1, :, 3:20, 5:33], many[0, :, 1:, :17], many[2].mT[:, 4:9], many[2, :, :6, :7]]
    wanted = each(cuts, (12, 9), mode)
    assert torch.equal(resize_packed(*pack(cuts), (12, 9), mode), wanted)
    assert torch.equal(resize_packed(*pack(cuts[:1]), (12, 9), mode), wanted[:1])


@pytest.mark.gpu
def test_a_gpu_takes_many_sizes_of_every_length() -> None:
    sides = [(length, 600 - length) for length in range(1, 600, 7)]
    crops = [torch.randint(0, 256, (3, *side), dtype=torch.uint8) for side in sides]
    got = resize_packed(*(x if x.ndim > 1 else x.cuda() for x in pack(crops)), (224, 224), "bicubic")
    assert torch.equal(got.cpu(), each(crops, (224, 224), "bicubic"))


def test_what_travels_is_bounded_and_the_same() -> None:
    source = TensorSource(torch.randint(0, 256, (4, 3, 90, 80), dtype=torch.uint8), None, None)
    augment = AugmentConfig(scale=(0.02, 1.0))
    ours, plain = (
        ImagePipeline(source, DataConfig(img_size=(24, 20), seed=1), augment, device_resizes=who)
        for who in (True, False)
    )
    draws = [int(draw_ids(torch.tensor(row), torch.tensor(copy))) for copy in range(8) for row in range(4)]
    part = ours.read(0, draws)
    sides = part.values["sides"].prod(1)
    assert 0 < (sides == 24 * 20).sum() < 32  # too large to travel as they were cut
    assert (
        sides.max() <= 2 * 24 * 20 and 3 * sides.max() <= ours.row_bytes and len(part.values["cuts"]) == 3 * sides.sum()
    )
    got = ours.join([ours.move(part.values, torch.device("cpu"))])
    assert torch.equal(got["image"], plain.read(0, draws).values["image"])


def crops_of(*images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is joined of images [n, C, H, W] that a worker each has read, and what a worker resizes of them."""
    data = DataConfig(img_size=(9, 7), seed=1)
    kinds = [[ImagePipeline(TensorSource(part, None, None), data, AugmentConfig(), device_resizes=who)
              for part in images] for who in (True, False)]  # fmt: skip
    return tuple(
        kind[0].join([own.move(own.read(0, range(len(part))).values, torch.device("cpu"))
                      for own, part in zip(kind, images, strict=True)])["image"]
        for kind in kinds
    )  # fmt: skip


def test_parts_of_a_batch_are_joined_as_a_worker_would() -> None:
    grey, more = (torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8) for count in (2, 3))
    got, wanted = crops_of(grey, more)
    assert got.dtype == torch.uint8 and torch.equal(got, wanted)
    got, wanted = crops_of(grey, torch.rand(3, 1, 20, 8), more)
    assert got.dtype == torch.float32 and torch.equal(got, wanted)
    with pytest.raises(SitusError, match="images of 1 and 3 channels cannot be in one batch"):
        crops_of(grey, more.expand(-1, 3, -1, -1))


@pytest.mark.parametrize("has", [True, False])
def test_a_device_with_kernels_resizes(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("situs.data.modalities.image.has_kernels", lambda _: has)
    source = TensorSource(torch.randint(0, 256, (4, 3, 9, 8), dtype=torch.uint8), None, None)
    config = DataConfig(img_size=6, batch=4, workers=0, resident="never")
    loader = make_loader(config, AugmentConfig(), "cpu", source=source)
    assert ("cuts" in loader.pipeline.read(0, [0, 1]).values) == has
    assert next(iter(loader.iterate())).inputs.shape == (4, 3, 6, 6)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(9, 13), (4, 5)])
def test_floats_stay_between_0_and_1(mode: str, size: tuple[int, int]) -> None:
    """Bicubic weights overshoot at an edge."""
    edge = torch.zeros(1, 9, 8)
    edge[:, :, 4:] = 1.0
    found = resized(edge, size, mode)
    wanted = F.interpolate(edge[None], size, mode=mode, antialias=True)[0]
    assert (float(found.min()), float(found.max())) == (0.0, 1.0)
    torch.testing.assert_close(found, wanted.clamp(0, 1), rtol=0, atol=1e-6)
