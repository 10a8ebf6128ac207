"""The page of a split audit: threat model, verdict, every attacker, images, what a defence costs and hides."""

from __future__ import annotations

from situs.audit.split import text
from situs.audit.split.attackers import ATTACKS
from situs.audit.split.result import (
    SCORES,
    THREAT,
    UTILITY,
    SplitAudit,
    paper_table,
    strengths,
    trade_off,
    utilities,
    who_was_tried,
)
from situs.audit.sweep.ladder import by_strength
from situs.errors import counted
from situs.locks.veil import Veil
from situs.pages.texts import MARKS, add_reads
from situs.report import figures
from situs.report.html import Page, Section, Tone
from situs.results import Cell, Table, percent

SHOWN = 4
CURVES = {"psnr": "PSNR, dB", "ssim": "SSIM", "places": "patches at their position, %"}
LIMITS = {"ssim": (0.0, 1.0), "places": (0.0, 100.0)}

Lines = dict[str, tuple[list[float], list[float]]]


def page(audit: SplitAudit) -> Page:
    """The page; with the samples and their recoveries if the audit has them."""
    summary = audit.summary()
    page = Page(f"Split audit of {audit.name}", summary.sentence)
    _judge(page, audit)
    attackers: dict[str, Cell] = {}
    for name in filter(ATTACKS.__contains__, audit.asked):
        attacker, knows = ATTACKS[name]
        does = (attacker.__doc__ or "").split("\n")[0].rstrip(".")
        attackers[f"attacker {name}"] = f"knows {knows}. {does}"
    page.box("Threat model").facts(THREAT).fold("What each attacker knows", Section("").facts(attackers))
    if summary.notes:
        page.section("Verdict").text("\n\n".join(summary.notes))
    _results(page.section("Attackers and defences"), audit.tables[0], audit)
    if (table6 := paper_table(audit.settings)) in audit.tables:
        _add_table(page.section("The paper's Table 6"), table6)
    if audit.private:
        _pictures(page.opening, audit)
    if strengths(audit.settings):
        _curves(page.section("What a defence hides, and what it costs"), audit)
    _add_table(page.section("Attackers that were tried"), who_was_tried(audit.settings))
    return page.end(audit.provenance.facts)


def _judge(page: Page, audit: SplitAudit) -> None:
    """The mark, the best attacker's numbers, and bars if there are no images."""
    psnr, placed, guess = audit.best("psnr"), audit.best("places"), audit.guess("psnr") or 0.0
    attacked = any(finding.figures for setting in audit.settings for finding in setting.findings)
    unsure = "Not proved private" if attacked else "Not attacked, so not proved private"
    page.judge(audit.tone, "Not private" if audit.tone == "bad" else unsure)
    feats = [f"recovered images at {psnr:.1f} dB"] if psnr is not None else []
    feats += [f"assigned {percent(placed, 0)} of the patches to their true positions"] if placed is not None else []
    if feats:
        page.lead = f"The server's best attackers {' and '.join(feats)}. {page.lead}"
    if psnr is not None:
        page.number(
            f"{psnr:.1f} dB",
            f"PSNR of the images that the best attacker recovered in any setting (blind guess: {guess:.1f} dB)",
        )
    if placed is not None:
        page.number(percent(placed), "of patches assigned to their true positions by the best attacker")
    if not audit.private and psnr is not None:
        bars = {str(setting.veil): setting.best("psnr") for setting in audit.settings}
        bars = {name: value for name, value in bars.items() if value is not None}
        bars = dict(sorted(bars.items(), key=lambda bar: -bar[1]))
        page.opening.bars(
            bars, "dB", "PSNR of the images that the best attacker recovered, for each setting of the client."
        )


def _add_table(section: Section, table: Table) -> None:
    section.table(table.header, table.rows, table.title + ".")


def _results(section: Section, table: Table, audit: SplitAudit) -> None:
    knows = list(table.header).index("knows")  # the threat model says it already, and the table is wide
    header, *rows = ([*row[:knows], *row[knows + 1 :]] for row in (table.header, *table.rows))
    caption = f"{table.title}. Blind guesses use no token. A value close to a blind guess shows no leak."
    section.table(list(map(str, header)), rows, caption)
    utility: dict[str, Cell] = {
        name: f"the utility for the client's task: {UTILITY[name][1]}" for name in utilities(audit.settings)
    }
    section.facts({**utility, **{name: about for name, (_, about) in SCORES.items() if name in table.header}})


def _pictures(section: Section, audit: SplitAudit) -> None:
    """Originals and the best attacker's images, setting by setting."""
    assert audit.pictures is not None
    strips = [("original", audit.pictures)]
    for setting in audit.settings:
        best = setting.pictured()
        if best is not None and best.shown is not None:
            strips.append((f"{setting.veil}\n{best.attack}", best.shown.to(audit.pictures)))
    drawn = figures.image_rows([(name, images[:SHOWN].cpu()) for name, images in strips])
    caption = (
        "Top: the original samples. Below: for each setting, the images recovered by the attacker with the best PSNR."
    )
    section.figure(drawn, caption, name="pictures")


