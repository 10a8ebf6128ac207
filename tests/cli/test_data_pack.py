"""`situs data pack`: the table, and the flags behind an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from situs.cli.main import main
from situs.data.open import open_source


def test_packs_and_says_so(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photographs / "torn.png").write_bytes((photographs / "0.png").read_bytes()[:90])
    words = ["--short-side", "32", "--encoding", "png", "--format", "webdataset", "--workers", "0"]
    try:
        assert main(["data", "pack", str(photographs), "--out", str(tmp_path / "out"), *words]) == 0
    finally:
        (photographs / "torn.png").unlink()
    printed = capsys.readouterr()
    assert "3 images in 1 shard (" in printed.out and "1 broken image left out" in printed.out
    assert "torn.png: cannot be decoded" in printed.out
    assert [tuple(open_source(tmp_path / "out").read(i)["image"].shape) for i in range(3)] == [(3, 35, 32)] * 3


def test_mistakes_name_their_flags(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    for words, said in (
        ([str(tmp_path / "none"), "--out", out], "no such folder or file (PATH)"),
        ([str(photographs), "--out", str(photographs)], "must be a folder outside of the data (--out)"),
        ([str(photographs), "--out", out, "--quality", "0"], "quality=0: must be in [1, 100] (--quality)"),
        ([str(photographs), "--out", out, "--split", "val"], "has no split 'val'"),
        (
            [str(photographs), "--out", out, "--format", "webdataset", "--row-group", "50"],
            "row_group=50: applies only to parquet, not to format=webdataset (--row-group, --format)",
        ),
        (
            [str(photographs), "--out", out, "--encoding", "png", "--quality", "80"],
            "quality=80: applies only to JPEG, but encoding=png is lossless (--quality, --encoding)",
        ),
        (
            [str(photographs), "--out", out, "--short-side", "0", "--quality", "80"],
            "but short_side=0 keeps the bytes of every image (--quality, --short-side)",
        ),
    ):
        assert main(["data", "pack", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or [*(tmp_path / "out").iterdir()] == []
