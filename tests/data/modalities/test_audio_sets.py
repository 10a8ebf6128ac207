"""A folder in the shape of Speech Commands, with all that goes wrong in one; and the real set where it is at hand."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from situs.data.audio import AUDIO, AudioAugment, AudioConfig
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.modalities.audio import (
    SILENCE,
    UNKNOWN,
    WORDS,
    Audio,
    Commands,
    NoiseBank,
    hashed_split,
    open_clips,
    part_of,
    read_noise,
)
from situs.data.sources.base import Wanted
from situs.errors import BrokenSampleError, SitusError

COMMANDS, EMPTY = AudioConfig(task="commands"), AudioConfig(task="commands", silence="empty")
pytest.importorskip("soundfile", reason="the extra `audio` is not installed")

RATE = 16_000
OTHERS = ("bed", "cat", "dog")
SPEAKERS = 12


def opened(path: Path, split: str | None = None, audio: AudioConfig = AUDIO):
    return open_clips(path, Wanted(split, settings=audio))


def write(file: Path, wave: np.ndarray, rate: int = RATE) -> None:
    import soundfile

    file.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(file, wave, rate)


def tone(word: int, speaker: int, samples: int = 1600) -> np.ndarray:
    """A tenth of a second is enough: it is filled up."""
    return 0.4 * np.sin(2 * np.pi * (200 + 50 * word + speaker) * np.arange(samples) / RATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    for number, word in enumerate((*WORDS, *OTHERS)):
        for speaker in range(SPEAKERS):
            write(root / word / f"{speaker:08x}_nohash_{number % 2}.wav", tone(number, speaker))
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 12 * RATE)
    write(root / "_background_noise_" / "hum.wav", noise)
    write(root / "_background_noise_" / "wind.flac", noise[::-1])
    (root / "_background_noise_" / "README.md").write_text("noise")
    (root / "LICENSE").write_text("CC BY 4.0")
    listed = {"validation_list.txt": (3, 4), "testing_list.txt": (7,)}
    for name, speakers in listed.items():
        lines = [f"{file.parent.name}/{file.name}" for file in sorted(root.glob("*/*_nohash_*"))]
        chosen = [line for line in lines if int(line.partition("/")[2][:8], 16) in speakers]
        (root / name).write_text("\n".join(chosen) + "\n")
    return root


def names(folder: Path, split: str) -> list[str]:
    source = opened(folder, split)
    return [source.key(index) for index in range(len(source))]


def test_the_lists_decide_the_splits(folder: Path) -> None:
    parts = {split: names(folder, split) for split in ("train", "val", "test")}
    assert [len(part) for part in parts.values()] == [9 * 13, 2 * 13, 13]
    assert {name.partition("/")[2][:8] for name in parts["test"]} == {"00000007"}
    assert len({name for part in parts.values() for name in part}) == SPEAKERS * 13
    assert names(folder, "validation") == parts["val"]
    source = opened(folder)
    assert source.name.endswith("(train)") and len(source) == 117
    assert source.classes == tuple(sorted((*WORDS, *OTHERS)))
    sample = source.read(0)
    assert sample["label"] == source.classes.index(source.key(0).partition("/")[0])
    assert sample["wave"].shape == (RATE,) and not sample["wave"][1600:].any() and sample["wave"][:1600].any()
    assert any(
        "left out 1 (their names are not those of clips: no ending 1); the first: LICENSE" in note
        for note in source.notes
    )


def test_without_lists_the_official_hash(folder: Path, tmp_path: Path) -> None:
    """As TensorFlow writes the rule, in percents."""

    def official(name: str) -> str:
        stem = re.sub(r"_nohash_.*$", "", name.rpartition("/")[2])
        number = int(hashlib.sha1(stem.encode(), usedforsecurity=False).hexdigest(), 16) % (2**27)
        percent = number * (100.0 / (2**27 - 1))
        return "val" if percent < 10 else "test" if percent < 20 else "train"

    copy = tmp_path / "plain"
    for file in folder.glob("*/*"):
        (copy / file.parent.name).mkdir(parents=True, exist_ok=True)
        (copy / file.parent.name / file.name).hardlink_to(file)
    every = [f"{file.parent.name}/{file.name}" for file in sorted(copy.glob("*/*_nohash_*"))]
    assert {official(name) for name in every} == {"train", "val", "test"}
    for split in ("train", "val", "test"):
        assert names(copy, split) == sorted(name for name in every if official(name) == split)
    assert hashed_split("yes/ff_nohash_0.wav") == hashed_split("no/ff_nohash_3.wav")  # a speaker is on one side


@pytest.mark.parametrize(("split", "words"), [("train", 90), ("val", 20), ("test", 10)])
def test_the_task_of_twelve_classes(folder: Path, split: str, words: int) -> None:
    source = opened(folder, split, audio=COMMANDS)
    assert isinstance(source, Commands)
    assert source.classes == (SILENCE, UNKNOWN, *WORDS)
    share = words // 10
    labels = [source.read(index)["label"] for index in range(len(source))]
    assert np.bincount(labels, minlength=12).tolist() == [share, share, *[share] * 10]
    for index, label in enumerate(labels):
        word = source.key(index).partition("/")[0]
        assert source.classes[label] == (word if word in WORDS or word == SILENCE else UNKNOWN)
    again = opened(folder, split, audio=COMMANDS)
    assert all(torch.equal(source.read(i)["wave"], again.read(i)["wave"]) for i in range(len(source)))
    silent = [source.read(index)["wave"] for index in range(len(source)) if labels[index] == 0]
    assert all(0 < float(wave.abs().max()) <= 0.5 for wave in silent)
    empty = opened(folder, split, audio=EMPTY)
    assert not empty.read(len(empty) - 1)["wave"].any() and empty.read(len(empty) - 1)["label"] == 0


def test_silence_is_the_same_wherever_the_set_lies(folder: Path, tmp_path: Path) -> None:
    """Or a run whose data was moved would go on with other clips."""
    (tmp_path / "moved").symlink_to(folder)
    for split in ("train", "test"):
        one, other = (opened(path, split, audio=COMMANDS) for path in (folder, tmp_path / "moved"))
        assert one.name != other.name and one.read(len(one) - 1)["label"] == 0
        assert torch.equal(one.read(len(one) - 1)["wave"], other.read(len(other) - 1)["wave"])


def test_too_few_unknown_words_are_told(folder: Path, tmp_path: Path) -> None:
    for word in (*WORDS, "bed"):
        (tmp_path / word).mkdir()
        for file in (folder / word).glob("*" if word != "bed" else "0000000b*"):
            (tmp_path / word / file.name).hardlink_to(file)
    (tmp_path / "validation_list.txt").write_text("")
    with pytest.raises(SitusError, match="_background_noise_: contains no background noise for the clips of silence"):
        opened(tmp_path, "train", audio=COMMANDS)
    source = opened(tmp_path, "train", audio=EMPTY)
    assert len(source) == 120 + 1 + 12
    assert any("has 1 clip of unknown words, but the task needs 12" in note for note in source.notes)


def test_broken_clips_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a" / "stereo.wav", np.stack([tone(0, 0, RATE), tone(5, 0, RATE)], axis=1))
    write(tmp_path / "a" / "short.flac", tone(0, 0, 4800))
    write(tmp_path / "a" / "long.ogg", tone(0, 0, 3 * RATE))
    write(tmp_path / "a" / "slow.wav", tone(0, 0, 8000), 8000)
    (tmp_path / "a" / "empty.wav").write_bytes(b"")
    (tmp_path / "a" / "text.wav").write_text("no sound at all\n" * 9)
    (tmp_path / "validation_list.txt").write_text("")
    source = opened(tmp_path)
    found, broken = {}, {}
    for index in range(len(source)):
        try:
            found[source.key(index)] = source.read(index)["wave"]
        except BrokenSampleError as error:
            broken[source.key(index)] = str(error)
    assert sorted(found) == ["a/long.ogg", "a/short.flac", "a/slow.wav", "a/stereo.wav"]
    assert all(wave.shape == (RATE,) for wave in found.values())
    assert sorted(broken) == ["a/empty.wav", "a/text.wav"]
    assert all(name in said and "cannot be decoded as audio" in said for name, said in broken.items())


def test_flat_folders_and_folders_of_splits(tmp_path: Path) -> None:
    flat, parted = tmp_path / "flat", tmp_path / "parted"
    for speaker in range(40):
        write(flat / f"{speaker:08x}_nohash_0.wav", tone(0, speaker))
    whole = opened(flat)
    assert whole.classes is None and len(whole) == 40 and "label" not in whole.read(0)
    parts = [len(opened(flat, split)) for split in ("train", "val", "test")]
    assert sum(parts) == 40 and min(parts) > 0
    for split, word in (("train", "a"), ("train", "b"), ("test", "b")):
        write(parted / split / word / "1.wav", tone(0, 1))
    assert [len(opened(parted, split)) for split in ("train", "test")] == [2, 1]
    assert opened(parted, "test").read(0)["label"] == 1
    write(parted / "test" / "c" / "1.wav", tone(0, 1))
    with pytest.raises(SitusError, match="class 'c' is not among the 2 classes"):
        opened(parted, "test")


def test_parquet_with_an_audio_column(folder: Path, tmp_path: Path) -> None:
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    words = sorted((*WORDS, *OTHERS))
    files = sorted(folder.glob("*/*_nohash_*"))
    rows = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    rows[2]["bytes"] = None
    features = {"label": {"names": words, "_type": "ClassLabel"}, "audio": {"_type": "Audio"}}
    table = pa.table({"audio": rows, "label": [words.index(file.parent.name) for file in files]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "train-0.parquet")
    (tmp_path / "_background_noise_").symlink_to(folder / "_background_noise_")
    source = opened(tmp_path, "train")
    assert source.classes == tuple(words) and len(source) == len(files)
    direct = opened(folder, "train")
    assert torch.equal(source.read(0)["wave"], direct.read(0)["wave"])
    with pytest.raises(BrokenSampleError, match="row 2 of row group 0"):
        source.read(2)
    with pytest.raises(BrokenSampleError, match="the row contains no clip bytes"):
        source.read(2)
    commands = opened(tmp_path, "train", audio=COMMANDS)
    assert np.bincount(commands.labels, minlength=12).tolist() == [0, 12, *[12] * 10] and commands.silent == 12
    pq.write_table(pa.table({"image": rows}), tmp_path / "train-0.parquet")
    with pytest.raises(SitusError, match=r"has no audio column .one of audio"):
        opened(tmp_path, "train")


def test_parquet_that_names_files(folder: Path, tmp_path: Path) -> None:
    """Paths from the root on, or from the parquet's folder, in {bytes, path} or a column of names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted(folder.glob("yes/*"))[:3]
    (tmp_path / "yes").symlink_to(folder / "yes")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    names = [str(files[0]), f"yes/{files[1].name}", "yes/nothing.wav", None]
    direct = opened(folder, "train")
    turned = pa.struct([("path", pa.string()), ("bytes", pa.binary())])
    rows = [{"bytes": None, "path": name} for name in names]
    for column in (pa.array(rows, kind), pa.array(rows, turned), pa.array(names, pa.string())):
        pq.write_table(pa.table({"audio": column}), tmp_path / "train-0.parquet")
        source = opened(tmp_path, "train")
        for index, file in enumerate(files[:2]):
            own = next(i for i in range(len(direct)) if direct.key(i) == f"yes/{file.name}")
            assert torch.equal(source.read(index)["wave"], direct.read(own)["wave"])
        with pytest.raises(
            BrokenSampleError,
            match=r"row 2 of row group 0: the row contains no clip bytes, and the file 'yes/nothing\.wav'",
        ):
            source.read(2)
        with pytest.raises(BrokenSampleError, match="row 3 of row group 0: the row contains no clip bytes"):
            source.read(3)


