"""Image and mask move as one: a figure that is known everywhere, whatever was drawn; and batches of many shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from masked import disc, write_ade

from situs.data.augment import geometry, randaugment
from situs.data.augment.recipes import AugmentConfig, apply_masked, draw
from situs.data.batch import VOID
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities.mask import MaskConfig, MaskPipeline, _extent
from situs.data.sources.base import Source
from situs.errors import BrokenSampleError, SitusError

SIZE = (24, 32)
NORMALISATION = (torch.zeros(3), torch.ones(3))
CROPS: dict[str, dict[str, Any]] = {
    "scaled": {"crop": "scaled", "scales": (0.6, 1.8)},
    "resized": {"crop": "resized", "scale": (0.3, 1.0)},
    "pad": {"crop": "pad", "pad": 5},
    "none": {"crop": "none"},
    "turned": {"crop": "scaled", "operations": 2},
}


def half_planes(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture that tells of each of its points where it is, and the class that this place has: four quarters."""
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    picture = torch.stack([x / 100, y / 100, torch.ones(height, width)])
    return picture, (2 * (y > 0.4 * height) + (x > 0.6 * width)).to(torch.int16)


@pytest.mark.parametrize("name", CROPS)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_class_of_each_pixel_is_that_of_the_place_its_colour_tells(name: str, interpolation: str) -> None:
    """Bilinear and bicubic give back a linear picture exactly: so a result's colours say where they are from."""
    sides = [(40, 60), (52, 44), (30, 30)]
    config = AugmentConfig(**CROPS[name], interpolation=interpolation)  # type: ignore[arg-type]
    pipeline = MaskPipeline(_Held(sides), DataConfig(img_size=SIZE, seed=3, mean=(0.0,) * 3, std=(1.0,) * 3), config)
    values = pipeline.collate(0, [0, 1, 2], [dict(zip(("image", "mask"), half_planes(*s), strict=True)) for s in sides])
    ids = torch.arange(3)
    seen = 0
    for epoch in range(4):
        noise = draw(config, ids, seed=3, epoch=epoch)
        if "operations" in noise:  # colours tell places here: the geometry of the operations alone
            boxes = geometry.scaled_crop_boxes(noise["crop"], *values["sides"].T, SIZE, config.scales)
            affine, flip = randaugment.matrices(randaugment.plan(noise["operations"]), *SIZE), noise["flip"] < 0.5
            told = {"sides": values["sides"], "finer": 1}
            images = geometry.warp(values["image"], boxes, flip, SIZE, torch.zeros(3), affine, interpolation, **told)
            masks = geometry.warp_masks(values["mask"], boxes, flip, SIZE, affine, fill=VOID, sides=values["sides"])
        else:
            images, masks = apply_masked(
                values["image"], values["mask"], values["sides"], noise, config, SIZE, NORMALISATION
            )
        for number, (height, width) in enumerate(sides):
            x, y, there = 100 * images[number]
            outside = masks[number] == VOID
            assert torch.equal(outside, there < 50)
            clear = ~outside & ((y - 0.4 * height).abs() > 0.6) & ((x - 0.6 * width).abs() > 0.6)
            # The repeated border is no longer linear.
            clear &= (x > 2) & (x < width - 2) & (y > 2) & (y < height - 2)
            wanted = (2 * (y > 0.4 * height) + (x > 0.6 * width)).to(torch.int16)
            assert torch.equal(masks[number][clear], wanted[clear])
            seen += int(clear.sum())
    assert seen > 0.3 * 12 * SIZE[0] * SIZE[1]


class _Held(Source):
    """Pictures of these sides."""

    target = "mask"  # type: ignore[assignment]

    def __init__(self, sides: list[tuple[int, int]]) -> None:
        super().__init__("held", ("a", "b", "c", "d"), 3, strict=False)
        self.sides = sides

    def __len__(self) -> int:
        return len(self.sides)

    def read(self, index: int) -> dict[str, Any]:
        return dict(zip(("image", "mask"), half_planes(*self.sides[index]), strict=True))


