"""What is left to the device is what a worker would make, with a decoder that needs no GPU."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from situs.data import late
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.image_pipeline import ImagePipeline
from situs.data.loader import make_loader
from situs.data.sources import open_source
from situs.data.sources.images import decode
from situs.data.sources.subset import Rows
from situs.errors import SitusError

CROP, CPU = AugmentConfig(), torch.device("cpu")


@pytest.fixture
def photographs(tmp_path):
    """Plain JPEG files among others that a device does not decode."""
    chance = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for number in range(10):
        pixels = chance.integers(0, 256, (30 + 3 * number, 50 - 2 * number, 3), dtype=np.uint8)
        place = tmp_path / "ab"[number % 2]
        place.mkdir(exist_ok=True)
        image, kind = Image.fromarray(pixels), "png" if number == 3 else "jpg"
        image = image.convert("CMYK") if number == 5 else image.convert("L") if number == 6 else image
        image.save(place / f"{number}.{kind}", **({"exif": exif} if number == 7 else {}))
    return tmp_path


def by_pillow(device, encoded):
    """In place of nvJPEG: RGB, and a RuntimeError for the whole batch where one is damaged."""
    try:
        return [decode(bytes(each.tolist()), "x", 3) for each in encoded]
    except ValueError as error:
        raise RuntimeError("nvjpeg: one of them") from error


def forgiving(device, encoded):
    """A decoder that fills up what is missing, as some do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
        return by_pillow(device, encoded)


def both(folder, monkeypatch, draws, decoder=by_pillow):
    monkeypatch.setattr("situs.data.image_pipeline.decode_on", decoder)
    source = open_source(folder, channels=3)
    plain = ImagePipeline(source, (8, 8), 3, CROP)
    late_one = ImagePipeline(source, (8, 8), 3, CROP, decoder="gpu", resizer="device")  # as a GPU has it
    part = late_one.read(2, draws)
    return plain.read(2, draws).values, part, late_one.move(part.values, CPU), source


def test_a_batch_is_the_workers(photographs, monkeypatch):
    monkeypatch.setattr(ImagePipeline, "_by_hand", None)  # nothing is decoded twice
    draws = [9, 0, 3, 5, 4, 7, 6, 1]
    wanted, part, got, source = both(photographs, monkeypatch, draws)
    names = [source.key(draw) for draw in draws]
    left = [row for row, name in enumerate(names) if name.split("/")[1][0] in "357"]  # to the workers
    assert part.values["rows"].tolist() == [row for row in range(8) if row not in left]
    assert got.keys() == wanted.keys() and torch.equal(got["label"], wanted["label"])
    assert torch.equal(got["image"], wanted["image"])


def test_an_image_of_16_bits_makes_floats_of_the_batch_as_a_worker_would(photographs, monkeypatch):
    deep = np.random.default_rng(1).integers(0, 65536, (40, 30), dtype=np.uint16)
    Image.fromarray(deep).save(photographs / "a/0.png")
    keys = [open_source(photographs).key(index) for index in range(11)]
    draws = [keys.index(name) for name in ("a/0.jpg", "a/0.png", "a/6.jpg", "b/5.jpg")]
    wanted, _, got, _ = both(photographs, monkeypatch, draws)
    assert got["image"].dtype == wanted["image"].dtype == torch.float32
    assert torch.allclose(got["image"], wanted["image"], atol=1 / 255)
    assert torch.equal(got["image"][[1, 3]], wanted["image"][[1, 3]])


def test_batches_of_one_kind(photographs, monkeypatch):
    keys = [open_source(photographs).key(index) for index in range(10)]
    for names in (("3", "5"), ("0", "1")):
        draws = [next(i for i, key in enumerate(keys) if f"/{name}." in key) for name in names]
        wanted, _, got, _ = both(photographs, monkeypatch, draws)
        assert torch.equal(got["image"], wanted["image"])


def cut(data):
    return data[:900]


def without_a_table(data):
    return data[:200] + b"\xff\xc4\0\5" + data[204:]


