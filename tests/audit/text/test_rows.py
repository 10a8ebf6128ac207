"""Rows of words against rows of places: what noise does not hide where both tables' gradients are sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import sentences, victim, write_folder

from situs.audit import audit_texts
from situs.audit.deadline import Deadline
from situs.audit.defences import Noise, create_defence
from situs.audit.text.audit import SENT, find_sentences
from situs.audit.text.recovered import UNNAMED
from situs.audit.text.rows import deviation, directions, match_rows, named_words, place_weight
from situs.audit.text.victim import text_gradients, word_weight
from situs.gate import ABOVE, NOT_JUDGED

TEXT = "3 7 1 9 3 5"
"""One word twice: its row is the sum of two places'."""


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("sigma", "kind"),
    [
        pytest.param(sigma, kind, marks=[pytest.mark.slow] * (sigma > 0.01 and kind not in ("bert", "albert")))
        for sigma in (0.01, 0.03)
        for kind in ("bert", "distilbert", "roberta", "electra", "albert")
    ],
)
def test_a_sentence_is_read_through_noise(tmp_path: Path, kind: str, sigma: float) -> None:
    made = victim(tmp_path, kind)
    [truth] = sentences(made, TEXT)
    upload = text_gradients(made, [truth], labels=[0], defence=Noise(sigma), seed=1)
    found = find_sentences(made.backbone, upload, 1, noise=sigma)
    assert found.sentences == (truth,) and found.words >= set(truth)
    assert match_rows(made.backbone, upload, 1).noise == pytest.approx(sigma, rel=0.15)  # as the rows tell it
    told = find_sentences(made.backbone, upload, 1, noise=100 * sigma)  # who states more noise hides no more
    assert told.sentences == (truth,)


