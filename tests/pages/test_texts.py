"""The page of a text audit: threat model first, every word marked, and no word where they are not to be shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from situs.audit.text.recovered import Read
from situs.audit.text.result import TextAudit, finding_of
from situs.findings import Remark
from situs.gate import Limit
from situs.pages import PRIVATE, make_page, publish
from situs.pages.texts import _systems, marked
from situs.results import Provenance

READ = Read("sentence 1", (2, 6, 7, 3), (2, 9), (True, False, True, True))
FACTS = [{"rank": 4, "tokens": 5, "channels": 8}]
ROW = finding_of("word gradient sent", 1, "done", [READ], [Remark("gap", "one is missing")], FACTS, 2.0)
TWIN = replace(ROW, defence="word gradient withheld", seconds=None)
SHOWN = {2: "[CLS]", 3: "[SEP]", 6: "<sea>", 7: "calm", 9: "wind"}
AUDIT = TextAudit(
    [ROW, TWIN],
    "a-model",
    ["sentence 1"],
    1,
    shown=SHOWN,
    about={"word gradient sent": "all of it"},
    limit=Limit("tokens", 0.2),
    provenance=Provenance(things="sentences"),
)


def test_every_word_has_its_mark() -> None:
    assert marked(READ, AUDIT) == [
        ("[CLS]", "right"),
        ("<sea>", "wrong"),
        ("→ wind", ""),
        ("(calm)", "missing"),
        ("([SEP])", "missing"),
    ]


def test_the_page_begins_with_the_threat_model(tmp_path: Path) -> None:
    whole = make_page(AUDIT).render()
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", whole)
    assert headings[:3] == ["Threat model", "Verdict", "What was recovered"] and "Sentences" in headings
    assert "Which defences reduce the leak, and which do not" in headings and "Clipping alone limits no" in whole
    private = AUDIT.provenance.worded(PRIVATE)
    assert "private sentences" in private and whole.index(private) < whole.index("Threat model")
    assert '<mark class="wrong" title="wrong">&lt;sea&gt;</mark>' in whole and "one is missing" in whole
    assert "not passed" in whole and whole.count('class="words"') == 2  # the first stands on the first screen too
    assert "word gradient withheld: the same as word gradient sent." in whole  # and is not shown again
    [headline] = re.findall(r"<h1>(.*?)</h1>", whole)  # words that are known without their place are no secret
    assert all(part in headline for part in ("0 of 1 sentence", "25 % of the tokens", "75 %", "one step", "server"))
    bare = make_page(AUDIT.without_pictures()).render()
    assert private not in bare and "calm" not in bare and "Sentences" not in re.findall(r"<h2[^>]*>(.*?)</h2>", bare)
    path = publish(AUDIT, tmp_path)
    assert path.name == "texts.html" and path.stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "texts.json").read_text())["defences"][0]["tokens"] == 4


def audit_of(*rows: tuple[str, str, tuple[int, ...]], **fields: Any) -> TextAudit:
    """Rows of a defence, a status and the recovered words of one sentence of three, of which 2 and 6 are known."""
    found = []
    for defence, status, words in rows:
        reads = [Read("sentence 1", (2, 6, 3), words, (True, True, False))] if status == "done" else []
        found.append(finding_of(defence, 1, status, reads, [], FACTS * bool(reads), 2.0))  # type: ignore[arg-type]
    return TextAudit(found, "m", ["sentence 1"], 1, shown=SHOWN, about={}, **fields)


def test_the_first_screen_names_the_best_attacked_row() -> None:
    page = make_page(audit_of(("a", "done", (2, 9, 9)), ("b", "done", (2, 6, 3)), ("c", "refused", ())))
    assert page.lead.startswith(
        "An honest server recovered from one step: 1 of 1 sentence word for word, 100 % of the tokens"
    )
    assert [*page.numbers] == [
        ("0 of 1", "sentences word for word, a"), ("1 of 1", "sentences word for word, b"),
    ]  # fmt: skip
    assert (page.tone, page.mark) == ("bad", "Not private")
    four = make_page(audit_of(*((name, "done", (2, 9, 9)) for name in "abcd")))
    assert len(four.numbers) == 3
    none = make_page(audit_of(("c", "refused", ())))
    assert (none.tone, none.mark, none.numbers) == ("unsure", "Not attacked, so not proved private", [])
    failed = TextAudit([finding_of("a", 1, "done", [Read("s", (2, 6), (), (False, False))])], "m", ["s"], 1, about={})
    assert make_page(failed).mark == "Not proved private"


def test_the_gates_table_leaves_out_a_blind_guess_and_nothing_else() -> None:
    text = make_page(audit_of(("a", "done", (2, 6, 9)), limit=Limit("tokens", 0.2))).render()
    table = text.partition("Verdict</h2>")[2].partition("</table>")[0]
    header = re.findall(r"<th [^>]*>(.*?)</th>", table)
    assert header == ["defence", "gate", "most exposed", "has", "limit", "by"]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table)
    assert [cells[0], *cells[2:5]] == ["a", "sentence 1", "tokens 0.6667", "0.2"] and len(cells) == 6


def test_what_the_attacker_measures_stands_row_by_row() -> None:
    facts = [
        {"rank": 4, "tokens": 5, "channels": 8, "candidates": 9},
        {"rank": 3, "rank_of_second": 6, "beginnings": 7},
    ]
    row = finding_of("a", 1, "done", [READ], [], facts, 2.0)
    audit = TextAudit([row, TWIN], "m", ["sentence 1"], 1, shown=SHOWN, about={})
    assert _systems(audit) == [
        ["a", 1, 4, 5, 8, 9], ["a", 2, 3, 6, None, 7], [TWIN.defence, 1, 4, 5, 8, None],
    ]  # fmt: skip


def test_sixteen_sentences_of_a_row_are_shown() -> None:
    reads = [Read(f"s{n}", (2, 6), (2, 9), (True, True)) for n in range(18)]
    row = finding_of("a", 18, "done", reads)
    page = make_page(TextAudit([row], "m", [read.name for read in reads], 18, shown=SHOWN, about={}))
    shown = re.findall(r"s(\d+), 1 of 2 tokens(?! found)", page.render())
    assert shown == [str(n) for n in range(16)]
