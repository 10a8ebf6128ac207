"""A generated folder in the form of Speech Commands, with all that goes wrong in one, through every verb."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from situs.cli.main import main
from situs.data.audio import AudioConfig
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities.audio import WORDS
from situs.data.open import judged_split, kind_of, open_source, splits_at
from situs.errors import SitusError
from situs.locks.folder import write_model
from situs.models import Model, open_model
from situs.models.data import load_set
from situs.train.checkpoint import RunFolder

soundfile: Any = pytest.importorskip("soundfile", reason="the extra `audio` is not installed")

RATE = 16_000
SMALL = """
backbone = { patch_size = [12, 1], model_args = { depth = 1, embed_dim = 16, num_heads = 2 } }
data = { batch = 16, audio = { seconds = 0.2, mels = 12, coefficients = 12 } }
optim = { warmup_steps = 1 }
train = { log_every = 2 }
"""


def tone(word: int, speaker: int, samples: int = RATE // 5) -> np.ndarray:
    return 0.4 * np.sin(2 * np.pi * (200 + 150 * word + speaker) * np.arange(samples) / RATE)


def write(file: Path, wave: np.ndarray, rate: int = RATE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(file, wave, rate)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten words and two others of twelve speakers; speakers 3 and 4 are for validation, 7 for the test."""
    root = tmp_path_factory.mktemp("clips") / "words"
    for word, name in enumerate((*WORDS, "bed", "cat")):
        for speaker in range(12):
            write(root / name / f"{speaker:08x}_nohash_0.wav", tone(word, speaker))
    write(root / "yes" / "000000f0_nohash_0.wav", np.stack([tone(0, 1), tone(9, 1)], axis=1))  # stereo
    write(root / "yes" / "000000f1_nohash_0.wav", tone(0, 1, 4800))  # .3 s
    write(root / "no" / "000000f2_nohash_0.flac", tone(1, 1, 800), 8000)
    (root / "no" / "000000f3_nohash_0.wav").write_bytes(b"")
    (root / "up" / "000000f4_nohash_0.wav").write_text("no sound at all\n" * 9)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 4 * RATE)
    write(root / "_background_noise_" / "hum.wav", noise)
    for name, speakers in {"validation_list.txt": (3, 4), "testing_list.txt": (7,)}.items():
        lines = [f"{file.parent.name}/{file.name}" for file in sorted(root.glob("*/0000000*_nohash_*"))]
        (root / name).write_text("\n".join(line for line in lines if int(line.partition("/")[2][:8], 16) in speakers))
    return root


@pytest.fixture(scope="session")
def small(clips: Path) -> list[str]:
    """The words that make a preset of speech small."""
    (clips.parent / "small.toml").write_text(SMALL)
    return ["--config", str(clips.parent / "small.toml"), "--data", str(clips), "--device", "cpu"]


@pytest.fixture(scope="session")
def mp3(clips: Path, small: list[str]) -> Path:
    """Six updates of MP3, in one go."""
    out = clips.parent / "mp3"
    words = [
        "--steps",
        "6",
        "--train.save-every",
        "2",
        "--train.keep",
        "1",
        "--train.keep-at",
        "2,4",
        "--out",
        str(out),
    ]
    assert main(["pretrain", "--preset", "speech-mp3", *small, *words]) == 0
    return out


@pytest.fixture(scope="session")
def tuned(clips: Path, small: list[str], mp3: Path) -> Path:
    out = clips.parent / "tuned"
    words = ["--from", str(mp3), "--validate-every", "1", "--epochs", "4", "--out", str(out)]
    assert main(["finetune", "--preset", "speech-supervised", *small, *words]) == 0
    return out


@pytest.fixture(autouse=True)
def _undrawn(undrawn: None) -> None:
    """Pages are made and their figures not drawn."""


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return RunFolder.open(run, writer=False).newest().tensors("model")


def logits(model: Model, data: Path, **chosen: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.backbone(batch.inputs) for batch in load_set(model, data, **chosen)])


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) not in (0, None)
    said = capsys.readouterr().err
    assert said.startswith("situs: ") and said.count("\n") == 1, said
    return said


def test_what_lies_there_is_found_out(clips: Path) -> None:
    assert kind_of(clips) == "audio" and kind_of("samples") == "image"
    assert splits_at(clips) == {"train", "val", "test"} and judged_split(clips) == "val"
    source = open_source(clips, "test", kind="audio")
    assert len(source) == 12 and source.classes == tuple(sorted((*WORDS, "bed", "cat"))) and source.things == "clips"


