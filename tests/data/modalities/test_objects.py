"""Image, mask and box move as one: figures that are known everywhere, whatever was drawn; batches, resume, workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figures import write_coco
from PIL import Image

from situs.data.augment import geometry
from situs.data.augment.recipes import AugmentConfig, apply_objects, draw_geometry
from situs.data.batch import VOID
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities.objects import ObjectPipeline
from situs.data.objects import objects_of, pack_masks
from situs.data.sources.base import Source
from situs.errors import SitusError

SIZE = (48, 48)
JITTER = AugmentConfig(crop="fitted", scales=(0.1, 2.0), interpolation="bilinear")


class Figures(Source):
    """A disc and a rectangle in pictures whose colours tell each place: red x, green y, both from 0 to 1, blue 1."""

    target = "objects"  # type: ignore[assignment]
    sides = ((60, 90), (100, 44), (30, 30))
    disc, rectangle = (0.35, 0.4, 0.22), (0.5, 0.55, 0.9, 0.95)
    """Centre and radius, and corners; of the width, the height, and the shorter side."""

    def __init__(self) -> None:
        super().__init__("figures", ("disc", "rectangle"), 3, strict=False)

    def __len__(self) -> int:
        return len(self.sides)

    def read(self, index: int) -> dict[str, Any]:
        high, wide = self.sides[index]
        y, x = torch.meshgrid(torch.arange(high) + 0.5, torch.arange(wide) + 0.5, indexing="ij")
        boxes = torch.tensor([self.box(high, wide, kind) for kind in (0, 1)])
        masks = torch.stack([self.within(x, y, high, wide, kind) for kind in (0, 1)])
        picture = torch.stack([x / wide, y / high, torch.ones(high, wide)])
        told = {"boxes": boxes, "classes": torch.arange(2), "crowd": torch.zeros(2, dtype=torch.bool)}
        return {"image": picture, **told, "masks": pack_masks(masks)}

    def within(self, x: Any, y: Any, high: int, wide: int, kind: int, slack: float = 0.0) -> Any:
        """Whether places in pixels lie in a figure that is larger by `slack` pixels."""
        if kind == 0:
            cx, cy, radius = self.disc
            return torch.hypot(x - cx * wide, y - cy * high) < radius * min(high, wide) + slack
        left, top, right, bottom = self.box(high, wide, 1)
        return (x > left - slack) & (x < right + slack) & (y > top - slack) & (y < bottom + slack)

    def box(self, high: int, wide: int, kind: int) -> list[float]:
        if kind == 1:
            left, top, right, bottom = self.rectangle
            return [left * wide, top * high, right * wide, bottom * high]
        cx, cy, radius = self.disc[0] * wide, self.disc[1] * high, self.disc[2] * min(high, wide)
        return [cx - radius, cy - radius, cx + radius, cy + radius]


CROPS: dict[str, dict[str, Any]] = {
    "fitted": {},
    "near": {"scales": (1.5, 2.0)},
    "none": {"crop": "none"},
    "turned": {"scales": (0.8, 1.2), "operations": 2},
}


def drawn(config: AugmentConfig, epoch: int) -> tuple[ObjectPipeline, Any, Any]:
    """The figures as a training sees them: the pipeline, what its worker made, and the batch."""
    pipeline = ObjectPipeline(Figures(), DataConfig(img_size=SIZE, seed=3, mean=(0.0,) * 3, std=(1.0,) * 3), config)
    made = pipeline.read(epoch, [0, 1, 2])
    return pipeline, made, pipeline.finish(made.values, made.ids, pipeline.noise(made.ids, epoch))


def places_in(pipeline: ObjectPipeline, made: Any, epoch: int, number: int) -> torch.Tensor:
    """Where each pixel of a result is from, x and y of the whole picture's sides."""
    assert pipeline.augment is not None
    sides, noise = made.values["sides"], pipeline.noise(made.ids, epoch)
    crops, flip, affine = draw_geometry(noise, pipeline.augment, SIZE, (sides[:, 0], sides[:, 1]), sides[:, 0])
    at = geometry.sampling_grid(crops, flip, SIZE, sides, affine)
    x, y = torch.broadcast_tensors(at.x, at.y)
    return torch.stack([x[number] / sides[number, 1], y[number] / sides[number, 0]])


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", CROPS)
def test_image_mask_and_box_stay_where_the_figure_is(name: str) -> None:
    """A result's colours say where they are from (of turned ones the places do), and there the figure is or is not."""
    config = replace(JITTER, **CROPS[name])
    seen = cut = gone = 0
    for epoch in range(8):
        pipeline, made, batch = drawn(config, epoch)
        gone += int((batch.targets["classes"] == VOID).sum())
        for number, found in enumerate(objects_of(batch.targets)):
            high, wide = Figures.sides[number]
            x, y, there = batch.inputs[number]
            inside = there > 0.99
            if name == "turned":  # the operations change colours too
                x, y = places_in(pipeline, made, epoch, number)
                inside = (x > 0) & (x < 1) & (y > 0) & (y < 1)
            else:
                covered = torch.zeros(SIZE, dtype=torch.bool)
                covered[: found.sides[0], : found.sides[1]] = True
                assert torch.equal(inside, covered)
            scale = pipeline._scale(epoch, number) * min(SIZE[0] / high, SIZE[1] / wide)
            slack = 0.8 + 0.8 / min(1.0, scale)  # half a pixel's diagonal, of the file's and of what was sampled
            for mask, box, kind in zip(found.masks, found.boxes, found.classes.tolist(), strict=True):
                sure, maybe = (Figures().within(x * wide, y * high, high, wide, kind, by) for by in (-slack, slack))
                assert not (sure & inside & ~mask)[2:-2, 2:-2].any() or name == "turned"
                assert not (mask & ~maybe).any()
                seen += int(mask.sum())
                assert bool((box[:2] >= 0).all() and (box[:2] < box[2:]).all() and (box[2:] <= SIZE[0]).all())
                rows, columns = mask.nonzero().unbind(1)
                ends = torch.stack([columns.amin(), rows.amin(), columns.amax() + 1, rows.amax() + 1])
                assert (ends - box).abs().max() <= 0.8 + 0.8 * max(1.0, scale)
                cut += int((ends[:2] == 0).any() or (ends[2:] == SIZE[0]).any())
    assert seen > 1000
    assert cut > 3 or name == "none"
    assert gone > 0 or name != "near"


