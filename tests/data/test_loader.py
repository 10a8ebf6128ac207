from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from recipes import recipe

from situs.data.audio import AudioConfig
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import Loader, ResidentStream, default_batch, make_loader
from situs.data.open import open_source
from situs.data.sampler import epoch_order, sample_of
from situs.data.sources.base import TensorSource
from situs.errors import SitusError

CONFIG = DataConfig(path="samples", img_size=28, channels=1, batch=64, workers=0)


def small(count: int = 50, channels: int = 3, size: int = 16) -> TensorSource:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator)
    return TensorSource(images, torch.arange(count) % 5, tuple("abcde"), "small")


SMALL = DataConfig(img_size=16, batch=12, workers=0, seed=9)


def holds(loader: Loader) -> bool:
    return isinstance(loader.stream, ResidentStream)


def tensors(batch):
    return [batch.inputs, batch.ids, *batch.targets.values()]


def join(batches):
    parts = list(batches)
    return (
        torch.cat([b.inputs for b in parts]),
        torch.cat([b.ids for b in parts]),
        [b.targets.get("label") for b in parts],
    )


@pytest.mark.parametrize("resident", ["always", "never"])
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("deit", "deit-pretrain")), "cifar-deit", "crop"]
)
def test_ranks_resume_and_repetition(resident, name):
    """Bit for bit: twice the same, resumed in mid-epoch the same, three ranks together the same."""
    config = replace(SMALL, resident=resident)
    loader = make_loader(config, recipe(name), source=small())
    whole = list(loader.iterate(3, 0))
    assert len(whole) == loader.steps_per_epoch == 4
    assert loader.global_batch == 12
    for a, b in zip(whole[2:], loader.iterate(3, 2), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
    shares = [list(make_loader(config, recipe(name), source=small(), rank=r, world=3).iterate(3)) for r in range(3)]
    for step, batch in enumerate(whole):
        assert all(
            torch.equal(torch.cat(parts), x)
            for parts, x in zip(
                zip(*(tensors(share[step]) for share in shares), strict=True), tensors(batch), strict=True
            )
        )
    other = next(loader.iterate(4))
    assert not torch.equal(other.ids, whole[0].ids)


def test_batches_are_what_they_should_be():
    loader = make_loader(CONFIG, recipe("crop"))
    batch = next(iter(loader))  # of the first epoch
    assert (batch.inputs.shape, batch.inputs.dtype) == ((64, 1, 28, 28), torch.float32)
    assert torch.equal(batch.ids, epoch_order(0, 0, 9000)[:64])
    labels = open_source("samples").labels  # pyright: ignore[reportAttributeAccessIssue]
    assert "label" in batch.targets
    assert torch.equal(batch.targets["label"], labels[batch.ids])
    assert loader.steps_per_epoch == 140
    assert loader.classes is not None
    assert len(loader.classes) == 10
    assert loader.describe() == "samples (train): 9,000 images of 1 × 28 × 28 on cpu, 7 MiB"


def test_the_images_are_the_samples_own():
    source = small()
    batch = next(make_loader(SMALL, recipe("none"), source=source).iterate(0))
    mean, std = (torch.tensor(part).view(1, 3, 1, 1) for part in SMALL.normalisation)
    assert torch.allclose(batch.inputs, (source.images[batch.ids] / 255 - mean) / std, atol=1e-6)
    streamed = next(make_loader(replace(SMALL, resident="never"), recipe("none"), source=source).iterate(0))
    assert torch.allclose(streamed.inputs, batch.inputs, atol=1e-6)


def test_soft_labels_and_repeats():
    batch = next(make_loader(SMALL, recipe("deit"), source=small()).iterate(0))
    assert "label" in batch.targets
    assert batch.targets["label"].shape == (12, 5)
    assert len(sample_of(batch.ids).unique()) == 4
    assert len(batch.ids.unique()) == 12
    alone = AugmentConfig(repeated=3)
    views = next(make_loader(SMALL, alone, source=small()).iterate(0)).inputs
    assert not torch.equal(views[0], views[4])  # two copies of one sample, differently cropped


@pytest.fixture
def photographs(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(30):
        height, width = (20, 30) if number % 2 else (40, 25)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / f"{number:02}.png")
    return tmp_path


def test_images_of_many_sizes_are_streamed_and_broken_ones_counted(photographs):
    (photographs / "03.png").write_bytes(b"torn")
    config = DataConfig(path=str(photographs), img_size=16, batch=10, workers=1)
    loader = make_loader(config, recipe("crop"))
    assert loader.describe() == f"{photographs.name}: 30 images streamed by 1 worker, shuffled exactly"
    batches = list(loader.iterate(0))
    assert [b.inputs.shape for b in batches] == [(10, 3, 16, 16)] * 3
    assert all("label" not in b.targets for b in batches)
    assert [*loader.source.skipped] == [3]
    assert "03.png" in (loader.source.skip_report() or "")
    evaluation = make_loader(replace(config, split="train"), None)
    assert len(join(evaluation)[1]) == 29
    held = make_loader(replace(config, resident="always"), recipe("crop"))
    assert "29 images of 3 × 18 × 18 on cpu" in held.describe()
    # Held or streamed, an image has the number it has in the set, whatever is broken before it.
    for resident in ("always", "never"):
        seen = make_loader(replace(config, split="train", resident=resident, workers=0), None)
        assert join(seen)[1].tolist() == [0, 1, 2, *range(4, 30)]
    drawn = make_loader(replace(config, resident="always"), replace(recipe("crop"), repeated=2)).iterate(1)
    ids = torch.cat([batch.ids for batch in drawn])
    assert set((ids >> 40).tolist()) == {0, 1}
    assert 3 not in sample_of(ids).tolist()
    with pytest.raises(SitusError, match=r"03\.png"):
        list(make_loader(replace(config, strict=True, workers=0), recipe("crop")).iterate(0))


def test_auto_streams_what_does_not_fit():
    assert not holds(make_loader(replace(SMALL, resident_gib=1e-6), recipe("crop"), source=small()))
    assert not holds(make_loader(replace(SMALL, img_size=7), recipe("crop"), source=small()))
    assert holds(make_loader(SMALL, recipe("crop"), source=small()))


def test_blocks_are_asked_of_a_set_that_has_some(photographs):
    config = DataConfig(path=str(photographs), img_size=16, batch=10, workers=0, order="blocks", resident="never")
    said = f"order='blocks': must be exact, because {photographs.name} is not read in blocks"
    with pytest.raises(SitusError, match=f"^{said}$") as caught:
        make_loader(config, recipe("crop"))
    assert caught.value.field == "order"
    assert make_loader(replace(config, split="train"), None).order == ""  # an evaluation keeps the set's order


def test_a_compiled_loader_fuses_its_augmentation_and_gives_the_same_batches(monkeypatch):
    asked = []

    def fuse(function, **options):
        asked.append(options)
        return lambda *given, **named: asked.append("called") or function(*given, **named)

    monkeypatch.setattr(torch, "compile", fuse)
    plain, fused = (make_loader(SMALL, recipe("crop"), source=small()) for _ in range(2))
    assert fused.compile() is fused
    for one, other in zip(plain.iterate(1), fused.iterate(1), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(one), tensors(other), strict=True))
    assert asked == [{"fullgraph": True}, *["called"] * plain.steps_per_epoch]