def test_a_run_knows_its_clips_and_says_what_it_left_out(
    clips: Path, mp3: Path, capsys: pytest.CaptureFixture[str], small: list[str], tmp_path: Path
) -> None:
    config = json.loads((mp3 / "config.json").read_text())
    data = config["data"]
    assert (data["kind"], data["channels"], data["img_size"]) == ("audio", 1, [12, 18])
    assert len(data["mean"]) == len(data["std"]) == 12 and min(data["std"]) > 0
    capsys.readouterr()
    assert main(["pretrain", "--preset", "speech-droppos", *small, "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    # Of the ten words 95 clips, 9 · 10 of the speakers and 5 odd ones, two broken; a tenth of them unknown and silence.
    assert "words (train): 113 clips of 3200 samples on cpu" in said
    assert "2 of 115 clips of words (train) could not be read and were skipped" in said
    assert "cannot be decoded as audio" in said


def test_a_run_that_was_stopped_goes_on_to_the_bit(clips: Path, mp3: Path, small: list[str], tmp_path: Path) -> None:
    words = ["pretrain", "--preset", "speech-mp3", *small, "--train.save-every", "2"]
    assert main([*words, "--steps", "3", "--out", str(tmp_path / "run")]) == 0
    assert main(["pretrain", "--resume", str(tmp_path / "run"), "--steps", "6", "--device", "cpu"]) == 0
    once, twice = tensors(mp3), tensors(tmp_path / "run")
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)
    assert main([*words, "--steps", "6", "--data.resident", "never", "--out", str(tmp_path / "streamed")]) == 0
    streamed = tensors(tmp_path / "streamed")
    config = json.loads((tmp_path / "streamed" / "config.json").read_text())
    assert config["data"]["mean"] == json.loads((mp3 / "config.json").read_text())["data"]["mean"]
    assert streamed.keys() == once.keys()  # a stand-in takes a broken clip's place there, so the batches are others


def test_named_checkpoints_stay_and_can_be_started_from(
    mp3: Path, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(each.name for each in (mp3 / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    early, late = open_model(mp3 / "checkpoints" / "step-00000002"), open_model(mp3)
    assert (early.facts["step"], late.facts["step"]) == (2, 6) and early.name == late.name == "mp3"
    words = ["--from", str(mp3 / "checkpoints" / "step-00000002"), "--steps", "1", "--optim.lr", "1e-9"]
    words += ["--validate-every", "0", "--optim.warmup-lr", "1e-9", "--out", str(tmp_path / "run")]
    assert main(["finetune", "--preset", "speech-supervised", *small, *words]) == 0
    assert "there is no validation, so the newest checkpoint is the run's model" in capsys.readouterr().err
    begun, own = open_model(tmp_path / "run").backbone.state_dict(), early.backbone.state_dict()
    block = "model.blocks.0.attn.qkv.weight"
    assert torch.allclose(begun[block], own[block], atol=1e-6)
    assert not torch.allclose(begun[block], late.backbone.state_dict()[block], atol=1e-6)


def test_the_best_validation_is_the_runs_model(tuned: Path) -> None:
    records = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    looks = [(each["val_top1"], -each["step"]) for each in records if "val_top1" in each]
    assert len(looks) == 4
    best = -max(looks)[1]
    assert open_model(tuned).facts["step"] == best
    assert (tuned / "checkpoints" / f"step-{best:08d}").is_dir()
    state = json.loads((tuned / "checkpoints" / f"step-{max(-s for _, s in looks):08d}" / "state.json").read_text())
    assert (state["best"]["by"], state["best"]["step"]) == ("val_top1", best)


def test_accuracy_clean_and_with_noise(clips: Path, tuned: Path, tmp_path: Path) -> None:
    for name, more in {"clean": [], "noisy": ["--snr-db", "-10"]}.items():
        words = ["--split", "test", "--device", "cpu", "--out", str(tmp_path / name), *more]
        assert main(["evaluate", "accuracy", str(tuned), *words]) == 0
    clean, noisy = (json.loads((tmp_path / name / "accuracy.json").read_text()) for name in ("clean", "noisy"))
    assert clean["loss"] != noisy["loss"]
    assert "snr_db" not in json.dumps(clean) and '"snr_db": -10' in json.dumps(noisy)
    model = open_model(tuned)
    assert torch.equal(logits(model, clips, snr_db=5.0), logits(model, clips, snr_db=5.0))
    assert not torch.equal(logits(model, clips, snr_db=5.0), logits(model, clips))


def test_an_export_reads_clips_as_the_run_did(clips: Path, tuned: Path, tmp_path: Path) -> None:
    import timm

    out = tmp_path / "export"
    assert main(["export", str(tuned), "--out", str(out)]) == 0
    run, export = open_model(tuned), open_model(out)
    assert export.data.kind == "audio" and export.classes == run.classes and len(run.classes or ()) == 12
    assert (export.data.audio, export.data.normalisation) == (run.data.audio, run.data.normalisation)
    assert torch.equal(logits(run, clips, split="test"), logits(export, clips, split="test"))
    batch = next(iter(load_set(run, clips, split="test")))
    plain = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(batch.inputs), run.backbone(batch.inputs), rtol=0, atol=1e-5)
    card = (out / "README.md").read_text()
    assert "Clips: 0.2 s at 16,000 samples per second" in card and "12 MFCCs per frame, 18 frames" in card
    assert str(clips.parent) not in card + (out / "config.json").read_text()
    words = ["--from", str(out), "--data", str(clips), "--steps", "1", "--validate-every", "0", "--device", "cpu"]
    recipe = ["--preset", "speech-supervised", "--config", str(clips.parent / "small.toml")]
    assert main(["finetune", *recipe, *words, "--out", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "config.json").read_text())["data"]
    assert again["mean"] == list(run.data.mean) and again["audio"]["seconds"] == 0.2


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "position", "MP3"],
        ["evaluate", "knn", "TUNED", "--k", "3"],
        ["evaluate", "probe", "TUNED"],
        ["evaluate", "consistency", "TUNED"],
        ["evaluate", "attention", "TUNED"],
        ["evaluate", "attention", "--kind", "correlation", "TUNED"],
        ["evaluate", "position", "--kind", "vectors", "TUNED"],
        ["evaluate", "reconstruct", "MP3"],
        ["features", "TUNED"],
        ["predict", "TUNED"],
        pytest.param(["adapt", "TUNED", "--data", "CLIPS", "--minutes", "0.001"], marks=pytest.mark.slow),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_verb_that_looks_at_a_model_takes_clips(
    words: list[str], mp3: Path, tuned: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [{"MP3": str(mp3), "TUNED": str(tuned), "CLIPS": str(clips)}.get(word, word) for word in words]
    out = tmp_path / {"features": "features.safetensors", "predict": "named.csv"}.get(words[0], "look")
    capsys.readouterr()
    assert main([*named, "--device", "cpu", "--out", str(out)]) in (0, None)
    assert out.exists()
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert len(pages) == (words[0] not in ("features", "predict"))
    for text in (*pages, capsys.readouterr().out):
        told = re.sub(r"data:image/[^\"]*|image-rendering", "", text.split("Words on this page")[0])
        assert not re.search(r"\bimages?\b", told, re.IGNORECASE), told


def test_what_is_for_images_is_one_sentence(
    clips: Path, tuned: Path, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pretrain", "--preset", "speech-mp3", *small, "--steps", "1", "--out", str(tmp_path / "run")]
    assert "crop_share=0.5: does not apply to clips" in refused([*words, "--data.crop-share", "0.5"], capsys)
    said = refused([*words, "--augment.mixup", "0.8"], capsys)
    assert "mixup=0.8: does not apply to clips" in said and "(--augment.mixup)" in said
    assert "(12,18)" in refused([*words, "--data.img-size", "40,98"], capsys)
    said = refused([*words, "--data.audio.noise", str(tmp_path / "none")], capsys)
    assert "no such folder of background noise (--data.audio.noise)" in said
    assert "contains clips, but only images can be checked" in refused(["data", "check", str(clips)], capsys)
    packing = ["data", "pack", str(clips), "--out", str(tmp_path / "packed")]
    assert "contains clips, but only images can be packed" in refused(packing, capsys)
    look = ["--device", "cpu", "--out", str(tmp_path / "look")]
    assert "corruptions apply only to images" in refused(["evaluate", "robustness", str(tuned), *look], capsys)
    assert not (tmp_path / "run").exists() and not (tmp_path / "packed").exists()


def test_images_for_clips_and_clips_for_images_are_told(
    clips: Path, tuned: Path, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--device", "cpu", "--out", str(tmp_path / "run")]
    preset = ["pretrain", "--preset", "speech-mp3", *small[:2]]
    told = "samples: contains images, but clips are expected (--data)"
    assert told in refused([*preset, "--data", "samples", *out], capsys)
    asked = refused(["pretrain", "--preset", "cifar100-mp3", "--data", str(clips), *out], capsys)
    assert f"{clips}: contains clips, but images are expected: mean=" in asked
    assert "contains clips, but images are expected (--data)" in refused(
        [*preset, "--data", str(clips), "--data.kind", "image", *out], capsys
    )
    look = ["--device", "cpu", "--out", str(tmp_path / "look")]
    assert told in refused(["evaluate", "accuracy", str(tuned), "--data", "samples", *look], capsys)
    said = refused([*preset, "--data", str(clips), "--data.audio.seconds", "0.01", *out], capsys)
    assert "seconds=0.01: must be at least 0.03 s, the length of a frame (--data.audio.seconds)" in said
    (tmp_path / "cover").mkdir()
    (tmp_path / "cover" / "a.png").write_bytes(b"")
    write(tmp_path / "cover" / "word" / "b.wav", tone(0, 0))
    assert kind_of(tmp_path / "cover", kind="audio") == "audio" and kind_of(tmp_path / "cover") == "image"


@pytest.mark.slow
def test_spectrogram_patches_of_transformers_are_trained_and_come_back(clips: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    patches = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 12}
    config = transformers.ASTConfig(**shape, **patches, architectures=["ASTForAudioClassification"])
    config.save_pretrained(tmp_path / "ast")
    words = ["--method", "supervised", "--backbone.name", str(tmp_path / "ast" / "config.json"), "--data", str(clips)]
    words += ["--data.audio.kind", "logmel", "--data.audio.mels", "12", "--data.audio.seconds", "0.18", "--batch", "16"]
    words += ["--steps", "2", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(["pretrain", *words]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "export")]) == 0
    run, export = open_model(tmp_path / "run"), open_model(tmp_path / "export")
    assert run.backbone.grid == (3, 4)
    (tmp_path / "written").mkdir()
    write_model(run, tmp_path / "written")  # as a lock does
    for other in (export, open_model(tmp_path / "written")):
        assert other.data.audio == run.data.audio and other.data.mean == run.data.mean
        assert torch.equal(logits(run, clips, split="test"), logits(other, clips, split="test"))


def test_few_labels_of_each_word(clips: Path) -> None:
    config = AudioConfig(task="commands", seconds=0.2, mels=12, coefficients=12)
    data = DataConfig(str(clips), kind="audio", audio=config, per_class=2, batch=8)
    found = make_loader(data, AugmentConfig())
    assert len(found.source) == 24
    labels = torch.cat([batch.targets["label"] for batch in found])
    assert labels.bincount(minlength=12).tolist() == [2] * 12


def test_a_model_of_images_is_not_given_clips(tuned: Path, clips: Path) -> None:
    loader = load_set(open_model(tuned), clips)
    with pytest.raises(SitusError, match="contains clips, but images are needed"):
        _ = loader.mean
    with pytest.raises(SitusError, match="contains clips, but images are expected"):
        make_loader(DataConfig(img_size=8), None, source=loader.source)


def test_a_flat_folder_is_pretrained_on_and_needs_no_noise(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(20):
        write(tmp_path / "flat" / f"{number}.wav", tone(number, 0))
    words = ["pretrain", "--preset", "speech-mp3", *small[:2], "--data", str(tmp_path / "flat"), "--device", "cpu"]
    words += ["--steps", "2", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "flat: has no background noise, so none is added" in said
    assert "flat: has no labels, so all clips are used and no silence is added" in said
    supervised = ["speech-supervised" if word == "speech-mp3" else word for word in words[:-1]]
    said = refused([*supervised, str(tmp_path / "other")], capsys)
    assert said.endswith(f"supervised needs labels, but {tmp_path / 'flat'} has no labels (--data)\n")
    many = refused([*words[:-1], str(tmp_path / "other"), "--batch", "64"], capsys)
    assert "batch=64: must be at most the set's 20 samples (--batch)" in many
