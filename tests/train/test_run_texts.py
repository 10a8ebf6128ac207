"""Sentences through the whole engine: fine-tuned, killed and resumed, judged, exported, with transformers as oracle."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentences import lines, write_pairs, write_plain, write_set
from tiny_texts import WORDS, write_folder

from situs import api
from situs.audit.text.victim import open_text_victim
from situs.backbones import create_backbone
from situs.core.when import When
from situs.errors import SitusError
from situs.measure.accuracy import evaluate_accuracy
from situs.measure.finetune import FinetuneConfig, data_as_seen, finetune_config
from situs.measure.perplexity import evaluate_perplexity
from situs.measure.predict import predict as api_predict
from situs.models import open_model
from situs.models.start import starting
from situs.train.assemble import Setup
from situs.train.checkpoint import RunFolder
from situs.train.contract import RunState
from situs.train.run import train_run

transformers = pytest.importorskip("transformers")

QUICK: dict[str, Any] = {"device": "cpu", "quiet": True, "batch": 8, "validate_every": 0}
OPTIM = {"lr": 5e-3, "warmup_epochs": 0, "ema": 0.9}
KINDS = ["bert", "gpt2", "llama"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, two sets, and what comes of them."""
    base = tmp_path_factory.mktemp("texts")
    write_set(base / "set")
    write_plain(base / "plain")
    small = {"num_hidden_layers": 1} | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1)
    write_folder(base / "bert", "bert", width=16, **small)
    write_folder(base / "gpt2", "gpt2", width=16, n_layer=1)
    write_folder(base / "llama", "llama", width=16, num_hidden_layers=1)
    for kind in KINDS:
        tuned = {**QUICK, "validate_every": 1} if kind == "bert" else QUICK
        api.finetune(base / kind, data=base / "set", out=base / f"{kind}-ft", steps=6, optim=OPTIM, **tuned)
        api.export(base / f"{kind}-ft", base / f"{kind}-export")
    words = {"data": {"path": str(base / "plain"), "text": {"longest": 16}}, "method": "language"}
    tuned = {**QUICK, "validate_every": 1}
    api.finetune(base / "gpt2", out=base / "lm", steps=24, optim=OPTIM, **words, **tuned)
    api.export(base / "lm", base / "lm-export", ema=False)
    return base


def config_of(world: Path, kind: str = "bert", **over: Any) -> Any:
    from situs.config import from_dict, merge

    tables = {"optim": OPTIM, "data": {"path": str(world / "set"), "batch": 8}, "train": {"seed": 3, "max_steps": 7}}
    tables = merge(tables, over, {"method"})
    made = from_dict(FinetuneConfig, merge(data_as_seen(world / kind), tables, {"method"}))
    return finetune_config(made, world / kind, None)


class KilledError(Exception):
    pass


