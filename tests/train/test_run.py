"""A whole run from one config: what follows from the data, what lies in the folder, how it is found again."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import small_hf, small_method, small_vit
from image_files import write

from situs.backbones import BackboneConfig
from situs.config import from_dict, merge
from situs.data.config import DataConfig
from situs.data.loader import Loader
from situs.errors import SitusError
from situs.folder_lock import lock_folder
from situs.models import open_model
from situs.models.data import open_several
from situs.models.start import starting
from situs.progress import note, notes_to
from situs.train.assemble import (
    RunConfig,
    Setup,
    describe,
    described_set,
    make_eval_loader,
    make_method,
    make_training_loader,
    rates_of,
    resolve_config,
    takes,
)
from situs.train.checkpoint import RunFolder, read_config
from situs.train.distributed import Ranks
from situs.train.private import DpConfig, Private
from situs.train.run import _note_skipped, is_run, load_run, train_run
from situs.train.tuning import freeze

BASE: dict[str, Any] = {
    "method": {"name": "mp3", "mask_ratio": 0.5},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    },
    "data": {"path": "samples", "img_size": 28, "channels": 1, "batch": 16, "held_out": 0.0},
    "augment": {"crop": "pad", "pad": 2},
    "optim": {"lr": 1e-2, "warmup_epochs": 0},
    "train": {"max_steps": 3, "precision": "fp32", "log_every": 1},
}


def config(**tables: Any) -> RunConfig:
    return from_dict(RunConfig, merge(BASE, tables, {"method"}))


def longer_by(own: RunConfig, **train: Any) -> RunConfig:
    return replace(own, train=replace(own.train, **train))


@pytest.mark.parametrize(
    ("tables", "gentle"),
    [
        ({}, True),
        ({"init": None}, False),
        ({"init_positions": False}, False),
        ({"tuning": {"parts": "head"}}, False),
        ({"dp": {"noise": 1.0}}, False),
        ({"method": {"name": "mp3"}}, False),
        ({"optim": {"lr": 1e-3}}, False),
    ],
)
def test_only_all_layers_of_a_pretrained_model_that_learns_classes_have_gentle_rates(
    tables: dict[str, Any], gentle: bool
) -> None:
    whole = {"method": {"name": "supervised"}, "init": "weights.pth", "optim": {"lr": None}}
    own = config(**merge(whole, tables, {"method"}))
    method = small_method(own.method_name)
    assert rates_of(own, method).layer_decay == (0.75 if gentle else None)
    assert (rates_of(own, method) == own.optim) == (not gentle)
    sentences = replace(own, data=DataConfig(kind="text", path="lines.csv"))
    assert rates_of(sentences, method) == own.optim


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_alone_speaks(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assembled(*_: Any, **__: Any) -> Any:
        note("the model is made")
        raise SitusError("enough")

    monkeypatch.setattr("situs.train.run.distributed.start", lambda _: Ranks(rank, 2, torch.device("cpu")))
    monkeypatch.setattr("situs.train.run.assemble", assembled)
    heard: list[str] = []
    with notes_to(heard.append), pytest.raises(SitusError, match="enough"):
        train_run(config(), out=tmp_path / "run", device="cpu")
    assert heard == ["the model is made"] * (rank == 0)


def test_what_a_model_takes_is_told_by_its_input() -> None:
    pixels = takes(small_vit((8, 12), in_chans=1))
    assert (pixels.size, pixels.channels, pixels.words, pixels.places) == ((8, 12), 1, 0, 0)
    words = small_hf(
        "BertModel", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=30,
        max_position_embeddings=12,
    )  # fmt: skip
    assert (takes(words, "home").words, takes(words).places, takes(words, "home").home) == (30, 12, "home")


def test_a_private_run_takes_no_sample_twice_and_an_added_loss_trains_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, Any]] = []

    def opened(data: DataConfig, *_: Any, step_sampler: Any, **__: Any) -> Any:
        seen.append((data.strict, step_sampler))
        return SimpleNamespace(source=SimpleNamespace(multi_label=False))

    monkeypatch.setattr("situs.train.assemble.make_loader", opened)
    private = Private(DpConfig(noise=1.0))
    for given in (None, private):
        make_training_loader(config(), Ranks(0, 1, torch.device("cpu")), given)
    assert seen == [(False, None), (True, private.draw)]  # one that stands for a broken sample would count twice
    with pytest.raises(SitusError, match=r"added losses need tuning\.parts=all, but tuning\.parts is head"):
        config(added=["mp3:weight=0.1"], tuning={"parts": "head"}, init="x")
    with pytest.raises(SitusError, match="differential privacy does not support added losses"):
        config(added=["mp3:weight=0.1"], dp={"noise": 1.0})
    assert config(added=["mp3:weight=0.1"]).added == ("mp3:weight=0.1",)


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunFolder.open(run, writer=False).latest()
    assert checkpoint is not None
    return checkpoint.tensors("model")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- what follows from the config ---------------------------------------------------------------------------


def test_channels_classes_and_size_follow_from_the_data() -> None:
    wide = config(data={"img_size": [28, 42], "channels": 2})
    method = make_method(wide, ("a", "b", "c"))
    assert method.backbone.input.channels == 2
    assert method.backbone.input.shape == (28, 42)
    assert method.backbone.grid == (4, 6)
    assert method.backbone.model.num_classes == 0  # MP3 has no use for a classifier, labels or not

    supervised = make_method(config(method={"name": "supervised"}), ("a", "b", "c"))
    assert supervised.backbone.model.num_classes == 3
    assert supervised.backbone(torch.zeros(2, 1, 28, 28)).shape == (2, 3)


def test_the_seed_decides_the_first_weights() -> None:
    torch.rand(7)
    first = make_method(config(), None).state_dict()
    torch.rand(5)
    again, other = make_method(config(), None).state_dict(), make_method(config(train={"seed": 1}), None).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["position_head.weight"], other["position_head.weight"])


def test_the_residual_stream_is_wide_where_it_is_asked_for() -> None:
    assert not make_method(config(), None).backbone.float32_residual
    assert make_method(config(train={"residual": "float32"}), None).backbone.float32_residual


def test_one_line_says_what_is_trained_where() -> None:
    method = make_method(config(backbone={"model_args": {"depth": 2, "embed_dim": 192, "num_heads": 2}}), None)
    method.backbone.model.pos_embed.requires_grad_(False)
    count = sum(p.numel() for p in method.parameters()) - method.backbone.model.pos_embed.numel()
    assert 800_000 < count < 1_000_000
    one = describe(config(), method, Ranks(0, 1, torch.device("cpu")))
    assert one == f"mp3 on vit_tiny_patch16_224: 4 x 4 patches, {count / 1e6:.1f} M trained parameters, fp32, cpu"
    assert describe(config(), method, Ranks(1, 2, torch.device("cpu"))).endswith(", fp32, 2 x cpu")


def test_a_line_says_of_few_weights_how_many_and_of_a_part_of_them_which() -> None:
    ranks = Ranks(0, 1, torch.device("cpu"))
    method = make_method(config(method={"name": "supervised"}), ("a", "b", "c"))
    weights = dict(method.named_parameters())
    count = sum(weight.numel() for weight in weights.values())
    assert f": 4 x 4 patches, {count:,} trained parameters, fp32, cpu" in describe(config(), method, ranks)
    for total, trained in ((99_999, "99,999"), (100_000, "0.1 M")):
        method.more = torch.nn.Parameter(torch.zeros(total - count))
        assert f"patches, {trained} trained parameters" in describe(config(), method, ranks)
    del method.more
    tuned = config(method={"name": "supervised"}, tuning={"parts": "head"}, init="w.pt")
    freeze(method, tuned.tuning, new_positions=False)
    held = weights["backbone.model.head.weight"].numel() + 3
    said = f"{held / 1e6:.3g} M of {count / 1e6:.3g} M parameters trained (the classifier), fp32, cpu"
    assert describe(tuned, method, ranks).endswith(f"patches, {said}")
    with_mp3 = config(method={"name": "supervised"}, added=["mp3:weight=0.25"])
    assert describe(with_mp3, method, ranks).startswith("supervised + 0.25 mp3 on ")
    pixels = config(method={"name": "supervised"}, backbone={"name": "resnet18", "patch_size": None, "model_args": {}})
    pixels = replace(pixels, backbone=BackboneConfig("test_resnet"))
    assert describe(pixels, make_method(pixels, ("a",)), ranks).startswith("supervised on test_resnet: 0.")


@pytest.mark.parametrize(("count", "batch", "share"), [(40, None, None), (40, 8, 0.5), (400, None, 0.0)])
def test_what_was_chosen_by_default_is_told(count: int, batch: int | None, share: float | None, tmp_path: Path) -> None:
    for number in range(count):
        write(tmp_path / "ab"[number % 2] / f"{number}.png")
    fields = {"path": str(tmp_path), "img_size": 5, "channels": 3, "batch": batch, "held_out": share, "workers": 0}
    asked = from_dict(RunConfig, {"method": {"name": "supervised"}, "data": fields})
    resolved = resolve_config(asked)
    loader = make_training_loader(resolved, Ranks(0, 1, torch.device("cpu")))
    held = count - len(loader.source)
    lines = [*described_set(asked, resolved, loader)]
    wanted = [loader.describe()]
    if share is None:
        assert 0 < held < count / 2
        wanted.append(
            f"{tmp_path.name}: has no split for evaluation, so {held} of its {count} images are held out and never "
            "trained on (data.held_out sets the fraction; 0 trains on all)"
        )
    if batch is None:
        updates = (count - held) // loader.global_batch
        wanted.append(
            f"batch {loader.global_batch}, because the set is small; this gives {updates} updates per epoch "
            "(data.batch sets the batch)"
        )
    assert lines == wanted and (held == 0) == (share == 0.0)


@pytest.mark.parametrize(
    ("batch", "asked", "world", "size"),
    [(16, None, 1, 16), (5000, None, 1, 1024), (16, 10, 3, 9), (None, None, 3, 255)],
)
def test_what_is_judged_is_judged_in_batches_that_the_ranks_share(
    batch: int | None, asked: int | None, world: int, size: int
) -> None:
    loader = make_eval_loader(config(data={"batch": batch}), batch=asked, rank=0, world=world)
    assert loader.global_batch == size and loader.source.name == "samples (test)"


def test_labels_are_asked_for_where_they_are_needed() -> None:
    with pytest.raises(SitusError, match=r"^supervised needs labels, but samples has no labels"):
        make_method(config(method={"name": "supervised"}), None)
    with pytest.raises(
        SitusError,
        match=r"of 14 × 14 pixels, but the data is loaded at 28 × 28 pixels; set only data\.img_size",
    ):
        make_method(config(backbone={"img_size": [14, 14]}), None)


def test_images_have_the_model_s_own_size_unless_another_is_given() -> None:
    assert resolve_config(from_dict(RunConfig, {"data": {"path": "samples"}})).data.size == (224, 224)
    tables = {"backbone": {"name": "vit_small_patch14_dinov2", "patch_size": 14}, "data": {"path": "samples"}}
    for change, size in (
        ({}, (518, 518)),
        ({"backbone": {"img_size": [28, 42]}}, (28, 42)),
        ({"data": {"img_size": 56}}, (56, 56)),
    ):
        assert resolve_config(from_dict(RunConfig, merge(tables, change))).data.size == size
    plain = {"backbone": {"name": "resnet18"}, "data": {"path": "samples"}, "method": {"name": "supervised"}}
    assert resolve_config(from_dict(RunConfig, plain)).data.size == (224, 224)
    with pytest.raises(SitusError, match=r"^img_size: must be set, because no model determines the size$"):
        _ = from_dict(RunConfig, {}).data.size


def test_paths_hold_from_anywhere(mp3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("images", "hf", "vit_tiny_patch16_224"):
        (tmp_path / name).mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "w.pt").touch()
    (tmp_path / "link").symlink_to("images")
    tables = {"data": {"path": "images"}, "init": "w.pt", "backbone": {"weights": "w.pt", "name": "hf"}}
    found = resolve_config(config(**tables))
    assert (found.data.path, found.init) == (str(tmp_path / "images"), str(tmp_path / "w.pt"))
    assert (found.backbone.name, found.backbone.weights) == (str(tmp_path / "hf"), str(tmp_path / "w.pt"))
    assert resolve_config(found) == found
    assert resolve_config(config(data={"path": "~/link"})).data.path == str(tmp_path / "link")
    assert resolve_config(config(backbone={"name": "hf:hf"})).backbone.name == f"hf:{tmp_path / 'hf'}"
    # A name is no path, and what is not there is left for the error to name.
    (tmp_path / "vit_small_patch16_224").touch()
    plain = config(data={"path": "nowhere"}, init="vit_x.in21k", backbone={"name": "vit_small_patch16_224"})
    assert resolve_config(plain) == plain
    assert (
        resolve_config(config(backbone={"name": "hf:hf/config.json"})).backbone.name == f"hf:{tmp_path}/hf/config.json"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_ends_its_workers(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a set that is streamed; by an error too, whose traceback would hold them."""

    def stop(*_: Any, **__: Any) -> None:
        raise SitusError("at once")

    if fails:
        monkeypatch.setattr("situs.train.run.fit", stop)
    closed: list[int] = []
    monkeypatch.setattr(Loader, "close", lambda self: closed.append(self.stream.workers))
    own = config(data={"resident": "never", "workers": 1}, train={"max_steps": 1})
    with pytest.raises(SitusError, match="at once") if fails else nullcontext():
        train_run(own, out=tmp_path / "run", device="cpu")
    assert closed == [1]


