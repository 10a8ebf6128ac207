"""Words out of hidden states: exact on tiny models in float64; no certificate for states that no word explains."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_texts import CAUSAL, write_folder
from torch import Tensor

from situs.audit.split import prompts
from situs.audit.split.prompts import (
    BFLOAT16,
    Guide,
    Known,
    Prior,
    Target,
    _inverted,
    _moments,
    _verdict,
    _Whole,
    find_columns,
    find_rows,
    nearest,
    read_prompt,
    states_at,
    study,
    under_noise,
)
from situs.audit.text.recovered import SURE
from situs.backbones.hf.text import PromptCache
from situs.models import open_model
from situs.models.data import opened

WORDS = 60
LENGTHS = (1, 5, 9, 12)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """kind -> (the model in float64, what is known at depths 0 and 1, private texts)."""

    @functools.cache
    def made(kind: str) -> tuple[Any, dict[int, Known], list[Tensor]]:
        folder = write_folder(tmp_path_factory.mktemp("model") / "it", kind)
        backbone: Any = opened(open_model(folder, any_weights=True)).backbone.double()
        chance = torch.Generator().manual_seed(1)
        public = [tuple(torch.randint(WORDS, (12,), generator=chance).tolist()) for _ in range(40)]
        private = [torch.randint(WORDS, (count,), generator=chance) for count in LENGTHS]
        return backbone, study(backbone, public, (0, 1), ((), ()), 0), private

    return made


def sent(backbone: Any, text: Tensor, depth: int) -> Tensor:
    return states_at(backbone, text[None], [depth])[depth][0]


@pytest.mark.parametrize(
    ("depth", "kind"),
    [
        *((depth, kind) for depth in (0, 1) for kind in ("gpt2", "llama", "gpt_neox")),
        (0, "bert"),
        pytest.param(1, "bert", marks=pytest.mark.slow),
    ],
)
def test_every_word_is_read_and_a_perturbed_state_is_not_accepted(kind: str, depth: int, scene: Any) -> None:
    backbone, known, private = scene(kind)
    for text in private:
        states = sent(backbone, text, depth)
        reading = read_prompt(states, known[depth])
        assert reading.words == tuple(text.tolist()) and reading.proved == len(text)
        assert reading.certificate.holds and reading.certificate.unique and not reading.certificate.verdict
        assert torch.allclose(reading.states, states, atol=1e-10)
        states[-1, 0] += 1e-6  # far below what separates two words
        other = read_prompt(states, known[depth])
        assert not other.certificate.holds and other.proved < len(text) and "no word" in other.certificate.verdict
        assert other.words == reading.words  # and is the likeliest all the same


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_state_may_be_off_by_some_rounding(kind: str, scene: Any) -> None:
    """A GPU's kernels round more for some lengths of a text than for the one that was checked."""
    backbone, known, private = scene(kind)
    states = sent(backbone, private[-1], 1)
    error = known[1].error(states) * torch.randn(states.shape, generator=torch.Generator().manual_seed(3)).sign()
    assert read_prompt(states + 15 * error, known[1]).certificate.holds
    assert not read_prompt(states + 60 * error, known[1]).certificate.holds


def test_the_blocks_of_an_encoder_are_inverted_from_a_wrong_word(scene: Any) -> None:
    backbone, known, private = scene("bert")
    text = private[-1]
    for place in (0, 7, len(text) - 1):
        wrong = text.clone()
        wrong[place] = (text[place] + 1) % WORDS
        looks = [*_inverted(sent(backbone, text, 1), wrong, known[1])]
        assert looks and torch.equal(looks[-1], text)


@pytest.mark.parametrize("kind", [kind for kind in CAUSAL if "classes" not in kind])
def test_next_states_are_the_models_own(kind: str, scene: Any) -> None:
    """One word at a time beside others, with a cache, against the whole text at once."""
    backbone, _, private = scene(kind)
    for depth in (0, 1, 2):
        cache, rows = PromptCache(), []
        for word in private[-1]:
            others = torch.stack([torch.tensor(7), word, torch.tensor(3)])
            rows.append(backbone.next_states(others, cache, depth)[1])
            if depth:
                cache.add(1)
            else:
                cache.length += 1
        assert torch.allclose(torch.stack(rows), sent(backbone, private[-1], depth), atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("depth", [0, 1])
def test_permuted_columns_are_solved_once(kind: str, depth: int, scene: Any) -> None:
    backbone, known, private = scene(kind)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(2))
    hidden = [sent(backbone, text, depth)[:, order] for text in private]
    columns = find_columns(hidden, known[depth])
    assert columns.proved and torch.equal(order[columns.clear], torch.arange(48))
    words = [read_prompt(text[:, columns.clear], known[depth]).words for text in hidden]
    assert words == [tuple(text.tolist()) for text in private]


