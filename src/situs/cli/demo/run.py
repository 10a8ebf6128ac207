"""`situs demo`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from situs.errors import SitusError
from situs.progress import took

if TYPE_CHECKING:
    from situs.cli.demo.stage import Stage
    from situs.report.html import Finding

MADE_HERE = ".demo"
"""Marks a folder of runs as the demo's own, which the next demo may replace."""


@dataclass(frozen=True)
class Demo:
    """Show what situs does on a small set of real images that comes with it, and write one HTML page about it.

    For example: situs demo --out demo
    """

    out: Path = Path("demo")
    """Folder for report.html and the runs it trains (runs/); made where it is missing."""

    quick: bool = False
    """Fewer images and steps: seconds instead of minutes, and models that know next to nothing."""

    seed: int = 0
    """Of every random number; the same seed gives the same figures, but for times and secret keys."""

    def run(self) -> None:
        """Makes the findings one after another, writes the page, prints them, what to try next and the page's path."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)  # at once: a folder that cannot be made costs no minutes
        except OSError as error:
            raise SitusError(f"out={self.out}: cannot make this folder ({error.strerror})", field="out") from error
        kept = self.out / "runs"
        if kept.exists() and not (kept / MADE_HERE).exists():
            raise SitusError(f"{kept}: is there and not of an earlier demo; choose another folder", field="out")
        with tempfile.TemporaryDirectory(dir=self.out, prefix=".runs-") as aside:
            runs = Path(aside) / "runs"
            runs.mkdir()
            (runs / MADE_HERE).touch()
            _show(self, runs)
            if kept.exists():
                shutil.rmtree(kept)
            runs.replace(kept)
        print(self.out / "report.html")


def _show(args: Demo, runs: Path) -> None:
    """All findings, the page, and what is printed of them."""
    progress, began = _Progress(), time.monotonic()
    with progress.step("loading torch and timm"):
        from situs.cli.demo.findings import find_gradients, find_labels, find_lock, find_order, find_places
        from situs.cli.demo.stage import Stage, one_thread
    findings: dict[str, Callable[[Stage], Finding]] = {
        "patches learn where they belong": find_places,
        "what that is worth with few labels": find_labels,
        "what one training step gives away": find_gradients,
        "a lock, and who opens it": find_lock,
        "split learning, and what its server sees": find_order,
    }
    stage = Stage(args.seed, args.quick, progress.say, runs)
    found = []
    with one_thread():
        for number, (name, find) in enumerate(findings.items(), start=1):
            with progress.step(f"{number}/{len(findings)} {name}"):
                found.append(find(stage))
    _finish(stage, found, time.monotonic() - began)
    stage.page.write(args.out / "report.html")
    print("\nWhat the demo found")
    for number, each in enumerate(found, start=1):
        print(f"  {number}  {each.title}\n     {each.number} {each.of}")
    if args.quick:
        print(f"\n{QUICK_NOTE}")
    print("\nNow your own:")
    print("\n".join(f"  {line}" for line in NEXT))
    print()


def _finish(stage: Stage, found: list[Finding], seconds: float) -> None:
    """The page's head and end: what it is, what to try next, how it was made."""
    from importlib.metadata import version

    from situs.report.html import Section

    page, (minutes, rest) = stage.page, divmod(round(seconds), 60)
    took = f"{minutes} min {rest} s" if minutes else f"{rest} s"
    left = [str(number) for number, each in enumerate(found, start=1) if each.number == "left out"]
    page.lead = (
        "What a transformer learns from position, and what it gives away. "
        f"Five findings, made on this machine in {took} from the images that come with Situs."
        + (f" Left out for want of an extra: {', '.join(left)}." if left else "")
    )
    if stage.quick:
        page.notice = QUICK_NOTE
    for section in page.sections:
        section.look = "fold"
    page.sections.insert(0, Section("Now your own").code("\n".join(NEXT)))
    command = "situs demo" + " --quick" * stage.quick + f" --seed {stage.seed}"
    made = page.fold("How each number was made")
    made.facts({"command": f"`{command}`", **{name: version(name) for name in ("situs", "torch", "timm")}})
    made.facts({"labels": stage.length.labelled, "images without labels": stage.length.images, "processes": 2})
    made.text("The models are beside this page in `runs`. In its folder, verbs that look at a model take them:")
    made.code("\n".join(FURTHER))
    page.footer = "Images: a cut of Fashion-MNIST, copyright 2017 Zalando SE, MIT licence."


NEXT = (
    "situs pretrain --data photos/ --out runs/mine",
    "situs audit gradients my_model:build --data photos/ --out audit",
    "situs lock exported/ --key owner.key --out locked",
)
"""What a user would try next, on own data."""

FURTHER = (
    "situs evaluate reconstruct runs/mp3 --out look",
    "situs evaluate knn runs/mp3 --count 500 --out look",
    "situs report runs/after-MP3 runs/from-random-weights --out look",
    "situs audit split runs/after-MP3 --defences none,noise=0.5 --attacks order,linkage --out look",
)
"""What to try with the demo's own runs."""

QUICK_NOTE = "After the few steps of --quick the models know next to nothing; without it they are trained for longer."


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
            print(f"{name}: done in {took(time.perf_counter() - start)}", flush=True)
            return
        from rich.console import Console

        console = Console(highlight=False)
        with console.status(name) as status:
            self._show = lambda text: status.update(f"{name}: {text}")
            yield
        console.print(f"[green]✓[/] {name} [dim]{took(time.perf_counter() - start)}[/]")