def trade_offs(audit: SplitAudit) -> dict[str, dict[str, Lines]]:
    """score -> defence -> permutations -> (utilities, scores), for defences at several strengths.

    A line begins at no defence, if that was audited; settings without the score are skipped.
    """
    utility_of, _ = UTILITY[utilities(audit.settings)[0]]
    lines: dict[str, dict[str, Lines]] = {}
    for score in CURVES:
        for kind in strengths(audit.settings):
            for rows, columns in ((False, False), (True, False), (False, True), (True, True)):
                points = [
                    (setting.veil, utility_of(setting.kept) or 0.0, value * (100 if score == "places" else 1))
                    for setting in audit.settings
                    if (setting.veil.rows, setting.veil.columns) == (rows, columns)
                    and setting.veil.kind in (kind, "none")
                    and (value := setting.best(score)) is not None
                ]
                if sum(veil.kind == kind for veil, *_ in points) > 1:
                    points.sort(key=lambda point: by_strength(point[0]))
                    _, x, y = zip(*points, strict=True)
                    name = str(Veil(rows=rows, columns=columns)).replace("none", "not permuted")
                    lines.setdefault(score, {}).setdefault(kind, {})[name] = (list(x), list(y))
    return lines


def _curves(section: Section, audit: SplitAudit) -> None:
    utility = utilities(audit.settings)[0]
    section.text(
        "Each line is a defence at several strengths, with or without a permutation. The horizontal axis is "
        "the utility for the client's task (high on the right). The vertical axis is the result of the best attacker; "
        "all attackers know the defence. If a line is low on the right, the defence keeps the utility, and these "
        "attackers do not undo it (other attackers may). If the lines with and without a permutation coincide, the "
        "permutation adds no protection."
    )
    for score, kinds in trade_offs(audit).items():
        guess = max((scores[score] for scores in audit.blind.values() if score in scores), default=None)
        panels = {f"{kind}: {CURVES[score]}": dict(lines) for kind, lines in kinds.items()}
        for lines in panels.values():
            if guess is not None:
                every = [value for x, _ in lines.values() for value in x]
                lines["blind guess"] = [min(every), max(every)], [guess, guess]
        drawn = figures.curve_panels(panels, f"utility: {utility}", LIMITS.get(score), x_least=0.1)
        caption = f"{CURVES[score]} of the best attacker, against {utility}: {UTILITY[utility][1]}."
        section.figure(drawn, caption, name=score)
    _add_table(section, trade_off(audit.settings))


def texts_page(audit: text.PromptAudit) -> Page:
    """The page of an audit on texts: what the server reads, word by word if the audit has the texts."""
    page = Page(f"Split audit of {audit.model}", audit.verdict)
    attacked = [row for row in audit.findings if row.attacked]
    unsure = "Not proved private" if attacked else "Not attacked, so not proved private"
    page.judge(audit.tone, "Not private" if audit.tone == "bad" else unsure)
    best = max(attacked, key=lambda row: (row.whole, row.shares["tokens"]), default=None)
    first = "Nothing was attacked, so this page does not tell whether the texts are private."
    if best is not None:
        texts = f"{best.whole} of {counted(best.count, 'texts')} word for word"
        words = f"{percent(best.shares['tokens'])} of the words of all texts"
        first = f'In the setting "{best.defence}", an honest server recovers {texts}, and {words}.'
    page.lead = f"{first}\n\n{audit.verdict}"
    names = {row.defence: row.defence + ", stopped" * (row.status == "stopped") for row in attacked}
    for row in attacked[:3]:
        page.number(f"{row.whole} of {row.count}", f"texts word for word, {names[row.defence]}")
    bars: dict[str, tuple[float, Tone]] = {names[row.defence]: (100 * row.shares["tokens"], "bad") for row in attacked}
    page.opening.bars(bars, "%", "Percentage of the words that the server reads, for each setting of the client.")
    page.box("Threat model").facts(text.THREAT).fold("What the client sends", Section("").facts(audit.about))
    if audit.ruling is not None:
        page.section("Verdict").note(audit.ruling.sentence)
    section = page.section("What the server reads")
    for table in audit.summary().tables:
        _add_table(section, table)
    if curve := _noise_lines(audit):
        axis = "σ of the noise, in standard deviations of a state"
        drawn = figures.curves(curve, axis, "words right", y_limits=(0.0, 1.0))
        page.section("Noise").figure(
            drawn, "Fraction of the words that the server reads, for each strength of the noise.", name="noise"
        )
    if audit.private:
        section = page.section("Texts").text(MARKS)
        for row in attacked:
            add_reads(section, row, audit)
    return page.end({name.replace("_", " "): fact for name, fact in audit.provenance.facts.items()})


def _noise_lines(audit: text.PromptAudit) -> Lines:
    """Cut and permutation -> (σ, share of words right), where noise has several strengths."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row, finding in zip(audit.rows, audit.findings, strict=True):
        if finding.attacked and row.veil.kind in ("none", "noise"):
            name = str(row._replace(veil=Veil(columns=row.veil.columns, rows=row.veil.rows)))
            points.setdefault(name, []).append((row.veil.strength, finding.shares["tokens"]))
    sorted_points = {name: sorted(line) for name, line in points.items() if len(line) > 2}
    return {name: ([x for x, _ in line], [y for _, y in line]) for name, line in sorted_points.items()}
