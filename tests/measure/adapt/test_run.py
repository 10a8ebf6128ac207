"""`situs adapt` and `situs.adapt` as a user runs them, on small pictures and a small model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import tiny_texts
import torch
from builders import small_vit
from memory_kinds import CLASSES, SIDE, pictures, write_folder
from safetensors.torch import save_file

import situs
from situs.errors import SitusError
from situs.measure.accuracy import Accuracy
from situs.measure.adapt import bench as benches
from situs.measure.adapt import run as runs
from situs.measure.adapt.bench import Bench
from situs.measure.adapt.run import FEWEST, FROZEN, plan_of, seconds_of
from situs.measure.adapt.ways import PARTS
from situs.measure.probe.linear import head_of
from situs.train.distributed import Ranks
from situs.train.run import load_run

TRAIN, TEST = pictures(24, 0), pictures(12, 1)
MEMORY = {
    "train": (TRAIN[0], [CLASSES[each] for each in TRAIN[1]]),
    "test": (TEST[0], [CLASSES[each] for each in TEST[1]]),
}
OPTIONS: dict[str, Any] = {"device": "cpu", "quiet": True, "minutes": 30.0}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    """Trainings of a few updates, whatever the machine does beside."""
    monkeypatch.setattr(runs, "UPDATES", 3)
    monkeypatch.setattr(runs, "EPOCHS", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small ViT that was hardly trained."""
    shape = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    backbone = {"name": "vit_tiny_patch16_224", "patch_size": 8, "model_args": shape}
    data, out = {"path": (TRAIN[0], TRAIN[1]), "img_size": SIDE}, tmp_path_factory.mktemp("adapt") / "base"
    quick: Any = {"steps": 1, "batch": 8, "device": "cpu", "quiet": True}
    return situs.pretrain(data, out=out, method="supervised", backbone=backbone, **quick)


def folder_of(path: Path) -> Path:
    for split, (pixels, labels) in (("train", TRAIN), ("test", TEST)):
        order = np.argsort(labels, kind="stable")
        write_folder(path / split, pixels[order], [labels[at] for at in order])
    return path


@pytest.mark.slow
def test_the_whole_in_memory_and_from_a_folder_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    order = np.argsort(TRAIN[1], kind="stable")
    same = {"train": (TRAIN[0][order], [CLASSES[TRAIN[1][at]] for at in order])}
    order = np.argsort(TEST[1], kind="stable")
    same["test"] = (TEST[0][order], [CLASSES[TEST[1][at]] for at in order])
    found = [
        situs.adapt(model, data=data, out=tmp_path / name, method="mp3", **OPTIONS)
        for name, data in (("memory", same), ("files", str(folder_of(tmp_path / "data"))))
    ]
    first, second = found
    assert [each.name for each in first.tried] == [each.name for each in second.tried]
    every = ["kNN", "class means", "linear probe", *PARTS]
    assert [each.name for each in first.tried] == [*every[:3], *PARTS, *(f"{way} after mp3" for way in every)]
    for one, other in zip(first.tried, second.tried, strict=True):
        assert torch.equal(one.right, other.right)
    weights = [load_run(tmp_path / name).method.state_dict() for name in ("memory", "files")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert situs.open_model(tmp_path / "files" / "export").backbone.num_classes == 3
    page = (tmp_path / "files" / "adapt.html").read_text(encoding="utf-8")
    numbers = json.loads((tmp_path / "files" / "adapt.json").read_text())
    assert sum(row["chosen"] for row in numbers["tried"]) == 1 and numbers["test"]["count"] == 12
    assert "all layers after mp3" in page and "top-1 of the simplest recipe" in page


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[bytes], set[bytes] | None]]:
    """Of every loader: its images, and whether it trains."""
    seen: list[Any] = []
    make = benches.make_loader

    def watched(data: Any, augment: Any, device: Any, *, source: Any) -> Any:
        seen.append(({source.read(at)["image"].numpy().tobytes() for at in range(len(source))}, augment is not None))
        return make(data, augment, device, source=source)

    monkeypatch.setattr(benches, "make_loader", watched)
    return seen


