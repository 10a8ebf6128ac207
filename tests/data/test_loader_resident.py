from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from situs.data import loader as resident
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import Resident, ResidentStream, load_resident, make_loader
from situs.data.modalities.image import ImagePipeline
from situs.data.open import open_source
from situs.data.sources.base import Source, TensorSource
from situs.errors import BrokenSampleError, SitusError
from situs.progress import listening


def load(source: Source, size: tuple[int, int] = (4, 6), max_bytes: int = 1 << 20) -> Resident:
    return load_resident(ImagePipeline(source, DataConfig(img_size=size), None, resident=size), "cpu", max_bytes)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(600):
        name = "cat" if number % 2 else "dog"
        (tmp_path / name).mkdir(exist_ok=True)
        array = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(array).save(tmp_path / name / f"{number:03}.png")
    return tmp_path


def test_it_holds_what_the_source_reads_in_the_same_order(folder):
    source = open_source(folder)
    seen = []
    with listening(lambda tasks: seen.extend((each.what, each.done, each.total) for each in tasks)):
        held = load(source)
    for index in (0, 1, 255, 256, 599):
        image, label = source.read(index).values()
        assert torch.equal(held.values["image"][index], image)
        assert int(held.values["label"][index]) == label
    assert dict.fromkeys(seen) == dict.fromkeys((f"reading {source.name}", done, 2) for done in range(2))
    assert torch.equal(held.index, torch.arange(600))
    assert load(source, (4, 4)).values["image"].shape == (600, 3, 4, 4)


@pytest.mark.parametrize("resident", ["auto", "never"])
@pytest.mark.parametrize("transparent", [True, False])
def test_transparent_images_are_noted_once(resident, transparent, tmp_path):
    for number in range(5):
        name = "cat" if number % 2 else "dog"
        (tmp_path / name).mkdir(exist_ok=True)
        mode, colour = ("RGBA", (9, 9, 9, 99)) if transparent and number in (2, 3) else ("RGB", (9, 9, 9))
        Image.new(mode, (6, 4), colour).save(tmp_path / name / f"{number}.png")
    source = open_source(tmp_path, channels=3)
    config = DataConfig(str(tmp_path), img_size=(4, 6), batch=2, workers=0, resident=resident)
    loader = make_loader(config, None, source=source)
    assert isinstance(loader.stream, ResidentStream) is (resident == "auto")
    for epoch in range(2):
        assert sum(len(batch.inputs) for batch in loader.iterate(epoch)) == 5
    notes = [note for note in source.notes if "transparent" in note]
    assert notes == [f"{source.name}: some images are transparent and get a white background"] * transparent


def test_parts_that_were_read_are_let_go(folder, monkeypatch):
    """Or a set would take twice its memory while it is read."""
    read, move, parts, alive = ImagePipeline.read, ImagePipeline.move, [], []

    def reading(*args):
        part = read(*args)
        parts.append(weakref.ref(part.values["image"]))
        return part

    def moving(*args):
        alive.extend(part for part in parts if part() is not None)
        return move(*args)

    monkeypatch.setattr(resident, "_TASK", 50)
    monkeypatch.setattr(ImagePipeline, "read", reading)
    monkeypatch.setattr(ImagePipeline, "move", moving)
    load(open_source(folder))
    assert len(parts) == 12 and len(alive) <= 2  # the first, by which the memory was counted, and the last


@pytest.mark.parametrize("deep", [0, 1, 3])
def test_one_deep_image_makes_all_of_them_floats(tmp_path, monkeypatch, deep):
    monkeypatch.setattr(resident, "_TASK", 1)
    wanted = torch.arange(16.0).view(4, 1, 2, 2) / 255
    for number in range(4):
        array = (wanted[number, 0] * 255).round().numpy()
        array = (array * 257).astype(np.uint16) if number == deep else array.astype(np.uint8)
        Image.fromarray(array).save(tmp_path / f"{number}.png")
    images = load(open_source(tmp_path), (2, 2)).values["image"]
    assert images.dtype == torch.float32 and torch.allclose(images, wanted)


def test_broken_images_are_skipped_counted_and_reported(folder):
    (folder / "cat/001.png").write_bytes(b"broken")
    (folder / "dog/300.png").write_bytes((folder / "dog/302.png").read_bytes()[:50])
    source = open_source(folder)
    held = load(source)
    assert len(held.values["image"]) == 598
    assert [*source.skipped] == [0, 300 + 150]
    assert torch.equal(held.values["image"][0], source.read(1)["image"])
    assert held.index[0] == 1
    report = source.skip_report()
    assert report is not None
    assert report.startswith(f"2 of 600 images of {folder.name} could not be read and were skipped; the first: ")
    assert "cat/001.png" in report
    strict = open_source(folder, strict=True)
    with pytest.raises(BrokenSampleError, match=r"cat/001\.png"):
        load(strict)