class Killer:
    def after_step(self, state: RunState) -> None:
        if state.step == 5:
            raise KilledError

    def after_epoch(self, state: RunState) -> None: ...


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_pairs_are_tuned_resumed_judged_and_exported(kind: str, world: Path, tmp_path: Path) -> None:
    data = {
        "path": str(write_pairs(tmp_path / "pairs")),
        "text": {"column": "a", "pair": "b", "label": "label", "longest": 12},
    }
    config = config_of(world, kind, data=data, train={"save_every": 2, "log_every": 1})
    asked, begun = {"device": "cpu", "quiet": True}, Setup(starting())
    train_run(config, begun, out=tmp_path / "peace", **asked)
    with pytest.raises(KilledError):
        train_run(config, replace(begun, hooks=lambda *_: [Killer()]), out=tmp_path / "run", **asked)
    train_run(config, begun, resume=tmp_path / "run", **asked)
    a, b = (RunFolder.open(tmp_path / name, writer=False).latest() for name in ("peace", "run"))
    assert a is not None and b is not None and a.step == b.step == 7
    left, right = a.tensors("model"), b.tensors("model")
    assert all(torch.equal(left[name], right[name]) for name in left)
    api.export(tmp_path / "run", tmp_path / "export")
    own = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").double().eval()
    tokeniser = transformers.AutoTokenizer.from_pretrained(tmp_path / "export", local_files_only=True)
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "validation.jsonl").read_text().splitlines()]
    pairs = [row["a"] for row in rows], [row["b"] for row in rows]
    types = {} if kind == "bert" else {"return_token_type_ids": True}  # what the model reads is given unasked
    told = tokeniser(*pairs, truncation=True, max_length=12, padding=True, return_tensors="pt", **types)
    given = {name: told[name] for name in ("input_ids", "attention_mask", "token_type_ids")[: 2 + (kind == "bert")]}
    opened, mask = open_model(tmp_path / "export").backbone.double(), told["attention_mask"].bool()
    assert not mask.all() and told["token_type_ids"].any()
    with torch.no_grad():
        wanted = own(**given).logits
        both = torch.stack([told["input_ids"], told["token_type_ids"]], dim=1)
        assert (opened(both, mask) - wanted).abs().max() < 1e-10
        assert ((opened(both[:, 0], mask) - wanted).abs().max() > 1e-4) == (kind == "bert")  # which tells them apart
        alone = torch.cat([opened(row[None, :, : int(real.sum())]) for row, real in zip(both, mask, strict=True)])
        assert (alone - wanted).abs().max() < 1e-10  # padding changes nothing
    labels = torch.tensor([int(row["label"] == "same") for row in rows])
    for source in (tmp_path / "run", tmp_path / "export"):  # which remembers the columns
        found = evaluate_accuracy(source, tmp_path / "pairs", batch=6).accuracy
        assert found.count == 20 and found.top1 == (wanted.argmax(1) == labels).double().mean()
        assert math.isclose(found.loss, float(torch.nn.functional.cross_entropy(wanted, labels)), rel_tol=1e-4)
        with pytest.raises(SitusError, match=f"no column 'a', only sentence, label; {source.name} was trained on"):
            evaluate_accuracy(source, world / "set")


def test_columns_that_are_named_win_over_those_that_a_model_remembers(world: Path, tmp_path: Path) -> None:
    text, sets = {"column": "a", "pair": "b", "label": "label"}, {}
    pairs = write_pairs(tmp_path / "pairs")
    data = {"path": str(pairs), "text": text}
    api.finetune(world / "bert", data=data, out=tmp_path / "run", steps=2, optim=OPTIM, **QUICK)
    api.export(tmp_path / "run", tmp_path / "export")
    rows = [json.loads(line) for line in (pairs / "validation.jsonl").read_text().splitlines()]
    for name, made in {
        "others": [{"one": row["a"], "two": row["b"], "cls": "x", "y": row["label"]} for row in rows],
        "single": [{"one": row["a"], "two": "w1", "y": row["label"]} for row in rows],
        "alone": [{"a": row["a"], "label": row["label"]} for row in rows],
    }.items():
        sets[name] = tmp_path / f"{name}.jsonl"
        sets[name].write_text("\n".join(map(json.dumps, made)))
    for source in (tmp_path / "run", tmp_path / "export"):
        wanted = evaluate_accuracy(source, pairs)
        with pytest.raises(SitusError, match=r"no column 'a', only one, .* was trained on .* column 'a'") as stop:
            evaluate_accuracy(source, sets["others"])
        assert stop.value.field == "text.column"
        with pytest.raises(SitusError, match=r"no column 'b', only a, label; .* was trained on .* column 'b'") as stop:
            evaluate_accuracy(source, sets["alone"])
        assert stop.value.field == "text.pair"
        named = {"column": "one", "pair": "two", "label": "y"}
        assert evaluate_accuracy(source, sets["others"], text=named).accuracy == wanted.accuracy
        alone = evaluate_accuracy(source, sets["single"], text={"column": "one", "pair": "none", "label": "y"})
        assert alone.accuracy.count == len(rows) and alone.accuracy.loss != wanted.accuracy.loss
        with pytest.raises(SitusError, match=r"no column 'six', only one, two, y$") as stop:
            evaluate_accuracy(source, sets["single"], text={"column": "six"})
        assert stop.value.field == "text.column"
    vit = open_model("vit_tiny_patch16_224", weights="random").backbone.model
    with pytest.raises(
        SitusError, match=r"text: applies only to models of sentences, but VisionTransformer takes images"
    ):
        evaluate_accuracy(vit, "samples", text={"column": "one"})