def test_a_fitted_crop_is_large_scale_jitter() -> None:
    noise = torch.rand(4000, geometry.CROP_NOISE, generator=torch.Generator().manual_seed(0))
    flip = noise[:, 5] < 0.5
    top, left, high, wide = geometry.scaled_crop_boxes(noise, 80, 60, (48, 48), (0.1, 2.0), flip).T
    scale = 80 / high  # at 1 the longer side is as long as the box
    assert torch.allclose(high, wide)
    assert 0.1 <= float(scale.min()) < 0.11 and 1.99 < float(scale.max()) <= 2.0
    assert abs(float(scale.mean()) - 1.05) < 0.03
    assert torch.equal(top[high >= 80], torch.zeros_like(top[high >= 80]))
    within = wide <= 60
    assert (left[within] >= 0).all() and (left + wide <= 60 + 1e-3)[within].all()
    assert abs(float((left / (60 - wide))[wide < 50].mean()) - 0.5) < 0.03
    assert torch.equal(left[~within & ~flip], torch.zeros_like(left[~within & ~flip]))
    assert torch.allclose((left + wide)[~within & flip], torch.tensor(60.0))  # so that the mirrored one begins at 0


def test_what_a_worker_shrinks_is_what_the_device_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of colours that tell places, shrunk by the worker or not: the same places to half a pixel."""
    config = replace(JITTER, scales=(0.3, 0.6), flip=0.0)
    _, small, one = drawn(config, 0)
    monkeypatch.setattr(ObjectPipeline, "_scale", lambda *_: 100.0)
    _, large, other = drawn(config, 0)
    assert small.values["image"].shape[-1] < large.values["image"].shape[-1]
    assert torch.allclose(one.inputs, other.inputs, atol=0.03)
    assert torch.allclose(one.targets["boxes"], other.targets["boxes"], atol=0.6)


def loader(path: Path, augment: AugmentConfig | None, **fields: Any) -> Any:
    given = {"target": "objects", "img_size": 32, "batch": 4, "workers": 0} | fields
    return make_loader(DataConfig(str(path), **given), augment)


def test_parts_of_a_batch_are_joined_whatever_their_sides(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 5})
    pipeline = loader(tmp_path, JITTER).pipeline
    ids, apart = torch.arange(5), [pipeline.read(0, [row]).values for row in range(5)]
    joined = pipeline.finish(pipeline.join(apart), ids, pipeline.noise(ids, 0))
    whole = pipeline.finish(pipeline.read(0, ids.tolist()).values, ids, pipeline.noise(ids, 0))
    assert torch.equal(joined.inputs, whole.inputs)
    assert all(torch.equal(joined.targets[name], whole.targets[name]) for name in whole.targets)


def test_an_evaluation_sees_images_whole_with_their_longer_side_at_the_size(tmp_path: Path) -> None:
    write_coco(tmp_path, {"val": 3})
    [batch] = loader(tmp_path, None)
    assert batch.inputs.shape == (3, 3, 32, 32)
    assert batch.targets["whole"].tolist() == [[40, 60], [46, 50], [52, 60]]
    assert batch.targets["sides"].tolist() == [[21, 32], [29, 32], [28, 32]]
    assert not batch.inputs[0, :, 21:].any() and batch.inputs[0, :, :21].any()


def test_deep_and_plain_images_of_several_workers_are_one_batch(tmp_path: Path) -> None:
    """A file of 16 bits is read as floats, and one of 8 as bytes."""
    write_coco(tmp_path, {"val": 2})
    Image.fromarray(np.full((40, 60), 30000, dtype=np.uint16)).save(tmp_path / "val2017" / f"{0:012}.png")
    pipeline = loader(tmp_path, None).pipeline
    apart, whole = [pipeline.read(0, [row]).values for row in range(2)], pipeline.read(0, [0, 1]).values
    assert apart[0]["image"].is_floating_point() and not apart[1]["image"].is_floating_point()
    assert torch.equal(pipeline.join(apart)["image"], whole["image"]) and float(whole["image"].max()) <= 1


def test_what_is_not_for_objects_is_refused(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 4})
    for wrong, said in (
        ({"crop": "resized"}, "must be none or fitted for images with objects"),
        ({"mixup": 0.8}, "mixup"),
    ):
        with pytest.raises(SitusError, match=said):
            loader(tmp_path, replace(JITTER, **wrong))
    with pytest.raises(SitusError, match="none, resized or pad for images"):
        make_loader(DataConfig(str(tmp_path / "train2017"), img_size=32), JITTER)


def test_that_images_with_objects_are_not_held_is_said_in_training(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 4, "val": 4})
    for resident in ("always", "auto", "never"):
        for augment in (JITTER, None):
            config = DataConfig(str(tmp_path), target="objects", img_size=32, batch=2, workers=0, resident=resident)
            said = [note for note in make_loader(config, augment).source.notes if "is streamed" in note]
            assert len(said) == (resident == "always" and augment is not None)
            assert all(each.endswith("resident=always does not apply to images with objects") for each in said)


def test_a_disc_that_the_border_cuts_has_the_box_of_what_is_left() -> None:
    """Cut beyond its centre: a disc at (20, 20) of radius 15, of which [30, 60] × [0, 30] is seen, twice as large."""
    y, x = torch.meshgrid(torch.arange(60) + 0.5, torch.arange(60) + 0.5, indexing="ij")
    masks = torch.stack([torch.hypot(x - 20, y - 20) < 15, torch.hypot(x - 10, y - 10) < 9])
    values = {
        "image": torch.zeros(1, 3, 60, 60),
        "sides": torch.tensor([[60, 60]]),
        "boxes": torch.tensor([[[5.0, 5, 35, 35], [1, 1, 19, 19]]]),
        "classes": torch.tensor([[0, 1]]),
        "crowd": torch.tensor([[True, True]]),
        "masks": pack_masks(masks[None]),
    }
    noise = {"crop": torch.zeros(1, geometry.CROP_NOISE)}
    noise["crop"][:, 21] = 1 - 1e-7
    config = replace(JITTER, scales=(2.0, 2.0), flip=0.0)
    _, targets = apply_objects(values, noise, config, (60, 60), (torch.zeros(3), torch.ones(3)))
    half = (15**2 - 10**2) ** 0.5
    assert torch.allclose(targets["boxes"][0, 0], torch.tensor([0, 2 * (20 - half), 10, 60]), atol=1.0)
    assert targets["classes"].tolist() == [[0, VOID]]  # the other is cut away
    assert targets["crowd"].tolist() == [[True, False]] and not targets["boxes"][0, 1].any()


@pytest.mark.parametrize(("wide", "left"), [(60, 6), (20, 2), (10, 1), (2, 1)])
def test_an_image_that_shrinks_keeps_a_column(wide: int, left: int) -> None:
    """A tenth of 2 columns is none, but no image has a side of 0."""
    values = {
        "image": torch.zeros(1, 3, 60, 60),
        "sides": torch.tensor([[60, wide]]),
        "boxes": torch.zeros(1, 0, 4),
        "classes": torch.zeros(1, 0, dtype=torch.long),
        "crowd": torch.zeros(1, 0, dtype=torch.bool),
        "masks": pack_masks(torch.zeros(1, 0, 60, 60, dtype=torch.bool)),
    }
    noise = {"crop": torch.zeros(1, geometry.CROP_NOISE)}
    config = replace(JITTER, scales=(0.1, 0.1), flip=0.0)
    _, targets = apply_objects(values, noise, config, (60, 60), (torch.zeros(3), torch.ones(3)))
    assert targets["sides"].tolist() == [[6, left]]
