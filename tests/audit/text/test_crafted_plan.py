"""The plan of crafted weights for texts: digits of words, edges, codes and channels, by exact laws."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import norm

from situs.audit.text.crafted import MEAN, Channels, Plan, Window, _once, _slopes, predicted
from situs.audit.text.recovered import UNNAMED

CHANNELS = Channels(8, 3, 4, 5, 2)
PLAN = Plan("next words", "neurons", CHANNELS, 50, 8, {1: "a", 2: "b", 5: "c"}, 2.0, False, 3, 2, 4)
CLASSES = replace(PLAN, task="classes")


def test_a_word_is_two_digits_and_other_digits_are_no_word() -> None:
    codes = PLAN.codes()
    digits = (codes - 0.5) * (PLAN.base - 1)
    assert PLAN.base == 8 and PLAN.base**2 >= PLAN.words > (PLAN.base - 1) ** 2
    torch.testing.assert_close(digits, digits.round())
    assert codes.min() == 0.5 and codes.max() == 1.5 and len(codes.unique(dim=0)) == 50
    assert PLAN.word_of(digits.round()).tolist() == [*range(50)]
    every = torch.cartesian_prod(torch.arange(-1, 10), torch.arange(-1, 10)).double()
    named = PLAN.word_of(every)
    assert sorted(named[named != UNNAMED].tolist()) == [*range(50)]


@pytest.mark.parametrize("batch", [3, 20])
def test_windows_are_equally_likely_and_apart_where_there_are_more_sentences(batch: int) -> None:
    likely = norm.cdf(PLAN.edges().numpy())
    assert likely == pytest.approx([(n + 0.5) / 8 for n in range(8)])
    low, high = norm.cdf(replace(PLAN, kind="values", batch=batch).edges().numpy()).T
    assert low == pytest.approx([n / 8 for n in range(8)])
    assert high - low == pytest.approx([1 / max(8, batch)] * 8)


@pytest.mark.parametrize(("plan", "block", "count"), [(PLAN, 1, 3), (PLAN, 2, 1), (PLAN, 3, 8), (CLASSES, 1, 8)])
def test_a_code_of_evenly_spread_digits_has_deviation_one(plan: Plan, block: int, count: int) -> None:
    rows = plan.functional(block)
    assert rows.shape == (count, 2) and plan.start(block) == count
    assert float(rows.square().sum()) / 12 == pytest.approx(1)
    if plan is CLASSES:  # the first token is the same in each sentence
        assert not rows[0].any()
        rows = rows[1:]
    for pair in rows[: len(rows) // 2 * 2].unflatten(0, (-1, 2)):
        assert torch.equal(pair[0], -pair[1].flip(0)) and pair.any()
    assert count < 8 or not torch.equal(rows, plan.functional(block + 6)[-len(rows) :])  # other blocks, other codes


@pytest.mark.parametrize("channels", [CHANNELS, Channels(3, 2, 1, 1, 0)])
def test_every_channel_has_one_place(channels: Channels) -> None:
    names = ("one", "plus", "minus", "zero", "first", "portion", "balance", "out", "sink")
    ranges = [
        range(channels.places * channels.digits),
        range(channels.word, channels.word + 2),
        range(channels.gate, channels.gate + channels.gates),
        range(channels.place, channels.place + channels.bits),
        *(range(getattr(channels, name), getattr(channels, name) + 1) for name in names),
        range(channels.sink + 1, channels.sink + 1 + channels.windows),
    ]
    assert [each for part in ranges for each in part] == [*range(channels.total)]
    told = [*ranges[0], channels.plus, channels.minus, channels.first, channels.portion]
    assert channels.telling == told
    with pytest.raises(AttributeError, match="other"):
        _ = channels.other


@pytest.mark.parametrize(("heads", "size"), [(8, 4), (5, 6), (2, 13), (1, 25), (1, 40)])
def test_the_heads_of_a_window_share_all_digits(heads: int, size: int) -> None:
    """Each has one channel fewer than it is wide: that is the first token's."""
    plan = replace(PLAN, kind="biases", heads=heads, head_size=size)
    parts = [plan.digits(part) for part in range(heads)]
    assert [digit for part in parts for digit in part] == [*range(CHANNELS.word)]
    assert all(len(part) == size - 1 for part in parts[:-1]) and 0 < len(parts[-1]) < size