def test_test_images_are_looked_at_last_and_folds_are_apart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = recorded(monkeypatch)
    situs.adapt(model, data=MEMORY, out=tmp_path / "out", **OPTIONS)
    test = {image.transpose(2, 0, 1).tobytes() for image in TEST[0]}
    train = {image.transpose(2, 0, 1).tobytes() for image in TRAIN[0]}
    at = next(number for number, (images, _) in enumerate(seen) if images & test)
    assert all(images == test or images <= train for images, _ in seen)
    assert not any(images & test for images, training in seen if training)
    trainings = [images for images, training in seen[:at] if training]
    pairs = [(seen[n][0], seen[n + 1][0]) for n in range(at - 1) if not seen[n][1] and seen[n + 1][1]]
    folds = [pair for pair in pairs if len(pair[0]) < len(train)]
    assert len(folds) == 5 * len(PARTS)  # each way on each of the folds
    assert all(not judged & learned and judged | learned == train for judged, learned in folds)
    assert len(trainings) >= len(folds)


def plant(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Of the ways that train, this one names every image of the folds right; all others none."""
    frozen, trained = Bench.frozen, Bench.trained

    def none_right(*given: Any) -> Any:
        return [each._replace(right=each.right * 0) for each in frozen(*given)]

    def planted(self: Bench, name: Any, *given: Any, **more: Any) -> Any:
        row = trained(self, name, *given, **more)
        return row._replace(right=row.right * 0 + (name == way))

    monkeypatch.setattr(Bench, "frozen", none_right)
    monkeypatch.setattr(Bench, "trained", planted)


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("all layers", "all"),
        pytest.param("LoRA", "lora", marks=pytest.mark.slow),
        pytest.param("none", "head", marks=pytest.mark.slow),
    ],
)
def test_the_best_on_the_folds_is_fitted_to_all_and_written(
    way: str, parts: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, way)
    result = situs.adapt(model, data=MEMORY, out=tmp_path / "out", **OPTIONS)
    assert result.chosen.way == ("class means" if way == "none" else way)
    loaded = load_run(tmp_path / "out")
    assert loaded.config.tuning.parts == parts and loaded.classes == CLASSES
    start = load_run(model).method.state_dict()
    name = "backbone.model.blocks.0.attn.qkv.weight"
    moved = not torch.equal(loaded.method.state_dict()[name], start[name])
    assert moved == (way != "none")
    assert loaded.checkpoint.step == result.chosen.updates
    again: Any = situs.evaluate_accuracy(tmp_path / "out", MEMORY)  # what was judged, by the verb that judges any run
    assert result.test is not None and again.accuracy.top1 == result.test.top1 and again.accuracy.count == 12


def test_one_label_a_class_takes_class_means_by_a_fixed_rule(model: Path, tmp_path: Path) -> None:
    data = {"train": (TRAIN[0][:3], MEMORY["train"][1][:3]), "test": MEMORY["test"]}
    result = situs.adapt(model, data=data, out=tmp_path / "out", **OPTIONS)
    assert [each.way for each in result.tried] == ["class means"] and "always chooses" in result.summary().sentence
    assert load_run(tmp_path / "out").config.train.max_steps == 1  # a run has a step, though none was needed
    # by hand: the nearest of three images by the cosine of what the classifier is fed
    loaded = load_run(tmp_path / "out")
    head, inputs = head_of(loaded.method.backbone, 3), list[torch.Tensor]()
    head.register_forward_pre_hook(lambda _, given: inputs.append(given[0].double()))
    mean, std = (torch.tensor(each)[:, None, None] for each in loaded.config.data.normalisation)
    for pixels in (TRAIN[0][:3], TEST[0]):
        loaded.method.backbone((torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - mean) / std)
    bank, test = (each / each.norm(dim=1, keepdim=True) for each in inputs)
    named = (test @ bank.T).argmax(dim=1)
    hits = (named == torch.tensor(TEST[1])).double().mean()
    assert result.test is not None and result.test.top1 == pytest.approx(float(hits))


def test_worse_than_the_start_is_said() -> None:
    def accuracy(top1: float, balanced: float) -> Accuracy:
        return Accuracy(top1, 1.0, 37, 1.0, balanced, 0.4, 3)

    assert (
        runs.worse(accuracy(0.9, 0.9), accuracy(0.8, 0.8)) == runs.worse(accuracy(0.8, 0.8), accuracy(0.8, 0.8)) == []
    )
    told = runs.worse(accuracy(0.7, 0.9), accuracy(0.8, 0.8))
    assert len(told) == 1 and all(part in told[0] for part in ("worse", "top-1", "70.00 %", "80.00 %", "37"))
    balanced = runs.worse(accuracy(0.9, 0.7), accuracy(0.8, 0.8))[0]
    assert all(part in balanced for part in ("balanced accuracy", "70.00 %", "80.00 %"))


def test_ctrl_c_chooses_among_what_was_measured(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, done = Bench.trained, list[str]()

    def stopped(self: Bench, name: Any, *given: Any, **more: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(name)
        return trained(self, name, *given, **more)

    monkeypatch.setattr(Bench, "trained", stopped)
    result = situs.adapt(model, data=MEMORY, out=tmp_path / "out", **OPTIONS)
    assert [each.way for each in result.tried] == ["kNN", "class means", "linear probe", "LoRA"]
    sentence = result.summary().sentence
    assert "interrupted" in sentence and ": all layers, head." in sentence
    assert load_run(tmp_path / "out").classes == CLASSES


@pytest.mark.parametrize("any_size", [True, False])
def test_images_are_reduced_where_their_features_take_the_whole_time(
    any_size: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if no size was chosen; either way the time is said before the features are computed."""
    weights = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=16, num_heads=2).state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    monkeypatch.setattr(runs, "FEATURES_SHARE", 1e-9)
    asked, said = list[tuple[Any, bool]](), list[str]()

    def opened(config: Any, origin: Any, limit: float, device: Any, start: Any, _: Any, may: bool) -> Any:
        asked.append((config.data.size, may))
        size = affordable_bench(config, origin, limit, device, start, said.append, may)[0].config.data.size
        raise SitusError(f"{size}")

    affordable_bench = runs.affordable_bench
    monkeypatch.setattr(runs, "affordable_bench", opened)
    shape = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    data = {"path": MEMORY, **({} if any_size else {"img_size": 224})}
    with pytest.raises(SitusError, match=r"\(112, 112\)" if any_size else r"\(224, 224\)"):
        situs.adapt(
            f"vit_tiny_patch16_224={tmp_path / 'w.safetensors'}",
            data=data,
            out=tmp_path / "out",
            backbone={"model_args": shape},
            **OPTIONS,
        )
    assert asked == [((224, 224), any_size)]
    assert len(said) == 1 and said[0].startswith(
        "At 224 × 224 pixels, computing the features of the frozen model already takes about"
    )
    assert ("reduced to 112 × 112 pixels (img_size sets another size)" in said[0]) == any_size


