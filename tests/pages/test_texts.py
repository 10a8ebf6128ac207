"""The page of a text audit: threat model first, every word marked, and no word where they are not to be shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from situs.audit.text.recovered import Read
from situs.audit.text.result import TextAudit, finding_of
from situs.findings import Remark
from situs.gate import Limit
from situs.pages import PRIVATE, make_page, publish
from situs.pages.texts import marked
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