def test_a_scaled_crop_is_as_much_smaller_as_its_image_is_scaled() -> None:
    noise = torch.rand(5000, geometry.CROP_NOISE, generator=torch.Generator().manual_seed(0))
    top, left, high, wide = geometry.scaled_crop_boxes(noise, 80, 60, (30, 40), (0.5, 2.0)).T
    assert torch.allclose(wide / high, torch.tensor(40 / 30))
    scale = 60 / wide  # at 1 the picture of 60 is as wide as the box
    assert 0.5 <= float(scale.min()) < 0.51 and 1.99 < float(scale.max()) <= 2.0
    assert abs(float(scale.mean()) - 1.25) < 0.02
    for start, length, side in ((top, high, 80), (left, wide, 60)):
        within = length <= side
        assert (start[within] >= 0).all() and (start + length <= side + 1e-3)[within].all()
        assert (start[~within] <= 0).all() and (start + length >= side - 1e-3)[~within].all()


def loader(path: Path, augment: AugmentConfig | None, rank: int = 0, world: int = 1, **fields: Any) -> Any:
    config = DataConfig(str(path), target="mask", img_size=24, batch=4, workers=0, masks=MaskConfig(1, (0,)), **fields)
    return make_loader(config, augment, rank=rank, world=world)


AUGMENT = AugmentConfig(crop="scaled", jitter=0.3)


def test_an_evaluation_sees_whole_images_and_their_masks_as_they_are(tmp_path: Path) -> None:
    write_ade(tmp_path, {"training": 2, "validation": 3})
    held = loader(tmp_path, None)
    assert held.classes == ("ground", "disc")
    [batch] = list(held)
    for number in range(3):
        picture, inside = disc(36 + 4 * (number % 3), 40 - 4 * (number % 2), number + 1000)
        tall, wide = batch.targets["whole"][number].tolist()
        high, long = batch.targets["sides"][number].tolist()
        assert (tall, wide) == inside.shape and min(high, long) == 24
        assert abs(high / long - tall / wide) < 0.05
        truth = batch.targets["mask"][number]
        assert np.array_equal(truth[2:tall, :wide], inside[2:])
        assert (truth[:2] == VOID).all() and (truth[tall:] == VOID).all() and (truth[:, wide:] == VOID).all()
        shown = held.shown(batch.inputs)[number, :, :high, :long]
        assert abs(float(shown.mean()) - picture.mean() / 255) < 0.02


def test_parts_of_several_workers_are_padded_to_the_largest() -> None:
    sides = [(40, 60), (52, 44), (30, 30)]
    pipeline = MaskPipeline(_Held(sides), DataConfig(img_size=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3), AUGMENT)
    samples = [pipeline.fetch(row, 0, row) for row in range(3)]
    whole = pipeline.collate(0, [0, 1, 2], samples)
    joined = pipeline.join([pipeline.collate(0, [0], samples[:1]), pipeline.collate(0, [1, 2], samples[1:])])
    assert whole.keys() == joined.keys() and all(torch.equal(whole[name], joined[name]) for name in whole)


def test_large_images_are_shrunk_with_their_masks() -> None:
    pipeline = MaskPipeline(_Held([(240, 360)]), DataConfig(img_size=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3), AUGMENT)
    sample = pipeline.fetch(0, 0, 0)
    height, width = sample["image"].shape[1:]
    assert (height, width) == (24, 36) and sample["mask"].shape == (24, 36)
    wanted = half_planes(240, 360)[1][5::10, 5::10]
    assert torch.equal(sample["mask"], wanted)
    closer = MaskPipeline(
        _Held([(240, 360)]),
        DataConfig(img_size=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3),
        replace(AUGMENT, scales=(1.0, 4.0)),
    )  # crops of half a side
    assert closer.fetch(0, 0, 0)["image"].shape[1:] == (48, 72)


@pytest.mark.parametrize("augment", [AUGMENT, None])
def test_a_thread_of_an_image_is_broken(augment: AugmentConfig | None) -> None:
    """Sixteen times as long as wide is still a picture."""
    source, config = (
        _Held([(4, 64), (64, 4), (4, 65), (65, 4)]),
        DataConfig(img_size=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3),
    )
    pipeline = MaskPipeline(source, config, augment)
    assert [pipeline.fetch(row, 0, row)["mask"].shape == (4, 64) for row in (0, 1)] == [True, False]
    for row, sides in ((2, "4 × 65"), (3, "65 × 4")):
        with pytest.raises(BrokenSampleError, match=f"image {row}: is {sides}, more than 16 times as long as wide$"):
            pipeline.fetch(row, 0, row)


