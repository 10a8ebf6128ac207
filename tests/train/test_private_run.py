"""Runs of DP-SGD: ε in their log, exact resumption with the secret, what is refused, and what an audit says of them."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import situs
from situs.audit import audit_gradients
from situs.config import from_dict
from situs.errors import SitusError
from situs.measure.finetune import FinetuneConfig
from situs.models import open_model
from situs.models.export import export_run
from situs.progress import notes_to
from situs.train.assemble import Setup
from situs.train.checkpoint import RunFolder
from situs.train.contract import RunState
from situs.train.private import KEY_FILE, KEY_SIZE, epsilon_of
from situs.train.run import RunConfig, rehearse, train_run

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(
    find_spec("opacus") is None, reason="opacus is not installed"
)  # it imports for a second

TABLES: dict[str, Any] = {
    "method": {"name": "supervised"},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 14,
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    },
    "data": {"path": "samples", "img_size": 28, "channels": 1, "count": 96, "batch": 32},
    "optim": {"lr": 1e-2, "warmup_epochs": 0, "ema": 0.5},
    "train": {"max_steps": 4, "epochs": None, "save_every": 2, "precision": "fp32"},
    "dp": {"noise": 1.0},
}


def config(**over: dict[str, Any]) -> RunConfig:
    return from_dict(RunConfig, {name: {**TABLES.get(name, {}), **over.get(name, {})} for name in {*TABLES, *over}})


def train(asked: RunConfig, *looks_on: Any, **place: Any) -> Path:
    train_run(asked, Setup(hooks=lambda *_: looks_on), device="cpu", quiet=True, **place)
    return place.get("out") or place["resume"]


@pytest.fixture
def quick_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes no time in place of Opacus', to which the tests of accounting hold every search for a noise."""
    for home in ("train.private", "models.open"):
        monkeypatch.setattr(f"situs.{home}.epsilon_of", lambda noise, rate, steps, delta: 9 * rate * steps / noise)


class Crash:
    """A hook that ends the process's run after a step, as a power cut would."""

    def after_step(self, state: RunState) -> None:
        if state.step == 3:
            raise RuntimeError("cut")

    def after_epoch(self, state: RunState) -> None:
        pass


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = RunFolder.open(run, writer=False).newest()
    assert newest.step == 4
    return {f"{kind}/{name}": value for kind in ("model", "ema", "optimizer")
            for name, value in newest.tensors(kind).items()}  # fmt: skip


@pytest.mark.usefixtures("quick_accountant")
def test_a_dry_run_says_what_the_run_then_spends_and_keeps_no_secret(tmp_path: Path) -> None:
    rehearsed = rehearse(config(), out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists() and rehearsed.steps == 4
    said: list[str] = []
    with notes_to(said.append):
        train_run(config(), out=tmp_path / "run", device="cpu", quiet=True)
    assert tuple(said) == rehearsed.notes and "ε = 12 at" in rehearsed.notes[-1]


@pytest.mark.usefixtures("quick_accountant")
def test_a_run_that_was_cut_goes_on_with_the_same_samples_and_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"s" * count)
    whole = train(config(), out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="cut"):
        train(config(), Crash(), out=tmp_path / "cut")
    assert (tmp_path / "cut" / KEY_FILE).read_bytes() == b"s" * KEY_SIZE
    half = train(config(), resume=tmp_path / "cut")
    one, other = tensors(whole), tensors(half)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    for run in (whole, half):
        assert not (run / KEY_FILE).exists()  # a complete run has forgotten its chance
        assert b"ssssssss" not in b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"t" * count)
    another = tensors(train(config(), out=tmp_path / "another"))
    assert not torch.equal(one["model/backbone.model.head.weight"], another["model/backbone.model.head.weight"])


