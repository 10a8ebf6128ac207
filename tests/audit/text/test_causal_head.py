"""What a place learned, by torch's own cross entropy; and beginnings of sentences as sets of tuples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.attacks.solver import TELLING
from situs.audit.defences import Step
from situs.audit.text.causal import Head, Place, _deltas, _ended, _ends, _pruned, _repeats, full
from situs.audit.text.recovered import UNNAMED


def chance(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NORM = nn.LayerNorm(12, elementwise_affine=False)
AT = chance(12, seed=1)


def learned(words: Tensor, word: int) -> Tensor:
    """The gradient of a stream whose next word is `word`."""
    at = AT.clone().requires_grad_()
    loss = F.cross_entropy((words @ NORM(at))[None], torch.tensor([word]))
    return torch.autograd.grad(loss, at)[0]


def head(words: Tensor, delta: Tensor) -> Head:
    return Head(Place(delta, AT, (words @ NORM(AT)).softmax(dim=0)), NORM, words)


@pytest.mark.parametrize("size", [20, 400])
def test_the_word_that_a_place_learned_and_its_weight(size: int) -> None:
    """Among fewer words than are compared in all, and among many more."""
    words = chance(size, 12, seed=2)
    for word in range(0, size, size // 10):
        delta = learned(words, word)
        one = head(words, 0.125 * delta)
        torch.testing.assert_close(one.step([word])[0], delta)
        found, factor, left = one.fit()
        assert (found, factor) == (word, pytest.approx(0.125)) and left < 1e-12
        off = chance(12, seed=word + 3)
        off = off - delta * (off @ delta) / (delta @ delta)
        off = off / off.norm() * delta.norm() * 1e-3
        found, factor, left = head(words, delta + off).fit()
        assert (found, factor) == (word, pytest.approx(1.0))
        assert left == pytest.approx(1e-3, rel=1e-4)
        found, rest = one.nearest(delta + off)
        assert found == word
        torch.testing.assert_close(rest, off, rtol=1e-6, atol=1e-12)
    assert head(words, -learned(words, 3)).fit()[1] != pytest.approx(1.0)


def test_words_that_end_here_are_taken_one_by_one_until_nothing_is_left() -> None:
    words = 5 * torch.eye(12, dtype=torch.float64) + 0.3 * chance(12, 12, seed=4)
    one = head(words, AT)
    steps = one.step(range(12))
    assert _ended(one, steps[5].clone(), 4, inner=False) == [5]
    assert _ended(one, 2 * steps[5], 4, inner=False) == [5, 5]
    assert sorted(_ended(one, steps[5] + steps[9], 4, inner=True)) == [5, 9]
    # More than may end here, or what no word explains, is not known; where others go on, it is nobody's end.
    assert _ended(one, 3 * steps[5], 2, inner=False) == [UNNAMED] and _ended(one, 3 * steps[5], 2, inner=True) == []
    assert _ended(one, 1e-3 * steps[5], 4, inner=False) == [UNNAMED] and _ended(one, 0 * AT, 4, inner=True) == []
    # What rounding leaves of the words that go on is no word.
    scale = float(one.mean.norm())
    rounding = AT / AT.norm() * scale * TELLING
    assert _ended(one, 9 * rounding, 4, inner=True) == []
    assert _ended(one, steps[5] + 0.5 * rounding, 4, inner=True) == [5]


def test_what_each_place_learned_solves_the_layers_equations() -> None:
    inputs, delta = chance(5, 9), chance(5, 7, seed=1)
    found = _deltas(inputs, delta.T @ inputs)
    assert found is not None
    torch.testing.assert_close(found, delta)
    alike = _deltas(inputs[[0, 0, 1]], delta[:3].T @ inputs[[0, 0, 1]])
    assert alike is not None
    torch.testing.assert_close(alike[0], (delta[0] + delta[1]) / 2)  # equal places share what they learned
    assert _deltas(inputs, (delta.T @ inputs).index_fill(1, torch.tensor([3]), torch.inf)) is None
    square = chance(9, 9, seed=2)
    assert _deltas(square, square) is None and _deltas(square[:8], square[:8]) is not None


@pytest.mark.parametrize(
    ("nodes", "pruned", "ends"),
    [
        ([(1,), (1, 1), (1, 1, 1)], [(1,)], [(1, 1, 1)]),
        ([(1,), (1, 1), (1, 1, 2), (1, 1, 1)], [(1,), (1, 1), (1, 1, 2)], [(1, 1, 2), (1, 1, 1)]),
        ([(1,), (2,), (1, 1), (2, 1)], [(1,), (2,), (2, 1)], [(1, 1), (2, 1)]),
        ([], [], []),
    ],
)
def test_repetitions_of_a_first_word_count_only_where_another_word_follows(
    nodes: list[Any], pruned: list[Any], ends: list[Any]
) -> None:
    assert _pruned(nodes) == pruned
    assert _ends(nodes, ()) == ends and _ends(nodes, (7, 8)) == [(*end, 7, 8) for end in ends]
    assert [_repeats(node) for node in ((1,), (1, 1), (1, 2), (2, 2, 2), ())] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("fields", "step", "said"),
    [
        ({"tells": True}, Step(), None),
        (
            {"rank": 0},
            Step(),
            "the noise is too strong, or the batch has too many tokens (the model has only 9 channels)",
        ),
        (
            {},
            Step(local_steps=2),
            "the layers have too many different inputs in 2 local steps (the model has only 9 channels), so",
        ),
        (
            {},
            Step(),
            "the batch has too many tokens (the model has only 9 channels), so every word fits the gradients",
        ),
        (
            {"spans": [(None, 1)]},
            Step(),
            "the batch has too many tokens (LoRA reduces a token to only 4 channels), so every word fits",
        ),
    ],
)
def test_why_a_span_says_nothing(fields: dict[str, Any], step: Step, said: str | None) -> None:
    span: Any = SimpleNamespace(**{"tells": False, "rank": 3, "channels": 4, "spans": [(None, None)], **fields})
    found = full(span, 9, step)
    assert found is None if said is None else str(found).startswith(said)