def test_no_update_is_timed_where_none_fits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing the ways itself takes longer than a time limit that is over already."""
    monkeypatch.setattr(runs, "seconds_of", lambda *_: pytest.fail("an update was timed"))
    result = situs.adapt(model, data=MEMORY, out=tmp_path / "out", **{**OPTIONS, "minutes": 1e-6})
    assert [each.way for each in result.tried] == ["kNN", "class means", "linear probe"]
    sentence = result.summary().sentence
    assert "not enough" in sentence and "LoRA, all layers, head." in sentence


def test_after_pretraining_the_frozen_recipes_are_tried_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the training split and the images without labels, never on those of the test."""
    monkeypatch.setattr(runs, "plan_of", lambda *_: runs.Plan({(FROZEN, True): 1.0}, 5, 2, 0.0))
    seen, more = recorded(monkeypatch), pictures(5, 2)[0]
    options = {**OPTIONS, "quiet": False}
    result = situs.adapt(model, data=MEMORY, out=tmp_path / "out", method="mp3", unlabelled=more, **options)
    frozen = ["kNN", "class means", "linear probe"]
    assert [each.name for each in result.tried] == [*frozen, *(f"{way} after mp3" for way in frozen)]
    first, last = result.tried[0].origin, result.tried[-1].origin
    assert (first.name, last.name, first.positions, last.positions, last.frozen) == ("", "mp3", None, "learned", "none")
    said = capsys.readouterr().out
    assert "pretrained with mp3: 2 updates on 29 images\n" in said
    assert "plan: pretraining with mp3, 2 updates, about 1 s\n" in said
    test, together = ({image.transpose(2, 0, 1).tobytes() for image in part} for part in (TEST[0], [*TRAIN[0], *more]))
    assert any(images == together and training for images, training in seen)
    assert not any(images & test for images, training in seen if training)


