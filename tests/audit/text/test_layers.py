"""Layers by their weights: what enters them is what the model itself computes; words pass by the graph's law."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_texts import WORDS, sentences, victim

from situs.audit.attacks.solver import SPARE
from situs.audit.client import EPS
from situs.audit.defences import Step
from situs.audit.text.layers import (
    ROUNDING,
    Inputs,
    _rounding,
    as_rows,
    calls_before,
    entering,
    qkv_weights,
    span_of,
    word_inputs,
    words_at,
)
from situs.audit.text.victim import padded, text_gradients

TEXTS = ("3 7 1 9", "4 3 8 2 9", "11 7 13 1 3")


@pytest.mark.parametrize(
    ("rank", "tells"), [(0, False), (1, True), (19 - SPARE, True), (20 - SPARE, False), (20, False)]
)
def test_a_span_tells_something_with_some_directions_and_some_left_out(rank: int, tells: bool) -> None:
    span: Any = SimpleNamespace(rank=rank, column=torch.ones(20))
    assert Inputs(((span, None),)).tells is tells
    assert not Inputs(((span, None),), clear=False).tells
    full: Any = SimpleNamespace(rank=20, column=torch.ones(20))
    both = Inputs(((full, None), (span, torch.eye(20))))  # one that tells is enough
    assert (both.tells, both.rank, both.channels) == (tells, 20, 20)


def closure(pairs: set[tuple[int, int]]) -> tuple[set[tuple[int, int]], int]:
    """All words × places of each component of the graph, and words + places - components; by plain flooding."""
    left, every, rank = set(pairs), set(), 0
    while left:
        words, places = {next(iter(left))[0]}, set()
        while True:
            grown = {p for w, p in pairs if w in words} | places
            more = {w for w, p in pairs if p in grown} | words
            if (more, grown) == (words, places):
                break
            words, places = more, grown
        every |= {(w, p) for w in words for p in places}
        rank += len(words) + len(places) - 1
        left = {pair for pair in left if pair[0] not in words}
    return every, rank


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_what_enters_a_block_is_what_the_model_computes(kind: str, tmp_path: Path) -> None:
    made = victim(tmp_path, kind)
    batch = sentences(made, *TEXTS)
    ids, mask = padded(batch)
    first, second = (qkv_weights(made.backbone, depth) for depth in (1, 2))
    assert len(first) == len(second) == (1 if kind == "gpt2" else 3) and not set(first) & set(second)
    with torch.no_grad():
        seen = entering(made.backbone, first[0], lambda: made.backbone(ids, mask))
        later = entering(made.backbone, second[0], lambda: made.backbone(ids, mask), on=True)
        assert later.shape == seen.shape and not torch.allclose(later, seen)
        for place in range(4):
            words = torch.arange(len(WORDS))
            inputs = word_inputs(made.backbone, words, place)
            assert torch.allclose(inputs[ids[:, place]], seen[:, place], atol=1e-12)
    # The gradient of a linear layer is δ^T h: its rows lie in the span of what enters.
    gradient = as_rows(made.backbone, first[0], text_gradients(made, batch, labels=[0, 1, 0])[first[0]])
    assert gradient.shape[1] == made.backbone.dim
    left = torch.linalg.lstsq(seen[mask].T, gradient.double().T, driver="gelsd").solution  # words occur twice
    assert float((seen[mask].T @ left - gradient.double().T).abs().max()) < 1e-6


def test_the_words_that_pass_are_the_closure_of_words_and_places(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert")
    batch = sentences(made, *TEXTS)
    upload = text_gradients(made, batch, labels=[0, 1, 0], dtype=torch.float64)
    span = span_of(made.backbone, upload, qkv_weights(made.backbone, 1))
    pairs = {(word, place) for sentence in batch for place, word in enumerate(sentence)}
    every, rank = closure(pairs)
    assert pairs < every  # there are false ones, so the law says something
    assert span.rank == min(len(pairs), rank + 1)  # one more for the bias of the embedding's norm
    words = torch.arange(len(WORDS))
    found = {(int(word), place) for place in range(8) for word in words_at(made.backbone, span, words, place)}
    assert found == (every if len(pairs) > rank else found | pairs) and pairs <= found <= every


def test_a_rotary_model_tells_words_without_places(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama")
    batch = sentences(made, *TEXTS)
    upload = text_gradients(made, batch, dtype=torch.float64)
    span: Any = span_of(made.backbone, upload, qkv_weights(made.backbone, 1))
    read = {word for sentence in batch for word in sentence[:-1]}
    assert span.rank == len(read)
    assert set(words_at(made.backbone, span, torch.arange(len(WORDS)), 0).tolist()) == read


@pytest.mark.parametrize(("layers", "inner", "calls"), [(3, 1, 1), (2, 2, 0)])
def test_what_enters_the_second_block_is_what_the_first_gave(
    layers: int, inner: int, calls: int, tmp_path: Path
) -> None:
    """Also where both are one layer of ALBERT's, which is called again."""
    made = victim(tmp_path, "albert", width=16, num_hidden_layers=layers, inner_group_num=inner)
    ids, seen = torch.tensor([[2, 7, 9, 3]]), list[torch.Tensor]()
    with torch.no_grad():
        stream = made.backbone.assemble(made.backbone.embed(ids), made.backbone.positions((4,)))
        made.backbone.run_layers(stream, None, [lambda _, z: seen.append(z)])
        assert calls_before(made.backbone, 2) == calls and len(seen) == layers * inner
        weight = qkv_weights(made.backbone, 2)[0]
        found = entering(made.backbone, weight, lambda: made.backbone(ids), calls=calls)
    assert torch.allclose(found, seen[0], atol=1e-12)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_a_step_of_adam_enlarges_the_error_of_rounding(size: float) -> None:
    """As measured: updates rounded to float32, and divided back to gradients in float64."""
    torch.manual_seed(0)
    gradient = size * EPS * torch.randn(40, 60, dtype=torch.float64)
    update = (gradient / (gradient.abs() + EPS)).float().double()
    back = EPS * update / (1 - update.abs())
    rows = gradient.square().mean(dim=1, keepdim=True).sqrt()
    measured = float(((back - gradient) / rows).square().mean().sqrt())
    adam = _rounding(gradient, Step(1, adam=True)) / ROUNDING
    assert 2 < adam / measured < 8  # rounding is at most half of eps, and as a rule a third of that
    plain = _rounding(gradient.float(), Step(1)) / ROUNDING
    assert plain == torch.finfo(torch.float32).eps
