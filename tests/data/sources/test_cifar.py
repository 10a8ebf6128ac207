"""CIFAR's two published forms; the pickled one is written by the real pickle and read by a restricted one."""

from __future__ import annotations

import os
import pickle
from itertools import chain

import numpy as np
import pytest
import torch

from situs.data.open import open_source
from situs.data.sources import cifar
from situs.data.sources.cifar import read_pickled
from situs.errors import SitusError

RNG = np.random.default_rng(2)
FINE = [b"apple", b"bear", b"cup"]


def batch(count: int) -> tuple[np.ndarray, list[int]]:
    return RNG.integers(0, 256, (count, 3072), dtype=np.uint8), RNG.integers(0, 3, count).tolist()


def check(source, pixels, labels):
    images = torch.stack([source.read(i)["image"] for i in range(len(source))])
    assert torch.equal(images, torch.from_numpy(pixels).view(-1, 3, 32, 32))
    assert [source.read(i)["label"] for i in range(len(source))] == labels


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_cifar100_python(tmp_path, protocol):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (pixels, labels), (test_pixels, test_labels) = batch(7), batch(4)
    content = {b"filenames": [b"x.png"] * 7, b"batch_label": b"1 of 1", b"fine_labels": labels}
    dump = lambda value, name: (folder / name).write_bytes(pickle.dumps(value, protocol))  # noqa: E731
    dump({**content, b"data": pixels, b"coarse_labels": labels}, "train")
    dump({"data": np.asfortranarray(test_pixels), "fine_labels": test_labels}, "test")
    dump({b"fine_label_names": FINE, b"coarse_label_names": []}, "meta")
    for path in (folder, tmp_path):
        source = open_source(path)
        assert (source.name, source.classes) == ("cifar100 (train)", ("apple", "bear", "cup"))
        check(source, pixels, labels)
    check(open_source(folder, "val"), test_pixels, test_labels)
    assert "label" not in open_source(folder, labels=False).read(0)


