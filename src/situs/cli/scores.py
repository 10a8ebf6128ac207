"""How the evaluations of classifiers print and write their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from situs.cli.tables import print_table
from situs.config import write_text
from situs.errors import SitusError
from situs.report.words import percent

if TYPE_CHECKING:
    from situs.evaluate.accuracy import Accuracy


def print_scores(data: str, scores: Mapping[str, Accuracy]) -> None:
    """One row a model: top-1, top-5, loss."""
    count = next(iter(scores.values())).count
    rows = [("", "top-1", "top-5", "loss")]
    rows += [(name, percent(s.top1, 2), percent(s.top5, 2), f"{s.loss:.4f}") for name, s in scores.items()]
    print_table(f"{data}, {count:,} images", rows)


def write_scores(path: Path, scores: Mapping[str, Any]) -> None:
    """The numbers as JSON, written aside and renamed, by the first rank."""
    from situs.train import distributed

    if distributed.rank():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(scores, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise SitusError(f"{path}: could not be written: {(error.strerror or str(error)).lower()} (--out)") from error
