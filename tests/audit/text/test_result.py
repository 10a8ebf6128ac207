"""The result: shares, tables and sentences; a gate that can fail and never passes what was not found."""

from __future__ import annotations

from typing import Any

import pytest

from situs.audit.text.recovered import Read
from situs.audit.text.result import METRICS, TextAudit, TextFinding, cells, finding_of, reasons, verdict
from situs.errors import SitusError
from situs.findings import Remark
from situs.gate import ABOVE, NOT_JUDGED, junit, parse_limit
from situs.results import Provenance

WHOLE = Read("sentence 1", (2, 5, 3), (2, 5, 3), (True, True, True))
PART = Read("sentence 2", (2, 6, 7, 3), (2, 9), (True, False, True, True))


def example(*rows: TextFinding, names: int = 2, **fields: Any) -> TextAudit:
    about = {row.defence: f"what {row.defence} is" for row in rows}
    shown = {2: "[CLS]", 3: "[SEP]", 5: "boat", 6: "<sea>", 7: "calm", 9: "wind"}
    sentences = [f"sentence {number + 1}" for number in range(names)]
    of = Provenance(things="sentences")
    return TextAudit(rows, "a-model", sentences, 2, shown=shown, about=about, provenance=of, **fields)


MISSING = Remark("gap", "one sentence is missing")
ROW = finding_of("sent", 2, "done", [WHOLE, PART], [MISSING], [{"rank": 4}], 1.25)


def test_shares_and_tables() -> None:
    assert ROW.shares == {"words": 6 / 7, "tokens": 4 / 7, "sentences": 0.5, "picked": 0.5}
    assert cells(ROW) == ["sent", 7, "85.7 %", "57.1 %", "1 of 2", "1 of 2", "1.2"]
    assert cells(finding_of("later", 2)) == ["later", None, None, None, "not attacked", None, None]
    audit = example(ROW, finding_of("later", 2), stopped="Ctrl-C")
    said = verdict(audit)
    assert (
        said.startswith("Assumed: an honest server. A partial result: stopped by Ctrl-C.")
        and "1 of 2 sentences were recovered word for word from one step on a batch of 2." in said
    )
    assert (
        "later: not attacked, so nothing is known about privacy." in said and "another attack may recover them" in said
    )
    assert reasons(audit) == [("sent", "one sentence is missing")]
    numbers = audit.numbers()
    assert numbers["schema"] == "situs-audit-texts/2" and numbers["gate"] is None
    assert numbers["defences"][0]["sentences_read"][1] == {
        "name": "sentence 2",
        "tokens": 4,
        "known": 3,
        "right": 1,
        "whole": False,
        "picked": None,
    }
    assert "boat" not in str(numbers) and audit.private and not audit.without_pictures().private


@pytest.mark.parametrize(
    ("limit", "status", "said"),
    [
        (
            "tokens=0.9",
            ABOVE,
            "1 of 2 sentences exceeds what the gate allows; most exposed: sentence 1 has tokens 1 by sentences",
        ),
        ("words=0.5", ABOVE, "sentence 1 has words 1"),
        ("sentences=0.4", ABOVE, "sentence 1 has sentences 0.5"),
        ("sentences=0.5", NOT_JUDGED, "another attack may find more than sentences"),
    ],
)
def test_a_gate_fails_and_never_passes(limit: str, status: int, said: str) -> None:
    ruling = example(ROW, limit=parse_limit(limit, METRICS)).ruling
    assert ruling is not None and ruling.status == status and said in ruling.sentence and not ruling.passed


def test_what_was_not_attacked_is_not_judged() -> None:
    little = finding_of("sent", 2, "stopped", [PART], [Remark("stopped", "0 of 2 sentences")])
    refused = finding_of("frozen", 2, "refused", remarks=[Remark("refused", "the gradient of x is not sent")])
    ruling = example(little, refused, finding_of("later", 2), limit=parse_limit("tokens=0.3", METRICS)).ruling
    assert ruling is not None and ruling.status == NOT_JUDGED
    answers = [judged.answer for judged in ruling.judgements]
    assert answers == ["incomplete", "nothing_applied", "incomplete"]
    assert "stopped after 0 of 2 sentences" in ruling.judgements[0].reason
    assert "the gradient of x is not sent" in ruling.judgements[1].reason
    made = example(little, refused, limit=parse_limit("tokens=0.3", METRICS))
    xml = junit("situs audit texts", ruling, made.provenance.facts, made.lines).decode()
    assert xml.count("<error") == 3 and "not attacked: the gradient of x" in xml


@pytest.mark.parametrize(
    ("limit", "share"),
    [
        (None, "tokens 0.5714"),
        ("words=0.5", "words 0.8571"),
        ("sentences=0.4", "sentences 0.5"),
        ("tokens=1e-9", "tokens 0.5714"),
    ],
)
def test_the_lines_of_a_defence_have_the_metric_of_the_gate(limit: str | None, share: str) -> None:
    audit = example(ROW, finding_of("later", 2), limit=None if limit is None else parse_limit(limit, METRICS))
    assert audit.lines("sent") == [f"{ROW.attack}: {share} over 2 sentences"]
    assert audit.lines("later") == [f"{ROW.attack}: not attacked: the audit was stopped first"]
    assert audit.lines("other") == []


def test_limits_that_mean_nothing_are_refused() -> None:
    assert {parse_limit(f"{name}=0", METRICS).metric for name in METRICS} == set(METRICS)
    for text, said in (
        ("psnr=20", "unknown metric"),
        ("tokens=1", "pass even a perfect copy"),
        ("tokens=x", "tokens=0.1"),
        ("tokens", "METRIC=NUMBER"),
    ):
        with pytest.raises(SitusError) as caught:
            parse_limit(text, METRICS)
        assert said in str(caught.value)
    with pytest.raises(SitusError, match="one metric with its bound"):
        example(ROW).judge(tokens=0.1, words=0.1)
    assert not example(ROW).judge(tokens=0.1).passed


@pytest.mark.parametrize(("picked", "doubts"), [((None, None), 0), ((True, False), 0), ((True, True), 1)])
def test_a_sentence_that_is_identified_but_not_recovered_is_a_doubt(
    picked: tuple[bool | None, ...], doubts: int
) -> None:
    """Sentence 1 is recovered in any case."""
    reads = [read._replace(picked=one) for read, one in zip((WHOLE, PART), picked, strict=True)]
    remarks = [remark for remark in finding_of("sent", 2, "done", reads, [MISSING]).remarks if remark != MISSING]
    assert [remark.kind for remark in remarks] == ["doubt"] * doubts
    assert not doubts or remarks[0].text.startswith("1 sentence")


def test_shares_of_one_word_and_of_nothing() -> None:
    one = finding_of("sent", 1, "done", [Read("sentence 1", (5,), (5,), (True,))])
    assert one.shares == {"words": 1.0, "tokens": 1.0, "sentences": 1.0, "picked": 1.0}
    assert set(finding_of("sent", 1, "done").shares.values()) == {0.0}