def test_epsilon_stands_in_the_log_and_in_whatever_opens_the_run(tmp_path: Path) -> None:
    run = train(config(), out=tmp_path / "run")
    told = [each for each in RunFolder.open(run, writer=False).records() if "epsilon" in each]
    assert [each["step"] for each in told] == [1, 3, 4]  # the first, an epoch of three, the last
    rate = 32 / 96
    for each in told:
        assert each["epsilon"] == pytest.approx(epsilon_of(1.0, rate, each["step"], 1e-5))
    spent = open_model(run).spent
    assert spent is not None and (spent.epsilon, spent.steps, spent.noise) == (told[-1]["epsilon"], 4, 1.0)
    audit = audit_gradients(run, "samples", count=2, attacks=["patchembed"], fail_above="psnr=20")
    [label] = audit.about
    assert label.startswith(f"dp-sgd C=1, noise 1·C, ε = {spent.epsilon:.3g}")
    assert "does not cover" in audit.notes["differential privacy"]
    assert audit_gradients(run, "samples", count=1, attacks=["patchembed"]).about.keys() > {label, "none"}


@pytest.mark.usefixtures("quick_accountant")
def test_a_target_sets_the_noise_and_the_run_cannot_be_made_longer(tmp_path: Path) -> None:
    run = train(config(dp={"noise": None, "epsilon": 6.0}), out=tmp_path / "run")
    spent = open_model(run).spent
    assert spent is not None and spent.epsilon is not None and 5.8 < spent.epsilon <= 6.0
    longer = config(dp={"noise": None, "epsilon": 6.0}, train={"max_steps": 8})
    with pytest.raises(SitusError, match="the noise was set for 4 steps"):
        train(longer, resume=run)
    assert open_model(run).spent == spent


class Judge:
    """A validation that likes the second step best."""

    def after_step(self, state: RunState) -> None:
        state.log({"val_top1": 0.9 if state.step == 2 else 0.1})

    def after_epoch(self, state: RunState) -> None:
        pass


def test_the_best_of_a_run_spends_what_all_its_steps_do(tmp_path: Path) -> None:
    """Which is the best is known by those behind it too."""
    run = train(config(train={"keep_best": True}), Judge(), out=tmp_path / "run")
    model = open_model(run)
    assert (model.facts["step"], model.facts["best_by"]) == (2, "val_top1")
    assert model.spent is not None and model.spent.steps == 4
    assert model.spent.epsilon == pytest.approx(epsilon_of(1.0, 32 / 96, 4, 1e-5))
    last = open_model(run / "checkpoints" / "step-00000004")
    assert "best_by" not in last.facts and last.spent == model.spent
    (run / "defence.json").write_text('{"defence": "noise=0.5", "scale": 1.0}')
    card = (export_run(run, tmp_path / "export").path / "README.md").read_text()  # which may be for all to see
    assert f"- Differential privacy: {model.spent}." in card and "| epsilon |" not in card
    assert (
        "- In split learning, the server saw the tokens only after the defence noise=0.5, which does not give "
        "differential privacy (no ε)." in card
    )


def test_a_best_that_nothing_judges_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ledger of ε looks on too, and is no validation."""
    train_run(config(train={"keep_best": True}), device="cpu", out=tmp_path / "run")
    assert "no validation metric was logged, so the newest checkpoint is" in capsys.readouterr().err
    assert open_model(tmp_path / "run").facts["step"] == 4


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"method": {"name": "mp3"}}, "supervised with dp"),
        ({"augment": {"mixup": 0.8}}, "the gradient of a mixed sample depends on two"),
        ({"augment": {"repeated": 2}}, "clipped separately"),
        ({"data": {"batch": 16}}, "at least 32"),
        ({"train": {"precision": "fp16"}}, "bf16 or fp32"),
    ],
)
def test_what_would_void_the_promise_is_refused_before_anything_is_written(
    over: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SitusError, match=said):
        train(config(**over), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quick_accountant")
def test_the_word_dp_is_an_epsilon(tmp_path: Path) -> None:
    asked = {key: TABLES[key] for key in ("backbone", "optim")}
    base = situs.pretrain(TABLES["data"], method="supervised", **asked, steps=1, out=tmp_path / "base", quiet=True)
    tuned = situs.finetune(
        base, dp=9, train="head", steps=3, batch=32, validate_every=0, out=tmp_path / "ft", quiet=True
    )
    held = from_dict(FinetuneConfig, RunFolder.open(tuned, writer=False).config)
    assert (held.dp.epsilon, held.tuning.parts) == (9, "head")
