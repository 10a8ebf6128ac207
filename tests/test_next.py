"""Every `next:` line of every verb runs as it is printed, and so do those that these commands print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from figures import NUMPY, write_coco
from masked import write_ade
from PIL import Image

import situs
from situs.cli.main import main
from situs.cli.shell import new_sibling
from situs.data.sources.samples import load_samples
from situs.split.transport.certificates import read_credentials

sys.path.insert(0, str(Path(__file__).parent / "split"))
from served import serving  # pyright: ignore[reportMissingImports]

SHAPE = "--backbone.model-args.depth 1 --backbone.model-args.embed-dim 16 --backbone.model-args.num-heads 2"
MODEL = f"--backbone vit_tiny_patch16_224 --backbone.patch-size 7 {SHAPE} --data.img-size 28 --data.workers 0"
QUICK = "--steps 2 --device cpu --train.precision fp32 --optim.warmup-epochs 0"
PRINTING = {"train.py", "split.py"}
"""Files of the command line that print such a line."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, whose name has a space, with a folder of 60 embedded pictures in ten classes, the same
    without labels, masks and objects."""
    home = tmp_path / "my work"
    home.mkdir()
    monkeypatch.chdir(home)
    images, labels, classes = load_samples("train")
    for index in range(60):
        for folder in (Path("photos") / classes[int(labels[index])].replace("/", "-"), Path("flat")):
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[index, 0].numpy()).save(folder / f"{index}.png")
    write_ade(home / "ade", {"training": 4, "validation": 3})
    write_coco(home / "coco", {"train": 4, "val": 3})
    return home


class Follower:
    """Runs commands, and whatever their `next:` lines say."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.ran = capsys, list[str]()

    def follow(self, words: list[str]) -> None:
        self.capsys.readouterr()
        status = main(words)
        said = self.capsys.readouterr()
        assert status == 0, (words, said.err)
        self.ran.append(" ".join(words[:2] if words[0] in ("evaluate", "split") else words[:1]))
        lines = [line.removeprefix("next: ") for line in said.out.splitlines() if line.startswith("next: ")]
        assert len(lines) <= 1
        for command in lines[0].split(", or ") if lines else ():
            first, *rest = shlex.split(command)
            assert first == "situs" and not any(word.isupper() for word in rest), command  # nothing to be filled in
            self.follow(rest)


def test_the_verbs_that_print_such_a_line_are_known() -> None:
    home = Path(situs.__file__).parent / "cli"
    found = {path.relative_to(home).as_posix(): path.read_text() for path in home.rglob("*.py") if path.stem != "shell"}
    assert {name for name, text in found.items() if "next_line(" in text} == PRINTING
    pages = [path for path in home.parent.rglob("*.py") if "next: situs" in path.read_text()]
    assert pages == []  # by that function alone


def test_a_name_beside_a_folder_is_a_new_one(tmp_path: Path) -> None:
    assert new_sibling(tmp_path / "mp3.v2", "tuned") == tmp_path / "mp3.v2-tuned"
    (tmp_path / "mp3.v2-tuned").mkdir()
    assert new_sibling(tmp_path / "mp3.v2", "tuned") == tmp_path / "mp3.v2-tuned-2"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "here")
@pytest.mark.parametrize(
    ("words", "ran"),
    [
        (f"pretrain --data photos {MODEL}", ["pretrain", "finetune", "evaluate accuracy", "export", "export"]),
        (f"pretrain --data flat {MODEL}", ["pretrain", "features", "export"]),
        (f"pretrain --data photos --method supervised {MODEL}", ["pretrain", "evaluate accuracy", "export"]),
        (f"split train --server local --data photos {MODEL}", ["split train", "evaluate accuracy", "export"]),
    ],
)
def test_a_training_and_what_comes_next(words: str, ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(capsys)
    follower.follow([*shlex.split(f"{words} {QUICK}"), "--out", "runs and more/first"])
    assert follower.ran == ran


@NUMPY
@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "here")
@pytest.mark.parametrize("kind", ["segmentation", "detection"])
def test_a_dense_training_and_what_comes_next(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    follower, small = Follower(capsys), "--data.img-size 32 --data.workers 0"
    words = f"pretrain --data flat --backbone vit_tiny_patch16_224 {SHAPE} {small} {QUICK} --out a"
    assert main(shlex.split(words)) == 0
    data = "ade --data.masks.first 1 --data.masks.void 0" if kind == "segmentation" else "coco --augment.crop fitted"
    follower.follow(shlex.split(f"finetune --from a --method {kind} --data {data} --batch 2 {QUICK} --out b"))
    assert follower.ran == ["finetune", "evaluate accuracy", "export"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_split_training_and_what_comes_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", "certs", "--out", "certs"]) == 0
    follower = Follower(capsys)
    with serving(here / "server", read_credentials(here / "certs", "server")) as server:
        deep = MODEL.replace("depth 1", "depth 2") + " --data.channels 1 --batch 4 --backbone.drop-path .1"
        deep += " --optim.clip .5 --optim.ema .9 --optim.lr 1e-3"
        words = f"split train --server {server.address} --tls certs --data photos {deep} {QUICK} --train.save-every 1"
        follower.follow([*shlex.split(words), "--backbone.num-classes", "10", "--out", "client"])
        follower.follow(["split", "merge", "client", "server", "--out", "whole"])
    assert follower.ran == ["split train", "split infer", "split merge", "evaluate accuracy", "export"]
