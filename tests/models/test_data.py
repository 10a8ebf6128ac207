"""One rule for every verb about data without splits, and a held-out share that a run remembers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_vit
from PIL import Image

from situs.cli.main import main
from situs.config import from_dict
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.measure.accuracy import evaluate_accuracy
from situs.measure.consistency import evaluate_consistency
from situs.measure.correlation import analyze_correlation
from situs.measure.ensemble import evaluate_ensemble
from situs.measure.finetune import FinetuneConfig, data_as_seen, finetune_config
from situs.measure.knn import evaluate_knn
from situs.measure.predict import predict
from situs.models import Model, open_model
from situs.models.data import check_classes, check_labels, examples, load_bank, load_set, made_with, top1_reason
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run

MODEL = ["test_vit", "--weights", "random", "--img-size", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pictures of two classes, not split, and a note beside them."""
    folder = tmp_path_factory.mktemp("data") / "flat"
    chance = np.random.default_rng(0)
    for number in range(40):
        place = folder / ("dark" if number % 2 else "light") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place)
    (folder / "dark" / "notes.txt").write_text("x")
    return folder


@pytest.fixture(scope="module")
def run(flat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that holds a quarter out."""
    out = tmp_path_factory.mktemp("run") / "mp3"
    words = ["--data", str(flat), "--data.held-out", "0.25", "--data.img-size", "8", "--data.batch", "8"]
    table = 'backbone = {name = "vit_tiny_patch16_224", patch_size = 4, model_args = {depth = 1, embed_dim = 48}}'
    (out.parent / "tiny.toml").write_text(table)
    shape = ["--config", str(out.parent / "tiny.toml")]
    steps = ["--train.epochs", "1", "--train.precision", "fp32", "--device", "cpu"]
    assert main(["pretrain", "--method", "mp3", *words, *shape, *steps, "--out", str(out)]) == 0
    return out


def names(loader: object) -> set[str]:
    source = loader.source  # type: ignore[attr-defined]
    return {source.key(index) for index in range(len(source))}


def test_a_run_is_judged_on_what_it_held_out(flat: Path, run: Path) -> None:
    assert json.loads((run / "config.json").read_text())["data"]["held_out"] == 0.25
    subject = open_model(str(run))
    judged, trained = (load_set(subject, split=split, batch=8) for split in (None, "train"))
    assert len(names(judged)) + len(names(trained)) == 40
    assert names(judged).isdisjoint(names(trained))
    assert names(judged) == names(make_eval_loader(load_run(run).config))
    assert names(load_set(subject, flat, split="val", batch=8)) == names(judged)  # the data named anew
    assert judged.source.name == "flat, held-out fraction 0.25"
    bank, test = load_bank(subject, batch=8)
    assert (names(bank), names(test)) == (names(trained), names(judged))
    assert len(load_set(subject, held_out=0.0).source) == 40
    said = made_with(subject, judged, 0, beside=[trained], more={"fitted_to": "x"})
    assert (
        said.facts["left out"]
        == "flat: left out 1 (their names are not those of images: .txt 1); the first: dark/notes.txt"
    )
    assert set(said.left_out) == {*trained.source.left_out(), *judged.source.left_out()}
    trained.source.notes.append("a part of it is gone")
    beside = made_with(subject, judged, 0, beside=[trained])
    assert "a part of it is gone" in beside.facts["left out"] and "a part of it is gone" in beside.left_out
    assert (said.name, said.facts["fitted_to"], list(said.facts)[-1]) == (subject.name, "x", "fitted_to")


def test_data_without_splits_is_taken_whole_and_that_is_said(flat: Path, run: Path, tmp_path: Path) -> None:
    subject = open_model(str(run)).holding_out(0.0)
    loader = load_set(subject, flat, batch=8)
    assert len(loader.source) == 40
    taken = (
        "flat: has no splits, so all its images were used, including the training samples; set held_out "
        "to use only a part"
    )
    assert loader.source.notes[-1] == load_set(subject, batch=8).source.notes[-1] == taken  # named or not
    other = shutil.copytree(flat, tmp_path / "other")
    assert "all its images were used; set held_out" in load_set(subject, other, batch=8).source.notes[-1]
    with pytest.raises(SitusError, match=r"has no split 'val'; it has no splits"):
        load_set(subject, flat, split="val", batch=8)
    bank, test = load_bank(subject, flat, batch=8)  # nobody is judged on what was learned from
    assert names(bank).isdisjoint(names(test)) and len(names(bank) | names(test)) == 40
    assert names(test) == names(load_set(subject, flat, split="val", held_out=0.2, batch=8))
    assert test.source.notes[-1] == (
        f"{flat}: has no split for evaluation, so a fraction of 0.2 of the samples is held out, chosen by their "
        "names; held_out sets the fraction"
    )


def test_so_many_samples_as_are_asked_for_are_taken_and_shown(flat: Path, run: Path) -> None:
    subject = open_model(str(run))
    loader = load_set(subject, flat, held_out=0.0, count=7, batch=4)
    batches = [*loader]
    assert len(loader.source) == 7 and [len(batch.ids) for batch in batches] == [4, 3]
    shown = examples(loader, 3)
    assert torch.equal(shown, loader.shown(batches[0].inputs)[:3]) and shown.shape == (3, 3, 8, 8)
    assert 0 <= float(shown.min()) < float(shown.max()) <= 1
    bank, test = load_bank(subject, train_count=6, count=5, batch=8)
    assert (len(bank.source), len(test.source)) == (6, 5)
    assert len(load_set(subject, flat, held_out=0.0, count=1).source) == 1
    for name, act in (("count", load_set), ("count", load_bank), ("train_count", load_bank)):
        with pytest.raises(SitusError, match=f"^{name}=0: must be >= 1$"):
            act(subject, **{name: 0})
    for split in ("train", "training", "all"):
        with pytest.raises(SitusError, match=f"split='{split}': the classifier is fitted to this split"):
            load_bank(subject, split=split)
    with pytest.raises(SitusError, match="is only one set; give a training set and an evaluation set"):
        load_bank(subject, loader.source)
    with pytest.raises(SitusError, match="is not a run, so Situs does not know its training data; give the images"):
        load_set(open_model("test_vit", weights="random", img_size=32))


def test_the_ratio_that_a_model_holds_out_is_told_of_other_data_alone(flat: Path, run: Path, tmp_path: Path) -> None:
    subject, other = open_model(str(run)), shutil.copytree(flat, tmp_path / "other")
    taken = load_set(subject, other, batch=8).source
    said = (
        f"so {len(taken)} of its 40 images were used (the fraction that {subject.name} holds out); held_out=0 uses all"
    )
    assert taken.notes[-1] == f"other: has no splits, {said}" and 0 < len(taken) < 20
    for chosen in (
        load_set(subject, batch=8),
        load_set(subject, flat, batch=8),
        load_set(subject, other, split="val", batch=8),
        load_set(subject, other, held_out=0.5, batch=8),
    ):
        assert not any("were used" in note for note in chosen.source.notes)


@pytest.mark.parametrize(("batch", "world", "size", "share"), [(8, 3, 6, 2), (8, 4, 8, 2), (2, 3, 3, 1), (9, 1, 9, 9)])
def test_ranks_share_a_batch_and_each_has_a_sample(
    batch: int, world: int, size: int, share: int, flat: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, parts = open_model(str(run)), list[list[int]]()
    monkeypatch.setattr("situs.models.data.distributed.world", lambda: world)
    for rank in range(world):
        monkeypatch.setattr("situs.models.data.distributed.rank", lambda rank=rank: rank)
        loader = load_set(subject, flat, held_out=0.0, batch=batch, shared=True)
        assert loader.global_batch == size and len(next(iter(loader)).ids) == share
        parts.append([number for each in loader for number in each.ids.tolist()])
    assert sorted(number for part in parts for number in part) == [*range(40)]
    assert load_set(subject, flat, held_out=0.0, batch=batch).global_batch == batch  # which all of them have
    if world > 1:
        with pytest.raises(SitusError, match=f"has only 1 image, but {world} ranks need at least {world}"):
            load_set(subject, flat, held_out=0.0, batch=batch, shared=True, count=1)
        assert len(load_set(subject, flat, held_out=0.0, batch=batch, shared=True, count=world).source) == world


VERBS = {
    "evaluate attention --kind correlation": ["--count", "4"],
    "evaluate knn": ["--k", "2"],
    "evaluate probe": ["--kind", "class"],
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("undrawn")
def test_every_verb_follows_the_rule(verb: str, flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*verb.split(), *MODEL, "--data", str(flat), "--out", str(tmp_path), "--batch", "8", *VERBS[verb]]
    learns = verb in {"evaluate knn", "evaluate probe"}
    assert main(words) == 0
    said = capsys.readouterr().err
    assert ("so a fraction of 0.2 of the samples is held out" if learns else "so all its images were used") in said
    if not learns:
        assert main([*words, "--split", "val"]) == 2
        assert "--held-out" in capsys.readouterr().err
    assert main([*words, "--held-out", "0.4"]) == 0
    said = capsys.readouterr()
    assert "flat, held-out fraction 0.4" in said.out + "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert "situs: flat: left out 1 (their names are not those of images: .txt 1)" in said.err


@pytest.mark.parametrize("names", [("cat", "dog", "fox"), ("LABEL_0", "dog", "LABEL_2"), None])
def test_a_transformers_folder_names_its_classes_where_it_has_names(
    names: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """transformers writes LABEL_0, LABEL_1, … where nobody named them; those are no names to compare with data's."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    named = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}} if names else {}
    config = ViTConfig(**shape, image_size=8, patch_size=4, num_labels=3, **named)
    ViTForImageClassification(config).save_pretrained(tmp_path)
    subject = open_model(str(tmp_path))
    assert (subject.classes, subject.classifier) == (names, True)


def test_a_share_is_refused_of_data_with_a_split_of_its_own(
    flat: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        shutil.copytree(flat, tmp_path / "own" / split)
    own = str(tmp_path / "own")
    capsys.readouterr()
    said = f"situs: held_out=0.1: {own} has its own evaluation split (val), so nothing more is held out; do not"
    assert main(["pretrain", "--data", own, "--data.held-out", ".1", "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == f"{said} set held_out (--data.held-out)\n"
    assert main(["evaluate", "knn", str(run), "--data", own, "--held-out", ".1", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == f"{said} set held_out (--held-out)\n"
    inherited = from_dict(FinetuneConfig, {"data": {**data_as_seen(run)["data"], "path": own}})
    assert inherited.data.held_out == 0.25
    assert finetune_config(inherited, run, None).data.held_out is None  # the share was of other data
    kept = replace(inherited, data=replace(inherited.data, path=str(flat)))
    assert finetune_config(kept, run, None).data.held_out == 0.25


CLASSES = ("cat", "dog", "owl")


@pytest.mark.parametrize(
    ("known", "there", "reason"),
    [
        (CLASSES, CLASSES, None),
        (None, CLASSES, None),
        (CLASSES, ("cat", "fox", "ape"), "is 'dog' in the model, but 'fox' in the data"),
        (CLASSES, CLASSES[::-1], "is 'cat' in the model, but 'owl' in the data"),
        (CLASSES, CLASSES[:2], "the data has 2 classes, but the model has 3"),
        (CLASSES[:1], CLASSES, "the data has 3 classes, but the model has 1"),
        (CLASSES, None, "pets: has no labels to compare with"),
    ],
)
@pytest.mark.parametrize("multi_label", [False, True])
def test_classes_of_data_are_those_of_the_classifier(
    known: tuple[str, ...] | None, there: tuple[str, ...] | None, reason: str | None, multi_label: bool
) -> None:
    source = SimpleNamespace(name="pets", things="images", multi_label=multi_label)
    loader: Any = SimpleNamespace(classes=there, source=source)
    model: Any = SimpleNamespace(name="vit", classes=known, multi_label=multi_label, classifier=True)
    if reason is None:
        check_classes(model, loader, multi_label=True)
    else:
        with pytest.raises(SitusError, match=f"^pets: .*{reason.removeprefix('pets: ')}$") as caught:
            check_classes(model, loader, multi_label=True)
        assert "data" in caught.value.field
    why = {None: None, "pets: has no labels to compare with": "the data has no labels"}
    other = "the data's classes differ from those that the model was trained on"
    several = "the data is multi-label" if multi_label and there else None
    assert top1_reason(model, loader) == (several or why.get(reason, other))
    if multi_label and there is not None:
        with pytest.raises(SitusError, match="is multi-label, but only single-label"):
            check_labels(loader)
    if known and there:
        model.multi_label = not multi_label
        with pytest.raises(
            SitusError, match=r"^pets: the data is (single|multi)-label, but vit is a (multi|single)-label model$"
        ):
            check_classes(model, loader, multi_label=True)


@pytest.mark.parametrize(
    ("evaluate", "shares"),
    [
        (evaluate_accuracy, True),
        (evaluate_consistency, True),
        (lambda model, data: evaluate_ensemble([model, replace(model, name="n")], data), True),
        (evaluate_knn, False),
        (analyze_correlation, False),
        (predict, False),
    ],
)
def test_an_evaluation_that_sums_over_ranks_reads_only_its_share(
    evaluate: Callable[..., Any], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, rank: int, world: int, **__: Any) -> Any:
        raise SitusError(f"stopped at {(rank, world)}")

    monkeypatch.setattr("situs.models.data.make_loader", stop)
    monkeypatch.setattr("situs.models.data.distributed.world", lambda: 2)
    monkeypatch.setattr("situs.models.data.distributed.rank", lambda: 1)
    model = Model("m", small_vit(16, num_classes=10), input=DataConfig(img_size=16, workers=0))
    with pytest.raises(SitusError) as stopped:
        evaluate(model, "samples")
    assert str(stopped.value) == f"stopped at {(1, 2) if shares else (0, 1)}"


def test_sentences_are_refused_for_a_model_of_images(run: Path, tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("sentence,label\na good film,1\na bad film,0\n")
    with pytest.raises(SitusError, match=r"reviews\.csv: contains sentences, but mp3 takes images$") as error:
        load_set(open_model(run), tmp_path / "reviews.csv")
    assert error.value.field == "data"


@pytest.mark.parametrize("classes", [("a", "b"), ("a", "c"), ("b", "a"), None])
def test_a_bank_and_what_is_asked_of_it_have_the_same_classes(
    classes: tuple[str, ...] | None, flat: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any, split: str, **__: Any) -> Any:
        found = ("a", "b") if split == "train" else classes
        return SimpleNamespace(classes=found, source=SimpleNamespace(name=f"flat ({split})", notes=[]))

    monkeypatch.setattr("situs.models.data.load_set", loaded)
    if classes == ("a", "b"):
        bank, test = load_bank(open_model(run), flat)
        assert (bank.source.name, test.source.name) == ("flat (train)", "flat (val)")
    else:
        with pytest.raises(SitusError, match=r"^flat \(val\): its classes differ from those of the training split$"):
            load_bank(open_model(run), flat)


def test_an_unknown_option_is_one_sentence(flat: Path, run: Path) -> None:
    with pytest.raises(SitusError, match=r"unknown option 'device'; choose one of: .*count.*split"):
        load_set(open_model(run), flat, device="cpu")  # pyright: ignore[reportCallIssue]
