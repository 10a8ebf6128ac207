"""A server that chooses the weights of a language model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import write_folder

from situs.audit.deadline import Deadline
from situs.audit.text.audit import SENT, WITHHELD, audit_texts
from situs.audit.text.crafted import (
    Plan,
    confirmed,
    craft_text,
    crafted_sentences,
    plan_of,
    predicted,
    read_windows,
    windows_of,
)
from situs.audit.text.recovered import UNNAMED
from situs.audit.text.victim import Sentence, TextVictim, open_text_victim, text_gradients
from situs.backbones.adapters import add_adapters
from situs.backbones.lora import add_lora
from situs.errors import SitusError

LAYERS = {"gpt2": "n_layer", "distilbert": "n_layers"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fresh models of four blocks."""
    place = tmp_path_factory.mktemp("models")
    kinds = ("bert", "gpt2", "distilbert", "llama", "masked", "albert", "electra", "qwen3")
    odd: dict[str, tuple[str, dict[str, Any]]] = {
        "one block": ("bert", {"num_hidden_layers": 1}),
        "few channels": ("electra", {"embedding_size": 32}),
        "narrow": ("bert", {"width": 16}),
    }
    made = {name: write_folder(place / name, kind, **fields) for name, (kind, fields) in odd.items()}
    return made | {
        kind: write_folder(place / kind, kind, width=96, **{LAYERS.get(kind, "num_hidden_layers"): 4}) for kind in kinds
    }


def victim_of(folder: Path, sent: str = "all") -> TextVictim:
    """The model of a folder that trains all its parameters, or these alone."""
    victim = open_text_victim(folder)
    if sent.startswith("lora"):
        add_lora(victim.backbone, 8, 16, [sent.removeprefix("lora ")])
    names = add_adapters(victim.backbone, 64) if sent == "adapters" else []
    endings = {
        "adapters": tuple(names),
        "biases": (".bias",),
        "head": tuple(
            f"{head}.{kind}" for head in ("classifier", "classifier.out_proj") for kind in ("weight", "bias")
        ),
    }.get(sent, (".0.up", ".0.down"))
    for name, parameter in victim.backbone.named_parameters():
        parameter.requires_grad_(sent == "all" or name.endswith(endings))
    return victim


def sentences(victim: TextVictim, count: int, shortest: int = 5) -> list[Sentence]:
    """Random sentences of 5 to 13 words."""
    chance = torch.Generator().manual_seed(count)
    lengths = torch.randint(shortest, 14, (count,), generator=chance).tolist()
    drawn = (torch.randint(55, (length,), generator=chance).tolist() for length in lengths)
    return victim.coded([" ".join(f"w{word}" for word in words) for words in drawn])


def step(victim: TextVictim, batch: list[Sentence]) -> tuple[TextVictim, dict[str, Any]]:
    """The model with weights for such a batch, and its gradients."""
    chosen = craft_text(victim, batch=len(batch))
    return chosen, text_gradients(chosen, batch, labels=[number % 2 for number in range(len(batch))])


def plan_for(victim: TextVictim, batch: int) -> Plan:
    plan = plan_of(victim, batch=batch)
    assert isinstance(plan, Plan)
    return plan


def test_names_shapes_and_types_are_those_of_the_model(folders: dict[str, Path]) -> None:
    victim = victim_of(folders["gpt2"])
    chosen = craft_text(victim)
    before, after = (dict(model.backbone.named_parameters()) for model in (victim, chosen))
    assert {n: (p.shape, p.dtype) for n, p in before.items()} == {n: (p.shape, p.dtype) for n, p in after.items()}
    assert float(before["model.transformer.wte.weight"].std()) > 0.1  # the victim's are as they were


@pytest.mark.parametrize(
    ("name", "sent", "kind", "bins"),
    [
        ("bert", "all", "neurons", 384),
        ("gpt2", "all", "neurons", 192),  # a word has two digits
        ("bert", "lora blocks", "product", 8),
        ("bert", "lora qkv", "values", 8),
        ("bert", "adapters", "neurons", 64),
        ("bert", "value.weight", "values", 32),
        ("bert", "head", "classifier", 1),
    ],
)
def test_bins_are_the_rows_that_are_read(folders: dict[str, Path], name: str, sent: str, kind: str, bins: int) -> None:
    """All neurons, the rank of a product, the width of an adapter; of values at most 32."""
    victim = victim_of(folders[name], "all" if "." in sent else sent)
    names = [name for name, _ in victim.backbone.named_parameters() if name.endswith(sent)] if "." in sent else None
    plan = plan_of(victim, names)
    assert isinstance(plan, Plan)
    assert (plan.kind, plan.bins) == (kind, bins)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "distilbert"])