def test_a_locked_folder_that_lacks_parts_is_tuned_with_both_files(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from situs.locks import lock, new_key

    key = new_key(tmp_path / "owner.key")
    second = tmp_path / "second.safetensors"
    lock(world / "bert", key, tmp_path / "locked", withhold=["embedding"], withheld=second)
    asked = {**QUICK, "data": world / "set", "steps": 2, "optim": OPTIM}
    opens: dict[str, Any] = {"key": tmp_path / "owner.key", "withheld": second}
    monkeypatch.chdir(tmp_path)
    api.finetune(world / "bert", out="open", **asked)
    api.finetune("locked", out="tuned", **opens, **asked)
    monkeypatch.chdir(world)  # a run is found again from anywhere
    api.finetune(resume=tmp_path / "tuned", steps=3, device="cpu", quiet=True)
    api.finetune(resume=tmp_path / "open", steps=3, device="cpu", quiet=True)
    a, b = (RunFolder.open(tmp_path / name, writer=False).latest() for name in ("open", "tuned"))
    assert a is not None and b is not None and a.step == b.step == 3
    left, right = a.tensors("model"), b.tensors("model")
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert (tmp_path / "tuned/config.json").read_text().count(str(tmp_path / "locked")) == 3  # model, tokeniser, init
    for given, said in (
        ({}, "is locked, and its blocks stay scrambled without its key"),
        ({"key": key}, "give the owner's second file too"),
    ):
        with pytest.raises(SitusError, match=said):
            api.finetune(tmp_path / "locked", out=tmp_path / "none", **given, **asked)


@torch.no_grad()
def alone(model: Any, texts: list[str], tokeniser: Any) -> torch.Tensor:
    """transformers' own logits, a sentence at a time and so without padding."""
    return torch.cat([model(torch.tensor([tokeniser(text)["input_ids"]])).logits for text in texts])


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_transformers_own_classifier_with_its_tokeniser(kind: str, world: Path) -> None:
    folder = world / f"{kind}-export"
    own = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).double().eval()
    tokeniser = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts, labels = zip(*lines(20, 2), strict=True)
    wanted = alone(own, list(texts), tokeniser)
    batch = tokeniser(list(texts), padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    assert not mask.all()
    opened = open_model(folder).backbone.double()
    with torch.no_grad():
        assert (opened(ids, mask) - wanted).abs().max() < 1e-10  # padding changes nothing
        padded = own(input_ids=ids, attention_mask=batch["attention_mask"]).logits
        assert (opened(ids, mask) - padded).abs().max() < 1e-10
    for source in (world / f"{kind}-ft", folder):
        found = evaluate_accuracy(source, world / "set", batch=6)
        assert (found.accuracy.count, found.provenance.things) == (20, "sentences")
        assert found.accuracy.top1 == (wanted.argmax(1) == torch.tensor(labels)).double().mean()
        loss = torch.nn.functional.cross_entropy(wanted, torch.tensor(labels))
        assert math.isclose(found.accuracy.loss, float(loss), rel_tol=1e-4)
        assert "img_size" not in found.provenance.facts and found.provenance.facts["longest"] == 16


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "GPTNeoX"])
def test_a_causal_classifier_reads_the_last_real_token_as_transformers_does(name: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {} if name == "GPT2" else {"intermediate_size": 24}
    more |= {} if name.startswith("GPT") else {"num_key_value_heads": 1}
    kind = getattr(transformers, f"{name}ForSequenceClassification")
    special = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, **more, **special, num_labels=3)).double().eval()
    ids = torch.randint(3, 40, (4, 9))
    mask = torch.arange(9) < torch.tensor([9, 1, 5, 7])[:, None]
    ids[~mask] = 0
    backbone = create_backbone(model)
    assert backbone.num_classes == 3 and not backbone.next_words
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask.long()).logits
        assert (backbone(ids, mask) - wanted).abs().max() < 1e-10
        short = torch.cat([backbone(row[None, : int(own.sum())]) for row, own in zip(ids, mask, strict=True)])
        assert (short - wanted).abs().max() < 1e-10


def test_an_export_finds_the_last_token_by_the_padding_of_its_own_tokeniser(world: Path, tmp_path: Path) -> None:
    """transformers' causal classifiers look for config.json's padding; where that is another, they read the filling."""
    model = write_folder(tmp_path / "model", "gpt2", width=16, n_layer=1, pad_token_id=7)
    api.finetune(model, data=world / "set", out=tmp_path / "run", steps=1, **QUICK)
    api.export(tmp_path / "run", tmp_path / "export")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    own = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    texts = ["w1 w2 w3 w4 w5 w6", "w9"]
    with torch.no_grad():
        filled = own(**read(texts, padding=True, return_tensors="pt")).logits
        alone = torch.cat([own(**read(text, return_tensors="pt")).logits for text in texts])
    assert torch.allclose(filled, alone, atol=1e-6)