def test_a_run_is_resumed_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    for folder in ("here/images", "there"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(20):
        Image.new("L", (28, 28), 10 * number).save(tmp_path / "here" / "images" / f"{number}.png")
    monkeypatch.chdir(tmp_path / "here")
    said: list[str] = []
    own = config(data={"path": "images", "batch": None, "workers": 0}, train={"max_steps": 1})
    with notes_to(said.append):
        train_run(own, out="../run", device="cpu")
    assert "batch 8, because the set is small; this gives 2 updates per epoch (data.batch sets the batch)" in said
    monkeypatch.chdir(tmp_path / "there")
    longer = longer_by(from_dict(RunConfig, read_config(tmp_path / "run")), max_steps=2)
    assert train_run(longer, resume="../run", device="cpu").step == 2


def test_what_a_source_notes_while_it_is_read_is_noted_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Read:
        def __init__(self, notes: list[str], report: str | None, skipped: dict[int, str]) -> None:
            self.notes, self.report, self.skipped = notes, report, skipped

        def skip_report(self) -> str | None:
            return self.report

    class Reader:
        def __init__(self, source: Read) -> None:
            self.loader = SimpleNamespace(source=source)

    monkeypatch.setattr("situs.train.run.DataReader", Reader)
    trained = Read(["at the start", "late"], "2 broken", {1: "a", 4: "b"})
    judged = Read(["not its own"], "1 broken", {0: "c"})
    parts: Any = SimpleNamespace(
        loader=SimpleNamespace(source=trained), hooks=[object(), Reader(judged), Reader(Read([], None, {}))]
    )
    heard: list[str] = []
    with notes_to(heard.append):
        assert _note_skipped(parts, ["at the start"]) == 3
    assert heard == ["late", "2 broken", "1 broken"]


def test_images_must_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        SitusError, match=r"^give a path to images, or \"samples\" for the 9,000 included images of clothes"
    ):
        train_run(config(data={"path": ""}), out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


# --- a run and its folder -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mp3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "mp3"
    said: list[str] = []
    with notes_to(said.append):
        result = train_run(config(), out=out, device="cpu")
    assert (result.step, result.total, result.interrupted) == (3, 3, False)
    assert said[0].startswith("samples (train): 9,000 images of 1 × 28 × 28")
    assert said[1].startswith("mp3 on vit_tiny_patch16_224: 4 x 4 patches, ")
    return out


def test_a_run_folder_holds_config_classes_log_and_no_pickle(mp3: Path) -> None:
    held = files(mp3)
    checkpoint = {f"checkpoints/step-00000003/{name}.safetensors" for name in ("model", "optimizer", "generators")}
    assert held == {
        "config.json", "classes.json", "metrics.jsonl", "checkpoints/step-00000003/state.json", *checkpoint,
    }  # fmt: skip
    assert from_dict(RunConfig, read_config(mp3)) == config()
    classes = json.loads((mp3 / "classes.json").read_text())["classes"]
    assert classes[:2] == ["T-shirt/top", "Trouser"]
    assert len(classes) == 10
    records = RunFolder.open(mp3, writer=False).records()
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["loss"] > 0 for record in records)
    assert is_run(mp3)
    assert not is_run(mp3.parent)


