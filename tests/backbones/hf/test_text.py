"""Each family of text models from a folder to every end: tuned, exported, locked, opened, audited; all with padding.

transformers' own Auto classes, in float64, are the oracle for every logit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentences import lines, write_pairs, write_plain, write_set
from tiny_texts import CAUSAL, sentences, victim, write_folder
from torch import Tensor

from situs import api
from situs.audit.text.audit import find_sentences
from situs.audit.text.victim import open_text_victim, text_gradients
from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.locks import lock, new_key, unlock
from situs.locks.owner import unlocking
from situs.measure.accuracy import evaluate_accuracy
from situs.measure.perplexity import evaluate_perplexity
from situs.models import open_model

transformers = pytest.importorskip("transformers")

QUICK: dict[str, Any] = {"device": "cpu", "quiet": True, "batch": 8, "validate_every": 0, "steps": 3}
OPTIM = {"lr": 5e-3, "warmup_epochs": 0}
SMALL: dict[str, dict[str, Any]] = {
    "roberta": {},
    "distilbert": {},
    "electra": {"embedding_size": 12},  # words of fewer channels than the layers have
    "albert": {"embedding_size": 12},  # the same, and one layer that runs twice
    "qwen3": {},
    "gpt_neox": {"pad_token_id": 0},
}
"""Kind -> what its config has beside the sizes."""

SOME = ("roberta", "albert", "qwen3")
KINDS = [pytest.param(kind, marks=() if kind in SOME else pytest.mark.slow) for kind in SMALL]
"""An encoder, one whose layers run twice, a decoder; test_create.py and locks/zoo.py hold all kinds to the laws."""

NEAR = {"qwen3": 1e-5}
"""Its norms are taken in float32 whatever its weights are."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("families")
    write_set(base / "set")
    write_plain(base / "plain", 100)
    for kind, fields in SMALL.items():
        write_folder(base / kind, kind, width=16, **fields)
    return base