def test_a_list_that_is_missing_or_wrong_is_told(folder: Path, tmp_path: Path) -> None:
    """Or clips of the test would be trained on, and nobody would know."""
    for word in ("yes", "no"):
        (tmp_path / word).symlink_to(folder / word)
    write(tmp_path / "up" / "1_nohash_0.wav", tone(0, 0))
    assert any(
        "has no lists of the splits, so the file names determine the split" in note for note in opened(tmp_path).notes
    )
    first, second = (f"yes/{file.name}" for file in sorted((tmp_path / "yes").iterdir())[:2])
    (tmp_path / "validation_list.txt").write_text(f"./{first}\r\n{second}\nno/gone.wav\n".replace("yes/", "yes\\"))
    notes = opened(tmp_path).notes
    assert any("has no testing_list.txt, so it has no test split" in note for note in notes)
    assert any(
        "validation_list.txt: names 1 clip that does not exist; the first: no/gone.wav" in note for note in notes
    )
    assert names(tmp_path, "val") == [first, second]
    (tmp_path / "testing_list.txt").write_text("yes/other.wav\n")
    with pytest.raises(
        SitusError, match=r"testing_list\.txt: none of the clips that it lists is in .*; the first is 'yes/other\.wav'"
    ):
        opened(tmp_path)
    (tmp_path / "testing_list.txt").write_text("")
    write(tmp_path / "stray.wav", tone(0, 0))
    source = opened(tmp_path, "train")
    assert source.classes is None and any("stray.wav lies beside folders with samples" in note for note in source.notes)