def test_every_sentence_of_a_small_batch_is_read_word_for_word(folders: dict[str, Path], kind: str) -> None:
    victim = victim_of(folders[kind])
    batch = sentences(victim, 6)
    recovered = crafted_sentences(*step(victim, batch), 6)
    assert sorted(recovered.sentences) == sorted(batch) and recovered.reason is None


@pytest.mark.parametrize("sent", ["lora blocks", "lora qkv", "adapters", "biases", "head"])
def test_one_sentence_is_read_however_little_is_sent(folders: dict[str, Path], sent: str) -> None:
    victim = victim_of(folders["bert"], sent)
    batch = sentences(victim, 1)
    chosen, upload = step(victim, batch)
    assert len(upload) < len(dict(victim.backbone.named_parameters()))
    assert crafted_sentences(chosen, upload, 1).sentences == tuple(batch)


@pytest.mark.parametrize("sent", ["lora blocks", "lora qkv", "adapters", "biases"])
def test_of_a_batch_some_are_read_and_none_wrongly(folders: dict[str, Path], sent: str) -> None:
    victim = victim_of(folders["bert"], sent)
    batch = sentences(victim, 8)
    recovered = crafted_sentences(*step(victim, batch), 8)
    assert recovered.sentences and set(recovered.sentences) <= set(batch)
    assert len(recovered.sentences) == 8 or "the crafted neurons isolated" in str(recovered.reason)


@pytest.mark.parametrize("kind", ["gpt2", "distilbert"])
def test_adapters_of_other_models_give_their_sentences(folders: dict[str, Path], kind: str) -> None:
    victim = victim_of(folders[kind], "adapters")
    batch = sentences(victim, 4)
    assert crafted_sentences(*step(victim, batch), 4).sentences
    assert set(crafted_sentences(*step(victim, batch), 4).sentences) <= set(batch)


def test_sentences_of_one_code_are_mixed_and_never_read(folders: dict[str, Path]) -> None:
    """The code is made of the first places: sentences that differ later stand in the same windows."""
    victim = victim_of(folders["bert"])
    same = " ".join(f"w{word}" for word in range(11, 23))
    batch = victim.coded([f"{same} w1", f"{same} w2", "w30 w31 w32"])
    recovered = crafted_sentences(*step(victim, batch), 3)
    assert recovered.sentences == (batch[2],) and "1 of 3" in str(recovered.reason)


def test_of_a_sentence_longer_than_the_weights_hold_the_beginning_is_read(tmp_path: Path) -> None:
    victim = victim_of(write_folder(tmp_path / "narrow", "bert", width=44))
    places = plan_for(victim, 1).channels.places
    [sentence] = victim.coded([" ".join(f"w{word}" for word in range(14))])
    recovered = crafted_sentences(*step(victim, [sentence]), 1)
    assert 4 < places < len(sentence) == 16
    assert recovered.sentences == ((*sentence[:places], *(UNNAMED,) * (16 - places)),)
    assert f"first {places} positions" in str(recovered.reason)


def test_a_wrong_word_does_not_reproduce_what_was_seen(folders: dict[str, Path]) -> None:
    victim = victim_of(folders["gpt2"])
    chosen, upload = step(victim, sentences(victim, 4))
    plan = plan_for(chosen, 4)
    windows = predicted(plan, read_windows(plan, upload))
    assert len(confirmed(chosen, plan, upload, windows, Deadline())) == len(windows) > 3
    for place in (0, 2):
        other = [
            window._replace(inputs=tuple(w % 50 + 1 if at == place else w for at, w in enumerate(window.inputs)))
            for window in windows
        ]
        assert not confirmed(chosen, plan, upload, other, Deadline())
    last = [window._replace(targets=(*window.targets[:-1], window.targets[-1] % 50 + 1)) for window in windows]
    assert not confirmed(chosen, plan, upload, last, Deadline())