def test_a_time_limit_ends_a_pretraining(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {("head", False): 1.0, (FROZEN, True): 1.0, ("head", True): 1.0}

    def planned(*_: Any) -> Any:
        monkeypatch.setattr(runs.time, "perf_counter", lambda: 1e15)
        return runs.Plan(steps, 1, 2, 0.0)

    monkeypatch.setattr(runs, "plan_of", planned)
    result = situs.adapt(model, data=MEMORY, out=tmp_path / "out", method="mp3", **OPTIONS)
    missing = (
        "The time limit was reached before these recipes were finished: head, pretraining with mp3, head after mp3."
    )
    assert missing in " ".join(result.remarks) and len(result.tried) == 3


def test_images_that_cannot_be_read_are_left_out(model: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    broken = sorted((folder / "train").rglob("*.png"))[:2]
    for number, file in enumerate(broken):
        file.write_bytes(b"nothing")
        data = {"path": str(folder), "resident_gib": 1e-9}
        options = {**OPTIONS, "minutes": 1e-6}
        result = situs.adapt(model, data=data, out=tmp_path / f"out{number}", **options)
        lost = (
            "1 labelled image cannot be read, and is left out.",
            "2 labelled images cannot be read, and are left out.",
        )
        assert lost[number] in " ".join(result.remarks)
        assert result.provenance.left_out[0].startswith(f"{number + 1} of 24 images of data (train) could not be read")
        assert len(result.labels) == 23 - number and all(len(each.right) == 23 - number for each in result.tried)


def test_a_run_that_cannot_be_exported_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise SitusError("its table is in no library")

    monkeypatch.setattr(runs, "export_model", refused)
    data = {"train": (TRAIN[0][:3], MEMORY["train"][1][:3]), "test": MEMORY["test"]}
    situs.adapt(model, data=data, out=tmp_path / "out", **{**OPTIONS, "quiet": False})
    assert "no export was written: its table is in no library" in capsys.readouterr().out
    assert load_run(tmp_path / "out").classes == CLASSES and not (tmp_path / "out" / "export").exists()


@pytest.mark.parametrize("of_a_run", [False, True])
def test_of_few_images_without_a_test_split_none_is_held_out(of_a_run: bool, model: Path, tmp_path: Path) -> None:
    """A run whose own data was split chooses nothing for other data."""
    source: Any = model if of_a_run else small_vit(SIDE, depth=1)
    assert load_run(model).config.data.held_out == 0.2
    result = situs.adapt(source, data=(TRAIN[0][:2], MEMORY["train"][1][:2]), out=tmp_path / "out", **OPTIONS)
    assert "The data has too few images to hold some out for testing, so the model was not tested." in result.remarks
    assert not any("were held out" in remark for remark in result.remarks)
    assert result.test is None and len(result.labels) == 2
    assert (result.figures(), result.details()) == ((), [])
    many = situs.adapt(source, data=MEMORY["train"], out=tmp_path / "many", **{**OPTIONS, "minutes": 1e-6})
    assert "The data has no test split, so 20 % of the samples were held out for testing." in many.remarks
    assert many.test is not None and many.test.count + len(many.labels) == 24 and many.figures() and many.details()


def test_adaptation_is_one_process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.distributed, "start", lambda _: Ranks(0, 2, torch.device("cpu")))
    with pytest.raises(SitusError, match="adaptation runs in one process only, but torchrun") as caught:
        situs.adapt(model, data=MEMORY, out=tmp_path / "out", **OPTIONS)
    assert caught.value.field == "device" and not (tmp_path / "out").exists()


def test_words_are_not_adapted_to(tmp_path: Path) -> None:
    bert = tiny_texts.write_folder(tmp_path / "bert", "bert")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("sentence,label\nw1 w2,1\nw3,0\n")
    with pytest.raises(SitusError, match="contains sentences, but adapt takes only images and clips; use finetune"):
        situs.adapt(bert, data=str(tmp_path / "data"), out=tmp_path / "out", **OPTIONS)


ONE = (TRAIN[0], ["cat"] * 24)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "minutes": ({"minutes": 0.0}, "minutes=0.0: must be > 0"),
    "method": ({"method": "mjp"}, "method='mjp': must be one of droppos, mp3, part, mae, none"),
    "no labels": ({"data": TRAIN[0]}, "has no labels"),
    "one class": ({"data": {"train": ONE, "test": (TEST[0], ["cat"] * 12)}}, "of one class"),
    "no image": (
        {"data": {"train": (TRAIN[0][:20], [0, 2] * 10), "test": TEST}},
        "1 class without training samples",
    ),
    "one class of three": (
        {"data": {"train": (TRAIN[0][:8], [2] * 8), "test": TEST}},
        "must have two classes or more, but all its images are of one class",
    ),
    "unlabelled": ({"unlabelled": TRAIN[0]}, "pretraining method"),
    "empty": ({"unlabelled": "EMPTY", "method": "mp3"}, "no images"),
    "text": ({"data": "TEXT"}, "sentences"),
    "option": ({"epochs": 3}, "epochs"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_sentence_and_nothing_is_written(name: str, model: Path, tmp_path: Path) -> None:
    bad, said = BAD[name]
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "TEXT").mkdir()
    (tmp_path / "TEXT" / "train.csv").write_text("sentence,label\ngood,1\nbad,0\n")
    paths = {
        key: str(tmp_path / value) if isinstance(value, str) and value.isupper() else value
        for key, value in bad.items()
    }
    given: dict[str, Any] = {"data": MEMORY, "out": tmp_path / "out", **OPTIONS, **paths}
    with pytest.raises(SitusError, match=re.escape(said)) as caught:
        situs.adapt(model, **given)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    assert "unlabelled" not in bad or caught.value.field == "unlabelled"


def test_a_plan_fits_and_drops_the_costliest_first() -> None:
    update = {"head": 0.1, "LoRA": 0.2, "all layers": 0.3}
    ample = plan_of(update, 0.3, 0.01, 100, 300, 1e6)
    assert (ample.folds, ample.total, ample.dropped) == (5, 300, ())
    assert ample.seconds["LoRA", False] == pytest.approx(5 * (300 * 0.2 + 8 * 0.01 * 20))
    for left in (2000.0, 600.0, 300.0, 100.0, 20.0, 1.0):
        plan = plan_of(update, 0.3, 0.01, 100, 300, left)
        assert sum(plan.seconds.values()) + plan.refit <= left
        assert not plan.seconds or plan.total >= FEWEST
        every = [*plan.seconds, *plan.dropped]
        assert every == [(w, False) for w in update] + [(FROZEN, True)] + [(w, True) for w in update]
    assert plan_of(update, None, 0.01, 100, 300, 1.0).seconds == {}
    short = plan_of(update, 0.3, 0.01, 100, 300, 100.0)
    enough = plan_of(update, 0.3, 0.01, 100, 300, short.whole)
    assert short.dropped and not enough.dropped and enough.total == FEWEST
    assert plan_of(update, 0.3, 0.01, 100, 300, 0.99 * short.whole).dropped


def test_the_first_steps_do_not_count() -> None:
    def steps() -> Iterator[int]:
        time.sleep(0.5)
        while True:
            yield 0

    assert seconds_of(steps(), torch.device("cpu")) < 0.1
