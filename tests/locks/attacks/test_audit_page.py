"""The page of attacks on a lock: every attacker in its row, and the line of those whose base drifted alone."""

from __future__ import annotations

from typing import Any

import pytest

from situs.locks.attacks import LockAudit
from situs.locks.attacks.recovery import KeyRecovery
from situs.pages import make_page
from situs.report import figures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> list[dict[str, Any]]:
    """The lines of every figure of curves that is made."""
    found: list[dict[str, Any]] = []
    made = figures.curves

    def curves(lines: Any, *labels: str, **fields: Any) -> Any:
        found.append(lines)
        return made(lines, *labels, **fields)

    monkeypatch.setattr(figures, "curves", curves)
    return found


def attack(name: str, right: int | None) -> KeyRecovery:
    return KeyRecovery(name, 8, right, 0.5, "a cost")


def test_the_line_has_the_bases_that_drifted_and_were_judged(drawn: list[dict[str, Any]]) -> None:
    blind = [attack("blind", 1), attack("base", 8)]
    drifted = [attack("drifted-base, 0.01 ×", 8), attack("drifted-base, 0.5 ×", 6)]  # two make a line
    text = make_page(LockAudit("m", (8,), 0, (*blind, *drifted, attack("drifted-base, 4 ×", None)))).render()
    assert drawn == [{"key recovered": ([0.01, 0.5], [100.0, 75.0])}]
    assert all(f"<td>{each.attacker}</td>" in text for each in (*blind, *drifted))


@pytest.mark.parametrize("more", [[], [attack("drifted-base, 1 ×", 4)], [attack("drifted-base, 1 ×", None)] * 2])
def test_one_point_makes_no_line(more: list[KeyRecovery], drawn: list[dict[str, Any]]) -> None:
    text = make_page(LockAudit("m", (8,), 0, (attack("blind", 1), attack("base", 8), *more))).render()
    assert drawn == [] and "base that drifted" not in text


def recovery(name: str, right: int | None = None, size: int = 64, **fields: Any) -> KeyRecovery:
    sizes = () if right is None else ((size, right),)
    return KeyRecovery(name, size, right, 0.5, "a cost", residual_sizes=sizes, **fields)


def test_the_first_screen_has_the_fewest_bits_and_what_was_not_tried() -> None:
    one, two = recovery("no-base", 1), recovery("images", 40)
    audit = LockAudit("m", (64,), 0, (one, two, recovery("labels")))
    (bits, of), (untried, _) = audit.summary().numbers
    assert two.bits is not None and one.bits is not None and two.bits < 256 < one.bits
    assert (bits, of) == (f"{two.bits:.0f} of 256", "bits left at most, after the attacks no-base; images")
    assert untried == "activations, public-base, drifted-base"
    assert f"The strength is at most {two.bits:.0f} bits (of 256)" in audit.verdict
    assert "remain unknown to the most successful of these attackers: no-base; images." in audit.verdict
    assert "The true key was not given, so this audit does not judge the results of: labels." in audit.verdict
    none = LockAudit("m", (64,), 0, ())
    assert none.summary().numbers[0] == ("no strength", "inconclusive (not a pass)")
    assert none.verdict.startswith("No attack was run, so no strength can be given. Attackers not tried: no-base (")
    every = LockAudit("m", (64,), 0, tuple(recovery(name, 1) for name in (
        "no-base", "images", "activations", "public-base", "drifted-base, 1 ×", "labels")))  # fmt: skip
    assert every.summary().numbers[1][0] == "none" and "not tried" not in every.verdict


def test_rows_say_what_was_judged() -> None:
    attacks = (recovery("no-base", 1), recovery("images", 40, doubt="too few"), recovery("labels", doubt="too few"),
               recovery("public-base", 64))  # fmt: skip
    audit = LockAudit(
        "m", (16, 48), 3, attacks, impossible={"activations": "It cannot."}, withheld="; the head withheld"
    )
    (table,) = audit.summary().tables
    assert table.title == "m: 16 + 48 residual channels, 3 permuted groups inside the blocks; the head withheld"
    rows = [list(row) for row in table.rows]
    assert rows[0] == ["no-base", "1.6 % (1 of 64)", "256", "0.50", "a cost"]  # never more than the key has
    assert rows[1][:3] == ["images", "62.5 % (40 of 64)", f"{attacks[1].bits:.0f}"]
    assert rows[2][:3] == ["labels", "not judged", "not judged"]
    assert rows[3][:3] == ["public-base", "100.0 % (64 of 64)", "0"]
    assert [row[0] for row in rows[4:]] == ["activations", "drifted-base"]
    assert rows[4][-1] == "cannot start" and str(rows[5][-1]).startswith("needs ")
    assert audit.title == "Attacks on a lock: m, locked; the head withheld" and "It cannot." in audit.verdict
    assert "activations (" not in audit.verdict and "drifted-base (" in audit.verdict


def test_a_doubtful_attack_gives_no_strength_unless_it_succeeded() -> None:
    weak, strong = recovery("images", 3, doubt="too few"), recovery("images", 40, doubt="too few")
    blind = recovery("no-base", 1)
    inconclusive = LockAudit("m", (64,), 0, (blind, weak))
    assert inconclusive.strength is None and inconclusive.mark == "No strength can be given"
    assert "Inconclusive for the attacker `images`: too few." in inconclusive.verdict
    assert list(inconclusive.summary().tables[0].rows[1])[2] == "inconclusive"
    found = LockAudit("m", (64,), 0, (blind, strong))
    assert found.strength == strong.bits and found.mark == "Not opened by these attackers" and found.tone == "unsure"
    assert "The attacker `images` may recover more with more data: too few." in found.verdict
    whole = LockAudit("m", (64,), 0, (blind, recovery("images", 64, doubt="too few")))
    assert (whole.strength, whole.tone, whole.mark) == (0.0, "bad", "Opened by these attackers")
    assert "may recover more" not in whole.verdict and "These attackers open the lock." in whole.verdict


