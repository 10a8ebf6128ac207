"""The page of a text audit: threat model, verdict, results, the sentences word by word, what would help."""

from __future__ import annotations

from situs.audit.defences.base import CHOOSES
from situs.audit.text.recovered import UNNAMED, Read
from situs.audit.text.result import HEADER, MEANING, NAME, TextAudit, TextFinding, cells, reasons, verdict
from situs.errors import counted
from situs.findings import ACTIVE
from situs.gate import Ruling
from situs.report.html import Page, Section, Tone
from situs.results import percent

THREAT = {
    "who": "an honest-but-curious server (or a reader of its traffic) in federated or distributed training",
    "sees": "the gradients of one client's step on a batch of sentences, by parameter name",
    "knows": "the weights at the start of the step, the tokeniser, the number of sentences in the batch, the loss and "
    "the defence with its settings",
    "does not know": "the sentences, their lengths, their labels, and which words are masked",
    f"attack {NAME}": "a word is in the batch if its vector lies in the span of the first block's "
    "gradients. From the gradients, the attack also computes outputs of the first block's attention, which show which "
    "words belong to the same sentence. Each candidate sentence is checked against the gradients of the "
    "second block. In a causal model, the attack builds each sentence from left to right. It does not use the "
    "true sentences. Some words are targets but not inputs (the last word of a sentence, masked words); the last "
    "layer's gradients reveal these words",
}
"""The attacker of this audit."""

GATE = (
    "The gate fails if more is recovered than the limit allows, even if the audit was stopped early. "
    "In all other cases the gate is "
    "inconclusive (not a pass), because this attack is a search, and a search may miss words."
)

MARKS = (
    "These are the true sentences, token by token. Right (red line): the token was recovered at its position. Wrong "
    "(struck through): another word was recovered at this position; an arrow points to the recovered word. Missing "
    "(dotted): no token was recovered here. Brackets: the attacker knows only that the word is in the batch."
)

REMEDIES = """
These measures do not help: withholding the gradient of the word embedding (compare the rows with and without this
gradient), small batches, fixed or rotary positions, and secret labels.

With secure aggregation over many clients the server sees only a sum. The attack on this page fails if the sum contains
at least as many tokens as the model has channels. Other attacks may still work. Only differential privacy limits what
every possible attack can recover, and the limit is strong only if ε is small. Use a noise multiplier of 0.5 or more:
with much less noise, the limit is useless. Clipping alone limits no attack.
"""

SHOWN = 16
"""Sentences shown per row."""


def page(audit: TextAudit) -> Page:
    """The page; with the sentences if the audit has them."""
    page = Page(f"Gradient audit of {audit.model}", verdict(audit))
    attacked = [row for row in audit.findings if row.attacked]
    unsure = "Not proved private" if attacked else "Not attacked, so not proved private"
    page.judge(audit.tone, "Not private" if audit.tone == "bad" else unsure)
    if best := max(attacked, key=lambda row: (row.whole, row.shares["tokens"], row.shares["words"]), default=None):
        words = max(row.shares["words"] for row in attacked)
        count = f"{best.whole} of {counted(len(best.reads), 'sentences')}"
        tokens = f"{percent(best.shares['tokens'], 0)} of the tokens at their position"
        known = f"the words, with or without their position, of {percent(words, 0)} of the tokens"
        server = audit.threat.server[:1].upper() + audit.threat.server[1:]
        page.lead = f"{server} recovered from one step: {count} word for word, {tokens}, and {known}.\n\n{page.lead}"
    for row in attacked[:3]:
        page.number(f"{row.whole} of {len(row.reads)}", f"sentences word for word, {row.defence}")
    bars: dict[str, tuple[float, Tone]] = {row.defence: (100 * row.shares["tokens"], "bad") for row in attacked}
    page.opening.bars(bars, "%", "Tokens recovered at their position in their sentence.")
    if audit.private and attacked:
        first = attacked[0].reads[0]
        page.opening.words(
            marked(first, audit), f"{first.name}, {first.right} of {counted(first.tokens, 'tokens')} found"
        )
    defences = {f"defence {name}": about for name, about in audit.about.items()}
    chooses = CHOOSES if audit.threat == ACTIVE else {}
    threat = {"model": audit.threat.name, **THREAT, **chooses}
    page.box("Threat model").facts({**threat, **audit.notes}).fold("The defences", Section("").facts(defences))
    if audit.ruling is not None:
        _gate(page.section("Verdict"), audit.ruling)
    section = page.section("What was recovered")
    caption = (
        f"{counted(len(audit.names), 'sentences')} in batches of {audit.batch}. Words known: tokens that the attacker "
        "knows to be in the batch. Tokens right: tokens recovered at their position in their sentence. Picked among "
        "candidates: sentences that were recovered completely, plus sentences that an attacker picks out. This "
        "attacker compares the true sentence with copies in which one word is replaced, and gives the true sentence "
        'a probability above 99 %. A dash under "seconds" in a row with results means: at least one batch was not '
        "attacked again, and the result of the row above was used."
    )
    section.table(HEADER, [cells(row) for row in audit.findings], caption)
    if rows := reasons(audit):
        section.table(["defence", "what was not recovered, and why"], rows)
    section.table(["defence", "batch", "rank", "tokens seen", "channels", "candidates"], _systems(audit), SYSTEMS)
    if audit.private:
        _sentences(page, audit)
    page.box("Which defences reduce the leak, and which do not").text(REMEDIES)
    return page.end({name.replace("_", " "): fact for name, fact in audit.provenance.facts.items()})


SYSTEMS = (
    "The attacker can measure these numbers without the true sentences. Rank: the rank of the gradients of the query, "
    "key and value weights in the first block. Tokens seen: the number of different tokens, which is the rank of the "
    "gradients of the weights that follow the first attention. The same word in two contexts counts twice. Candidates: "
    "the pairs of a word and a position that fit the gradients of the first block. For a causal model, candidates are "
    "the beginnings of sentences that fit the gradients of the second block."
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
    blind = header.index("a blind guess")  # words have none
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
            add_reads(section, row, audit)


def add_reads(section: Section, row: TextFinding, audit: TextAudit) -> None:
    """The first sentences of a row, word by word."""
    section.text(f"{row.defence}:")
    for read in row.reads[:SHOWN]:
        section.words(marked(read, audit), f"{read.name}, {read.right} of {counted(read.tokens, 'tokens')}")


def marked(read: Read, audit: TextAudit) -> list[tuple[str, str]]:
    """The true tokens as (word, mark); a wrong token is followed by the recovered word."""
    out: list[tuple[str, str]] = []
    for place, word in enumerate(read.truth):
        text = audit.shown.get(word, "?")
        guess = read.recovered[place] if place < len(read.recovered) else UNNAMED
        if guess == word:
            out.append((text, "right"))
        elif guess == UNNAMED:
            out.append((f"({text})" if read.known[place] else text, "missing"))
        else:
            out += [(text, "wrong"), (f"→ {audit.shown.get(guess, '?')}", "")]
    return out
