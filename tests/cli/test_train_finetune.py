"""`situs finetune`: as the README gives it, on a run alone, with every kind of position, and its mistakes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import encoded, write

from situs.cli.main import main
from situs.data.open import open_source
from situs.train.checkpoint import RunFolder
from situs.train.run import load_run

QUICK = ["--device", "cpu", "--batch", "12", "--data.workers", "0", "--steps", "3", "--optim.warmup-epochs", "0"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["finetune", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("situs: ")
    assert said.count("\n") == 1
    return said.removeprefix("situs: ").rstrip("\n")


def test_a_run_and_a_folder_are_enough(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images, their size and the model are the pretrained run's; only the training is asked for."""
    out = tmp_path / "ft"
    assert main(["finetune", "--from", str(trained.mp3), "--out", str(out), *QUICK]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "24 images of 3 × 8 × 8" in lines[0]
    assert lines[1].startswith(f"started from {trained.mp3}: ")
    assert lines[2] == "left as initialised: head.bias, head.weight, pos_embed"
    assert re.match(
        r"done: 3 steps, loss .*, accuracy .*, val top1 [\d.]+, val balanced [\d.]+, val majority [\d.]+, val loss",
        lines[-2],
    )
    assert lines[-1] == f"next: situs evaluate accuracy {out}, or situs export {out} --out {out}-exported"
    config = json.loads((out / "config.json").read_text())
    assert (config["data"]["path"], config["data"]["img_size"]) == (str(trained.data), 8)
    assert config["backbone"]["positions"] == "learned"
    assert config["method"]["name"] == "supervised"
    assert load_run(out).classes == ("dark", "light", "middle")


@pytest.mark.thin(2)
@pytest.mark.parametrize("positions", ["learned", "sincos", "relative", "none"])
def test_every_kind_of_position_can_be_asked_for(positions: str, trained: Any, tmp_path: Path) -> None:
    words = ["--from", str(trained.mp3), "--positions", positions, "--data", str(trained.data), *QUICK]
    assert main(["finetune", *words, "--out", str(tmp_path / "ft")]) == 0
    loaded = load_run(tmp_path / "ft")
    kinds = {"learned": {"table"}, "sincos": {"table"}, "relative": {"bias"}, "none": set()}
    assert set(loaded.method.backbone.positions().kinds) == kinds[positions]


def test_how_often_it_looks_has_one_flag(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["--probe-every", "2"], capsys)
    assert said.startswith("--probe-every: situs finetune has no such flag")
    assert main(["finetune", "--help", "all"]) == 0
    shown = capsys.readouterr().out
    assert "--validate-every" in shown and "--probe-every" not in shown


def test_validation_is_written_and_resuming_goes_on(trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "ft"
    words = ["--from", str(trained.one), *QUICK[:6], "--optim.warmup-epochs", "0", "--validate-every", "1"]
    assert main(["finetune", *words, "--epochs", "2", "--out", str(out)]) == 0
    assert main(["finetune", "--resume", str(out), "--epochs", "3", "--validate-every", "1", "--device", "cpu"]) == 0
    records = RunFolder.open(out, writer=False).records()
    assert [record["step"] for record in records if "val_top1" in record] == [2, 4, 6]


def test_weights_that_are_no_run_can_be_fine_tuned(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--init means what it means in pretrain, and positions can be replaced as with --from."""
    state = load_run(trained.mp3).method.backbone.model.state_dict()
    torch.save(state, tmp_path / "w.pt")
    (tmp_path / "tiny.toml").write_text(
        "[backbone]\nname = 'vit_tiny_patch16_224'\npatch_size = 4\n"
        "model_args = {depth = 2, embed_dim = 16, num_heads = 2}\n[optim]\nlr = 1e-9\n"
    )
    words = ["--init", str(tmp_path / "w.pt"), "--config", str(tmp_path / "tiny.toml"), "--data", str(trained.data)]
    words += ["--data.img-size", "8", *QUICK]
    assert main(["finetune", *words, "--out", str(tmp_path / "ft")]) == 0
    assert f"started from {tmp_path / 'w.pt'}" in capsys.readouterr().out
    found = load_run(tmp_path / "ft").method.backbone.model.state_dict()
    name = "blocks.1.attn.qkv.weight"
    torch.testing.assert_close(found[name], state[name], rtol=0, atol=1e-7)
    torch.testing.assert_close(found["pos_embed"], state["pos_embed"], rtol=0, atol=1e-7)
    assert main(["finetune", *words, "--positions", "none", "--out", str(tmp_path / "no")]) == 0
    assert "pos_embed" not in load_run(tmp_path / "no").method.backbone.model.state_dict()
    assert "method=mp3: fine-tuning needs" in refused([*words, "--method", "mp3", "--out", str(tmp_path / "x")], capsys)
    resume = ["--resume", str(tmp_path / "ft")]
    assert refused([*resume, "--positions", "none"], capsys) == (
        "positions=none: applies only to a new fine-tuning run; a resumed run keeps its own value (--positions)"
    )
    assert "--from" in refused([*resume, "--from", str(trained.mp3)], capsys)


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "ft")]
    told = [*out, "--from", str(trained.mp3), *QUICK]
    assert refused(out, capsys) == (
        "the initial weights are missing; give a pretrained model, or a weight file together with the name of its "
        "model, or a run to resume (--from, --init, --backbone, --resume)"
    )
    assert refused([*told, "--init", "x.pt"], capsys) == (
        f"give the initial model ({trained.mp3}) or other weights (x.pt), not both (--from, --init)"
    )
    assert refused([*told, "--backbone", "vit_tiny_patch16_224"], capsys) == (
        f"backbone=vit_tiny_patch16_224: {trained.mp3} has its own backbone; do not set backbone, "
        f"or give {trained.mp3} as init to load only its weights (--backbone, --init)"
    )
    for_pretrain = ["--resume", str(trained.mp3), "--device", "cpu"]
    assert refused(for_pretrain, capsys) == (
        f"{trained.mp3}: is a pretraining run (method mp3), not a fine-tuning run; use pretrain to resume this run, "
        "or start a new fine-tuning run from this run (--resume, --from, --out)"
    )
    assert "is a pretraining run (method supervised)" in refused(["--resume", str(trained.one)], capsys)
    none = tmp_path / "none"
    assert refused([*out, "--from", str(none)], capsys) == f"{none}: no such run, model folder or file (--from)"
    assert "method=mp3: fine-tuning needs a method that learns from labels" in refused(
        [*told, "--method", "mp3"], capsys
    )
    assert refused([*told, "--validate-every", "-1"], capsys) == "validate_every=-1: must be >= 0 (--validate-every)"
    # Where validation is asked for and none can be, the run is refused before it has begun.
    alone = [*told, "--data", str(trained.data / "train"), "--data.held-out", "0", "--validate-every", "1"]
    assert refused(alone, capsys) == (
        f"{trained.data / 'train'}: has no split 'val'; it has no splits, so 'train' means all samples; hold out a "
        "fraction of the data (such as 0.1), or choose another split; to train without validation, set "
        "validate_every=0 (--data.held-out, --data.split, --validate-every)"
    )
    flat = [*told, "--data", str(trained.data / "train" / "dark"), "--batch", "4"]
    assert refused(flat, capsys).startswith(
        f"supervised needs labels, but {trained.data / 'train' / 'dark'} has no labels"
    )
    (tmp_path / "broken.safetensors").write_bytes(b"abc" * 9)
    start = ["--data", str(trained.data), "--from", f"test_vit={tmp_path / 'broken.safetensors'}", *QUICK]
    said = refused([*out, *start], capsys)
    assert said.startswith(f"{tmp_path / 'broken.safetensors'}: is not a readable") and said.endswith(
        "(--from, --init)"
    )
    assert not (tmp_path / "ft").exists()


def test_a_fine_tuning_that_pretrain_goes_on_with_is_still_validated(trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "ft"
    words = ["--from", str(trained.one), *QUICK[:6], "--optim.warmup-epochs", "0", "--validate-every", "1"]
    assert main(["finetune", *words, "--epochs", "1", "--out", str(out)]) == 0
    assert main(["pretrain", "--resume", str(out), "--epochs", "2", "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "val_top1" in line]) == 2


def test_where_the_frozen_features_do_better_it_says_so_with_a_command_that_shows_it(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--from", str(trained.one), *QUICK[:-4], "--epochs", "10", "--optim.lr", "1e-9", "--train", "head"]
    words += ["--tuning.head", "new"]
    assert main(["finetune", *words, "--out", str(tmp_path / "ft")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "frozen features" in line]
    found = re.fullmatch(
        r".*frozen features.* better.*: (.+?) has .*?([\d.]+) %.* fine-tuned model .*?([\d.]+) %"
        r" \(to measure the frozen features: situs (.+)\)",
        lines[0],
    )
    assert found is not None and len(lines) == 1
    assert float(found[2]) > float(found[3])
    assert main([*shlex.split(found[4]), "--out", str(tmp_path / "look"), "--device", "cpu"]) == 0
    assert f"{found[2]} %" in capsys.readouterr().out
    # Three steps are less than ten passes: one more look at the images would cost much of the run.
    assert (
        main(["finetune", "--from", str(trained.one), *QUICK, "--optim.lr", "1e-9", "--out", str(tmp_path / "x")]) == 0
    )
    assert "are better" not in capsys.readouterr().err


def test_cut_images_are_counted_at_the_end_with_the_command_that_lists_all(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "my images", tmp_path / "ft"
    for number in range(40):
        value = np.full((8, 8, 3), 10 * (number % 20) + 5, np.uint8)
        write(data / ("dark" if number < 20 else "light") / f"{number:02d}.jpg", encoded(value, "JPEG"))
    cut = [data / open_source(str(data), split, held_out=0.2).key(0) for split in ("train", "val")]
    for file in cut:
        file.write_bytes(file.read_bytes()[:300])
    words = ["--from", str(trained.mp3), "--data", str(data), "--data.held-out", "0.2", "--data.resident", "never"]
    assert main(["finetune", *words, *QUICK, "--batch", "7", "--steps", "5", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    trained_on, judged_on = lines[-5:-3]
    assert "and was replaced by the next readable one; the first: " in trained_on
    assert "and was skipped; the first: " in judged_on
    assert "my images, without the held-out fraction 0.2 could not be read" in trained_on and str(cut[0]) in trained_on
    assert "my images, held-out fraction 0.2 could not be read" in judged_on and str(cut[1]) in judged_on
    assert lines[-3] == f"situs data check '{data}' lists every sample that cannot be read"
    assert main([*shlex.split(lines[-3].partition(" lists ")[0])[1:], "--workers", "0", "--out", "none"]) == 3
    listed = capsys.readouterr().out
    assert all(file.name in listed for file in cut)