@pytest.mark.parametrize(
    ("attacks", "said"),
    [
        ([recovery("public-base", 1)], True),
        ([recovery("drifted-base, 1 ×", 1)], True),
        ([recovery("public-base", 64)], False),
        ([recovery("public-base", 1), recovery("drifted-base, 1 ×", 64)], False),
        ([recovery("no-base", 1)], False),
    ],
)
def test_a_base_that_reveals_nothing_is_not_the_last_word(attacks: list[KeyRecovery], said: bool) -> None:
    audit = LockAudit("m", (64,), 0, tuple(attacks), published="vit_x")
    assert ("The tested base model revealed nothing. Another base model may reveal the key." in audit.verdict) == said
    tested = attacks[0].attacker != "no-base"
    assert ("Weights of vit_x are public, but this audit did not use them to attack the lock." in audit.verdict) == (
        not tested
    )
    assert ("public-base" in {*audit.untried}) == (attacks[0].attacker != "public-base")


def test_accuracies_that_few_samples_cannot_tell_apart_are_named_with_both() -> None:
    blurred = [recovery("no-base", 1, tested=100, owner=0.53, before=0.47, after=0.5),
               recovery("images", 2, tested=50, owner=0.9, before=0.85, after=0.9)]  # fmt: skip
    said = LockAudit("m", (64,), 0, tuple(blurred), judged=True).verdict
    assert "The accuracy is 53.0 % with the key and 47.0 % without the key. 100 samples are too few" in said
    assert said.count("too few to separate") == 1
    assert "too few to separate" not in LockAudit("m", (64,), 0, (recovery("no-base", 1, tested=100),)).verdict


def test_what_was_not_run_is_named_where_the_strength_depends_on_it() -> None:
    attacks = (recovery("no-base", 1),)
    for missing, reason in (("public-base", "the strength depends on them"), ("images", "anybody could run them")):
        audit = LockAudit("m", (64,), 0, attacks, missing=frozenset({missing}))
        assert audit.strength is None and f"Attacks that were not run, although {reason}: {missing} (" in audit.verdict
        assert audit.verdict.count(f"{missing} (") == 1
    assert "Attacks that were not run" not in LockAudit("m", (64,), 0, attacks).verdict


def test_bars_fall_and_an_attack_that_restores_the_accuracy_is_bad() -> None:
    attacks = (recovery("no-base", 1), recovery("images", 48), recovery("labels"), recovery("public-base", 16))
    (bars,) = LockAudit("m", (64,), 0, attacks).figures()
    assert list(bars.values[0].items()) == [
        ("images", (75.0, "bad")),
        ("public-base", (25.0, "bad")),
        ("no-base", (1.5625, "bad")),
    ]
    judged = [recovery(name, 1, before=0.125, owner=0.875, after=after, tested=1000)
              for name, after in (("no-base", 0.25), ("images", 0.875), ("labels", 0.5))]  # fmt: skip
    (bars,) = LockAudit("m", (64,), 0, tuple(judged), judged=True).figures()
    assert list(bars.values[0].items()) == [
        ("with the key", (87.5, "good")), ("locked", (12.5, "")), ("attacker images", (87.5, "bad")),
        ("attacker labels", (50.0, "")), ("attacker no-base", (25.0, "")),
    ]  # fmt: skip
    drifted = [recovery(f"drifted-base, {amount} ×", right) for amount, right in ((0.25, 64), (2, 16))]
    _, line = LockAudit("m", (64,), 0, tuple(drifted)).figures()
    assert line.values[0] == {"key recovered": ([0.25, 2.0], [100.0, 25.0])} and line.options["y_limits"] == (0, 100)


@pytest.mark.parametrize(
    ("owner", "before", "tested", "separable"),
    [
        (0.6, 0.4, 1000, True), (0.4, 0.6, 1000, False), (0.5, 0.5, 10**9, False),
        # two standard errors of 100 samples: 2 √(0.49 / 100) = 0.14
        (0.571, 0.429, 100, True), (0.569, 0.431, 100, False), (0.9, None, 100, False), (None, 0.1, 100, False),
        (1.0, 0.0, None, True),
    ],
)  # fmt: skip
def test_accuracies_differ_beyond_two_standard_errors(
    owner: float | None, before: float | None, tested: int | None, separable: bool
) -> None:
    found = recovery("x", 1, owner=owner, before=before, tested=tested, after=owner)
    assert (found.separable, found.broken) == (separable, separable)


@pytest.mark.parametrize(("after", "broken"), [(0.892, True), (0.8919, False), (0.9, True), (0.1, False)])
def test_an_attack_breaks_the_lock_where_it_closes_99_per_cent_of_the_gap(after: float, broken: bool) -> None:
    found = recovery("x", 1, owner=0.9, before=0.1, tested=10**6, after=after)
    assert (found.broken, found.bits == 0, found.successful) == (broken, broken, broken)
    assert recovery("x", 33).successful and not recovery("x", 32).successful