def test_cifar10_python_joins_its_five_batches(tmp_path):
    parts = [batch(2) for _ in range(5)]
    for number, (pixels, labels) in enumerate(parts, 1):
        content = {b"data": pixels, b"labels": labels}
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps(content, 2))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": FINE}, 2))
    check(
        open_source(tmp_path),
        np.concatenate([p for p, _ in parts]),
        list(chain.from_iterable((labels for _, labels in parts))),
    )


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2 wrote: byte strings as SHORT_BINSTRING / BINSTRING, the array through numpy.core.multiarray."""
    short = lambda s: b"U" + bytes([len(s)]) + s  # noqa: E731
    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + short(b"b") + b"tR"
        b"(K\x01K" + bytes([len(pixels)]) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\n("
        + short(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + short(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"fine_labels") + numbers + b"u."


def test_the_form_python_2_wrote(tmp_path):
    pixels, labels = batch(3)
    data = python2_batch(pixels, labels)
    assert pickle.loads(data, encoding="bytes")[b"fine_labels"] == labels  # the hand-made file is a real pickle
    (tmp_path / "train").write_bytes(data)
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": FINE}, 2))
    check(open_source(tmp_path), pixels, labels)


@pytest.mark.parametrize(("prefix", "names"), [("", "fine_label_names.txt"), ("data_batch", "batches.meta.txt")])
def test_the_binary_version(tmp_path, prefix, names):
    pixels, labels = batch(10)
    numbers = np.array(labels, np.uint8)[:, None]
    (tmp_path / names).write_text("apple\nbear\ncup\n\n")
    if prefix:
        for part in range(5):
            rows = np.hstack([numbers, pixels])[2 * part : 2 * part + 2]
            (tmp_path / f"data_batch_{part + 1}.bin").write_bytes(rows.tobytes())
    else:
        (tmp_path / "train.bin").write_bytes(np.hstack([255 - numbers, numbers, pixels]).tobytes())
    check(open_source(tmp_path), pixels, labels)


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_and_never_runs(tmp_path, protocol):
    target = tmp_path / "made"
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": FINE}, 2))
    (tmp_path / "train").write_bytes(pickle.dumps({"data": Evil(str(target)), "fine_labels": []}, protocol))
    with pytest.raises(
        SitusError, match=r"train: its pickle would call \w+\.mkdir, but no CIFAR batch needs this call"
    ):
        open_source(tmp_path)
    assert not target.exists()
    pickle.loads((tmp_path / "train").read_bytes())
    assert target.exists()  # the file was as bad as it looked


@pytest.mark.parametrize(
    "data",
    [
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        b"\x80\x02cos\nsystem\nU\x04true\x85\x81.",
        b"\x80\x04\x8c\x05numpy\x8c\x11dtype.__reduce__\x93.",
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x02U\x04trueQ.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
    ],
    ids=["INST", "OBJ", "NEWOBJ", "a dotted name", "a name alone", "a persistent id", "an extension", "a new array"],
)
def test_every_instruction_that_could_act_is_refused(data):
    with pytest.raises(SitusError, match=r"^file: (its pickle would call|is not a CIFAR batch)"):
        read_pickled(data, "file")


@pytest.mark.parametrize("kind", [">i4", "<i4", ">f8", "<u2", "u1", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_back_in_its_byte_order(kind, order):
    value = np.arange(6).reshape(2, 3).astype(kind, order=order)
    read = read_pickled(pickle.dumps({"data": value}, 2), "file")["data"]
    assert np.array_equal(read, value) and read.dtype == value.dtype


def test_attributes_set_on_a_constructor_die_with_the_pickle(tmp_path):
    """BUILD may set attributes of whatever stands on the stack, our constructors too."""
    data = b"\x80\x02}U\x01xc_codecs\nencode\n}X\x01\x00\x00\x00wK\x01sbs."
    assert vars(read_pickled(data, "file")["x"]) == {"w": 1}
    assert not vars(cifar._encode)
    assert not vars(read_pickled(b"\x80\x02}U\x01xc_codecs\nencode\ns.", "file")["x"])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is not a CIFAR batch"),
        (b"garbage", "is not a CIFAR batch"),
        (pickle.dumps([1, 2], 2), "contains a list instead of a dict"),
        (pickle.dumps({"other": 1}, 2), "contains no 'data'"),
        (pickle.dumps({"data": [1], "fine_labels": [1]}, 2), "'data' is not uint8"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1]}, 2), "2 images and 1 labels"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [9]}, 2), "outside the 3 classes"),
        (pickle.dumps({"data": {1, 2}, "fine_labels": [1]}, 4), "'data' is not uint8"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}, 2)[:500], "is not a CIFAR batch"),
        (pickle.dumps(np.dtype("u1"), 2), "is not a CIFAR batch"),
        (pickle.dumps({"data": np.array([{}])}, 2), "list found where bytes are expected"),
        (b"\x80\x02}(U\x04dataNr\xf0\xff\xff\xffu.", "an index in its pickle memo is larger"),
        (pickle.dumps({"data": np.array(["a"])}, 2), "arrays of 'U1' are not plain numbers"),
        (pickle.dumps({"data": np.array([0], "M8[s]")}, 2), "arrays of 'M8' are not plain numbers"),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}, 2).replace(b"K\x02M\x00\x0c", b"K\x03M\x00\x0c"),
            r"6144 bytes do not fill an array of shape \(3, 3072\)",
        ),
        (
            b"\x80\x02}U\x04datac_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86Rs.",
            "encoding 'utf-8' is not expected here",
        ),
    ],
)
def test_a_wrong_batch_is_one_sentence(tmp_path, data, sentence):
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": FINE}, 2))
    (tmp_path / "train").write_bytes(data)
    with pytest.raises(SitusError, match=sentence):
        open_source(tmp_path)


@pytest.mark.parametrize("missing", ["data_batch_4", "batches.meta"])
def test_a_file_that_is_missing_is_named(tmp_path, missing):
    pixels, labels = batch(2)
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, 2))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": FINE}, 2))
    (tmp_path / missing).unlink()
    with pytest.raises(SitusError, match=rf"/{missing}: cannot be read \(No such file or directory\)$"):
        open_source(tmp_path)


def test_a_torn_binary_file(tmp_path):
    (tmp_path / "fine_label_names.txt").write_text("a\nb\n")
    (tmp_path / "train.bin").write_bytes(bytes(3073))
    with pytest.raises(SitusError, match="3073 bytes are not a whole number of 3074-byte"):
        open_source(tmp_path)


def test_a_number_in_place_of_bytes_makes_no_zeros(tmp_path):
    """bytes(4 * 10**9) is four gigabytes of zeros, which a damaged or hostile file of 200 bytes could ask for."""
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
    count = b"\x8a\x05" + (4 * 10**9).to_bytes(5, "little")
    array = b"cnumpy.core.numeric\n_frombuffer\n(" + count + dtype + b"(K\x01" + count + b"tU\x01CtR"
    data = b"\x80\x02}(U\x04data" + array + b"U\x0bfine_labels](K\x00eu."
    (tmp_path / "train").write_bytes(data)
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": FINE}, 2))
    with pytest.raises(SitusError, match="int found where bytes are expected"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": 7},
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [b"a", b"b"]},
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [2**70, 0]},
        {b"data": np.zeros((0, 3072), np.uint8), b"fine_labels": []},
        {b"data": np.zeros((), np.uint8), b"fine_labels": [1]},
    ],
    ids=["a number", "words", "too large", "none", "no rows"],
)
def test_labels_and_pixels_of_a_wrong_kind_name_the_file(tmp_path, content):
    (tmp_path / "train").write_bytes(pickle.dumps(content, 2))
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": FINE}, 2))
    with pytest.raises(SitusError, match=r"train: (is not a CIFAR batch|'data' is not uint8)"):
        open_source(tmp_path)


@pytest.mark.parametrize("names", [7, [b"\xff"], b"\x80\x02torn"])
def test_class_names_of_a_wrong_kind_name_the_file(tmp_path, names):
    pixels, labels = batch(3)
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": pixels, b"fine_labels": labels}, 2))
    torn = names if isinstance(names, bytes) else pickle.dumps({b"fine_label_names": names}, 2)
    (tmp_path / "meta").write_bytes(torn)
    with pytest.raises(SitusError, match=r"meta: is not a CIFAR batch"):
        open_source(tmp_path)