@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_rows_are_sorted_by_the_place_whose_words_come_nearest(sigma: float, scene: Any) -> None:
    """A shortlist never gives a smaller distance than all words do, and misses no word at its place."""
    backbone, known, private = scene("bert")
    chance = torch.Generator().manual_seed(6)
    for text in [*private, torch.full((12,), 7)]:
        states = sent(backbone, text, 0)
        states = states + sigma * known[0].scale * torch.randn(states.shape, generator=chance)
        order = torch.randperm(len(text), generator=chance)
        seen = states[order]
        assert torch.equal(order[find_rows(seen, known[0])], torch.arange(len(text)))
        for place in range(len(text)):
            every = torch.cdist(seen, known[0].states_of(torch.arange(WORDS), place)).square().amin(dim=1)
            listed, own = known[0].distance(seen, place), order == place
            assert bool((listed >= every - 1e-9).all())
            torch.testing.assert_close(listed[own], every[own], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [0, 1])
def test_noise_may_be_four_deviations_off(depth: int, scene: Any) -> None:
    """Of the mean square of its entries, in units of what noise predicts: here drawn, not computed."""
    _, known, _ = scene("gpt2")
    noisy = under_noise(known[depth], 0.3 * known[depth].scale, 0.0)
    drawn = torch.randn(20000, 48, generator=torch.Generator().manual_seed(0)).square().mean(dim=1)
    assert noisy.limit == pytest.approx(1 + 4 * float(drawn.std()), rel=0.02)
    assert known[depth].limit > noisy.limit  # rounding is not random


def test_under_heavy_noise_there_is_no_certificate(scene: Any) -> None:
    backbone, known, private = scene("llama")
    chance = torch.Generator().manual_seed(3)
    for depth in (0, 1):
        for strength, read in ((0.05, True), (30.0, False)):
            sigma = strength * known[depth].scale
            noisy = under_noise(known[depth], sigma, 0.0)
            for text in private[1:]:
                states = sent(backbone, text, depth)
                states = states + sigma * torch.randn(states.shape, generator=chance, dtype=states.dtype)
                reading = read_prompt(states, noisy)
                assert reading.certificate.holds is read and reading.certificate.unique is read
                assert (reading.words == tuple(text.tolist())) is read
            hidden = [sent(backbone, text, depth)[:, torch.randperm(48, generator=chance)] for text in private]
            assert read or not find_columns(hidden, noisy).proved


def test_the_prior_is_half_public_text_and_half_what_the_model_predicts(scene: Any) -> None:
    """Its slow reference: the model's own forward on all words so far, and the words counted one by one."""
    for kind in ("gpt2", "llama", "gpt_neox", "bert"):
        backbone, known, private = scene(kind)
        chance = torch.Generator().manual_seed(1)  # as in `scene`
        public = [word for _ in range(40) for word in torch.randint(WORDS, (12,), generator=chance).tolist()[1:]]
        different = len({*public})
        counted = [(public.count(word) + different / WORDS) / (len(public) + different) for word in range(WORDS)]
        prior, words = Prior(known[1]), private[-1]
        assert torch.allclose(prior.log.exp(), torch.tensor(counted, dtype=torch.float64), atol=1e-12)
        for number, word in enumerate(words.tolist(), start=1):
            prior.add(word)
            expected = torch.tensor(counted, dtype=torch.float64)
            if kind != "bert":
                expected = (expected + backbone(words[None, :number])[0, -1].softmax(dim=0)) / 2
            assert torch.allclose(prior.log.exp(), expected, atol=1e-12)


def test_a_decoder_that_predicts_classes_changes_no_prior(scene: Any) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    _, known, private = scene("gpt2")
    config = GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=48, n_layer=1, n_head=4, pad_token_id=0)
    backbone: Any = opened(open_model(GPT2ForSequenceClassification(config))).backbone
    prior = Prior(replace(known[1], backbone=backbone))
    before = prior.log
    for word in private[-1].tolist():
        prior.add(word)
        assert torch.equal(prior.log, before)