def test_what_cannot_be_held_is_refused(folder, tmp_path):
    with pytest.raises(SitusError, match=r"600 images .* 43,200 bytes of memory, .* 43,199 bytes.*stream"):
        load(open_source(folder), max_bytes=600 * 72 - 1)
    assert load(open_source(folder), max_bytes=600 * 72).values["image"].nbytes == 600 * 72
    config = DataConfig(str(folder), img_size=(4, 6), resident_gib=600 * 72 / 2**30)  # which `auto` finds enough
    assert "600 images of 3 × 4 × 6" in make_loader(config, None, source=open_source(folder)).describe()
    images = torch.zeros(5, 3, 4, 6, dtype=torch.uint8)
    with pytest.raises(SitusError, match=r"need 360 bytes of memory, .* 359 bytes"):
        load(TensorSource(images, torch.arange(5), tuple("abcde")), max_bytes=359)
    assert load(TensorSource(images, torch.arange(5), tuple("abcde")), max_bytes=360).values["image"] is images
    Image.new("L", (6, 4)).save(folder / "dog/600.png")
    with pytest.raises(SitusError, match=r"images of 1 and 3 channels"):
        load(open_source(folder))
    assert load(open_source(folder, channels=3)).values["image"].shape == (601, 3, 4, 6)
    for number in range(256):  # the first of them
        (folder / f"cat/{2 * number + 1:03}.png").write_bytes(b"broken")
    with pytest.raises(SitusError, match=r"need 43,272 bytes"):
        load(open_source(folder, channels=3), max_bytes=601 * 72 - 1)
    (tmp_path / "none").mkdir()
    (tmp_path / "none/a.png").write_bytes(b"no")
    with pytest.raises(SitusError, match="its only image cannot be read"):
        load(open_source(tmp_path / "none"))


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (2**30, "3.00 GiB of memory, but the limit is 1.00 GiB"),
        (2**30 - 1, "3,221,225,472 bytes of memory, but the limit is 1,073,741,823 bytes"),
    ],
)
def test_much_memory_is_told_in_gib(limit, said):
    side = 2**15
    huge = TensorSource(torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(3, 1, side, side), None, None)  # of one byte
    with pytest.raises(SitusError) as caught:
        load(huge, (side, side), limit)
    advice = "raise the limit (resident_gib), or stream the data (resident=never)"
    assert str(caught.value) == f"tensors: 3 images need {said}; {advice}"
    assert caught.value.fields == ("resident_gib", "resident")


def test_deep_images_stay_deep(tmp_path):
    deep = np.array([[0, 1], [2, 65535]], dtype=np.uint16)
    for number in range(2):
        Image.fromarray(deep).save(tmp_path / f"{number}.png")
    images = load(open_source(tmp_path), (2, 2)).values["image"]
    assert images.dtype == torch.float32
    assert torch.allclose(images[1, 0], torch.from_numpy(deep.astype(np.float32)) / 65535)


def test_tensors_need_no_decoding():
    images = torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8)
    source = TensorSource(images, torch.arange(5), tuple("abcde"))
    assert load(source, (4, 4)).values["image"] is images
    assert load(TensorSource(images, None, None, channels=3), (4, 4)).values["image"].shape == (5, 3, 4, 4)
    assert load(TensorSource(images, None, None, channels=3), (2, 2)).values["image"].shape == (5, 3, 2, 2)
    with pytest.raises(SitusError, match=r"must be \[5\]"):
        TensorSource(images, torch.arange(4), None)
    with pytest.raises(SitusError, match=r"must be \[n, C, H, W\]"):
        TensorSource(images[0], None, None)


@pytest.mark.slow
@pytest.mark.shared_data
def test_the_whole_of_cifar100(shared_data):
    held = load(open_source(shared_data / "cifar100"), (32, 32), 1 << 30).values
    assert held["image"].shape == (50000, 3, 32, 32)
    assert torch.bincount(held["label"]).tolist() == [500] * 100
    # The published channel means of the training set.
    mean = held["image"].double().mean((0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor([0.5071, 0.4865, 0.4409]).double(), atol=1e-4)


@pytest.mark.parametrize("start", [0, 3])
def test_the_last_steps_of_an_epoch_are_augmented_in_the_shape_of_the_others(start: int, monkeypatch) -> None:
    """On a GPU another shape is compiled anew, which takes half a minute; the batches are the same."""
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    source = TensorSource(images, torch.arange(40) % 3, ("a", "b", "c"))
    config = DataConfig(img_size=8, batch=4)
    alone = [*make_loader(config, AugmentConfig(mixup=0.5), "cpu", source=source).iterate(1, start)]
    monkeypatch.setattr(ResidentStream, "steps_at_once", lambda _: 4)
    loader = make_loader(config, AugmentConfig(mixup=0.5), "cpu", source=source)
    finish, shapes = loader.pipeline.finish, []

    def seen(values, ids, noise):
        shapes.append(len(ids))
        return finish(values, ids, noise)

    monkeypatch.setattr(loader.pipeline, "finish", seen)
    together = [*loader.iterate(1, start)]
    assert len(together) == len(alone) == 10 - start and set(shapes) == {16}
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets["label"], other.targets["label"])