@pytest.mark.parametrize(
    ("own", "size", "held"),
    [
        ((16, 48), (16, 24), True),  # just twice as wide
        ((48, 16), (24, 16), True),
        ((16, 48), (24, 16), False),
        ((48, 16), (16, 24), False),
    ],
)
def test_auto_streams_what_is_more_than_twice_as_high_or_as_wide_as_needed(own, size, held):
    source = TensorSource(torch.zeros(12, 3, *own, dtype=torch.uint8), None, None)
    assert holds(make_loader(replace(SMALL, img_size=size), recipe("none"), source=source)) is held


def test_several_steps_at_once_are_the_same_steps(monkeypatch):
    """What a GPU does with small batches, on the CPU: augment them together, hand them out one by one."""
    loader = make_loader(SMALL, recipe("deit"), source=small())
    alone = list(loader.iterate(1, 1))
    monkeypatch.setattr(ResidentStream, "steps_at_once", lambda self: 2)
    together = list(loader.iterate(1, 1))
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def test_odd_batches_keep_their_pairs():
    """Mixed one by one, however many would be augmented at once."""
    for batch, augment, at_once in ((7, "deit", 1), (8, "deit", 6), (7, "crop", 7)):
        stream = make_loader(replace(SMALL, batch=batch), recipe(augment), source=small()).stream
        assert isinstance(stream, ResidentStream)
        stream.device = torch.device("cuda")
        assert stream.steps_at_once() == at_once


def test_waiting_is_measured():
    loader = make_loader(SMALL, recipe("crop"), source=small())
    assert loader.data_wait == 0.0
    list(loader.iterate(0))
    assert 0 < loader.data_wait < 5


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"batch": 0}, "batch", ">= 1"),
        ({"img_size": 0}, "img_size", ">= 1"),
        ({"img_size": (32, 0)}, "img_size[1]", ">= 1"),
        ({"mean": (0.5,)}, "mean", "3 numbers, one per channel"),
        ({"std": (0.5, 0.0, 1.0)}, "std[1]", "> 0"),
        ({"crop_share": 1.5}, "crop_share", "in (0, 1]"),
        ({"workers": -1}, "workers", ">= 0"),
    ],
)
def test_wrong_values_are_refused(change, field, allowed):
    with pytest.raises(SitusError) as caught:
        DataConfig(**change)
    assert (caught.value.field, caught.value.allowed) == (field, allowed)