def test_neurons_are_on_where_the_code_is_above_their_edge(folders: dict[str, Path]) -> None:
    """The law behind it, in the model's own numbers: the lower edges first, and of the first token alone."""
    victim = craft_text(victim_of(folders["bert"]))
    plan, batch = plan_for(victim, 1), sentences(victim, 5, shortest=12)
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        victim.backbone.parts()[at].mlp.up[0].register_forward_hook(lambda _, __, out, at=at: seen.update({at: out}))
        for at in plan.reads
    ]
    for ids in batch:
        with torch.no_grad():
            victim.backbone(torch.tensor([ids]))
        for at in plan.reads:
            functional = plan.functional(at)
            code = float(((plan.codes()[list(ids[: len(functional)])] - 1) * functional).sum())
            on = seen[at][0] > 0
            assert not on[1:, : plan.bins].any()
            assert torch.equal(on[0, : plan.bins], code > plan.edges())
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("kind", "sent", "batch", "reason"),
    [
        ("llama", "all", 1, "rotations inside the attention"),
        ("masked", "all", 1, "masked words do not enter any layer"),
        ("albert", "all", 1, "share weights"),
        ("bert", "head", 2, "a single sentence, not a batch"),
        ("gpt2", "biases", 1, "for a model that predicts words"),
        ("qwen3", "all", 1, "rotations inside the attention"),
        ("one block", "all", 1, "the model has fewer than two blocks"),
        ("few channels", "all", 1, "word embedding has fewer channels than its blocks"),
        ("narrow", "all", 1, r"too few channels \(16\), too few neurons \(64 per block\), or too low"),
        ("bert", "nothing", 1, "the gradient of a later block or of a classifier, and neither is sent"),
        ("electra", "head", 1, "an activation before the classifier that is linear near 0"),
    ],
)
def test_what_is_not_read_is_refused_with_the_reason(
    folders: dict[str, Path], kind: str, sent: str, batch: int, reason: str
) -> None:
    victim = victim_of(folders[kind], sent)
    assert re.search(reason, str(plan_of(victim, batch=batch)))
    assert crafted_sentences(victim, dict[str, torch.Tensor](), batch).reason == plan_of(victim, (), batch)
    with pytest.raises(SitusError, match=reason):
        craft_text(victim, batch=batch)


def test_an_audit_of_an_active_server_reads_what_it_wrote(folders: dict[str, Path], tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("w1 w2 w3 w4 w5 w6\nw7 w8 w9 w1 w2\nw9 w8 w7 w6 w5 w4 w3\nw10 w11 w12 w13 w14\n")
    asked: dict[str, Any] = {"count": 4, "batch": 4, "server": "active", "fail_above": "sentences=0.5"}
    audit = audit_texts(folders["bert"], texts, defences=["none", "noise=0.1"], **asked)
    sent, withheld, *noisy = audit.findings
    assert (sent.defence, withheld.defence) == (SENT, WITHHELD) and sent.whole == withheld.whole == 4
    assert [finding.whole for finding in noisy] == [0, 0] and "noise hides" in str(noisy[0].reasons)
    assert audit.ruling is not None and audit.ruling.status == 3
    assert audit.to_json()["threat"] == "active" and audit.to_json()["attack"] == "crafted"
    refused = audit_texts(folders["llama"], texts, **asked)
    assert all(finding.status == "refused" and "rotations" in finding.reasons[0] for finding in refused.findings)
    assert refused.ruling is not None and refused.ruling.status == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_window_shows_the_gradient_of_its_sentence_and_of_no_other(folders: dict[str, Path], kind: str) -> None:
    """An independent reference: the gradient of each sentence of the batch by itself, in float64."""
    victim = victim_of(folders[kind])
    batch = sentences(victim, 24)
    chosen, upload = step(victim, batch)
    plan = plan_for(chosen, 24)
    chosen.backbone.double()
    singles = [text_gradients(chosen, [ids], labels=[number % 2]) for number, ids in enumerate(batch)]
    windows = read_windows(plan, upload)
    assert len({window.inputs for window in windows}) > 18
    for window in windows:
        shown = [
            windows_of(plan, window.block, single[plan.reads[window.block]])[0][:, window.number] for single in singles
        ]
        size = torch.stack([rows.abs().max() for rows in shown])
        here = [ids[: len(window.inputs)] == window.inputs for ids in batch]
        assert here.index(True) == int(size.argmax()) and sum(here) == 1
        assert float(size[torch.tensor(here).logical_not()].max()) < 1e-6 * float(size.max())