def coded(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Sentences of unequal length as transformers' own tokeniser has them: ids, mask, labels."""
    texts, labels = zip(*lines(12, 2), strict=True)
    told = transformers.AutoTokenizer.from_pretrained(folder)(list(texts), padding=True, return_tensors="pt")
    mask = told["attention_mask"].bool()
    assert not mask.all()
    return told["input_ids"], mask, torch.tensor(labels)


def loaded(kind: str, folder: Path) -> Any:
    """The folder as transformers alone reads it."""
    model, found = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    return model.double().eval()


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_is_tuned_and_exported(kind: str, world: Path, tmp_path: Path) -> None:
    api.finetune(world / kind, data=world / "set", out=tmp_path / "run", optim=OPTIM, **QUICK)
    api.export(tmp_path / "run", tmp_path / "export")
    began, ended = load_file(world / kind / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    body = [name for name in began if name in ended and "word" not in name and "embed" not in name]
    assert any("layer" in name for name in body) and not any(torch.equal(began[name], ended[name]) for name in body)
    ids, mask, _ = coded(tmp_path / "export")
    own = loaded("AutoModelForSequenceClassification", tmp_path / "export")
    backbone = open_model(tmp_path / "export").backbone
    with torch.no_grad():
        wanted = own(input_ids=ids, attention_mask=mask.long()).logits
        assert (backbone(ids, mask) - wanted).abs().max() < 1e-5
        backbone = backbone.double()
        assert (backbone(ids, mask) - wanted).abs().max() < NEAR.get(kind, 1e-10)
        alone = torch.cat([backbone(row[None, : int(real.sum())]) for row, real in zip(ids, mask, strict=True)])
        assert (alone - wanted).abs().max() < NEAR.get(kind, 1e-10)  # padding changes nothing
    found = evaluate_accuracy(tmp_path / "export", world / "set", batch=6).accuracy
    assert found.count == 20 and 0 < found.top1 <= 1


def test_pairs_are_read_with_what_stands_between_them_alone(world: Path, tmp_path: Path) -> None:
    data = {"path": str(write_pairs(tmp_path / "pairs")), "text": {"column": "a", "pair": "b", "longest": 16}}
    api.finetune(world / "roberta", data=data, out=tmp_path / "run", optim=OPTIM, **QUICK)
    api.export(tmp_path / "run", tmp_path / "export")
    texts = [text for text, _ in lines(8, 4)]
    told = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")(
        *(texts[:4], texts[4:]),
        truncation=True,
        max_length=16,
        padding=True,
        return_tensors="pt",
        return_token_type_ids=True,
    )
    ids, mask, types = told["input_ids"], told["attention_mask"], told["token_type_ids"]
    own, backbone = loaded("AutoModelForSequenceClassification", tmp_path / "export"), open_model(tmp_path / "export")
    assert types.any() and not mask.all()
    with torch.no_grad():
        found = backbone.backbone.double()(torch.stack([ids, types], dim=1), mask.bool())
        assert (found - own(input_ids=ids, attention_mask=mask).logits).abs().max() < 1e-10


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.slow), "gpt_neox"])
def test_a_language_model_is_tuned_and_exported(kind: str, world: Path, tmp_path: Path) -> None:
    data = {"path": str(world / "plain"), "text": {"longest": 12}}
    api.finetune(world / kind, data=data, method="language", out=tmp_path / "run", optim=OPTIM, **QUICK)
    api.export(tmp_path / "run", tmp_path / "export")
    ids, mask, _ = coded(tmp_path / "export")
    own, backbone = loaded("AutoModelForCausalLM", tmp_path / "export"), open_model(tmp_path / "export").backbone
    with torch.no_grad():
        wanted, found = own(input_ids=ids, attention_mask=mask.long()).logits, backbone.double()(ids, mask)
    assert (found - wanted)[mask].abs().max() < NEAR.get(kind, 1e-10)
    assert evaluate_perplexity(tmp_path / "export", world / "plain").scores.perplexity > 1


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_locked_it_is_another_model_and_with_the_key_the_same(kind: str, world: Path, tmp_path: Path) -> None:
    key = new_key(tmp_path / "owner.key")
    lock(world / kind, key, tmp_path / "locked", cover=True)
    unlock(tmp_path / "locked", key, tmp_path / "open")
    for file in (world / kind).iterdir():
        assert file.read_bytes() == (tmp_path / "open" / file.name).read_bytes()
    ids, mask, _ = coded(world / kind)
    kept = mask if kind in CAUSAL else slice(None)
    opened = {name: open_model(tmp_path / name).backbone.double()(ids, mask)[kept] for name in ("open", "locked")}
    wanted = open_model(world / kind).backbone.double()(ids, mask)[kept]
    keyed = open_model(tmp_path / "locked", unlock=unlocking(key, keyed=True)).backbone.double()(ids, mask)[kept]
    assert torch.equal(opened["open"], wanted)
    assert (keyed - wanted).abs().max() < NEAR.get(kind, 1e-10)
    assert (opened["locked"] - wanted).abs().max() > 0.1


HARD = ("3 7 1 9", "4 3 8 2 9", "11 7 13 1 3", "30 31")


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "kind",
    ["roberta", "electra", "qwen3", "distilbert masked"]
    + [
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("distilbert", "gpt_neox", "roberta masked", "electra masked")
    ],
)
def test_the_sentences_behind_a_gradient_are_found(kind: str, tmp_path: Path) -> None:
    fields = {"embedding_size": 20} if "electra" in kind else {}
    made = victim(tmp_path, kind, width=64, **fields)
    truth = sentences(made, *HARD)
    upload = text_gradients(made, truth, labels=[row % 2 for row in range(len(truth))], dtype=torch.float64)
    hidden = made.tokeniser.mask_token_id if made.task == "masked words" else None
    found = find_sentences(made.backbone, upload, len(truth), hidden=hidden)
    assert sorted(found.sentences) == sorted(truth) and found.reason is None


