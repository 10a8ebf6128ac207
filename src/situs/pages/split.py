"""The page of a split audit: threat model, verdict, every attacker, pictures, what a defence costs and hides."""

from __future__ import annotations

from situs.audit.split.attackers import ATTACKS
from situs.audit.split.result import SCORES, THREAT, SplitAudit, table
from situs.audit.split.view import Setting
from situs.pages.gradients import picture_rows
from situs.report import figures
from situs.report.html import Page, Section
from situs.results import Cell

SHOWN = 4
CURVES = {"psnr": "best PSNR, dB", "places": "patches in their places, %"}


def page(audit: SplitAudit) -> Page:
    """The page, with the samples and what was made of them where the audit has them."""
    lead = "What a server that runs this model's blocks, and is sent a client's tokens, can see of the samples."
    page = Page(f"Split audit of {audit.name}", lead)
    asked = dict.fromkeys(reading.attack for found in audit.settings for reading in found.readings)
    does = {f"attacker {name}": _about(name) for name in asked if name in ATTACKS}
    page.section("Threat model").facts({**THREAT, **does})
    said = audit.summary()
    section = page.section("Verdict").note(said.sentence)
    for note in said.notes:
        section.text(note)
    _table(page.section("Attackers and defences"), audit)
    if audit.private:
        _pictures(page.section("Pictures"), audit)
    if lines := trade_offs(audit):
        _curves(page.section("What a defence hides, and what it costs"), lines, audit)
    return page.end(audit.provenance.facts)


def _about(name: str) -> Cell:
    attacker, knows = ATTACKS[name]
    does = (attacker.__doc__ or "").rstrip(".")
    return f"knows {knows}. {does}"


def _table(section: Section, audit: SplitAudit) -> None:
    drawn = table(audit)
    section.table(drawn.header, drawn.rows, f"{drawn.title}. Guesses saw no token: what is near them says nothing.")
    meant: dict[str, Cell] = {name: what for name, (_, what) in SCORES.items() if name in drawn.header}
    features = "mean cosine of the pooled features with those of the undefended samples: what the client's task keeps"
    section.facts({"features": features, **meant})


def _pictures(section: Section, audit: SplitAudit) -> None:
    """Originals beside the best attacker's pictures, setting by setting."""
    assert audit.pictures is not None
    strips = [("original", audit.pictures)]
    for found in audit.settings:
        best = found.pictured
        if best is not None and best.images is not None:
            strips.append((f"{found.setting}\n{best.attack}", best.images.to(audit.pictures)))
    count = min(SHOWN, len(audit.pictures))
    drawn = picture_rows(strips, count)
    section.figure(drawn, "The first samples, and what the attacker with the best PSNR made of them, by setting.")


def trade_offs(audit: SplitAudit) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """score -> defence and permutations -> (what the features keep, the score), where there are several strengths.

    A line begins at no defence, where that was audited; what no attacker gave is left out of it.
    """
    lines: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    kinds = dict.fromkeys(found.setting.defence.kind for found in audit.settings)
    for score in CURVES:
        for kind in (each for each in kinds if each in ("noise", "lowpass", "batch-shuffle")):
            for rows, columns in ((False, False), (True, False), (False, True), (True, True)):
                chosen = [
                    (found.cosine, value * (100 if score == "places" else 1), found.setting.defence.kind)
                    for found in audit.settings
                    if (found.setting.rows, found.setting.columns) == (rows, columns)
                    and found.setting.defence.kind in (kind, "none")
                    and (value := found.best(score)) is not None
                ]
                if sum(each == kind for *_, each in chosen) > 1:
                    x, y, _ = zip(*sorted(chosen), strict=True)
                    plain = str(Setting(rows=rows, columns=columns))
                    name = kind if plain == "none" else f"{kind} + {plain}"
                    lines.setdefault(score, {})[name] = (list(x), list(y))
    return lines


def _curves(section: Section, lines: dict[str, dict[str, tuple[list[float], list[float]]]], audit: SplitAudit) -> None:
    section.text(
        "Each line is one defence at several strengths: what the features keep (right: all), and what the best "
        "attacker finds. A defence is worth something where its line falls while it is still on the right."
    )
    guess = max((scores["psnr"] for scores in audit.blind.values()), default=None)
    for score, series in lines.items():
        level = ("blind guess", guess) if score == "psnr" and guess is not None else None
        drawn = figures.curves(series, "cosine of the features with the undefended ones", CURVES[score], level=level)
        section.figure(drawn, f"{CURVES[score]} against what the features keep.", name=score)