def test_clips_that_the_lists_leave_out_or_name_twice_are_told(folder: Path, tmp_path: Path) -> None:
    for word in ("yes", "no"):
        (tmp_path / word).symlink_to(folder / word)
    one = "yes/00000003_nohash_0.wav"
    (tmp_path / "validation_list.txt").write_text(f"{one}\n")
    with pytest.raises(SitusError, match=f"^{tmp_path} has no clips of the split 'test'$") as stop:
        opened(tmp_path, "test")
    assert stop.value.field == "split"
    (tmp_path / "testing_list.txt").write_text(f"no/00000003_nohash_1.wav\n./{one}\n")
    with pytest.raises(SitusError, match=rf"testing_list\.txt: {one} is in validation_list\.txt as well$"):
        opened(tmp_path)


def test_a_clip_of_the_task_tells_which_file_it_is(folder: Path) -> None:
    source = opened(folder, "val", audio=EMPTY)
    for index in range(len(source)):
        whole, row = source.origin(index)
        assert whole.key(row) == source.key(index)
        assert torch.equal(whole.read(row)["wave"], source.read(index)["wave"])
        assert (whole is source) == (source.label(index) == 0)
    assert [source.key(index) for index in range(len(source)) if source.label(index) == 0] == [
        f"{SILENCE}/0",
        f"{SILENCE}/1",
    ]