def test_a_loaded_run_has_the_trained_weights_and_logits(tmp_path: Path) -> None:
    trained: list[Any] = []

    class Keeper:
        def after_step(self, state: Any) -> None:
            trained.append(state.method)

        def after_epoch(self, state: Any) -> None:
            pass

    own = config(method={"name": "supervised"}, optim={"ema": 0.5})
    train_run(own, Setup(hooks=lambda *_: [Keeper()]), out=tmp_path / "run", device="cpu")
    method = trained[-1].eval()
    loaded = load_run(tmp_path / "run", ema=False)
    assert loaded.config == own
    assert loaded.classes is not None
    assert len(loaded.classes) == 10
    assert not loaded.method.training
    state = method.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.method.state_dict().items())
    batch = next(iter(make_eval_loader(own)))
    assert batch.inputs.shape == (16, 1, 28, 28)
    assert torch.equal(loaded.method.backbone(batch.inputs), method.backbone(batch.inputs))
    mean = load_run(tmp_path / "run")  # the mean of the weights, since there is one
    assert not torch.equal(mean.method.backbone(batch.inputs), method.backbone(batch.inputs))
    both = open_several([open_model(tmp_path / "run", ema=which) for which in (None, False)])
    assert len({each.identity for each in both.values()}) == 2  # so that neither's results take the other's place


