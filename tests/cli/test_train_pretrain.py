"""`situs pretrain`: what it says, what it leaves on disk, and each mistake as one sentence."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import torchrun
from warm import Warm

from situs.cli.main import main
from situs.cli.train import _next_command
from situs.presets import preset_names
from situs.train.checkpoint import RunFolder
from situs.train.run import RunConfig

SMALL = [
    "--backbone.name", "vit_tiny_patch16_224", "--data.img-size", "28", "--data.channels", "1",
    "--train.precision", "fp32", "--optim.warmup-epochs", "0", "--device", "cpu", "--batch", "16",
]  # fmt: skip
RECIPE = """
[backbone]
patch_size = 7
model_args = {depth = 1, embed_dim = 16, num_heads = 2}
"""


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The words of a tiny run on the embedded samples; a model's own arguments come from a TOML file."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return ["pretrain", "--config", str(tmp_path / "tiny.toml"), "--data", "samples", *SMALL]


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunFolder.open(run, writer=False).latest()
    assert checkpoint is not None
    return checkpoint.tensors("model")


def refused(words: list[str], capsys: pytest.CaptureFixture[str], out: Path | None = None) -> str:
    """The one sentence on stderr; nothing was written."""
    capsys.readouterr()
    assert main(words) not in (0, None)
    said = capsys.readouterr().err
    assert said.startswith("situs: ")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert out is None or not out.exists()
    return said.removeprefix("situs: ").rstrip("\n")


# --- what a user sees ---------------------------------------------------------------------------------------


def test_a_first_run_says_what_it_does_and_what_comes_next(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*small, "--steps", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "samples (train): 9,000 images of 1 × 28 × 28 on cpu, 7 MiB"
    told = r"mp3 on vit_tiny_patch16_224: 4 x 4 patches, [\d,]+ trained parameters, fp32, cpu.*"
    assert re.fullmatch(told, lines[1])
    assert re.fullmatch(rf"done: 2 steps, loss [\d.]+, position accuracy [\d.]+; the run is in {out}", lines[2])
    assert (
        lines[3] == f"next: situs finetune --from {out} --out {out}-tuned, or situs export {out} --out {out}-exported"
    )
    assert re.search(r"step 2/2 · epoch 0.00 · loss .* samples/s · data-wait \d+ %", printed.err)


def test_the_next_command_fits_what_is_labelled(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning needs two classes."""
    out = tmp_path / "run"
    assert main([*small, "--steps", "1", "--out", str(out)]) == 0
    names = RunFolder.open(out, writer=False).classes()
    assert names is not None and len(names) == 10
    for classes, verb in ((names, "finetune"), (names[:2], "finetune"), (names[:1], "features"), (None, "features")):
        monkeypatch.setattr(RunFolder, "classes", lambda _, classes=classes: classes)
        assert _next_command(out, with_labels=False)[0] == verb
        assert _next_command(out, with_labels=True) == ["evaluate", "accuracy", out]