def test_what_is_for_a_class_an_image_is_refused(tmp_path: Path) -> None:
    write_ade(tmp_path, {"training": 4, "validation": 2})
    for name, value in (("mixup", 0.8), ("cutmix", 1.0), ("label_smoothing", 0.1)):
        with pytest.raises(SitusError, match=f"{name}={value}: does not apply to images with masks"):
            loader(tmp_path, replace(AUGMENT, **{name: value}))
    for fields in ({"multi_label": True}, {"balanced": True}, {"per_class": 3}):
        with pytest.raises(SitusError, match="does not apply to images with masks"):
            loader(tmp_path, AUGMENT, **fields)
    with pytest.raises(SitusError, match=r"augment\.crop='scaled': must be none, resized or pad"):
        make_loader(DataConfig("samples", img_size=28, channels=1), AUGMENT)


def test_a_set_that_is_held_gives_the_batches_of_one_that_is_streamed(tmp_path: Path) -> None:
    """Images of several sizes, from any step, on any rank; but a broken one is left out, and nothing stands in."""
    write_ade(tmp_path, {"training": 9, "validation": 2})
    for told in ({}, {"rank": 1, "world": 2}):
        streamed, held = (loader(tmp_path, AUGMENT, resident=each, **told) for each in ("never", "always"))
        assert "streamed" in streamed.describe() and "9 images of 3 × " in held.describe()
        for epoch, start in ((0, 0), (3, 1)):
            pairs = list(zip(streamed.iterate(epoch, start), held.iterate(epoch, start), strict=True))
            assert len(pairs) == 2 - start
            for one, other in pairs:
                assert torch.equal(one.ids, other.ids) and torch.equal(one.inputs, other.inputs)
                assert torch.equal(one.targets["mask"], other.targets["mask"])
    with pytest.raises(SitusError, match=r"9 images .* bytes of memory, .* 1,073 bytes"):
        loader(tmp_path, AUGMENT, resident="always", resident_gib=1e-6)
    (tmp_path / "annotations/training/ADE_00000004.png").write_bytes(b"no png")
    held = loader(tmp_path, AUGMENT, resident="always")
    assert held.plan.n == 8 and [*held.source.skipped] == [4]
    assert 4 not in torch.cat([batch.ids for batch in held.iterate(0)])


@pytest.mark.parametrize("scales", [(0.5, 2.0), (0.8, 2.5), (1.5, 2.5), (2.0, 2.0)])
def test_an_image_is_kept_as_large_as_its_crops_need_and_a_row_takes_so_much(
    scales: tuple[float, float], tmp_path: Path
) -> None:
    """Midway between the narrowest and the widest crop, and never larger than its file."""
    write_ade(tmp_path, {"training": 3})
    config = DataConfig(str(tmp_path), target="mask", img_size=8, batch=3, workers=0, masks=MaskConfig(1, (0,)))
    pipeline = make_loader(config, AugmentConfig(crop="scaled", scales=scales)).pipeline
    values = pipeline.read(0, [0, 1, 2]).values
    side = 8 * max(1.0, (scales[0] * scales[1]) ** 0.5)
    assert [abs(min(sides) - side) <= 0.5 for sides in values["sides"].tolist()] == [True] * 3
    held = sum(values[name].nbytes for name in ("image", "mask")) / 3
    assert held / 1.5 < pipeline.row_bytes < 1.5 * held


@pytest.mark.parametrize(
    ("augment", "extent"),
    [
        ({"crop": "scaled", "scales": (0.5, 2.0)}, (1.0, 2)),
        ({"crop": "scaled", "scales": (0.8, 2.5)}, (2**0.5, 2)),
        ({"crop": "scaled", "scales": (0.2, 2.0)}, (1.0, 4)),  # at most four
        ({"crop": "scaled", "scales": (2.0, 2.0)}, (2.0, 1)),
        ({"crop": "resized", "scale": (0.25, 1.0)}, (2**0.5, 1)),
        ({"crop": "resized", "scale": (0.04, 1.0)}, (5**0.5, 2)),
        ({"crop": "resized", "scale": (0.16, 0.25)}, (5**0.5, 1)),
        ({"crop": "none"}, (1.0, 1)),
    ],
)
def test_an_image_is_kept_midway_between_its_crops(augment: dict[str, Any], extent: tuple[float, int]) -> None:
    assert _extent(AugmentConfig(**augment)) == pytest.approx(extent)