def test_the_log_holds_the_validation_and_a_tiny_model_learns(world: Path) -> None:
    told = {}
    for name in ("bert-ft", "lm"):
        records = map(json.loads, (world / name / "metrics.jsonl").read_text().splitlines())
        told[name] = [each for each in records if "val_loss" in each]
    assert all("val_top1" in each for each in told["bert-ft"]) and told["bert-ft"]
    losses = [each["val_loss"] for each in told["lm"]]
    assert len(losses) == 12 and losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert all(math.isclose(each["val_perplexity"], math.exp(each["val_loss"]), rel_tol=1e-9) for each in told["lm"])


def test_perplexity_is_that_of_transformers(world: Path) -> None:
    own = transformers.GPT2LMHeadModel.from_pretrained(world / "lm-export", local_files_only=True).double().eval()
    ids = [WORDS.index(word) for word in (world / "plain" / "valid.txt").read_text().split()]
    total = count = 0.0
    for start in range(0, 300, 16):
        block = torch.tensor([ids[start : start + 16]])
        with torch.no_grad():
            total += float(own(block, labels=block).loss) * (block.shape[1] - 1)
        count += block.shape[1] - 1
    for source in (world / "lm-export", open_model(world / "lm", ema=False)):
        found = evaluate_perplexity(source, world / "plain", batch=5)
        assert found.scores.words == count == 300 - 19
        assert math.isclose(found.scores.loss, total / count, rel_tol=1e-5)
        assert math.isclose(found.scores.perplexity, math.exp(total / count), rel_tol=1e-4)
    assert "has a perplexity of" in found.summary().sentence
    with pytest.raises(SitusError, match="has no head that predicts the next word"):
        evaluate_perplexity(world / "bert", world / "plain")
    with pytest.raises(SitusError, match="lm: predicts the next word"):
        evaluate_accuracy(world / "lm")


def test_padding_does_not_change_a_language_models_loss(world: Path) -> None:
    from situs.methods import create_method
    from situs.methods.base import Batch

    torch.manual_seed(1)
    method = create_method("language", open_model(world / "gpt2").backbone.double())
    ids = torch.randint(5, 60, (2, 7))
    short = Batch(ids, torch.arange(2), {"words": ids}, torch.ones(2, 7, dtype=torch.bool))
    more = torch.cat([ids, torch.full((2, 5), 9)], dim=1)
    mask = torch.arange(12) < 7
    long = Batch(more, torch.arange(2), {"words": more.masked_fill(~mask, -1)}, mask.expand(2, -1))
    losses = [float(method(each, {}).loss) * (each.inputs.shape[1] - 1) for each in (short, long)]
    assert abs(losses[0] - losses[1]) < 1e-10


