"""Scores: each true sentence gets the found one that fits it best, and no found one serves twice."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from situs.audit.text.recovered import UNNAMED, Recovered, decoys, score

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
