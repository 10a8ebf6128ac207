"""Fine-tune a locked ViT with its key, without it, and from scratch: the paper's Table 7 and Figures 4 to 6.

Without a run to start from, a small ViT is pretrained on the embedded images first; all of it takes minutes on a CPU.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from situs.cli.arguments import configured
from situs.cli.tables import print_table
from situs.locks.study.finetune import StudyConfig
from situs.results import percent

if TYPE_CHECKING:
    from situs.locks.study.finetune import Study

PAPER = {"normal": "97.74 %", "authorised": "97.94 %", "unauthorised": "78.03 %", "from scratch": "–"}
"""Table 7, ViT-Base: test accuracy in per cent. From scratch stands in Figure 5 alone, below the unauthorised."""


@dataclass(frozen=True)
class Args:
    """The fine-tuning study of a locked ViT."""

    source: Annotated[str | None, Parameter(name="--from", metavar="RUN")] = None
    """The run whose model is locked; by default a small ViT is pretrained on the embedded images."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled images to fine-tune on; by default those of the run."""

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Write report.html and study.json there."""

    config: StudyConfig = configured(StudyConfig)
    """How long, and on how much."""


def run(args: Args) -> None:
    """Trains in all four ways, prints the table, writes the page."""
    import tempfile

    from situs.errors import SitusError
    from situs.locks.study.finetune import from_run, pretrain, run_study

    if args.source is None and args.data is not None:
        raise SitusError(f"data={args.data}: give the run to start from as well (--from)")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if args.source is None:
            start = pretrain(args.config, folder, print)
        else:
            start = from_run(args.source, args.data, args.config)
        study = run_study(start, args.config, folder, print)
    rows = [("", "accuracy", "loss", "the paper's ViT-B"), *_rows(study)]
    print()
    print_table(study.about, rows)
    print(agreement(study))
    for line in rule_lines(study):
        print(line)
    if args.out is not None:
        _write(args.out, study, args.config)
        print(f"wrote {args.out / 'report.html'} and {args.out / 'study.json'}")


def _rows(study: Study) -> list[tuple[str, ...]]:
    return [
        (way, percent(curve.accuracy[-1], 2), f"{curve.loss[-1]:.4f}", PAPER[way])
        for way, curve in study.curves.items()
    ]


def agreement(study: Study) -> str:
    """One sentence on how far normal and authorised are apart."""
    return (
        f"Normal and authorised differ by rounding alone: logits by at most {study.logits_gap:.1e}, weights by "
        f"{study.weights_gap:.1e} after {study.curves['normal'].steps[-1]} float32 steps. Chance is "
        f"{percent(study.chance)}."
    )


def rule_lines(study: Study) -> list[str]:
    """The paper's own rule for keys (Eq. 6) on the model that was locked, a sentence for each kind of key."""
    return [
        f"The paper's Eq. 6 {'holds' if each.holds else 'fails'} with {each.key}: an error of {each.error:.0e} in "
        f"float64; {each.why}."
        for each in study.rule
    ]


def _write(out: Path, study: Study, config: StudyConfig) -> None:
    from situs.cli.scores import write_scores
    from situs.report import figures
    from situs.report.html import Page

    write_scores(out / "study.json", json.loads(json.dumps({"config": asdict(config), **asdict(study)})))
    page = Page("Fine-tuning a locked model", lead=f"With its key, without it, and from scratch: {study.about}.")
    section = page.section("Who can use a locked model")
    section.text(
        "The lock permutes the channels between the blocks. Its owner permutes the stream along, so that training with "
        "the key is training in another order of the channels; a thief has blocks whose weights do not fit the "
        "embedding and the head, and can only train on from there."
    )
    section.table(["way", "accuracy", "loss", "the paper's ViT-B (Table 7)"], _rows(study), "After the last step.")
    section.note(" ".join([agreement(study), *rule_lines(study)]))
    for title, unit, name, scale in (
        ("Validation loss", "cross entropy", "loss", 1),
        ("Validation accuracy", "images classified right, %", "accuracy", 100),
    ):
        lines = {way: (c.steps, [scale * v for v in getattr(c, name)]) for way, c in study.curves.items()}
        drawn = figures.curves(lines, "update", unit, title=title)
        section.figure(figures.png(drawn), f"{title} of the four ways (Figures 4 and 5 of the paper).")
    section.text(
        "What the unauthorised have over training from scratch is what the lock does not take away: embedding, "
        "positions, and the statistics of the weights. `situs audit lock` measures how far a thief gets by attacking "
        "the key instead."
    )
    page.write(out / "report.html")