def test_as_many_tokens_as_words_have_channels_is_a_reason_and_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = victim(tmp_path, "electra", width=64, embedding_size=12)
    truth = sentences(made, *HARD)
    upload = text_gradients(made, truth, labels=[0, 1, 0, 1], dtype=torch.float64)
    monkeypatch.setattr("situs.audit.text.encoder.PAIRS", 100)
    found = find_sentences(made.backbone, upload, len(truth))
    said = "the batch has too many tokens (a word vector has only 12 channels), so every word fits the gradients"
    assert str(found.reason).startswith(said)
    assert found.sentences == () and found.words == {word for sentence in truth for word in sentence}  # by their rows


@pytest.mark.parametrize(
    ("layers", "groups", "inner"),
    [(3, 1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 2, 1), (2, 1, 2)))],
)
def test_the_sentences_behind_blocks_that_run_again_and_again(
    layers: int, groups: int, inner: int, tmp_path: Path
) -> None:
    shape = {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    # Wider words make larger numbers, under which attention would see one word alone.
    made = victim(tmp_path, "albert", width=128, embedding_size=48, initializer_range=0.15, **shape)
    truth = sentences(made, *HARD)
    upload = text_gradients(made, truth, labels=[0, 1, 0, 1], dtype=torch.float64)
    found = find_sentences(made.backbone, {name: each for name, each in upload.items() if "word_" not in name}, 4)
    assert sorted(found.sentences) == sorted(truth) and found.reason is None
    assert found.facts["runs"] == layers * inner // (groups * inner)
    if layers == 3:
        made = victim(tmp_path / "small", "albert", width=32, embedding_size=24, **shape)
        upload = text_gradients(made, truth, labels=[0, 1, 0, 1], dtype=torch.float64)
        reason = find_sentences(made.backbone, upload, 4).reason
        assert reason is not None and "token counts 3 times" in reason


def test_what_all_blocks_share_is_not_withheld(world: Path, tmp_path: Path) -> None:
    key = new_key(tmp_path / "owner.key")
    with pytest.raises(SitusError, match="has 1 block with separate weights, but at least one block must remain"):
        lock(world / "albert", key, tmp_path / "locked", withhold=["blocks=1"])
    lock(world / "albert", key, tmp_path / "locked", withhold=["embedding"], withheld=tmp_path / "second")
    assert not [name for name in load_file(tmp_path / "locked" / "model.safetensors") if "embedding" in name]


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", ["droppos", "mjp"])
def test_words_of_fewer_channels_learn_their_places(method: str, world: Path, tmp_path: Path) -> None:
    size = {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1} if method == "droppos" else {}
    told = {"method": {"name": method, **size}, "device": "cpu", "quiet": True, "steps": 2}
    api.pretrain(world / "set", backbone=str(world / "electra"), out=tmp_path / "run", **told)
    api.finetune(tmp_path / "run", data=world / "set", out=tmp_path / "tuned", optim=OPTIM, **QUICK)
    assert open_model(tmp_path / "tuned").backbone.token_dim == 12


def test_an_encoder_without_a_head_gets_a_classifier_to_be_audited_with(tmp_path: Path) -> None:
    for kind, bare in (
        ("roberta", "RobertaModel"),
        ("distilbert", "DistilBertModel"),
        ("electra", "ElectraForPreTraining"),
    ):
        folder = write_folder(tmp_path / kind, kind, width=16)
        getattr(transformers, bare).from_pretrained(folder).save_pretrained(folder)
        made = open_text_victim(folder, classes=3)
        assert made.task == "classes" and made.backbone.num_classes == 3 and "classifier" in made.notes
    for kind in ("qwen3", "gpt_neox"):
        folder = write_folder(tmp_path / kind, kind, width=16)
        create_backbone(folder, num_classes=2).model.save_pretrained(folder)
        assert open_text_victim(folder).task == "classes"