@pytest.mark.parametrize(("damage", "decoder"), [(cut, by_pillow), (cut, forgiving), (without_a_table, by_pillow)])
def test_a_damaged_one_is_replaced_as_a_worker_would(photographs, monkeypatch, damage, decoder):
    file = photographs / "a/4.jpg"
    file.write_bytes(damage(file.read_bytes()))
    source = open_source(photographs, channels=3)
    bad = next(index for index in range(10) if source.key(index) == "a/4.jpg")
    wanted, part, got, source = both(photographs, monkeypatch, [bad, 0, 9], decoder)
    for index, reason in part.broken:  # as the loader does
        source.skip(index, reason)
    assert torch.equal(got["image"], wanted["image"]) and torch.equal(got["label"], wanted["label"])
    assert [entry.index for entry in source.skipped] == [bad]


@pytest.mark.parametrize("decoder", ["gpu", "scaled"])
def test_a_part_of_a_set_is_decoded_as_the_whole_is(photographs, monkeypatch, decoder):
    monkeypatch.setattr("situs.data.image_pipeline.decode_on", by_pillow)
    whole = open_source(photographs, channels=3)
    part = Rows(Rows(whole, [1, 4, 8, 9]), [0, 2, 3])
    of_whole, of_part = (ImagePipeline(source, (8, 8), 3, CROP, decoder=decoder) for source in (whole, part))
    assert (of_part.late, of_part.scaled) == (decoder == "gpu", decoder == "scaled")
    for index, row in enumerate((1, 8, 9)):
        own, there = of_part.fetch(index, 0, 7), of_whole.fetch(row, 0, 7)
        assert own.keys() == there.keys() and own["label"] == there["label"] and own.get("sides") == there.get("sides")
        assert own.get("encoded") == there.get("encoded") and ("image" in own) == ("image" in there)


@pytest.mark.parametrize("decoder", ["cpu", "scaled"])
def test_what_the_device_resizes_is_what_a_worker_would(photographs, decoder):
    source, draws = open_source(photographs, channels=3), [9, 0, 3, 5, 4, 7]
    by_worker, by_device = (
        ImagePipeline(source, (8, 12), 3, CROP, decoder=decoder, resizer=who) for who in ("worker", "device")
    )
    part = by_device.read(2, draws)
    assert part.values["cuts"].dtype == torch.uint8 and "image" not in part.values
    wanted, got = by_worker.read(2, draws).values, by_device.join([by_device.move(part.values, CPU)])
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("order", ["exact", "blocks"])
def test_a_run_s_batches_are_the_same_whoever_resizes_and_however_many_read(photographs, tmp_path_factory, order):
    from situs.data.pack import PackConfig, pack

    packed = tmp_path_factory.mktemp("packed") / "set"
    pack(photographs, packed, PackConfig(row_group=2, short_side=0))
    found = []
    for who, workers in (("worker", 0), ("device", 0), ("device", 2)):
        config = DataConfig(
            str(packed), img_size=8, batch=4, resident="never", resize=who, workers=workers, order=order
        )  # fmt: skip
        found.append([batch.inputs for batch in make_loader(config, CROP, "cpu").iterate(0)])
    assert len(found[0]) == 2
    assert all(torch.equal(got, wanted) for other in found[1:] for got, wanted in zip(other, found[0], strict=True))


def test_it_is_for_random_crops_in_three_channels(photographs):
    for augment, channels in ((None, 3), (AugmentConfig(crop="none"), 3), (CROP, 1)):
        pipeline = ImagePipeline(open_source(photographs, channels=channels), (8, 8), 0, augment, decoder="gpu")
        assert "encoded" not in pipeline.read(0, [0]).values


def test_without_a_cuda_device_it_is_refused(photographs):
    config = DataConfig(path=str(photographs), img_size=8, resident="never", decode="gpu")
    with pytest.raises(SitusError, match="decode='gpu': must be auto, cpu or scaled without a CUDA device"):
        make_loader(config, CROP, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "options"), [("RGB", {}), ("L", {}), ("RGB", {"progressive": True})])
def test_nvjpeg_gives_nearly_the_pixels_of_libjpeg(mode, options):
    y, x = np.mgrid[0:120, 0:90]
    buffer = io.BytesIO()
    image = Image.fromarray(np.stack([y * 2, x * 2, y + x], -1).astype(np.uint8)).convert(mode)
    image.save(buffer, "JPEG", quality=90, **options)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    got = late.decode_on(torch.device("cuda"), [data, data])
    apart = (got[1].cpu().int() - decode(buffer.getvalue(), "x", 3).int()).abs()
    assert got[1].shape == (3, 120, 90) and apart.float().mean() < 2
