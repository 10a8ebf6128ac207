from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch

from situs.data.sources import samples
from situs.data.sources.samples import load_samples
from situs.errors import SitusError

FOLDER = resources.files("situs.data")


@pytest.mark.parametrize(("split", "count"), [("train", 9000), ("test", 2000)])
def test_shapes_and_balance(split: samples.Split, count: int) -> None:
    images, labels, classes = load_samples(split)
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (count, 1, 28, 28))
    assert (labels.dtype, tuple(labels.shape)) == (torch.int64, (count,))
    assert torch.bincount(labels, minlength=len(classes)).tolist() == [count // 10] * 10
    assert labels[:20].tolist() == [*range(10), *range(10)]


def test_the_caller_owns_the_tensors() -> None:
    first = load_samples("test")
    before = first.images.clone()
    first.images.zero_()
    first.labels.zero_()
    again = load_samples("test")
    assert torch.equal(again.images, before)
    assert again.labels[1] == 1


def test_the_package_carries_at_most_four_megabytes_and_the_licence() -> None:
    packed = FOLDER.joinpath(samples.FILE).read_bytes()
    assert len(packed) <= 4_000_000
    licence = FOLDER.joinpath("FASHION_MNIST_LICENSE").read_text(encoding="utf-8")
    assert "2017 Zalando SE" in licence
    assert "Permission is hereby granted" in licence


def test_unknown_split_names_the_choices() -> None:
    with pytest.raises(SitusError, match=r"'val'.*test, train"):
        load_samples("val")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("content", [b"torn", None])
def test_a_damaged_or_missing_file_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / samples.FILE).write_bytes(content)
    monkeypatch.setattr(samples.resources, "files", lambda _: tmp_path)
    samples._read.cache_clear()
    try:
        with pytest.raises(
            SitusError, match=r"fashion_sample\.npy\.xz are (damaged|not readable).*install situs again"
        ):
            load_samples("train")
    finally:
        samples._read.cache_clear()
