"""One door to whatever a user has on disk: `open_source` looks at the path and picks the reader."""

from __future__ import annotations

from pathlib import Path

from situs.data.base import Source, TensorSource, choose_split, find_shards
from situs.data.cifar import find_cifar, open_cifar
from situs.data.folder import FolderSource
from situs.errors import SitusError

SAMPLES = "samples"


def open_source(
    path: str | Path,
    split: str | None = None,
    *,
    labels: bool = True,
    channels: int | None = None,
    strict: bool = False,
) -> Source:
    """The images at `path`: image folder, Hugging Face parquet, WebDataset tars, CIFAR batches or "samples".

    split:    train, val or test; without one the training split is taken where the data is split. `val`
              falls back on test and `test` on val.
    labels:   use the labels where there are some; False reads any layout as a flat set.
    channels: convert every image to so many channels, or refuse it; None leaves each as it is.
    strict:   a broken image is an error for the loaders, not skipped.
    """
    if channels is not None and channels < 1:
        raise SitusError(f"channels={channels}: must be at least 1 (--data.channels)")
    if str(path) == SAMPLES:
        return _open_samples(split, labels, channels)
    path = Path(path).expanduser()
    if not path.exists():
        raise SitusError(f"{path}: no such folder or file (--data)")
    if path.is_file():
        return _open_file(path, split, labels, channels, strict)
    if any(True for _ in _shards(path, ".parquet")):
        from situs.data.parquet import ParquetSource

        return ParquetSource(path, split, labels=labels, channels=channels, strict=strict)
    if any(True for _ in _shards(path, ".tar")):
        from situs.data.webdataset import TarSource

        return TarSource(path, split, labels=labels, channels=channels, strict=strict)
    if find_cifar(path):
        return open_cifar(path, split, labels=labels, channels=channels)
    return FolderSource(path, split, labels=labels, channels=channels, strict=strict)


def _shards(path: Path, suffix: str) -> list[Path]:
    """Shards of any split: what decides the kind of a folder must not depend on the split asked for."""
    return find_shards(path, suffix, None)


def _open_file(path: Path, split: str | None, labels: bool, channels: int | None, strict: bool) -> Source:
    if path.suffix == ".parquet":
        from situs.data.parquet import ParquetSource

        return ParquetSource(path, split, labels=labels, channels=channels, strict=strict)
    if path.suffix == ".tar":
        from situs.data.webdataset import TarSource

        return TarSource(path, split, labels=labels, channels=channels, strict=strict)
    raise SitusError(f"{path}: must be a folder, a .parquet or a .tar file (--data)")


def _open_samples(split: str | None, labels: bool, channels: int | None) -> TensorSource:
    from situs.data.samples import load_samples

    chosen = choose_split(("train", "test"), split, SAMPLES)
    samples = load_samples("test" if chosen == "test" else "train")
    numbers = samples.labels if labels else None
    return TensorSource(samples.images, numbers, samples.classes, f"samples ({chosen})", channels=channels)