def test_too_large_a_batch_and_a_missing_split():
    with pytest.raises(SitusError, match="batch=64: must be at most the set's 50 samples"):
        make_loader(replace(SMALL, batch=64), recipe("crop"), source=small())
    with pytest.raises(SitusError, match="nowhere: no such folder"):
        make_loader(replace(SMALL, path="nowhere"), recipe("crop"))


def test_a_batch_that_nobody_gave_fits_the_set():
    assert [default_batch(n, 1, training=True) for n in (9000, 2560, 2559, 149, 30, 1)] == [256, 256, 255, 14, 8, 1]
    assert all(n // default_batch(n, 1, training=True) >= 10 for n in range(80, 4000))  # updates per epoch
    assert [default_batch(n, 3, training=True) for n in (9000, 100, 2)] == [255, 9, 3]
    assert [default_batch(n, 1, training=True, by_chance=True) for n in (9000, 149)] == [256, 149]
    assert [default_batch(n, 3, training=False) for n in (9000, 100)] == [255, 255]
    open_end = replace(SMALL, batch=None)
    loader = make_loader(open_end, recipe("crop"), source=small())
    assert (loader.global_batch, loader.steps_per_epoch) == (8, 6)
    assert sum(len(batch.ids) for batch in make_loader(open_end, None, source=small())) == 50
    with pytest.raises(SitusError, match=r"give a path to images, or .samples. .*"):
        make_loader(SMALL, recipe("crop"))


@pytest.mark.shared_data
def test_real_photographs_stream(shared_data):
    config = DataConfig(path=str(shared_data / "imagenet-samples"), img_size=64, batch=16, workers=2)
    batch = next(make_loader(config, recipe("deit-pretrain")).iterate(0))
    assert batch.inputs.shape == (16, 3, 64, 64)
    assert batch.inputs.isfinite().all()
    assert 0.5 < float(batch.inputs.std()) < 2.0


@pytest.mark.gpu
def test_a_gpu_gives_the_batches_of_the_cpu():
    here = list(make_loader(SMALL, recipe("deit"), source=small()).iterate(0))
    there = list(make_loader(SMALL, recipe("deit"), "cuda", source=small()).iterate(0))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.ids, b.ids.cpu())
        assert ((a.inputs - b.inputs.cpu()).abs() < 0.05).float().mean() > 0.97


def test_an_image_of_another_size_is_found_wherever_it_stands_in_a_small_set(tmp_path):
    """Of up to sixteen images all are looked at, so that a set of two sizes is streamed and not refused."""
    for count in (3, 8, 16):
        for other in range(count):
            folder = tmp_path / f"{count}-{other}"
            folder.mkdir()
            for number in range(count):
                Image.new("L", (8, 9 if number == other else 8)).save(folder / f"{number:02}.png")
            config = DataConfig(str(folder), split="train", img_size=8, channels=1, batch=4, workers=0)
            assert sum(len(batch.inputs) for batch in make_loader(config, None)) == count


def test_large_images_of_one_size_are_held_small(tmp_path):
    for number in range(3):
        Image.new("L", (80, 60)).save(tmp_path / f"{number}.png")
    for size, held in ((7, (8, 8)), (10, (60, 80)), (9, (10, 10))):
        config = DataConfig(str(tmp_path), split="train", img_size=size, channels=1, batch=3, resident="always")
        assert f"1 × {held[0]} × {held[1]} on" in make_loader(config, None).describe()


def test_training_on_a_part_of_the_images_and_judging_on_all():
    """count: a choice that is the same every time, with the labels that belong to it; an evaluation sees them all."""
    config, source = replace(SMALL, count=20, batch=20), small()
    chosen = epoch_order(0, 0, 50)[:20].sort().values
    (batch,) = make_loader(config, AugmentConfig(crop="pad", pad=0, flip=0.0), source=source).iterate(0)
    rows = chosen[sample_of(batch.ids)]
    assert torch.equal(batch.targets["label"], rows % 5)
    assert sorted(rows.tolist()) == chosen.tolist()
    assert sum(len(batch.ids) for batch in make_loader(config, None, source=source)) == 50


def test_clips_of_any_split_are_scaled_by_the_training_split(tmp_path) -> None:
    soundfile = pytest.importorskip("soundfile")
    for split, level in (("train", 0.5), ("test", 0.001)):
        for number in range(4):
            file = tmp_path / split / "ab"[number % 2] / f"{number}.wav"
            file.parent.mkdir(parents=True, exist_ok=True)
            wave = level * torch.rand(1600, generator=torch.Generator().manual_seed(number))
            soundfile.write(file, wave.numpy(), 16_000)
    config = DataConfig(str(tmp_path), audio=AudioConfig(seconds=0.1))
    trained = make_loader(config, AugmentConfig()).pipeline
    judged = make_loader(replace(config, split="test"), None)
    assert "test" in judged.source.name
    assert all(torch.equal(getattr(judged.pipeline, name), getattr(trained, name)) for name in ("mean", "std"))
