"""Scores: each true sentence gets the found one that fits it best, and no found one serves twice."""

from __future__ import annotations

import math
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from situs.audit.deadline import Deadline
from situs.audit.text import recovered as module
from situs.audit.text.recovered import UNNAMED, Read, Recovered, decoys, pick, score

SENTENCE = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@given(st.lists(SENTENCE, min_size=1, max_size=4), st.lists(SENTENCE, max_size=4))
def test_the_pairing_has_most_tokens_right(truth: list[tuple[int, ...]], found: list[tuple[int, ...]]) -> None:
    reads = score([str(row) for row in range(len(truth))], truth, Recovered(sentences=tuple(found)))
    assert [read.truth for read in reads] == truth
    used = [read.recovered for read in reads if read.recovered]
    assert all(used.count(one) <= found.count(one) for one in used)

    def right(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        return sum(x == y for x, y in zip(a, b, strict=False))

    padded = [*found, *[()] * len(truth)]
    best = max(sum(map(right, truth, order)) for order in permutations(padded, len(truth)))
    assert sum(read.right for read in reads) == best
    assert all(read.whole == (read.truth == read.recovered) for read in reads)


def test_words_are_known_without_a_sentence() -> None:
    [read] = score(["a"], [(1, 2, 1, 5)], Recovered(frozenset({1, 9}), ((1, UNNAMED),)))
    assert read.known == (True, False, True, False) and read.right == 1 and not read.whole and read.tokens == 4
    [none] = score(["a"], [(1, 2)], Recovered())
    assert none.recovered == () and none.right == 0 and none.known == (False, False)


@pytest.mark.parametrize("sentence", [(2, 5, 6, 7, 8, 3), (2, 5, 3), (2, 5, 5, 3), (4, 9)])
@pytest.mark.parametrize("seed", range(3))
def test_a_decoy_has_one_other_word(sentence: tuple[int, ...], seed: int) -> None:
    tokeniser = SimpleNamespace(all_special_ids=[0, 2, 3])
    inner = SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(20, 1))
    victim: Any = SimpleNamespace(tokeniser=tokeniser, backbone=SimpleNamespace(inner=inner))
    copies = decoys(victim, sentence, torch.Generator().manual_seed(seed))
    assert len(copies) == 3
    places = []
    for copy in copies:
        assert len(copy) == len(sentence)
        (place,) = [at for at, (a, b) in enumerate(zip(copy, sentence, strict=True)) if a != b]
        assert sentence[place] not in {0, 2, 3} and copy[place] not in {0, 2, 3} and 0 <= copy[place] < 20
        places.append(place)
    words = sum(word not in {0, 2, 3} for word in sentence)
    assert len(set(places)) == min(words, 3)
    assert decoys(victim, (2, 3), torch.Generator()) == []


def test_scores_are_shares_of_the_tokens_and_a_whole_sentence_is_picked() -> None:
    read = Read("a", (1, 2, 3, 4), (1, 9, 3), (True, True, False, False))
    assert read.scores == {"words": 0.5, "tokens": 0.5, "sentences": 0.0, "picked": 0.0}
    assert read._replace(picked=True).scores["picked"] == 1.0
    whole = read._replace(recovered=(1, 2, 3, 4))
    assert whole.scores == {"words": 0.5, "tokens": 1.0, "sentences": 1.0, "picked": 1.0}
    assert not whole._replace(grouped=False).whole and not read._replace(recovered=(1, 2, 3)).whole


def test_words_at_their_places_count_where_no_sentence_has_more_of_them() -> None:
    placed = frozenset({(1, 0), (2, 1), (9, 3)})
    [read] = score(["a"], [(1, 2, 3, 4)], Recovered(sentences=((1, 5, 5, 5),), placed=placed))
    assert read.recovered == (1, 2, UNNAMED, UNNAMED) and not read.grouped and read.right == 2
    [read] = score(["a"], [(1, 2, 3, 4)], Recovered(sentences=((1, 2, 5, 5),), placed=placed))
    assert read.recovered == (1, 2, 5, 5) and read.grouped  # as many: the sentence


@pytest.mark.parametrize(
    ("ahead", "picked"), [(math.log(297) - 0.05, False), (math.log(297) + 0.05, True), (-1.0, False)]
)
def test_a_sentence_is_picked_where_it_is_a_hundred_times_as_likely_as_all_decoys(
    ahead: float, picked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three decoys that fit alike; noise is what the likeliest candidate leaves."""
    truth, numbers, asked = [(4, 5, 6), (7, 8, 9)], 50, list[Any]()
    near, least = 3.0, 3.0 * (1 + 2 * abs(ahead) / 50)
    left = (near, least) if ahead > 0 else (least, near)

    def gradients(victim: Any, batch: Any, **options: Any) -> dict[str, torch.Tensor]:
        asked.append((list(batch), options["labels"], options["seed"]))
        size = math.sqrt(left[list(batch) != truth] / numbers)
        return {"a": torch.full((20,), size), "b": torch.full((30,), -size)}

    monkeypatch.setattr(module, "text_gradients", gradients)
    inner = SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(20, 1))
    tokeniser = SimpleNamespace(all_special_ids=[0])
    victim: Any = SimpleNamespace(tokeniser=tokeniser, backbone=SimpleNamespace(inner=inner))
    upload = {"a": torch.zeros(20, dtype=torch.float64), "b": torch.zeros(30, dtype=torch.float64)}
    assert pick(victim, upload, truth, [1], labels=[0, 1], seed=5) == {1: picked}
    assert asked[0] == (truth, [0, 1], 5) and len(asked) == 4
    for batch, *_ in asked[1:]:
        assert batch[0] == truth[0] and sum(a != b for a, b in zip(batch[1], truth[1], strict=True)) == 1
    asked.clear()
    assert pick(victim, upload, truth, [], labels=[0, 1]) == {} and not asked
    late = Deadline(seconds=1e-9)
    assert pick(victim, upload, truth, [0, 1], labels=[0, 1], deadline=late) == {}
    assert pick(victim, upload, [(0, 0), truth[1]], [0], labels=[0, 1]) == {0: False}  # no word to change