@pytest.mark.parametrize("tokens", [2, 9, 16, 17])
@pytest.mark.parametrize("width", [10, 30, 47, 48, 49, 500])
def test_as_many_places_as_fit_and_bits_for_all_tokens(tokens: int, width: int) -> None:
    backbone: Any = SimpleNamespace(dim=width, num_tokens=tokens)
    channels = Channels.of(backbone, 11, 3, 2, 4)
    assert 2**channels.bits >= tokens > 2 ** (channels.bits - 1)
    assert channels.places in (0, 11) or width - 3 < channels.total <= width
    assert channels.places == 11 or channels._replace(places=channels.places + 1).total > width
    assert channels.places == 0 or channels.total <= width


def test_windows_of_a_later_block_have_channels_of_their_own() -> None:
    plan = replace(PLAN, kind="values", bins=4)
    gated = [plan.gated(block) for block in (1, 2, 5)]
    first = CHANNELS.sink + 1
    assert gated == [range(first, first + 4), range(first + 4, first + 8), range(first + 8, first + 12)]
    assert PLAN.gated(2) == range(0)
    assert [PLAN.gate(block) - CHANNELS.gate for block in (1, 2, 6, 7)] == [0, 1, 5, 0]
    assert {CLASSES.gate(block) for block in range(1, 9)} == {CHANNELS.gate}
    assert (PLAN.directions, CLASSES.directions, PLAN.unit, replace(PLAN, post=True).unit) == (2, 1, 1.0, 0.5)


def test_the_gradients_of_tokens_follow_from_the_shares_of_places() -> None:
    """A token adds its slope to its own place, and through the mean to its own and all earlier ones."""
    start, count = PLAN.start(1), 7
    slopes = torch.randn(2, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slopes[:, :start] = 0  # tokens before have no code
    share = slopes.clone()
    for token in range(count):
        for place in range(token + 1):
            share[:, place] += slopes[:, token] * MEAN / (token + 1)
    torch.testing.assert_close(_slopes(PLAN, 1, share), slopes)


def window(words: tuple[int, ...], factor: float, last: int, number: int = 0) -> Window:
    """The slopes of a sentence's inputs, to the last digit; tokens before the code's have none."""
    codes = PLAN.codes()
    slopes = (codes.mean(dim=0) - codes[[*words[1:], last]]).T / factor
    slopes[:, : PLAN.start(1)] = 0
    return Window(1, number, words, len(words), slopes)


def test_last_words_follow_from_the_factor_that_known_words_give() -> None:
    """Of a sentence with too few known words by the others'; where nobody knows a factor, no word."""
    long, short = window((4, 9, 1, 33, 20, 7, 2), 0.3, 41), window((4, 9, 1, 33), 0.3, 12, 1)
    assert [found.sentence[-1] for found in predicted(PLAN, [long, short])] == [41, 12]
    assert predicted(PLAN, [long])[0].targets == (9, 1, 33, 20, 7, 2, 41)
    two = window((4, 9, 1, 33, 20, 7), 0.3, 41)  # its own factor is good enough for itself alone
    assert [found.sentence[-1] for found in predicted(PLAN, [two, short])] == [41, UNNAMED]
    assert predicted(PLAN, [short])[0].sentence == (4, 9, 1, 33, UNNAMED)
    others = [window((4, 9, 1, 33, 20, 7, n), 0.3 * factor, 41) for n, factor in ((5, 1.0), (6, 1.0), (8, 9.0))]
    assert predicted(PLAN, [*others, short])[-1].sentence[-1] == 12  # the middle one of all factors
    full = window((4, 9, 1, 33, 20, 7, 2, 3), 0.3, 41)
    assert predicted(PLAN, [full])[0].sentence[-1] == UNNAMED  # it may go on
    off = long._replace(slopes=long.slopes.clone() if long.slopes is not None else None)
    assert off.slopes is not None
    off.slopes[:, -1] += 0.5 / (PLAN.base - 1) / 0.3  # half a digit
    assert predicted(PLAN, [off])[0].sentence[-1] == UNNAMED


def test_a_sentence_is_put_through_the_model_once_with_all_its_words_if_somebody_knows_them() -> None:
    unknown, known, again = (Window(1, number, (3, 4), 2, targets=(4, last)) for number, last in enumerate((-1, 7, 8)))
    assert UNNAMED == -1
    other = Window(2, 5, (3, 5), 2, targets=(5, -1))
    assert _once([unknown, other, known, again]) == [known, other]
    assert _once([known, unknown]) == [known]
    assert Window(1, 0, (3, 4), 4, targets=()).sentence == (3, 4, UNNAMED, UNNAMED)