@pytest.mark.thin(2)
@pytest.mark.parametrize("defence", ["fp16", "bf16", "int8", "noise=0.001", "clip=2"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_other_defences_do_not_hide_whose_row_it_is(tmp_path: Path, kind: str, defence: str) -> None:
    made = victim(tmp_path, kind)
    [truth] = sentences(made, TEXT)
    upload = text_gradients(made, [truth], labels=[0], defence=create_defence(defence), seed=1)
    rows = match_rows(made.backbone, upload, 1, steps=defence == "int8")
    named = {(word, place) for word, place, _ in rows.tokens}
    assert named <= {(word, place) for place, word in enumerate(truth)} and len(named) >= (
        5 if defence == "clip=2" else 8
    )
    assert rows.words <= set(truth)


def test_words_of_a_batch_are_placed_and_sentences_are_not_claimed(tmp_path: Path) -> None:
    made = victim(tmp_path, "distilbert")
    batch = sentences(made, "3 7 1 9", "4 3 8 2")
    upload = text_gradients(made, batch, labels=[0, 1], defence=Noise(0.1), seed=1)
    found = find_sentences(made.backbone, upload, 2, noise=0.1)
    truth = {(word, place) for one in batch for place, word in enumerate(one)}
    assert len(found.placed & truth) >= 7 and len(found.placed - truth) <= 2 and not found.sentences
    assert "the attack did not test which words belong to the same sentence" in str(found.reason)


def test_a_causal_model_with_a_table_and_one_with_a_tied_head(tmp_path: Path) -> None:
    for tied in (False, True):
        made = victim(tmp_path / str(tied), "gpt2", tie_word_embeddings=tied)
        [truth] = sentences(made, TEXT)
        upload = text_gradients(made, [truth], defence=Noise(0.01), seed=1)
        [one] = find_sentences(made.backbone, upload, 1, noise=0.01).sentences
        assert one[: len(truth) - 1] == truth[:-1]  # the last word is learned, and never read


@pytest.mark.parametrize("tied", [False, True])
def test_without_a_table_of_places_that_is_the_reason(tmp_path: Path, tied: bool) -> None:
    made = victim(tmp_path, "llama", tie_word_embeddings=tied)
    [truth] = sentences(made, TEXT)
    upload = text_gradients(made, [truth], defence=Noise(0.3), seed=1)
    found = find_sentences(made.backbone, upload, 1, noise=0.3)
    assert "no position table" in str(found.reason)
    assert tied or set(truth[:-1]) <= found.words <= set(truth)
    bert = victim(tmp_path / "bert", "bert")
    sent = text_gradients(bert, sentences(bert, TEXT), labels=[0], defence=Noise(0.3))
    name = place_weight(bert.backbone)
    assert name is not None and "is not sent" in str(
        find_sentences(bert.backbone, {n: g for n, g in sent.items() if n != name}, 1, noise=0.3).reason
    )
    del sent[word_weight(bert.backbone)]
    assert not match_rows(bert.backbone, sent, 1).tables


def test_numbers_that_overflowed_or_are_not_known_count_as_nothing(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert")
    [truth] = sentences(made, TEXT)
    sent = text_gradients(made, [truth], labels=[0], defence=Noise(0.01), seed=1)
    spared, weight = dict(sent), word_weight(made.backbone)
    for name in (weight, str(place_weight(made.backbone))):
        spared[name] = sent[name].index_fill(0, torch.arange(len(sent[name]) - 4, len(sent[name])), 0.0)
    expected = match_rows(made.backbone, spared, 1)
    assert expected.sentence == truth
    lost = {name: g.masked_fill(spared[name] == 0, torch.nan) for name, g in sent.items()}
    assert match_rows(made.backbone, lost, 1) == expected
    for value in (torch.nan, torch.inf, -torch.inf):
        table = torch.full_like(sent[weight], value).index_copy(0, torch.tensor([3]), sent[weight][[3]])
        assert match_rows(made.backbone, {weight: table}, 1).noise == 0
        named = named_words(made.backbone, {weight: sent[weight].masked_fill(spared[weight] == 0, value)})
        assert named == named_words(made.backbone, spared) >= set(truth)


def test_noise_alone_is_no_sentence(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert")
    for seed in range(5):
        chance = torch.Generator().manual_seed(seed)
        upload = {
            name: torch.randn(p.shape, generator=chance)
            for name, p in made.backbone.named_parameters()
            if name in (word_weight(made.backbone), place_weight(made.backbone))
        }
        rows = match_rows(made.backbone, upload, 1)
        assert not rows.tokens and not rows.words and rows.sentence == () and rows.noise == pytest.approx(1, rel=0.15)


def test_the_noise_is_that_of_rows_without_words() -> None:
    rows = 0.2 * torch.randn(400, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert deviation(rows) == pytest.approx(0.2, rel=0.03)
    rows[:200] += 5.0  # half of them have words
    assert deviation(rows) == pytest.approx(0.2, rel=0.08)


def test_directions_are_a_basis_by_strength() -> None:
    strength = torch.logspace(0, -6, 24, dtype=torch.float64)
    rows = torch.randn(40, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * strength
    parts = directions(rows, 1e-3)
    basis = torch.cat(parts, dim=1)
    assert torch.allclose(basis.mT @ basis, torch.eye(24, dtype=torch.float64), atol=1e-9)
    sizes = [float((rows @ part).norm(dim=0).mean()) for part in parts]
    assert len(parts) > 2 and sizes == sorted(sizes, reverse=True)


def test_the_gain_is_that_of_the_likelihood() -> None:
    """Against the Gaussian's own logarithm, with every token's variance searched for."""
    from situs.audit.text.rows import _Search

    chance = torch.Generator().manual_seed(0)
    vector = 2 * torch.randn(12, generator=chance, dtype=torch.float64)
    words, places = (torch.randn(n, 12, generator=chance, dtype=torch.float64) for n in (4, 3))
    words[1] += vector
    places[2] += vector
    search = _Search(words, places, [torch.eye(12, dtype=torch.float64)], 1.0)
    rows = torch.cat([words, places])

    def likelihood(used: list[tuple[int, int, float]]) -> float:
        spread = torch.eye(7, dtype=torch.float64)
        for word, place, variance in used:
            column = torch.zeros(7, dtype=torch.float64)
            column[[word, 4 + place]] = 1
            spread = spread + variance * torch.outer(column, column)
        power = (rows * torch.linalg.solve(spread, rows)).sum()
        return float(-0.5 * power - 6 * torch.logdet(spread))

    def best(word: int, place: int, used: list[tuple[int, int, float]]) -> tuple[float, float]:
        tried = [float(each) for each in torch.logspace(-2, 2, 120)]
        values = [likelihood([*used, (word, place, each)]) for each in tried]
        return max(max(values) - likelihood(used), 0.0), tried[max(range(120), key=values.__getitem__)]

    gain = search._gain()
    assert divmod(int(gain.argmax()), 3) == (1, 2)
    for word, place in ((1, 2), (0, 0), (3, 1)):
        assert float(gain[word, place]) == pytest.approx(best(word, place, [])[0], abs=1e-2)
    first = (1, 2, best(1, 2, [])[1])
    search._add(1, 2)
    assert float(search._gain()[0, 2]) == pytest.approx(best(0, 2, [first])[0], abs=5e-2)


@pytest.mark.parametrize(("rest", "least"), [(0, 1), (1, 1), (40, 40)])
def test_a_token_is_as_probable_as_its_likelihood_among_all_words(rest: int, least: int) -> None:
    """Words that were not looked at gain nothing; at each place there are at most as many words as sentences."""
    from situs.audit.text.rows import _Search

    chance = torch.Generator().manual_seed(2)
    words, places = (torch.randn(n, 12, generator=chance, dtype=torch.float64) for n in (4, 3))
    for word, place in ((1, 2), (3, 0), (0, 0)):
        vector = torch.randn(12, generator=chance, dtype=torch.float64)
        words[word] += vector
        places[place] += vector

    def search() -> Any:
        return _Search(words, places, [torch.eye(12, dtype=torch.float64)], 1.0)

    tokens, other = search().run(2, rest, Deadline()), search()
    assert {token[:2] for token in tokens} == {(1, 2), (3, 0), (0, 0)}
    gone = torch.zeros(4, 3, dtype=torch.bool)
    for word, place, sure in tokens:
        column = other._gain()[:, place].masked_fill(gone[:, place], -math.inf).exp()
        assert sure == pytest.approx(float(column[word] / (column.sum() + least)), rel=1e-9)
        gone[word, place] = True
        other._add(word, place)
    assert [token[:2] for token in search().run(1, rest, Deadline())] == [(1, 2), (3, 0)]


@pytest.mark.parametrize(
    ("kind", "fields", "defence"), [("bert", {}, "noise=0.03"), ("bert", {"num_hidden_layers": 1}, "noise=0.01")]
)
def test_a_gate_sees_what_rows_tell(tmp_path: Path, kind: str, fields: dict[str, Any], defence: str) -> None:
    folder, file = write_folder(tmp_path / kind, kind, **fields), tmp_path / "lines.txt"
    file.write_text("w3 w7 w1 w9\nw4 w8 w2 w6 w5\n")
    audit = audit_texts(folder, file, count=2, defences=[defence], fail_above="tokens=0.2")
    sent = next(row for row in audit.findings if row.defence.endswith(SENT))
    assert sent.shares["tokens"] > 0.6
    assert audit.ruling is not None and audit.ruling.status == ABOVE


def test_what_no_attack_finds_is_still_told_from_candidates(tmp_path: Path) -> None:
    folder, file = write_folder(tmp_path / "bert", "bert"), tmp_path / "lines.txt"
    file.write_text("w3 w7 w1 w9\n")
    audit = audit_texts(folder, file, count=1, defences=["noise=0.3", "noise=1000"], fail_above="sentences=0.5")
    near, far = audit.findings[1], audit.findings[3]  # the word gradient is withheld
    assert near.whole == 0 and near.picked == 1 and near.shares["picked"] == 1.0
    assert far.whole == far.picked == 0
    assert audit.ruling is not None and audit.ruling.judgements[1].status == NOT_JUDGED
    assert (
        "1 sentence was not recovered, but an attacker can distinguish it from versions"
        in audit.ruling.judgements[1].reason
    )
    assert audit.judge(picked=0.5).status == ABOVE and audit.tone == "bad"
    shown = str(audit.summary().tables[0].rows)
    assert "none found" in shown and "0.0 %" not in shown and math.isclose(near.shares["tokens"], 0.0)
    assert UNNAMED not in audit.shown


def test_the_search_ends_with_the_time_and_looks_at_a_limited_number_of_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = victim(tmp_path, "bert")
    [truth] = sentences(made, TEXT)
    upload = text_gradients(made, [truth], labels=[0], defence=Noise(0.01), seed=1)
    stopped = match_rows(made.backbone, upload, 1, deadline=Deadline(seconds=1e-9))
    assert stopped.cut and not stopped.tokens and stopped.tables
    monkeypatch.setattr("situs.audit.text.rows.LARGEST", len(set(truth)) + 2)
    few = match_rows(made.backbone, upload, 1)
    assert few.sentence == truth and not few.cut  # the longest rows are those of the sentence
