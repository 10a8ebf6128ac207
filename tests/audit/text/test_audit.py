"""A text audit from a folder and a file: two rows always, everything comes back, and a stop is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_texts import write_folder

from situs.audit.deadline import Deadline
from situs.audit.text.audit import SENT, WITHHELD, Texts, _joined, audit_texts, first_lines
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.rows import Matched
from situs.audit.text.victim import text_gradients
from situs.errors import SitusError
from situs.gate import ABOVE, NOT_JUDGED
from situs.pages import make_page

LINES = ("w3 w7 w1 w9", "w4 w3 w8 w2", "w11 w12 w13", "w20 w21 w3 w7 w30")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("bert"), "bert", width=64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(LINES) + "\n\n")
    return file


def test_both_rows_of_an_encoder_come_back_whole(bert: Path, texts: Path) -> None:
    kept: list[Any] = []
    audit = audit_texts(bert, texts, batch=2, count=4, keep=kept.append, fail_above="sentences=0")
    assert [row.defence for row in audit.findings] == [SENT, WITHHELD] and audit.stopped is None
    for row in audit.findings:
        assert row.status == "done" and row.whole == 4 and row.shares == dict.fromkeys(row.shares, 1.0)
        assert row.seconds is not None and row.seconds > 0 and len(row.facts) == 2
    assert audit.ruling is not None and audit.ruling.status == ABOVE
    assert len(kept[-1].findings[0].reads) == 4
    assert audit.shown[8] == "w3" and audit.provenance.facts["texts"] == "4 of lines.txt"
    assert str(texts.parent) not in str(audit.to_json())


def test_every_batch_has_draws_and_labels_of_its_own_and_both_rows_the_same(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    def gradients(victim: Any, sentences: Any, **options: Any) -> Any:
        asked.append((len(sentences), options["labels"], options["seed"]))
        return text_gradients(victim, sentences, **options)

    monkeypatch.setattr("situs.audit.text.audit.text_gradients", gradients)
    folder = write_folder(tmp_path / "it", "gpt2 classes")
    found = audit_texts(folder, texts, batch=2, count=4, seed=5, defences=["noise=1"])
    wanted = [(2, [0, 1], 5), (2, [0, 1], 5 + 2)]
    assert len(found.findings) == 2 and asked == wanted


def test_a_tied_embedding_says_no_more_and_is_not_attacked_twice(llama: Path, texts: Path) -> None:
    audit = audit_texts(llama, texts, batch=4, count=4)
    assert [row.whole for row in audit.findings] == [4, 4]
    assert audit.findings[0].seconds is not None and audit.findings[1].seconds is None


def test_rounding_and_noise_are_attacked_too(llama: Path, texts: Path) -> None:
    audit = audit_texts(llama, texts, batch=2, count=2, defences=["bf16", "noise=5+bf16"], fail_above="tokens=0")
    assert [row.defence for row in audit.findings][2:] == [f"noise σ=5 + bf16, {SENT}", f"noise σ=5 + bf16, {WITHHELD}"]
    assert all(row.status == "done" and len(row.reads) == 2 for row in audit.findings)
    noisy = audit.findings[2]
    assert noisy.whole == 0 and noisy.reasons
    assert audit.ruling is not None and audit.ruling.judgements[2].status == NOT_JUDGED
    assert "the attacker knows the settings" in audit.about[noisy.defence]


def test_words_are_not_counted_where_the_row_that_names_them_is_withheld(bert: Path, texts: Path) -> None:
    audit = audit_texts(bert, texts, batch=4, count=4, defences=["noise=0.03"])
    sent, withheld = (row.shares["words"] for row in audit.findings)
    assert sent > withheld and audit.findings[1].seconds is not None


def test_words_that_the_embedding_names_count_where_no_sentence_can_be_looked_for(tmp_path: Path, texts: Path) -> None:
    one = write_folder(tmp_path / "one", "bert", num_hidden_layers=1)
    audit = audit_texts(one, texts, batch=2, count=4, fail_above="words=0.5")
    assert [row.status for row in audit.findings] == ["done", "refused"] and audit.findings[0].shares["words"] == 1
    assert audit.ruling is not None
    assert [judged.answer for judged in audit.ruling.judgements] == ["above", "nothing_applied"]
    assert (
        "the model has only one" in audit.findings[0].reasons[0]
        and "the model has only one" in make_page(audit).render()
    )


def test_a_stop_is_told_and_is_no_pass(llama: Path, texts: Path) -> None:
    clock = iter(range(10_000))
    deadline = Deadline(seconds=30, clock=lambda: float(next(clock)))
    audit = audit_texts(llama, texts, batch=1, count=4, deadline=deadline, fail_above="words=0.99")
    assert str(audit.stopped).startswith("the time limit of 30 s, with ")
    assert any(row.why("stopped") for row in audit.findings)
    assert all((row.why("stopped") or "of 4 sentences").endswith("of 4 sentences") for row in audit.findings)
    assert audit.ruling is not None and not audit.ruling.passed


@pytest.mark.parametrize(("batch", "told"), [(2, "2 of 4 sentences"), (4, "1 of 4 sentences found")])
def test_sentences_of_a_batch_whose_attack_was_cut_do_not_count_as_attacked(
    llama: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, batch: int, told: str
) -> None:
    """The last batch is cut off: of several the others count, of a single one it is what the attack says of it."""
    results = [Recovered()] * (4 // batch - 1) + [Recovered(partial="1 of 4 sentences found")]
    monkeypatch.setattr("situs.audit.text.audit.find_sentences", lambda *_, **__: results.pop(0))
    first = audit_texts(llama, texts, batch=batch, count=4).findings[0]
    assert first.status == "stopped" and first.why("stopped") == told and len(first.reads) == 4


@pytest.mark.parametrize("tells", [(True, True), (True, False), (False, False)])
def test_the_time_that_is_left_is_for_the_turns_that_need_some(tells: tuple[bool, bool]) -> None:
    """Two defences with two rows each, three batches in turn; a row that repeats the one before takes no time."""
    trials = list[Any]()
    for row, each in enumerate(tells):
        sent = SimpleNamespace(row=row, twin=None, tells=each, total=3)
        trials += [sent, SimpleNamespace(row=row, twin=sent, tells=False, total=3)]
    order = [(at, number) for at in range(3) for number in range(4)]
    needs = [number % 2 == 0 or tells[number // 2] for _, number in order]
    texts: Any = SimpleNamespace(_trials=trials)
    for turn, (at, number) in enumerate(order):
        trials[number].at = at
        assert Texts.turns(texts, trials[number]) == max(sum(needs[turn:]), 1)


def test_wrong_calls_are_one_sentence(llama: Path, texts: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"count": 5}, "has only 4 sentences, but count=5"),
        ({"count": 4, "batch": 3}, "4 sentences cannot be divided into batches of 3"),
        ({"batch": 5}, "a batch needs 5"),
        ({"count": 4, "defences": ["mjp"]}, "clip, clip-batch, fedavg, fedavg-adam, fp16, int8, noise, none for texts"),
        ({"count": 4, "defences": []}, "one or more"),
        ({"count": 4, "fail_above": "psnr=20"}, "unknown metric"),
    ]
    for given, said in cases:
        with pytest.raises(SitusError) as caught:
            audit_texts(llama, texts, **given)
        assert said in str(caught.value)
    with pytest.raises(SitusError, match="takes images, not texts"):
        audit_texts("test_vit", texts, count=2, weights="random")


@pytest.mark.parametrize(
    ("there", "count", "batch", "usual", "taken"),
    [
        (8, None, 1, 12, 8),
        (40, None, 1, 12, 12),
        (8, None, 3, 12, 6),
        (40, None, 5, 12, 10),
        (40, None, 16, 12, 16),
        (3, None, 1, 4, 3),
        (40, 20, 1, 12, 20),
    ],
)
def test_without_a_count_there_are_as_many_sentences_as_the_file_has(
    tmp_path: Path, there: int, count: int | None, batch: int, usual: int, taken: int
) -> None:
    (tmp_path / "texts").write_text("\n".join(f"w{number}" for number in range(there)))
    found = first_lines(tmp_path / "texts", count, batch, usual)
    assert found == [f"w{number}" for number in range(taken)]


def test_an_audit_takes_what_there_is(llama: Path, texts: Path) -> None:
    audit = audit_texts(llama, texts, deadline=Deadline(seconds=1e-6))
    assert len(audit.names) == 4


def test_a_sentence_that_is_cut_is_said(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("w1 w2 w3\n" + " ".join(f"w{number}" for number in range(40)))
    audit = audit_texts(llama, file, count=2, deadline=Deadline(seconds=1e-6))
    assert audit.notes["length"].startswith("1 sentence fills the model's 16 tokens")
    file.write_text("w1 w2 w3\n")
    assert "length" not in audit_texts(llama, file, count=1, deadline=Deadline(seconds=1e-6)).notes


PLACED = ((7, 0, 0.9), (9, 2, 0.8))
"""Two words of three places."""


@pytest.mark.parametrize(
    ("rows", "batch", "sentences", "partial", "said"),
    [
        (Matched(PLACED, frozenset({7, 9, 11}), 0.1, 3, True), 1, ((7, UNNAMED, 9),), None, "1 of 3 positions have no"),
        (
            Matched(PLACED, noise=0.1, length=3, tables=True, cut=True),
            1,
            ((7, UNNAMED, 9),),
            "finding 2 words",
            "1 of 3",
        ),
        (Matched(PLACED, noise=0.1, length=3, tables=True), 2, (), None, "did not test which words belong to the same"),
        (
            Matched(noise=0.125, tables=True),
            1,
            (),
            None,
            "no row of a word matches the row of a position: the noise of",
        ),
        (Matched(), 1, (), None, "the gradient of places is not sent, so there are no rows that give the positions"),
    ],
)
def test_what_rows_tell_is_added_to_what_the_spans_tell(
    rows: Matched, batch: int, sentences: Any, partial: str | None, said: str
) -> None:
    found = _joined(Recovered(frozenset({3})), rows, batch, "places")
    assert found.words == {3} | rows.words | {word for word, *_ in rows.tokens} and found.sentences == sentences
    assert said in str(found.reason)
    assert (found.partial is None) is (partial is None) and str(partial or "") in str(found.partial)
    assert _joined(Recovered(partial="a half"), rows, batch, None).partial == "a half"
    assert found.facts["matched"] == len(rows.tokens) and found.facts["noise_of_rows"] == rows.noise
