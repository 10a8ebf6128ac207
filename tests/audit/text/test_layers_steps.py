"""Uploads of several local steps, and of LoRA alone: the laws of their spans, whole sentences below the limit, and a
reason above it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import sentences, victim
from torch import Tensor
from torch.nn import functional as F

from situs.audit.defences import FedAvg, Step
from situs.audit.text.audit import find_sentences
from situs.audit.text.causal import after_steps, makes_again
from situs.audit.text.layers import DOWN, UP, as_rows, entering, midway, qkv_weights, span_of
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.victim import Sentence, TextVictim, padded, text_gradients
from situs.backbones.hf.text import DecoderBackbone
from situs.backbones.lora import add_lora

TEXTS = ("3 7 1 9", "3 7 8 2", "20 21 22 23 24 25")


def upload_of(made: TextVictim, truth: Sequence[Sentence], client: FedAvg) -> dict[str, Tensor]:
    labels = [number % 2 for number in range(len(truth))]
    return text_gradients(made, truth, labels=labels, defence=client, dtype=torch.float64)


def attack(made: TextVictim, truth: Sequence[Sentence], client: FedAvg) -> Recovered:
    return find_sentences(made.backbone, upload_of(made, truth, client), len(truth), step=client.step(Step()))


def slow_steps(made: TextVictim, truth: Sequence[Sentence], client: FedAvg, weight: str) -> tuple[Any, list[Tensor]]:
    """The weights after plain steps of torch's SGD on the model's own loss, and each step's inputs of a layer."""
    moved = deepcopy(made.backbone)
    optimiser = torch.optim.SGD(moved.parameters(), lr=client.lr)
    ids, mask = padded(truth)
    seen: list[Tensor] = []
    for _ in range(int(client.steps)):
        with torch.no_grad():
            seen.append(entering(moved, weight, lambda: moved(ids, mask))[mask])
        logits = moved(ids, mask)
        loss = F.cross_entropy(logits[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return moved, seen


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_update_of_k_steps_spans_the_inputs_of_all_of_them(kind: str, tmp_path: Path) -> None:
    made, client = victim(tmp_path, kind, width=96), FedAvg(3, 0.01)
    truth = sentences(made, *TEXTS)
    upload = upload_of(made, truth, client)
    beginnings = len({one[:end] for one in truth for end in range(1, len(one))})  # here as many as words
    for depth in (1, 2):
        weights = qkv_weights(made.backbone, depth)
        moved, seen = slow_steps(made, truth, client, weights[0])
        after = dict(moved.named_parameters())
        for name, before in made.backbone.named_parameters():
            gone = (before - after[name]) / (client.steps * client.lr)
            assert torch.allclose(gone, upload[name], atol=1e-10), name
        rows = torch.cat([as_rows(made.backbone, name, upload[name]) for name in weights])
        assert int(torch.linalg.matrix_rank(rows, rtol=1e-12)) == 3 * beginnings
        span = span_of(made.backbone, upload, weights, step=client.step(Step()))
        keep = torch.cat([torch.tensor([True] * (len(one) - 1) + [False]) for one in truth])
        assert span.rank == 3 * beginnings and bool(span.holds(seen[0][keep]).all())
        assert float(torch.linalg.lstsq(rows.T, seen[0][keep].T, driver="gelsd").solution.abs().max()) < 1e9
        assert not bool(span.holds(torch.randn_like(seen[0])).any())


def test_the_weights_in_the_middle_cancel_the_first_order(tmp_path: Path) -> None:
    """The mean gradient of k steps differs from that of the middle's weights by the square of the rate."""
    made = victim(tmp_path, "gpt2")
    truth, left = sentences(made, *TEXTS), list[float]()
    for rate in (1e-6, 1e-7):
        client = FedAvg(4, rate)
        upload = upload_of(made, truth, client)
        made_midway = TextVictim(midway(made.backbone, upload, client.step(Step())), None, made.task, made.name)
        once = upload_of(made_midway, truth, FedAvg(1, rate))
        left.append(max(float((upload[name] - once[name]).abs().max()) for name in upload))
    assert 60 < left[0] / left[1] < 150


@pytest.mark.parametrize(
    ("kind", "client"),
    [("gpt2", FedAvg(4, 0.01)), ("llama", FedAvg(2, 0.01)), ("llama classes", FedAvg(4, 0.1))],
)
def test_sentences_of_local_steps_come_back_whole(kind: str, client: FedAvg, tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 3} if kind == "llama classes" else {}
    made = victim(tmp_path, kind, width=128, **fields)
    truth = sentences(made, *TEXTS, *(["3 7 1"] if kind == "llama classes" else []))  # it begins another
    recovered = attack(made, truth, client)
    assert sorted(recovered.sentences) == sorted(truth) and recovered.reason is None


def test_an_encoder_too(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert", width=96)
    truth = sentences(made, "3 7 1 9", "4 3 8")
    assert sorted(attack(made, truth, FedAvg(2, 0.01)).sentences) == sorted(truth)


def test_steps_that_fill_the_channels_are_a_reason(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama", width=32)
    recovered = attack(made, sentences(made, *TEXTS), FedAvg(4, 0.1))
    assert not recovered.sentences and "4 local steps" in str(recovered.reason)
    assert "only 32 channels" in str(recovered.reason)


def test_last_words_that_do_not_make_the_upload_again_are_not_claimed(tmp_path: Path) -> None:
    made, client = victim(tmp_path, "gpt2", width=96), FedAvg(2, 0.01)
    truth, backbone = sentences(made, *TEXTS), made.backbone
    assert isinstance(backbone, DecoderBackbone)
    upload, step = upload_of(made, truth, client), client.step(Step())
    assert makes_again(backbone, upload, truth, step)
    assert not makes_again(backbone, upload, [(*truth[0][:-1], truth[1][-1]), *truth[1:]], step)
    nodes = sorted({one[:end] for one in truth for end in range(1, len(one))})
    noisy = {name: sent + 0.01 * sent.std() * torch.randn_like(sent) for name, sent in upload.items()}
    assert {one[-1] for one in after_steps(backbone, noisy, nodes, len(truth), step)} == {UNNAMED}


# --- large batches ---------------------------------------------------------------------------------------------------


def of_three(made: TextVictim, count: int) -> list[Sentence]:
    chance = torch.Generator().manual_seed(0)
    drawn = {tuple(row) for row in torch.randint(55, (2 * count, 3), generator=chance).tolist()}
    return sentences(made, *(" ".join(map(str, row)) for row in sorted(drawn)[:count]))


@pytest.mark.parametrize("batch", [32, 64, 128])
def test_large_batches_below_the_channels_come_back_whole(batch: int, tmp_path: Path) -> None:
    made = victim(tmp_path, "gpt2", width=256)
    truth = of_three(made, batch)
    recovered = find_sentences(made.backbone, text_gradients(made, truth, dtype=torch.float64), batch)
    assert sorted(recovered.sentences) == sorted(truth) and recovered.reason is None


@pytest.mark.parametrize("batch", [32, 64, 128])
def test_large_batches_above_the_channels_are_a_reason(batch: int, tmp_path: Path) -> None:
    made = victim(tmp_path, "gpt2", width=48)
    truth = of_three(made, batch)
    recovered = find_sentences(made.backbone, text_gradients(made, truth), batch)
    assert not recovered.sentences and "too many tokens (the model has only 48 channels" in str(recovered.reason)


# --- LoRA alone -----------------------------------------------------------------------------------------------------


def with_lora(folder: Path, kind: str, rank: int, **fields: Any) -> TextVictim:
    """A victim that trains LoRA's products alone."""
    made = victim(folder, kind, width=64, **fields)
    torch.manual_seed(1)
    add_lora(made.backbone, rank, 2 * rank, ["blocks"])
    for name, parameter in made.backbone.named_parameters():
        parameter.requires_grad_(name.endswith((UP, DOWN)))
    made.backbone.double()
    return made


def test_the_gradient_of_up_spans_what_down_makes_of_the_inputs(tmp_path: Path) -> None:
    made = with_lora(tmp_path, "llama", 20)
    truth = sentences(made, *TEXTS)
    upload, named = upload_of(made, truth, FedAvg(1, 0.01)), dict(made.backbone.named_parameters())
    layer = qkv_weights(made.backbone, 1)[2].removesuffix(".weight")  # the values, in whose gradient all tokens are
    ids, mask = padded(truth)
    with torch.no_grad():
        inputs = entering(made.backbone, f"{layer}.weight", lambda: made.backbone(ids, mask))
    images = torch.cat([row[: len(one) - 1] for row, one in zip(inputs, truth, strict=True)]) @ named[layer + DOWN].T
    words = {word for one in truth for word in one[:-1]}
    assert not bool(upload[layer + DOWN].any())
    assert int(torch.linalg.matrix_rank(upload[layer + UP], rtol=1e-12)) == len(words)
    both = torch.cat([upload[layer + UP], images])
    assert int(torch.linalg.matrix_rank(both, rtol=1e-12)) == len(words)


@pytest.mark.parametrize(("kind", "rank"), [("llama", 20), ("llama classes", 24)])
def test_sentences_from_lora_alone_below_its_rank(kind: str, rank: int, tmp_path: Path) -> None:
    made = with_lora(tmp_path, kind, rank, **({"num_hidden_layers": 3} if kind != "llama" else {}))
    truth = sentences(made, *TEXTS)
    recovered = attack(made, truth, FedAvg(1, 0.01))
    assert sorted(recovered.sentences) == sorted(truth) and recovered.reason is None


def test_lora_of_an_encoder_gives_back_a_sentence_alone_and_words_of_a_batch(tmp_path: Path) -> None:
    made = with_lora(tmp_path, "bert", 28, num_hidden_layers=3)
    truth = sentences(made, "3 7 1 9")
    assert list(attack(made, truth, FedAvg(1, 0.01)).sentences) == truth
    batch = sentences(made, "3 7 1 9", "4 3 8 2")
    several = attack(made, batch, FedAvg(1, 0.01))
    assert not several.sentences and several.words == {word for one in batch for word in one}
    assert "but not which words belong to the same sentence" in str(several.reason)


def test_more_tokens_than_loras_channels_are_a_reason(tmp_path: Path) -> None:
    made = with_lora(tmp_path, "llama", 8)
    truth = sentences(made, *TEXTS)
    recovered = attack(made, truth, FedAvg(1, 0.01))
    assert not recovered.sentences and not recovered.words
    assert "too many tokens (LoRA reduces a token to only 8 channels" in str(recovered.reason)


def test_after_two_steps_the_three_downs_name_words_beyond_the_rank_of_one(tmp_path: Path) -> None:
    made = with_lora(tmp_path, "llama", 8)
    truth = sentences(made, *TEXTS)  # 10 words, 8 channels, 24 rows of ∂down
    recovered = attack(made, truth, FedAvg(2, 0.01))
    assert recovered.words == {word for one in truth for word in one[:-1]}
    assert not recovered.sentences and "LoRA reduces a token to only 8 channels" in str(recovered.reason)
