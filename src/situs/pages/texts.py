"""The page of a text audit: threat model, verdict, both rows, the sentences with every word marked, what would help."""

from __future__ import annotations

from situs.audit.text.attack import NAME
from situs.audit.text.recovered import UNNAMED, Read
from situs.audit.text.result import HEADER, MEANING, TextAudit, cells, reasons, verdict
from situs.errors import counted, verb
from situs.gate import Ruling
from situs.report.html import Page, Section, Tone
from situs.results import percent

THREAT = {
    "who": "an honest-but-curious server (or whoever reads its traffic) in federated or distributed training",
    "sees": "the gradients of one client's step on a batch of sentences, by parameter name",
    "knows": "the weights the step began with, the tokeniser, how many sentences the batch has, the loss and the "
    "defence with its settings",
    "does not know": "the sentences, how long they are, their labels, and which words are masked",
    f"attack {NAME}": "words whose vectors lie in the span of the first block's gradients are in the batch; sentences "
    "are put together by the first block's own attention, or from the left where the model is causal, and held "
    "against the gradients of the second block, without the truth; words that are learned and not read (the last of a "
    "sentence, those that are masked) are read off the last layer's gradients",
}
"""The attacker of this audit, for the page's first section."""

GATE = (
    "The gate. Above: some sentence is above the share, also in an audit that was stopped. Inconclusive, which is no "
    "pass: everything else, because this attack is a search, and what it does not find may still be there."
)

MARKS = (
    "Each sentence as it is, token by token. Right (red line): found at its place. Wrong (struck): another word was "
    "found there, which stands behind it. Missing (dotted): no sentence was found with it; in brackets where the "
    "attacker knows that the word is in the batch."
)

REMEDIES = """
Keeping back the gradient of the word embedding is no remedy: compare the two rows. Nor are small batches, fixed or
rotary positions, or not telling the labels.

What ends this attack is a batch with as many tokens as the model has channels, seen as one sum only: with secure
aggregation over many clients nobody sees less. That says nothing of other attacks. Differential privacy with a noise
multiplier that means something (0.5 and more) bounds all of them; clipping alone does not.
"""

PRIVATE = (
    "This page holds private sentences and what was recovered of them: keep it as safe as the sentences themselves, or "
    "make it without pictures."
)

SHOWN = 16
"""Sentences of a row that are shown."""


def page(audit: TextAudit) -> Page:
    """The page, with the sentences where the audit has them."""
    page = Page(f"Gradient audit of {audit.model}", verdict(audit), PRIVATE if audit.private else "")
    read = [row for row in audit.findings if row.attacked]
    unsure = "Not proved private" if read else "Not attacked, which is not private"
    page.judge(audit.tone, "Not private" if audit.tone == "bad" else unsure)
    if best := max(read, key=lambda row: (row.whole, row.shares["tokens"], row.shares["words"]), default=None):
        known = max(row.shares["words"] for row in read)
        first = f"{best.whole} of {counted(len(best.reads), 'sentences')} {verb(best.whole, 'were')} read word for word"
        shares = f"{percent(best.shares['tokens'], 0)} of the tokens in their place and {percent(known, 0)} as words"
        page.lead = f"{first}, {shares}, from one step.\n\n{page.lead}"
    for row in read[:3]:
        page.number(f"{row.whole} of {len(row.reads)}", f"sentences word for word, {row.defence}")
    bars: dict[str, tuple[float, Tone]] = {row.defence: (100 * row.shares["tokens"], "bad") for row in read}
    page.opening.bars(bars, "%", "Tokens known with their place in their sentence.")
    if audit.private and read:
        first = read[0].reads[0]
        page.opening.words(
            marked(first, audit), f"{first.name}, {first.right} of {counted(first.tokens, 'tokens')} found"
        )
    defences = {f"defence {name}": said for name, said in audit.about.items()}
    page.box("Threat model").facts({**THREAT, **audit.notes}).fold("The defences", Section("").facts(defences))
    if audit.ruling is not None:
        _gate(page.section("Verdict"), audit.ruling)
    section = page.section("What was recovered")
    caption = (
        f"{counted(len(audit.names), 'sentences')} in batches of {audit.batch}. Words known: tokens whose word is "
        "known to be in the batch. Tokens right: known with their place in their sentence. Told from candidates: those "
        "known whole, and those that one who has candidates with one word changed is sure of. A dash for seconds: the "
        "attack reads the same numbers as in the row above it."
    )
    section.table(HEADER, [cells(row) for row in audit.findings], caption)
    if said := reasons(audit):
        section.table(["defence", "what was not found, and why"], said)
    section.table(["defence", "batch", "rank", "tokens seen", "channels", "candidates"], _systems(audit), SYSTEMS)
    if audit.private:
        _sentences(page, audit)
    page.box("What would reduce the leak, and what would not").text(REMEDIES)
    return page.end({name.replace("_", " "): fact for name, fact in audit.provenance.facts.items()})


SYSTEMS = (
    "What the attacker sees without the truth. Rank: directions of the first block's gradients. Tokens seen: "
    "directions behind its attention, one for each token in its context. Candidates: words at places (of a causal "
    "model: beginnings of sentences) that pass the test."
)


def _systems(audit: TextAudit) -> list[list[str | int | float | None]]:
    rows = []
    for row in audit.findings:
        for number, fact in enumerate(row.facts):
            tokens = fact.get("tokens", fact.get("rank_of_second"))
            passed = fact.get("candidates", fact.get("beginnings"))
            rows.append([row.defence, number + 1, fact.get("rank"), tokens, fact.get("channels"), passed])
    return rows


def _gate(section: Section, ruling: Ruling) -> None:
    header, rows = ruling.table()
    blind = header.index("a blind guess")  # of words there is none
    parts = [[*row[:blind], *row[blind + 1 :]] for row in (header, *rows)]
    section.note(ruling.sentence).table([str(name) for name in parts[0]], parts[1:], GATE)
    section.text(f"`{ruling.limit.metric}` is {MEANING[ruling.limit.metric]}.")


def _sentences(page: Page, audit: TextAudit) -> None:
    section = page.section("Sentences").text(MARKS)
    for number, row in enumerate(audit.findings):
        same = [other.defence for other in audit.findings[:number] if other.reads == row.reads]
        if row.reads and same:
            section.text(f"{row.defence}: the same as {same[0]}.")
        elif row.reads:
            section.text(f"{row.defence}:")
            for read in row.reads[:SHOWN]:
                section.words(marked(read, audit), f"{read.name}, {read.right} of {counted(read.tokens, 'tokens')}")


def marked(read: Read, audit: TextAudit) -> list[tuple[str, str]]:
    """The true tokens as (word, mark), and behind a wrong one what was found in its place."""
    out: list[tuple[str, str]] = []
    for place, word in enumerate(read.truth):
        text = audit.shown.get(word, "?")
        found = read.recovered[place] if place < len(read.recovered) else UNNAMED
        if found == word:
            out.append((text, "right"))
        elif found == UNNAMED:
            out.append((f"({text})" if read.known[place] else text, "missing"))
        else:
            out += [(text, "wrong"), (f"→ {audit.shown.get(found, '?')}", "")]
    return out