def test_flags_go_before_the_file_and_the_file_before_the_preset(small: list[str], tmp_path: Path) -> None:
    words = [*small, "--preset", "samples-mp3", "--steps", "1", "--seed", "3", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["backbone"]["patch_size"] == 7
    assert config["data"]["batch"] == 16
    assert (config["train"]["seed"], config["data"]["seed"], config["train"]["max_steps"]) == (3, 3, 1)
    assert config["method"]["mask_ratio"] == 0.5  # the preset's
    assert config["train"]["log_every"] == 35


def test_help_is_short_and_names_flags_of_every_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["pretrain", "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    text = re.sub(r"[\s│]+", " ", shown)
    assert "situs pretrain --preset samples-mp3 --out runs/mp3" in text
    for flag in (
        "--preset NAME",
        "--data PATH",
        "--out FOLDER",
        "--resume FOLDER",
        "--epochs INT",
        "--steps INT",
        "--batch INT",
    ):
        assert flag in text
    below = text[text.index("--help GROUP") :]
    for group in ("method", "backbone", "data", "augment", "optim", "train", "tuning", "dp"):
        named = re.search(rf" {group} --{group}\.(.*?)(?= [a-z]+ --|$)", below)
        assert named is not None
        flags = {name.strip().replace("-", "_") for name in named[1].split(",")}
        held = getattr(RunConfig(), group)
        tables = {f.name: f"{f.name}.…" for f in fields(held) if is_dataclass(getattr(held, f.name))}
        tables["model_args"] = "model_args.KEY"
        assert len(flags) > 1
        assert {f.removesuffix(" …") for f in flags} - {"…"} <= {tables.get(f.name, f.name) for f in fields(held)}


def _keys(config: Any) -> Iterator[str]:
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            yield from (f"{field.name}.{key}" for key in _keys(value))
        else:
            yield field.name


def test_help_of_each_group_is_in_help_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flag the parser takes is explained somewhere, and only where it belongs."""
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["pretrain", "--help", "all"]) == 0
    flags = set(re.findall(r"(?m)^[ │]{2}(--[a-z][\w.-]*)", capsys.readouterr().out))
    found = set()
    for group in ("method", "backbone", "data", "augment", "optim", "train", "tuning", "dp"):
        assert main(["pretrain", "--help", group]) == 0
        shown = capsys.readouterr().out
        own = set(re.findall(r"(?m)^[ │]{2}(--[a-z][\w.-]*)", shown))
        assert all(flag.startswith(f"--{group}.") for flag in own)
        names = set(_keys(getattr(RunConfig(), group))) - {"model_args"}
        assert own - {"--backbone.model-args.KEY"} == {f"--{group}.{name.replace('_', '-')}" for name in names}
        assert ("--backbone.model-args.KEY" in shown) == (group == "backbone")
        found |= own
    assert found == {flag for flag in flags if "." in flag}


def test_help_lists_the_presets_and_tells_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--help", "presets"]) == 0
    assert set(preset_names()) <= set(capsys.readouterr().out.splitlines())
    assert main(["pretrain", "--preset", "samples-mp3", "--help", "presets"]) == 0
    assert "Hardware: two CPU cores" in capsys.readouterr().out


# --- resuming -----------------------------------------------------------------------------------------------


def test_resume_goes_on_with_the_recorded_config(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after step 2 of 4 (the later checkpoint is taken away): the same weights as in peace."""
    fixed = [*small, "--steps", "4", "--train.save-every", "2", "--backbone.drop-path", "0.2"]
    for name in ("peace", "killed"):
        assert main([*fixed, "--out", str(tmp_path / name)]) == 0
    (tmp_path / "killed" / "checkpoints" / "step-00000004" / "state.json").unlink()
    capsys.readouterr()
    assert main(["pretrain", "--resume", str(tmp_path / "killed"), "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("the checkpoint of step 4 is damaged") == 1
    assert "resumed after step 2 of 4" in printed.err
    peace, killed = weights(tmp_path / "peace"), weights(tmp_path / "killed")
    assert [name for name in peace if not torch.equal(peace[name], killed[name])] == []


def test_a_run_without_a_whole_checkpoint_is_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*small, "--steps", "1", "--out", str(out)]) == 0
    [damaged] = (out / "checkpoints").iterdir()
    (damaged / "state.json").write_text((damaged / "state.json").read_text().replace('"step": ', '"step": 1'))
    assert refused(["pretrain", "--resume", str(out), "--device", "cpu"], capsys) == (
        f"{out}: all checkpoints of this run are damaged or missing (the checkpoint of step 1 is damaged (state.json "
        "has changed since it was written)); start the run again in another folder (--out)"
    )


def test_another_config_on_resume_is_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*small, "--steps", "1", "--out", str(out)]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    words = ["pretrain", "--resume", str(out), "--device", "cpu"]
    assert refused([*words, "--batch", "32"], capsys) == (
        f"{out}: cannot resume with another config: data.batch was 16 and is now 32 (--resume)"
    )
    assert "method.mask_ratio was 0.75 and is now 0.5" in refused([*words, "--method.mask-ratio", ".5"], capsys)
    assert refused([*words, "--preset", "samples-mp3"], capsys).endswith("(--resume, --preset, --config)")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    said = refused(["pretrain", "--resume", str(tmp_path / "none")], capsys)
    assert str(tmp_path / "none") in said


# --- mistakes -----------------------------------------------------------------------------------------------


def test_flags_that_cannot_be_meant(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    told = [*small, "--out", str(out)]
    both = "give either a new folder or a run to resume (--out, --resume)"
    assert refused(small, capsys) == both
    assert refused([*told, "--preset", "nosuch"], capsys, out).startswith("unknown preset 'nosuch'; choose one of: ade")
    assert refused([*told, "--method.mask-ratio", "1.2"], capsys, out) == (
        "method.mask_ratio=1.2: must be in [0, 1) (--method.mask-ratio)"
    )
    assert (
        refused([*told, "--device", "abacus"], capsys, out)
        == "device='abacus': must be cpu, cuda, cuda:N or mps (--device)"
    )
    assert "batch=9001: must be at most the set's 9,000 samples" in refused([*told, "--batch", "9001"], capsys, out)
    assert "epochs=0: must be >= 1 (--epochs)" in refused([*told, "--epochs", "0"], capsys, out)
    assert "vit_nosuch" in refused([*told, "--backbone.name", "vit_nosuch"], capsys, out)
    assert "--init" in refused([*told, "--init", "nowhere.pth"], capsys, out)
    capsys.readouterr()
    assert main([*told, "--mask-ratio", ".5"]) == 2  # no such flag: the parser's own frame, with the nearest ones
    printed = capsys.readouterr().err
    assert "--method.mask-ratio" in printed
    assert not out.exists()


def test_the_embedded_images_must_be_asked_for(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    bare = [word for word in small if word not in ("--data", "samples")]
    said = 'give a path to images, or "samples" for the 9,000 included images of clothes (--data)'
    assert refused([*bare, "--out", str(out)], capsys, out) == said
    for name in preset_names():
        verb = "finetune" if "finetune" in name or name == "few-labels" else "pretrain"
        told = [verb, "--preset", name, "--device", "cpu", "--out", str(out)]
        if verb == "pretrain" and not name.startswith("samples-"):
            assert refused(told, capsys, out) == said


def test_both_out_and_resume(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main([*small, "--steps", "1", "--out", str(out)]) == 0
    said = refused(["pretrain", "--resume", str(out), "--out", str(tmp_path / "new")], capsys, tmp_path / "new")
    assert said == "give either a new folder or a run to resume (--out, --resume)"
    before = weights(out)
    assert refused([*small, "--steps", "1", "--out", str(out)], capsys) == (
        f"{out}: already contains a run; resume this run, or choose another folder (--resume, --out)"
    )
    assert all(torch.equal(value, before[name]) for name, value in weights(out).items())
    (tmp_path / "file").write_text("")
    assert "could not be written" in refused([*small, "--out", str(tmp_path / "file" / "x")], capsys)


def write_image(path: Path, grey: int) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (28, 28), (grey, 255 - grey, 90)).save(path)


def test_data_that_is_not_there(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    told = [*small, "--out", str(out), "--data"]
    assert refused([*told, str(tmp_path / "none")], capsys, out) == (
        f"{tmp_path / 'none'}: no such folder or file (--data)"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "readme.txt").write_text("no image")
    said = refused([*told, str(tmp_path / "empty")], capsys, out)
    assert re.match(rf"{tmp_path / 'empty'}: contains no images .* \(--data\)$", said)
    for number in range(20):
        write_image(tmp_path / "flat" / f"{number}.png", number)
    assert refused([*told, str(tmp_path / "flat"), "--method", "supervised"], capsys, out) == (
        f"supervised needs labels, but {tmp_path / 'flat'} has no labels: put the images of each class into a separate "
        "folder; for several classes per image, set multi_label (--data, --data.multi-label)"
    )
    assert main([*told, str(tmp_path / "flat"), "--steps", "1"]) == 0  # MP3 needs none
    assert not (out / "classes.json").exists()


@pytest.mark.parametrize("resident", ["auto", "never"])
def test_one_cut_jpeg_is_counted_at_the_end_with_the_command_that_lists_all(
    resident: str, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "images", tmp_path / "run"
    for number in range(32):
        write_image(data / f"{number:02d}.jpg", number)
    whole = (data / "07.jpg").read_bytes()
    (data / "07.jpg").write_bytes(whole[: len(whole) // 3])
    words = [*small, "--data", str(data), "--data.workers", "0", "--data.resident", resident, "--epochs", "1"]
    assert main([*words, "--out", str(out)]) == 0
    broken, command = capsys.readouterr().out.splitlines()[-4:-2]
    fate = "skipped" if resident == "auto" else "replaced by the next readable one"
    assert re.match(rf"1 of 32 images of images could not be read and was {fate}; the first: .*07\.jpg: ", broken)
    assert command == f"situs data check {data} lists every sample that cannot be read"
    strict = [*words, "--data.strict", "--out", str(tmp_path / "strict")]
    assert "07.jpg: cannot be decoded as an image" in refused(strict, capsys)
    assert not (tmp_path / "strict").exists()


def test_a_full_disk_is_one_sentence_and_the_earlier_checkpoint_is_whole(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from situs.train.checkpoint import writing

    real = writing.write_tensors

    def full(path: Path, *told: Any) -> Any:
        if "step-00000004" in str(path) and path.name.startswith("optimizer"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *told)

    out = tmp_path / "run"
    words = [*small, "--steps", "4", "--train.save-every", "2"]
    monkeypatch.setattr(writing, "write_tensors", full)
    capsys.readouterr()
    assert main([*words, "--out", str(out)]) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("situs: ")]
    assert said == (
        f"situs: {out}: the checkpoint of step 4 could not be written: no space left on device; "
        f"the checkpoint of step 2 is whole: resume {out} to continue from there"
    )
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.setattr(writing, "write_tensors", real)
    assert main(["pretrain", "--resume", str(out), "--device", "cpu"]) == 0
    assert main([*words, "--out", str(tmp_path / "peace")]) == 0
    resumed, peace = weights(out), weights(tmp_path / "peace")
    assert [name for name in peace if not torch.equal(peace[name], resumed[name])] == []


# --- a process of its own -----------------------------------------------------------------------------------


def test_ctrl_c_saves_and_the_run_can_be_resumed(small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Warm("-m", "situs", *small, "--steps", "100000", "--train.log-every", "1", "--out", out) as process:
        until = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "Traceback" not in complaints
    step = max(RunFolder.open(out, writer=False).steps())
    assert f"stopped after step {step}; resume {out} to continue" in complaints
    assert "done:" not in printed
    told = ["pretrain", "--resume", str(out), "--device", "cpu", "--steps", str(step + 1), "--train.log-every", "1"]
    assert main(told) == 0
    assert step + 1 in RunFolder.open(out, writer=False).steps()


@pytest.mark.slow
def test_two_ranks_under_torchrun_equal_one(small: list[str], tmp_path: Path) -> None:
    """The same global batch: a mean over ranks that is wrong by a factor moves the weights far more than this.

    Plain descent would show a factor directly; AdamW divides it away, so the gradient's norm is compared as well.
    """
    fixed = [*small, "--steps", "4", "--train.log-every", "1", "--backbone.drop-path", "0", "--optim.lr", "1e-3"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*fixed, "--out", str(one)]) == 0
    printed, complaints = torchrun("-m", "situs", *fixed, "--out", two)
    assert "fp32, 2 x cpu" in printed
    assert printed.count("done: 4 steps") == 1  # rank 0 alone speaks
    assert "arning" not in complaints.replace("learning", "")
    alone, both = (RunFolder.open(run, writer=False).records() for run in (one, two))
    for a, b in zip(alone, both, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=1e-4)
    start = weights(one)
    for name, value in weights(two).items():
        torch.testing.assert_close(value, start[name], rtol=0, atol=2e-5)  # one step moves a weight by 1e-3


def test_a_run_that_ends_at_chance_says_so(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, told in (("1e-9", True), ("1e-2", False)):
        steps = ["--steps", "2" if told else "60", "--data.count", "64", "--optim.lr", rate, "--train.log-every", "5"]
        assert main([*small, "--method", "mp3", *steps, "--out", str(tmp_path / rate)]) == 0
        printed = capsys.readouterr().err
        assert ("is near chance (0.0625): the run has learned almost nothing in 2 updates" in printed) is told, printed