def test_a_loaded_run_asks_for_none_of_the_files_it_started_from(mp3: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    for name, source in (
        ("init", {"init": str(started)}),
        ("weights", {"backbone": {"weights": str(tmp_path / "w.pt")}}),
    ):
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        shutil.copytree(mp3, started)
        torch.save(load_run(mp3).method.backbone.model.state_dict(), tmp_path / "w.pt")
        train_run(config(**source, train={"max_steps": 1}), Setup(start=starting()), out=tmp_path / name, device="cpu")
        (tmp_path / "w.pt").unlink()
        shutil.move(started, tmp_path / "gone")
        assert load_run(tmp_path / name).config.train.max_steps == 1


def test_a_run_says_that_the_folder_its_model_is_made_by_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    shape = transformers.ViTConfig(**sizes, image_size=28, patch_size=7, num_channels=1)
    transformers.ViTModel(shape).save_pretrained(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    own = replace(config(train={"max_steps": 1}), backbone=BackboneConfig("hf"))
    train_run(own, out=tmp_path / "run", device="cpu")
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "hf" / "model.safetensors").unlink()  # the checkpoint has the weights
    assert load_run(tmp_path / "run").config.backbone.name == str(tmp_path / "hf")
    shutil.move(tmp_path / "hf", tmp_path / "elsewhere")
    with pytest.raises(SitusError, match=r"hf: no longer exists, .*config.json"):
        load_run(tmp_path / "run")


def test_a_run_without_a_checkpoint_cannot_be_loaded(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", config())
    with pytest.raises(SitusError, match="the run has no checkpoint yet"):
        load_run(tmp_path / "run")


# --- resuming -----------------------------------------------------------------------------------------------


def test_a_stopped_and_extended_run_equals_one_that_never_stopped(mp3: Path, tmp_path: Path) -> None:
    """--steps only cuts the run short here: with a constant rate the schedule does not tell the two apart."""
    steady = config(optim={"schedule": "constant"}, backbone={"drop_path": 0.3})
    train_run(steady, out=tmp_path / "cut", device="cpu")
    longer = longer_by(steady, max_steps=5)
    assert train_run(longer, resume=tmp_path / "cut", device="cpu").step == 5
    train_run(longer, out=tmp_path / "whole", device="cpu")
    cut, whole = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert cut.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(cut[name], whole[name])] == []
    assert not torch.equal(whole["position_head.weight"], weights(mp3)["position_head.weight"])
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["train"]["max_steps"] == 5


def test_a_resumed_run_is_held_from_its_assembly_on(mp3: Path, tmp_path: Path) -> None:
    """Or a second process would read a set, and a model, for nothing."""
    run, refused = tmp_path / "run", list[str]()
    shutil.copytree(mp3, run)

    def hooks(*_: Any) -> tuple[()]:
        with pytest.raises(SitusError) as caught, lock_folder(run):
            pass
        refused.append(str(caught.value))
        return ()

    train_run(config(), Setup(hooks=hooks), resume=run, device="cpu", quiet=True)
    assert len(refused) == 1 and "is using this folder" in refused[0]
    with lock_folder(run):
        pass


def test_a_run_that_died_before_its_first_checkpoint_starts_from_its_init_again(mp3: Path, tmp_path: Path) -> None:
    own = config(init=str(mp3), optim={"lr": 1e-9}, train={"max_steps": 1})
    with pytest.raises(SitusError, match="no function `start`"):  # and not trained from random weights
        train_run(own, out=tmp_path / "peace", device="cpu")
    train_run(own, Setup(start=starting()), out=tmp_path / "peace", device="cpu")
    RunFolder.create(tmp_path / "died", own)
    train_run(own, Setup(start=starting()), resume=tmp_path / "died", device="cpu")
    peace, died = weights(tmp_path / "peace"), weights(tmp_path / "died")
    assert all(torch.equal(peace[name], died[name]) for name in peace)
    name = "backbone.model.blocks.0.attn.qkv.weight"
    torch.testing.assert_close(died[name], weights(mp3)[name], rtol=0, atol=1e-7)


def test_a_damaged_checkpoint_is_told_from_none(mp3: Path, tmp_path: Path) -> None:
    torn = shutil.copytree(mp3, tmp_path / "torn")
    for weights_file in torn.glob("checkpoints/*/model.safetensors"):
        weights_file.write_bytes(b"cut")
    with pytest.raises(SitusError, match=r"has no whole checkpoint: .* is damaged \(model\.safetensors has 3 of"):
        load_run(torn)


def test_what_is_no_run_is_said_without_a_flag_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        SitusError, match=r"none: is not a run: a run is a folder that contains config\.json and checkpoints$"
    ):
        load_run(tmp_path / "none")