def test_a_folder_of_noise_that_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    elsewhere = AudioConfig(task="commands", noise=str(tmp_path / "hum"))
    with pytest.raises(SitusError, match=f"^{tmp_path}/hum: no such folder of background noise$") as stop:
        opened(folder, audio=elsewhere)
    assert stop.value.field == "audio.noise"
    (tmp_path / "hum").symlink_to(folder / "_background_noise_")
    moved, beside = (opened(folder, audio=audio) for audio in (elsewhere, COMMANDS))
    assert torch.equal(moved.read(len(moved) - 1)["wave"], beside.read(len(beside) - 1)["wave"])


def test_each_side_hears_its_own_part_of_the_noise(folder: Path, tmp_path: Path) -> None:
    source, noise = opened(folder), folder / "_background_noise_"
    flat: dict[str, Any] = {"channels": 1, "mean": (0.0,) * 40, "std": (1.0,) * 40}
    data = DataConfig(str(folder), kind="audio", **flat)
    quiet = [AugmentConfig(audio=AudioAugment(**{name: 0})) for name in ("noise_share", "noise_level")]

    def heard(augment: AugmentConfig | None, **changed: Any) -> NoiseBank | None:
        return Audio().pipeline(source, replace(data, **changed), augment, torch.device("cpu")).bank

    loud, train = AudioConfig(snr_db=5.0), AugmentConfig()
    for part, augment, changed in (
        ("train", train, {}),
        ("train", train, {"split": "training"}),
        ("test", train, {"split": "test"}),
        ("val", None, {"audio": loud}),
        ("test", None, {"audio": loud, "split": "test"}),
        ("train", train, {"path": "", "audio": AudioConfig(noise=str(noise))}),
    ):
        bank, (wanted, _) = heard(augment, **changed), read_noise(noise, part)
        assert bank is not None and wanted is not None
        assert all(torch.equal(one, other) for one, other in zip(bank, wanted, strict=True))
    for augment, changed in ((None, {}), (quiet[0], {}), (quiet[1], {}), (train, {"path": ""})):
        assert heard(augment, **changed) is None
    assert not any("background noise" in note for note in source.notes)
    assert heard(train, path=str(tmp_path)) is None
    assert source.notes[-1] == f"{source.name}: has no background noise, so none is added"


