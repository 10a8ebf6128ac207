"""Split training on text from one config: local training's bits, and what is hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sentences import write_plain, write_set
from tiny_texts import CAUSAL, write_folder

from situs.config import from_dict
from situs.errors import SitusError
from situs.locks import lock, new_key
from situs.locks.owner import unlocking
from situs.measure.accuracy import evaluate_accuracy
from situs.measure.perplexity import evaluate_perplexity
from situs.models import open_model
from situs.models.start import initialise, starting
from situs.split.generate import open_writer
from situs.split.hiding import Hide
from situs.split.run import train_split
from situs.split.serving import make_server
from situs.split.whole import merge, open_split
from situs.train.assemble import RunConfig, Setup
from situs.train.checkpoint import RunFolder
from situs.train.run import train_run

NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
"""Client and server draw separately, so dropout at both gives other bits than one process."""


class Text:
    """A tiny model with its data, a server in this process, and a run of each."""

    def __init__(self, place, kind: str, *, steps: int = 3) -> None:
        words = kind in CAUSAL and not kind.endswith("classes")
        self.place, self.seen = place, []
        self.folder = write_folder(place / "model", kind, **NO_DROPOUT.get(kind.split(maxsplit=1)[0], {}))
        data = write_plain(place / "data") if words else write_set(place / "data")
        tables = {"method": {"name": "language" if words else "supervised"}}
        tables["backbone"] = {"name": str(self.folder / "config.json"), "num_classes": None if words else 2}
        tables["data"] = {"path": str(data), "kind": "text", "batch": 8, "text": {"tokeniser": str(self.folder)}}
        tables["optim"] = {"lr": 1e-3, "clip": 0.5, "ema": 0.9, "eps": 1e-4}  # no update by rounding alone
        tables["train"] = {"epochs": None, "max_steps": steps, "precision": "fp32"}
        self.config = from_dict(RunConfig, tables)

    def serve(self, init=None) -> None:
        data = replace(self.config.data, path="")  # it has none
        served = replace(self.config, data=data, init=None if init is None else str(init))
        self.server = make_server(served, self.place / "server", device="cpu")

    def call(self, message, _):
        self.seen.append(message)
        return self.server.answer("me", message)

    def split(self, hide=Hide(), **options) -> None:  # noqa: B008  (frozen)
        options = {"out": self.place / "split", "device": "cpu", "quiet": True} | options
        train_split(options.pop("config", self.config), self.call, hide, **options)

    def tensors(self, run: str) -> dict[str, torch.Tensor]:
        newest = RunFolder.open(self.place / run).newest()
        return {f"{file}/{k}": v for file in ("model", "optimizer", "ema") for k, v in newest.tensors(file).items()}


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["bert", "llama", "distilbert", "gpt2 classes", "gpt2", "gpt_neox"])
def test_split_training_on_text_is_local_training_to_the_bit(tmp_path, kind, capsys) -> None:
    text = Text(tmp_path, kind)
    text.serve()
    text.split()
    merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole")
    train_run(text.config, out=tmp_path / "local", device="cpu", quiet=True)
    one, two = text.tensors("whole"), text.tensors("local")
    assert one.keys() == two.keys() and len(one) > 60
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert "sees the length of every sentence" in "".join(capsys.readouterr())
    measure = evaluate_perplexity if kind in ("gpt2", "llama", "gpt_neox") else evaluate_accuracy
    with open_split(tmp_path / "split", text.call) as model:
        losses = [measure(each).numbers()["loss"] for each in (model, tmp_path / "local")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_run_whose_embedding_is_its_head_is_opened_with_the_mean_of_both(tmp_path) -> None:
    text = Text(tmp_path, "gpt2")
    train_run(text.config, out=tmp_path / "local", device="cpu", quiet=True)
    [mean] = [value for name, value in text.tensors("local").items() if name.startswith("ema/") and "wte" in name]
    model = open_model(tmp_path / "local").backbone.model
    assert torch.equal(model.transformer.wte.weight, mean) and torch.equal(model.lm_head.weight, mean)
    begun = open_model(text.folder).backbone
    initialise(begun, str(tmp_path / "local"))
    assert torch.equal(begun.model.lm_head.weight, mean)


def test_a_locked_language_model_is_trained_without_the_key_and_then_generates(tmp_path) -> None:
    text, key = Text(tmp_path, "llama"), new_key(tmp_path / "owner.key")
    lock(text.folder, key, tmp_path / "locked")
    text.serve(tmp_path / "locked")
    config = replace(text.config, init=str(tmp_path / "locked"))
    text.split(Hide(("columns",)), config=config, key=key, start=starting(unlocking(key)))
    merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole", key=key)
    alone = replace(text.config, init=str(text.folder))
    train_run(alone, Setup(starting()), out=tmp_path / "alone", device="cpu", quiet=True)
    one, two = text.tensors("whole"), text.tensors("alone")
    assert max(float((one[name] - two[name]).abs().max()) for name in one if name.startswith("model")) < 2e-5
    with open_writer(tmp_path / "whole") as writer:
        expected = list(writer.tokens([5, 6, 7], max_tokens=8))
    with open_writer(tmp_path / "split", text.call, key=key) as writer:
        assert list(writer.tokens([5, 6, 7], max_tokens=8)) == expected
        text.server.sessions.clear()  # restarted
        assert list(writer.tokens([5, 6, 7], max_tokens=8)) == expected
    with pytest.raises(SitusError, match="always uses the defence that it was trained with"):
        open_writer(tmp_path / "split", text.call, key=key, defence="noise=1").__enter__()


def test_noise_hides_sentences_and_their_padding_and_other_defences_are_refused(tmp_path) -> None:
    text = Text(tmp_path, "bert", steps=1)
    text.serve()
    text.split(Hide(("rows",), "noise=0.5"))
    sent = next(m.tensors for m in text.seen if m.kind == "forward")
    padding = sent["z"][~sent["mask"]]
    assert len(padding) > 1 and len(padding.unique(dim=0)) == len(padding)
    for defence in ("lowpass=0.5", "batch-shuffle"):
        with pytest.raises(SitusError, match="sentences have different lengths"):
            text.split(Hide(defence=defence), out=tmp_path / "no")
    causal = Text(tmp_path / "causal", "gpt2", steps=1)
    causal.serve()
    with pytest.raises(
        SitusError, match="permute=rows: GPT2LMHeadModel does not support this permutation: its causal mask"
    ):
        causal.split(Hide(("rows",)))