# --- a start that is refused --------------------------------------------------------------------------------


def test_out_or_resume_and_not_both(mp3: Path, tmp_path: Path) -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"out": tmp_path / "x", "resume": mp3})
    for given in cases:
        with pytest.raises(SitusError, match="give either a new folder or a run to resume"):
            train_run(config(), device="cpu", **given)
    assert not (tmp_path / "x").exists()


def test_a_folder_with_a_run_and_a_file_are_refused_before_the_data_is_read(mp3: Path, tmp_path: Path) -> None:
    absent = config(data={"path": "nowhere"})
    (tmp_path / "file").touch()
    with pytest.raises(SitusError, match=r"file: is a file; a run is a folder"):
        train_run(absent, out=tmp_path / "file", device="cpu")
    with pytest.raises(SitusError, match="already contains a run; resume this run"):
        train_run(absent, out=mp3, device="cpu")


@pytest.mark.parametrize("where", ["hooks", "method", "loop"])
def test_a_refused_start_leaves_no_folder(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise SitusError("no")

    def hooks(*_: Any) -> list[Any]:
        return refuse() if where == "hooks" else []

    if where != "hooks":
        monkeypatch.setattr(
            "situs.train.assemble.make_method" if where == "method" else "situs.train.loop._Loop", refuse
        )
    with pytest.raises(SitusError, match="no"):
        train_run(config(), Setup(hooks=hooks), out=tmp_path / "a" / "run", device="cpu")
    assert not (tmp_path / "a" / "run").exists()


def test_what_a_failed_run_has_reached_stays(tmp_path: Path) -> None:
    class Fails:
        def after_step(self, state: Any) -> None:
            if state.step == 2:
                raise RuntimeError("a bug")

        def after_epoch(self, state: Any) -> None:
            pass

    own = replace(config(), train=replace(config().train, save_every=1, log_every=9))
    with pytest.raises(RuntimeError, match="a bug"):
        train_run(own, Setup(hooks=lambda *_: [Fails()]), out=tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").is_file()
    assert train_run(own, resume=tmp_path / "run", device="cpu").step == 3


def test_a_folder_with_files_in_it_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = r"is not empty: it has notes\.txt; a run needs a new or empty folder"
    with pytest.raises(SitusError, match=said):
        train_run(config(data={"path": "nowhere"}), out=tmp_path, device="cpu")  # said before the data is read
    with pytest.raises(SitusError, match=said):
        RunFolder.create(tmp_path, config())
    (tmp_path / "picture.png").touch()
    with pytest.raises(SitusError, match=r"it has notes\.txt and 1 more;"):
        RunFolder.create(tmp_path, config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "picture.png"]
    (tmp_path / "empty").mkdir()
    assert train_run(config(train={"max_steps": 1}), out=tmp_path / "empty", device="cpu").step == 1