@pytest.mark.parametrize("depth", [0, 1])
def test_under_noise_the_most_probable_word_is_read(depth: int, scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The posterior of all words by hand, at a first place whose prior knows one word; the certificate ignores it."""
    backbone, known, _ = scene("llama")
    chance, words = torch.Generator().manual_seed(5), torch.arange(WORDS)
    log = torch.full((WORDS,), -6.0, dtype=torch.float64)
    log[7] = 6.0
    monkeypatch.setattr(Prior, "log", property(lambda _: log))
    clear = states_at(backbone, words[:, None], [depth])[depth][:, 0]
    changed = 0
    for strength in (0.2, 2.0, 8.0):
        sigma = strength * known[depth].scale
        noisy = under_noise(known[depth], sigma, 0.0)
        for word in range(0, WORDS, 6):
            seen = clear[word] + sigma * torch.randn(clear.shape[1], generator=chance, dtype=clear.dtype)
            likelihood = -((clear - seen) / noisy.error(seen)).square().sum(dim=1) / 2
            reading = read_prompt(seen[None], noisy)
            [read] = reading.words
            assert read == int((likelihood + log).argmax())
            changed += read != int(likelihood.argmax())
            assert (reading.certain == 1) == (float(likelihood.softmax(dim=0)[read]) > SURE)
    assert changed


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_under_little_noise_the_search_goes_on_until_a_word_fits(
    kind: str, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a block the guide may name the right word last, noise or not."""
    backbone, known, private = scene(kind)
    monkeypatch.setattr(prompts, "UNPROVED", 4)
    noisy = under_noise(known[1], 0.01 * known[1].scale, 0.0)
    backwards = [replace(guide, expected=guide.expected.flip(0)) for guide in (noisy.first, noisy.rest) if guide]
    poor = replace(noisy, first=backwards[0], rest=backwards[1])
    text = private[-1]
    states = sent(backbone, text, 1)
    states = states + noisy.sigma * torch.randn(states.shape, generator=torch.Generator().manual_seed(4))
    reading = read_prompt(states, poor)
    assert reading.words == tuple(text.tolist()) and reading.proved == len(text) and reading.tried > 8 * len(text)


def test_the_deviation_of_rounding_is_that_of_rounded_numbers() -> None:
    for power in (-7, 0, 5):
        numbers = 2.0**power * torch.linspace(1, 1.04, 100_001, dtype=torch.float64)
        errors = (numbers.bfloat16().double() - numbers) / numbers
        assert float(errors.square().mean().sqrt()) == pytest.approx(BFLOAT16, rel=0.05)


def test_rounded_numbers_are_expected(scene: Any) -> None:
    """In bf16 the residual is what the rounding explains; without the rounding, the same states are not accepted."""
    backbone, known, private = scene("gpt2")
    states = sent(backbone, private[-1], 1).bfloat16().double()
    reading = read_prompt(states, under_noise(known[1], 0.0, BFLOAT16))
    assert reading.certificate.holds and reading.words == tuple(private[-1].tolist())
    assert reading.certificate.residual is not None and reading.certificate.expected is not None
    assert 0.3 < reading.certificate.residual / reading.certificate.expected < 3
    assert not read_prompt(states, known[1]).certificate.holds


def test_one_place_needs_the_same_work_whatever_the_length(scene: Any) -> None:
    """Linear in the length: the candidates of a longer text are those of its beginning and of the rest."""
    backbone, known, private = scene("llama")
    states = sent(backbone, private[-1], 1)
    tried = [read_prompt(states[:count], known[1]).tried for count in range(1, len(states) + 1)]
    assert all(0 < after - before <= WORDS for before, after in itertools.pairwise(tried))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_guide_that_is_wrong_in_this_context_is_learned_anew(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guide that names words at random would need about half of them."""
    words = 4000
    backbone: Any = opened(
        open_model(write_folder(tmp_path / "it", kind, vocab_size=words), any_weights=True)
    ).backbone.double()
    chance = torch.Generator().manual_seed(1)
    public = [tuple(torch.randint(words, (12,), generator=chance).tolist()) for _ in range(20)]
    known = study(backbone, public, (2,), ((), ()), 0)[2]
    assert known.rest is not None and known.first is not None
    mixed = known.rest.expected[torch.randperm(words, generator=chance)]
    wrong = replace(known, rest=replace(known.rest, expected=mixed), first=replace(known.first, expected=mixed))
    text = torch.randint(words, (6,), generator=chance)
    reading = read_prompt(sent(backbone, text, 2), wrong)
    assert reading.certificate.holds and reading.words == tuple(text.tolist())
    monkeypatch.setattr("situs.audit.split.prompts.RELEARNED", words)
    assert read_prompt(sent(backbone, text, 2), wrong).tried > 1.5 * reading.tried


def test_the_nearest_rows_are_first_and_a_bonus_is_taken_off_their_distance() -> None:
    chance = torch.Generator().manual_seed(0)
    rows, point, bonus = (torch.randn(*n, generator=chance, dtype=torch.float64) for n in ((30, 5), (5,), (30,)))
    norms, far = rows.square().sum(dim=1), (rows - point).square().sum(dim=1)
    assert nearest(rows, norms, point, 7).tolist() == far.argsort()[:7].tolist()
    assert nearest(rows, norms, point, 99, bonus).tolist() == (far - bonus).argsort().tolist()


def test_a_guide_is_a_regression_and_its_distances_are_those_of_what_that_leaves() -> None:
    """By torch's least squares with a ridge as more rows; under noise the same as learned with that noise."""
    chance = torch.Generator().manual_seed(0)
    embedding, slope = (torch.randn(*n, generator=chance, dtype=torch.float64) for n in ((20, 4), (4, 6)))
    words = torch.randint(20, (400,), generator=chance)
    states = embedding[words] @ slope + 0.3 * torch.randn(400, 6, generator=chance, dtype=torch.float64) + 5
    guide = Guide.learn(states, words, embedding)
    x = (states - states.mean(dim=0)) / states.std(dim=0)
    y = embedding[words] - embedding[words].mean(dim=0)
    ridge = (prompts.RIDGE * 400 * y.var(dim=0).mean()).sqrt() * torch.eye(4)
    by_hand = torch.linalg.lstsq(torch.cat([y, ridge]), torch.cat([x, torch.zeros(4, 6)])).solution
    left = x - y @ by_hand
    covariance = left.T @ left / 400 + prompts.SMALLEST * torch.eye(6)
    said = (embedding - embedding[words].mean(dim=0)) @ by_hand
    away = x[:9, None] - said
    expected = torch.einsum("nvd,de,nve->nv", away, torch.linalg.inv(covariance), away)
    found = (guide.whitened(states[:9])[:, None] - guide.expected).double().square().sum(dim=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(guide.norms, guide.expected.square().sum(dim=1))
    assert guide.likeliest(guide.whitened(states[0]), 3).tolist() == expected[0].argsort()[:3].tolist()
    log = 20 * torch.randn(20, generator=chance)
    posterior = -expected[0] / 2 + log
    assert guide.likeliest(guide.whitened(states[0]), 4, prior=log).tolist() == posterior.argsort().tolist()[:-5:-1]
    moved = guide.offset(words[:50], states[:50] + 1)
    torch.testing.assert_close(moved, (guide.whitened(states[:50] + 1) - guide.expected[words[:50]]).mean(dim=0))
    noisy = Guide.learn(states, words, embedding, sigma=0.7)
    again = prompts._noisy(guide, 0.7 / guide.spread)
    torch.testing.assert_close(again.whiten, noisy.whiten)
    torch.testing.assert_close(again.expected, noisy.expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_place_moves_the_words_as_far_as_in_the_model_itself(kind: str, scene: Any) -> None:
    """And a shortlist of the words at the first place has those that are nearest at the others."""
    backbone, known, _ = scene(kind)
    words = torch.arange(WORDS)
    at_place = states_at(backbone, words[:, None].expand(-1, 8).contiguous(), [0])[0]
    for place in (0, 1, 7):
        torch.testing.assert_close(known[0].states_of(words, place), at_place[:, place])
        torch.testing.assert_close(known[0].moved(place), (at_place[:, place] - at_place[:, 0]).mean(dim=0))
        for state in at_place[::9, place]:
            far = (at_place[:, place] - state).square().sum(dim=1)
            assert known[0].nearest(state, place, 5)[:2].tolist() == far.argsort()[:2].tolist()
            noisy = replace(known[0], sigma=2.0)
            log = 3 * torch.randn(WORDS, generator=torch.Generator().manual_seed(place)).double()
            found = noisy.nearest(state, place, 15, log)
            assert found.tolist() == (far - 8 * log).argsort()[:15].tolist()


def test_a_misfit_is_in_units_of_what_rounding_wire_and_noise_predict(scene: Any) -> None:
    _, known, _ = scene("bert")
    parts = {"rounding": 0.3, "wire": 0.4, "sigma": 0.5, "typical": 2.0}
    plain = replace(known[1], **{**parts, "sigma": 0.0})
    given = torch.tensor([[3.0, -1.0], [0.0, 2.0]], dtype=torch.float64)
    errors = [[(0.3 * (abs(z) + 2)) ** 2 + (0.4 * z) ** 2 for z in row] for row in given.tolist()]
    torch.testing.assert_close(plain.error(given), torch.tensor(errors, dtype=torch.float64).sqrt())
    noisy = replace(plain, sigma=0.5)
    torch.testing.assert_close(noisy.error(given).square(), plain.error(given).square() + 0.25)
    target = Target.of(given, noisy, ordered=False)
    other = given + noisy.error(given) * torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    assert target.misfit(other).tolist() == pytest.approx([5.0, 2.0])
    expected = float(noisy.error(given).norm() / given.norm())
    assert target.relative(9.0) == pytest.approx((3 * expected, expected))
    order = Target.of(given, noisy, ordered=True)
    assert order.misfit(given.flip(1)).tolist() == [0.0, 0.0] and target.misfit(given.flip(1)).min() > 0
    assert plain.limit == 900.0  # thirty deviations, and no chance among them


def test_moments_and_verdicts_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, -3.0]])
    torch.testing.assert_close(_moments(rows), torch.tensor([[3.0, 7**0.5, 6.0, 1.0], [-1.0, 3**0.5, 0.0, -3.0]]))
    torch.testing.assert_close(_moments(rows.flip(1)), _moments(rows))
    assert _verdict([True, True], 2, 2) == ""
    assert _verdict([True, False, False], 0, 3) == "no word tried at position 2 reproduces the state that was sent"
    assert _verdict([True] * 3, 1, 3) == "at 2 positions a second word is equally likely"


def test_words_of_a_whole_text_are_changed_where_the_sum_of_states_comes_nearer(scene: Any) -> None:
    """Every other word at one place, and all texts of three words, against the model's own states."""
    backbone, known, private = scene("bert")
    text = private[1][:3]
    target = Target.of(sent(backbone, text, 1), known[1], ordered=False)
    infinite = torch.full((3,), torch.inf, dtype=torch.float64)
    whole = _Whole(known[1], target, text, torch.zeros(3, 48), infinite, [False] * 3)
    wrong = text.clone()
    wrong[1] = (text[1] + 1) % WORDS
    assert whole.take(wrong) and not whole.take(wrong) and torch.equal(whole.words, wrong)
    assert not whole.fits and (whole.tried, whole.costs) == (2, 6)
    torch.testing.assert_close(whole.states, sent(backbone, wrong, 1))
    torch.testing.assert_close(whole.misfit, target.misfit(whole.states))
    others = torch.tensor([wrong[1], (text[1] + 2) % WORDS, (text[1] + 3) % WORDS])
    every = [torch.tensor([text[0], word, text[2]]) for word in others]
    sums = [float(target.misfit(sent(backbone, each, 1)).sum()) for each in every]
    best = sums.index(min(sums))
    assert whole.change(1, others) is (best > 0) and torch.equal(whole.words, every[best])
    assert whole.tried == 5  # the word that is there is tried once
    assert whole.change(1, torch.arange(WORDS)) and torch.equal(whole.words, text) and whole.fits
    assert whole.sure == [False, True, False] and not whole.change(1, others)
    torch.testing.assert_close(whole.states, sent(backbone, text, 1))
    assert whole.costs == 3 * (5 + WORDS + 4)
    assert not replace(whole, known=replace(known[1], sigma=1e-3)).fits  # noise alone could be as near


@pytest.mark.parametrize("computed", [0, 400])
def test_the_states_computed_for_one_text_are_limited(
    computed: int, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For states of no text: one round ends at the limit, up to the words of one place."""
    _, known, _ = scene("bert")
    seen = 3 * torch.randn(6, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(prompts, "_inverted", lambda *_: iter(()))
    monkeypatch.setattr(prompts, "COMPUTED", computed)
    reading = read_prompt(seen, known[1])
    costs = reading.tried * 6
    assert not reading.certificate.holds and reading.cut is None
    assert costs == 6 if not computed else computed < costs <= computed + 6 * (1 + prompts.CHANGES * 4**2)
