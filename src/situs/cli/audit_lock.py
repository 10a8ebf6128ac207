"""Attack a locked model as somebody without its key would, and say what is left of the lock.

For example: situs audit lock locked/ --key owner.key --images PHOTOGRAPHS
             situs audit lock locked/ --attacker public-base,drifted-base --base MODEL --drift 0.3,1,3

A lock is obfuscation, not encryption: who has the model it was made from reads the key off its weights, and who has
a few images may come near it without.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from situs.cli.flags import POSITIONAL
from situs.cli.tables import print_table
from situs.results import percent

if TYPE_CHECKING:
    from situs.locks.attacks import LockAudit
    from situs.locks.attacks.recovery import Recovery


@dataclass(frozen=True)
class Args:
    """Attacks on a lock."""

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The locked folder (situs lock)."""

    attacker: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """no-base, images, public-base, drifted-base or labels; several apart by commas. By default
    no-base, images where there are --images or --texts, and public-base where there is a --base."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """What the attacker has: a run, an export or model folder, or a timm name with --weights."""

    weights: Annotated[str | None, Parameter(metavar="FILE")] = None
    """The weights of a --base that is a timm name."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's key, to judge the attacks by; not needed where --base is the very model that was locked."""

    images: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Unlabelled images for the attacker `images`, any that look like those the model was made for."""

    texts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The same for a model of words: a file with a text on each line; the locked folder brings the tokeniser."""

    count: Annotated[int, Parameter(metavar="SAMPLES")] = 24
    """So many of the --images or --texts, chosen at random and the same every time."""

    drift: Annotated[tuple[float, ...], Parameter(metavar="X")] = (0.3,)
    """drifted-base: noise on the base, in standard deviations of each tensor."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled images: for the attacker `labels`, and to measure accuracy before and after every attack."""

    k: int = 100
    """Labelled samples that the attacker `labels` has."""

    steps: int = 200
    """Updates that the attacker `labels` makes."""

    test: int = 1000
    """Images that accuracy is measured on."""

    seed: int = 0
    """Of the drift and of the attacker's training."""

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Write report.html and audit.json there."""


def run(args: Args) -> None:
    """Runs the attacks, prints the table and the strength, writes the page."""
    from situs.locks.attacks import LockAuditConfig, audit_lock

    key = None
    if args.key is not None:
        from situs.cli.passphrase import read_key

        key = read_key(args.key)
    audit = audit_lock(
        args.locked,
        base=args.base,
        weights=args.weights,
        key=key,
        images=args.images,
        texts=args.texts,
        data=args.data,
        attacker=[name.strip() for text in args.attacker for name in text.split(",") if name.strip()],
        config=LockAuditConfig(args.count, args.drift, args.k, args.steps, args.test, args.seed),
    )
    cover = f", {audit.inner} inner groups as cover" if audit.inner else ""
    sizes = " + ".join(map(str, audit.sizes))
    print_table(f"{audit.model}: {sizes} residual channels{cover}{audit.kept}", [header(audit), *rows_of(audit)])
    print(audit.verdict)
    if args.out is not None:
        _write(args.out, audit)
        print(f"wrote {args.out / 'report.html'} and {args.out / 'audit.json'}")


def header(audit: LockAudit) -> tuple[str, ...]:
    """The table's first row; accuracies only where there is data."""
    scores = ("locked", "after attack", "with the key") if audit.judged else ()
    return ("attacker", "key recovered", "bits left", *scores, "seconds", "what it took")


def rows_of(audit: LockAudit) -> list[tuple[str, ...]]:
    """The attacks as text."""
    return [_row(result, judged=audit.judged) for result in audit.attacks]


def _row(result: Recovery, *, judged: bool) -> tuple[str, ...]:
    from situs.locks.attacks.recovery import SEED_BITS

    share = "not judged" if result.share is None else f"{percent(result.share)} ({result.right} of {result.size})"
    bits = "not judged" if result.bits is None else f"{min(float(SEED_BITS), result.bits):.0f}"
    scores = [_percent(value) for value in (result.before, result.after, result.owner)]
    if result.control is not None:
        scores[1] += f" (random blocks {_percent(result.control)})"
    return (result.attacker, share, bits, *(scores if judged else ()), f"{result.seconds:.2f}", result.cost)


def _percent(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _write(out: Path, audit: LockAudit) -> None:
    from situs.cli.scores import write_scores
    from situs.locks.attacks.recovery import ATTACKERS
    from situs.report import figures
    from situs.report.html import Page

    write_scores(out / "audit.json", audit.to_json())
    page = Page("Attacks on a lock", lead=f"{audit.model}, locked{audit.kept}: {audit.verdict}")
    section = page.section("What each attacker got")
    section.table(header(audit), rows_of(audit))
    section.facts({name: f"{text}." for name, text in ATTACKERS.items()})
    drifted = [(r.attacker, r.share) for r in audit.attacks if r.attacker.startswith("drifted") and r.share is not None]
    if len(drifted) > 1:
        amounts = [float(name.split(", ")[1].removesuffix(" ×")) for name, _ in drifted]
        line = {"key recovered": (amounts, [100 * share for _, share in drifted])}
        labels = "noise on the base, in standard deviations", "residual channels recovered, %"
        drawn = figures.curves(line, *labels, y_limits=(0, 100))
        section.figure(figures.png(drawn), "Linear assignment against a base that drifted.")
    section.note(
        "Bits left, at most the seed's 256: log2 of the orders of the channels that are still wrong, the attacker "
        "being taken to know which; where most are right, log2 of the exchanges that put one after the other right; 0 "
        "where accuracy came back without the key. J tells how well the two sides agree, which needs no key: a search "
        "that failed ends where those from random hints do. Inner groups (MLP units, heads, their channels) never "
        "count: moving them leaves the function as it was."
    )
    page.write(out / "report.html")