@pytest.mark.parametrize("seconds", [12, 30])
def test_every_moment_of_the_noise_belongs_to_one_split(seconds: int, tmp_path: Path) -> None:
    write(tmp_path / "hum.wav", tone(0, 0, seconds * RATE))
    end = 0
    for part in ("train", "val", "test"):
        bank, _ = read_noise(tmp_path, part)
        assert bank is not None and bank.starts.tolist() == [end]
        end += int(bank.lengths)
    assert end == seconds * RATE


@pytest.mark.parametrize(
    ("resident", "more", "held"), [("auto", 0, True), ("auto", -1, False), ("always", -1, True), ("never", 0, False)]
)
def test_clips_are_held_where_they_fit(folder: Path, resident: Any, more: int, held: bool) -> None:
    """Two bytes a sample of sound."""
    source = opened(folder, "test")
    gib = (len(source) * RATE * 2 + more) / 2**30
    scale: dict[str, Any] = {"channels": 1, "mean": (0.0,) * 40, "std": (1.0,) * 40}
    data = DataConfig(str(folder), kind="audio", resident=resident, resident_gib=gib, **scale)
    assert Audio().pipeline(source, data, None, torch.device("cpu")).resident is held


def test_own_clips_of_silence_are_not_unknown_words(folder: Path, tmp_path: Path) -> None:
    for each in folder.iterdir():
        (tmp_path / each.name).symlink_to(each)
    write(tmp_path / SILENCE / "1_nohash_0.wav", tone(0, 0))
    source = opened(tmp_path, "train", audio=COMMANDS)
    assert len(source) == len(opened(folder, "train", audio=COMMANDS))
    assert any("left out 1 clip of _silence_" in note for note in source.notes)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match="contains no clips"):
        opened(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(SitusError, match="must be a folder of audio files"):
        opened(tmp_path / "a.txt")
    write(tmp_path / "a" / "1.wav", tone(0, 0))
    with pytest.raises(SitusError, match="has no clips of yes, no, up"):
        opened(tmp_path, "train", audio=EMPTY)
    with pytest.raises(SitusError, match="one of train, val, test"):
        opened(tmp_path, "tset")
    assert [part_of(name) for name in (None, "training", "valid", "validation", "test")] == [
        *("train", "train", "val", "val", "test"),
    ]


@pytest.mark.shared_data
def test_the_published_splits_follow_the_hash(shared_data: Path) -> None:
    """Speech Commands v0.01: the lists were made by the rule, so that each clip's own name must give its split."""
    import pyarrow.parquet as pq

    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        file = next((shared_data / "speech_commands").glob(f"{name}-*.parquet"))
        paths = [each["path"] for each in pq.ParquetFile(file).read(columns=["audio.path"])["audio"].to_pylist()]
        assert {hashed_split(path) for path in paths} == {split}


@pytest.mark.slow
@pytest.mark.shared_data
def test_the_papers_counts(shared_data: Path) -> None:
    for split, words, unknown in (("train", 18_538, 1_800), ("val", 2_577, 258), ("test", 2_567, 257)):
        source = opened(shared_data / "speech_commands", split, audio=COMMANDS)
        counts = np.bincount(source.labels, minlength=12)
        assert (counts[2:].sum(), counts[1]) == (words, unknown)
        assert source.silent == -(-words // 10)
        assert source.read(0)["wave"].shape == (RATE,) and source.read(len(source) - 1)["label"] == 0
