"""Show what situs does on a small set of real images that comes with it, and write one HTML page about it."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from situs.errors import SitusError

MADE_HERE = ".demo"
"""Marks a folder of runs as the demo's own, which the next demo may replace."""


@dataclass(frozen=True)
class Args:
    """Flags of `situs demo`."""

    out: Path = Path("demo")
    """Folder for report.html and the runs it trains (runs/); made where it is missing."""

    quick: bool = False
    """Fewer draws and steps: seconds instead of minutes, coarser numbers."""

    seed: int = 0
    """Of every random number; the same seed gives the same page, but for the secret orders of split learning."""


def run(args: Args) -> None:
    """Runs the sections one after another, writes the page, prints a short table and the page's path."""
    try:
        args.out.mkdir(parents=True, exist_ok=True)  # at once: a folder that cannot be made costs no minutes
    except OSError as error:
        raise SitusError(f"out={args.out}: cannot make this folder ({error.strerror})", field="out") from error
    kept = args.out / "runs"
    if kept.exists() and not (kept / MADE_HERE).exists():
        raise SitusError(f"{kept}: is there and not of an earlier demo; choose another folder", field="out")
    with tempfile.TemporaryDirectory(dir=args.out, prefix=".runs-") as aside:
        runs = Path(aside) / "runs"
        runs.mkdir()
        (runs / MADE_HERE).touch()
        _show(args, runs)
        if kept.exists():
            shutil.rmtree(kept)
        runs.replace(kept)
    print(args.out / "report.html")


def _show(args: Args, runs: Path) -> None:
    """All sections, the page, and the printed table."""
    progress = _Progress()
    with progress.step("loading torch and timm"):
        from situs.cli.demo.learned import SECTIONS
        from situs.cli.demo.sections import QUICK_NOTE, Stage, summarise
    stage = Stage(args.seed, args.quick, progress.say, runs)
    lines: list[tuple[str, str]] = []
    for number, (name, section) in enumerate(SECTIONS.items(), start=1):
        with progress.step(f"{number}/{len(SECTIONS)} {name}"):
            lines += section(stage)
    summarise(stage, lines)
    stage.page.write(args.out / "report.html")
    from situs.cli.tables import print_table
    from situs.results import Table

    print()
    print_table(Table("What the demo found", (), lines))
    if args.quick:
        print(QUICK_NOTE)


class _Progress:
    """A spinner with the latest word on a terminal, plain lines elsewhere; a finished step says its seconds."""

    def __init__(self) -> None:
        self._show: Callable[[str], None] = print

    def say(self, text: str) -> None:
        """The latest word of the running step."""
        self._show(text)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around one step."""
        start = time.perf_counter()
        if not sys.stdout.isatty():
            self._show = lambda text: print(f"{name}: {text}", flush=True)
            yield
            print(f"{name}: done in {time.perf_counter() - start:.1f} s", flush=True)
            return
        from rich.console import Console

        console = Console(highlight=False)
        with console.status(name) as status:
            self._show = lambda text: status.update(f"{name}: {text}")
            yield
        console.print(f"[green]✓[/] {name} [dim]{time.perf_counter() - start:.1f} s[/]")