def test_faults_are_one_sentence_each(world: Path, tmp_path: Path) -> None:
    def refused(said: str, source: str, **over: Any) -> None:
        asked = {"data": world / "set", "steps": 1, "out": tmp_path / "run", **QUICK, **over}
        with pytest.raises(SitusError, match=said):
            api.finetune(world / source, **asked)
        assert not (tmp_path / "run").exists()

    refused("samples: contains images, but sentences are expected", "bert", data="samples")
    refused(
        r"data.text.longest=17: must be at most 16", "bert", data={"path": str(world / "set"), "text": {"longest": 17}}
    )
    (tmp_path / "one.csv").write_text("sentence,label\n" + "w1 w2,good\n" * 9)
    refused(r"one: has only one class, 'good'", "bert", data=tmp_path / "one.csv")
    (tmp_path / "one.csv").write_text("sentence,label\n" + "w1 w2,1\n" * 9 + "w3,-1\n")
    refused(r"one: has only one class, '1'", "bert", data=tmp_path / "one.csv")
    with pytest.raises(SitusError, match="must be text, not images, because BertModel") as stop:
        api.pretrain(world / "plain", method="mp3", backbone=str(world / "bert"), out=tmp_path / "run", quiet=True)
    assert stop.value.field == "data.kind"
    (tmp_path / "deberta").mkdir()
    (tmp_path / "deberta/config.json").write_text('{"model_type": "deberta-v2"}')
    with pytest.raises(SitusError, match=r"deberta-v2 in .* is refused: .* attention") as stop:
        api.finetune(tmp_path / "deberta", data=world / "set", out=tmp_path / "run", **QUICK)
    assert stop.value.field == "source"  # what was given, and not the backbone that follows from it
    refused("mixup=0.8: does not apply to sentences", "bert", augment={"mixup": 0.8})
    refused("has no head for the next word", "bert", method="language")
    refused(
        "img_size=8: does not apply to sentences, which .*set contains",
        "bert",
        data={"path": str(world / "set"), "img_size": 8},
    )
    (tmp_path / "bare.jsonl").write_text('{"text": "w1 w2"}\n' * 9)
    refused("supervised needs labels, but .*bare.jsonl has no labels", "bert", data=tmp_path / "bare.jsonl")
    with pytest.raises(SitusError, match="has no labels to compare with") as stop:
        evaluate_accuracy(world / "bert-ft", tmp_path / "bare.jsonl")
    assert stop.value.fields == ("data", "text.label")
    large = write_folder(tmp_path / "large", "bert", width=16)
    vocabulary = json.loads((large / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["w99"] = 99
    (large / "tokenizer.json").write_text(json.dumps(vocabulary))
    refused(
        "its tokeniser has 100 words, but BertForSequenceClassification knows 60",
        "bert",
        data={"path": str(world / "set"), "text": {"tokeniser": str(large)}},
    )
    told: dict[str, Any] = {"method": "mae", "device": "cpu", "quiet": True}
    with pytest.raises(SitusError, match=r"mae learns from images and clips, but .* has sentences"):
        api.pretrain(world / "set", backbone=str(world / "bert"), out=tmp_path / "run", **told)
    with pytest.raises(SitusError, match=r"takes images, but .* contains sentences"):
        api.pretrain(
            world / "set", method="supervised", backbone="vit_tiny_patch16_224", out=tmp_path / "run", device="cpu"
        )


def test_an_export_names_what_loads_it_with_its_head(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from situs.cli.main import main

    for run, kind in (("bert-ft", "BertForSequenceClassification"), ("lm", "GPT2LMHeadModel")):
        assert main(["export", str(world / run), "--out", str(tmp_path / run)]) == 0
        assert f'Load it with transformers.{kind}.from_pretrained("{tmp_path / run}")' in capsys.readouterr().out


def test_the_export_of_mp3_on_sentences_says_where_the_places_are_kept(world: Path, tmp_path: Path) -> None:
    told = {"steps": 1, "device": "cpu", "quiet": True}
    api.pretrain(world / "set", method="mp3", backbone=str(world / "bert"), out=tmp_path / "run", **told)
    api.export(tmp_path / "run", tmp_path / "x")
    with pytest.raises(SitusError, match="run: the audit supports only models that were trained to predict classes"):
        open_text_victim(tmp_path / "run")
    assert open_text_victim(tmp_path / "x").task == "classes"
    card = (tmp_path / "x" / "README.md").read_text()
    assert "contains zeros as the entries of the words" in card
    assert "start from the run instead of this export" in card
    kept = RunFolder.open(tmp_path / "run", writer=False).latest()
    began, name = load_file(world / "bert" / "model.safetensors"), "embeddings.position_embeddings.weight"
    (table,) = (value for key, value in kept.tensors("model").items() if key.endswith(name))  # pyright: ignore[reportOptionalMemberAccess]
    assert any(key.endswith(name) and torch.equal(value, table) for key, value in began.items())


def test_broken_sentences_are_left_out_and_told(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_set(tmp_path / "set")
    with (tmp_path / "set" / "validation.jsonl").open("a") as file:
        file.write('{"sentence": "", "label": 1}\n')
    found = evaluate_accuracy(world / "bert-ft", tmp_path / "set")
    assert found.accuracy.count == 20
    assert any("1 of 21 sentences" in said and "the sentence is empty" in said for said in found.provenance.left_out)


def test_authorised_fine_tuning_of_a_locked_bert_is_the_normal_one(world: Path) -> None:
    """float64, 50 steps, from one head and one order: the key holder's losses are those of the open model."""
    from situs.data.loader import make_loader
    from situs.locks.groups import permute_state, random_keys, residual_only
    from situs.locks.owner import with_key
    from situs.methods import Supervised
    from situs.train.run import make_method, resolve_config
    from situs.train.step import Stepper

    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = resolve_config(config_of(world, backbone={"model_args": still}))
    loader = make_loader(config.data, config.augment)

    def train(*, locked: bool) -> list[float]:
        method: Any = make_method(config, loader.classes).double()
        if locked:
            groups = residual_only(method.backbone.groups())
            keys = random_keys(groups, torch.Generator().manual_seed(1))
            method.backbone.model.load_state_dict(permute_state(method.backbone.model.state_dict(), groups, keys))
            method = Supervised(with_key(method.backbone, groups, keys), config.method)
        told: dict[str, Any] = {"seed": 0, "precision": "fp32", "accumulate": 1, "parallel": "ddp", "compiled": False}
        stepper, losses = Stepper(method.train(), config.optim, **told), []
        for step in range(50):
            batch = next(loader.iterate(*divmod(step, loader.steps_per_epoch)))
            losses.append(float(method(batch, {}).loss))
            stepper.update(
                batch, When(step=step, epoch=step // loader.steps_per_epoch, progress=step / 50), 5e-3, ragged=False
            )
        return losses

    normal, authorised = train(locked=False), train(locked=True)
    assert max(abs(a - b) for a, b in zip(normal, authorised, strict=True)) < 1e-9
    assert normal[-1] < 0.8 * normal[0]


def test_the_gradients_of_a_tuned_run_are_audited_with_its_own_tokeniser(world: Path) -> None:
    for name, ids in (("bert-ft", (2, 6, 7, 3)), ("lm", (6, 7))):
        assert open_text_victim(world / name).coded(["w1 w2"]) == [ids]


def test_the_class_of_every_sentence_is_named_without_its_label(world: Path, tmp_path: Path) -> None:
    import csv

    said = [*(line for line, _ in lines(9, seed=4)), ""]
    file = tmp_path / "mail.csv"
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["sentence"], *([line] for line in said)])
    found = api_predict(world / "bert-ft", file, out=tmp_path / "named.csv")
    model = open_model(world / "bert-ft")
    config = model.samples
    tokeniser = transformers.AutoTokenizer.from_pretrained(config.text.tokeniser)
    for row, (line, told) in enumerate(zip(said[:-1], found.rows, strict=False)):
        ids = torch.tensor([tokeniser(line, truncation=True, max_length=config.size[1])["input_ids"]])
        with torch.no_grad():
            shares = model.backbone(ids, torch.ones_like(ids, dtype=torch.bool)).double().softmax(-1)[0]
        assert told.path == f"mail.csv, row {row}"
        assert told.name == model.classes[int(shares.argmax())]  # pyright: ignore[reportOptionalSubscript]
        assert told.probability == pytest.approx(float(shares.max()), abs=1e-5)
    assert (len(found.rows), found.broken) == (10, ["mail.csv, row 9"])
    assert (tmp_path / "named.csv").read_text().splitlines()[-1] == '"mail.csv, row 9",,'


def test_features_of_sentences_are_means_over_what_is_no_padding(world: Path) -> None:
    from situs.measure.features import extract_features

    found, alone = (extract_features(world / "bert-ft", split="all", batch=batch) for batch in (7, 1))
    torch.testing.assert_close(found.features, alone.features, rtol=1e-4, atol=1e-5)  # alone there is the least padding
    model = open_model(world / "bert-ft")
    tokeniser = transformers.AutoTokenizer.from_pretrained(model.samples.text.tokeniser)
    assert found.names is not None and found.labels is not None and len(found.labels) == len(found.names)
    for line, vector in list(zip(found.names, found.features, strict=True))[:5]:
        ids = torch.tensor([tokeniser(line, truncation=True, max_length=model.samples.size[1])["input_ids"]])
        with torch.no_grad():
            own = model.backbone.encode(model.backbone.embed(ids), model.backbone.positions()).patches[0].mean(0)
        torch.testing.assert_close(vector, own, rtol=1e-4, atol=1e-5)
    with pytest.raises(SitusError, match=r"tokens='patches'.*sentences"):
        extract_features(world / "bert-ft", tokens="patches")
