"""The progress of a job, from its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from situs.studies.run import progress_in


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", 0.0),
        ("compiling\n", 0.0),
        ("step 10/40 · loss 2.1 · 0:10 left\n", 0.25),
        ("step 10/40 · loss 2.1\nstep 30/40 · loss 1.9\nvalidation\n", 0.75),
        ("step 1,000/4,000 · loss 2.1\n", 0.25),
        (" 12 %  attacks: 2 of 7  1:00 left\n", 0.12),
        ("step 10/40 · loss 2.1\n 50 %  val\n", 0.5),
        ("wrote 3 files\n100 % of the rows were read\n", 0.0),
    ],
)
def test_the_newest_line_with_progress_counts(log: str, expected: float, tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    file.write_text(log)
    assert progress_in(file, 0) == expected


def test_the_log_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    file.write_text(before := "step 30/40 · loss 1.9\n")
    assert progress_in(file, len(before)) == 0.0
    file.write_text(before + "x" * 10_000 + "\nstep 4/40 · loss 1.9\n")
    assert progress_in(file, len(before)) == 0.1
