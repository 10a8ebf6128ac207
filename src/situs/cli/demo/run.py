"""`situs demo`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from situs.cli.shell import answer, as_document
from situs.errors import SitusError
from situs.progress import task

if TYPE_CHECKING:
    from situs.cli.demo.stage import Stage
    from situs.report.html import Finding

MADE_HERE = ".demo"
"""This file marks a folder of runs that the next demo may replace."""


@dataclass(frozen=True)
class Demo:
    """Show what situs does, on a small included set of real images. The demo writes one HTML page.

    For example: situs demo --out demo
    """

    out: Path = Path("demo")
    """Output folder for report.html and the demo's runs (in runs/)."""

    quick: bool = False
    """Use fewer images and steps. The demo then takes seconds instead of minutes, but the models learn almost
    nothing."""

    seed: int = 0
    """Random seed. The same seed gives the same numbers, except for times and secret keys."""

    examples: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Do not run the demo; copy the scripts and notebooks of the tutorials to this new folder."""

    def run(self) -> None:
        """Makes the findings, writes the page, and prints the findings and what to try next."""
        if self.examples is not None:
            copy_examples(self.examples)
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)  # before the minutes of training
        except OSError as error:
            raise SitusError(f"out={self.out}: this folder cannot be made ({error.strerror})", field="out") from error
        old_runs = self.out / "runs"
        if old_runs.exists() and not (old_runs / MADE_HERE).exists():
            raise SitusError(
                f"{old_runs}: exists but does not come from an earlier demo; choose another folder", field="out"
            )
        with tempfile.TemporaryDirectory(dir=self.out, prefix=".runs-") as folder:
            runs = Path(folder) / "runs"
            runs.mkdir()
            (runs / MADE_HERE).touch()
            _show(self, runs)
            if old_runs.exists():
                shutil.rmtree(old_runs)
            runs.replace(old_runs)
        print(self.out / "report.html")


def copy_examples(out: Path) -> None:
    """Copies all examples or none, and lists what each script does."""
    if out.exists():
        raise SitusError(f"examples={out}: already exists; give a new folder", field="examples")
    package = Path(__file__).resolve().parents[2]  # as installed; a checkout has them beside src
    source = next(folder for folder in (package / "examples", package.parents[1] / "examples") if folder.is_dir())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".examples-") as folder:
            copy = Path(folder) / "examples"
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            copy.rename(out)
    except OSError as error:
        reason = f"examples={out}: cannot be written ({error.strerror})"
        raise SitusError(reason, field="examples") from error
    answer([str(path) for path in sorted(out.rglob("*")) if path.is_file()])
    for path in () if as_document() else sorted(out.glob("*.py")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].strip('"')
        print(f"python {path}  # {title.partition(' python ')[0].rstrip(':')}")


def _show(args: Demo, runs: Path) -> None:
    """Makes the findings, writes the page, and prints them."""
    from situs.cli.demo.findings import find_gradients, find_labels, find_lock, find_order, find_places
    from situs.cli.demo.stage import Stage, one_thread

    began = time.monotonic()
    steps: dict[str, Callable[[Stage], Finding]] = {
        "a model learns where patches belong": find_places,
        "accuracy with few labels": find_labels,
        "what one training step reveals": find_gradients,
        "which attackers open a lock": find_lock,
        "split learning, and what its server sees": find_order,
    }
    stage, findings = Stage(args.seed, args.quick, runs), list["Finding"]()
    with one_thread(), task("demo", len(steps)) as progress:
        for number, (name, find) in enumerate(steps.items()):
            progress.tell(number, name)
            findings.append(find(stage))
    _finish(stage, findings, time.monotonic() - began)
    stage.page.write(args.out / "report.html")
    print("\nWhat the demo found")
    for number, finding in enumerate(findings, start=1):
        print(f"  {number}  {finding.title}\n     {finding.number} {finding.of}")
    if args.quick:
        print(f"\n{QUICK_NOTE}")
    print(f"\nNext, with your own data and model ({NEEDS}):")
    print("\n".join(f"  {line}" for line in NEXT))
    print()


def _finish(stage: Stage, findings: list[Finding], seconds: float) -> None:
    """Completes the page: its lead, what to try next, and how it was made."""
    from importlib.metadata import version

    from situs import __version__
    from situs.pages.glossary import add_words
    from situs.report.html import Section

    page, (minutes, remainder) = stage.page, divmod(round(seconds), 60)
    duration = f"{minutes} min {remainder} s" if minutes else f"{remainder} s"
    skipped = [str(number) for number, finding in enumerate(findings, start=1) if finding.number == "left out"]
    page.lead = (
        "These five findings show what a transformer learns from position, and what its gradients, tokens and locked "
        "weights reveal. "
        f"They were computed on this machine in {duration}, from the images that come with Situs."
        + (f" Findings skipped because an extra is missing: {', '.join(skipped)}." if skipped else "")
    )
    if stage.quick:
        page.notice = QUICK_NOTE
    for section in page.sections:
        section.look = "fold"
    page.sections.insert(0, Section("Next, with your own data and model").text(NEEDS).code("\n".join(NEXT)))
    command = "situs demo" + " --quick" * stage.quick + f" --seed {stage.seed}"
    origin = page.fold("How each number was made")
    versions = {"situs": __version__, **{name: version(name) for name in ("torch", "timm")}}
    origin.facts({"command": f"`{command}`", **versions})
    origin.facts({"labels": stage.length.labelled, "images without labels": stage.length.images})
    origin.text(
        "The folder of this page also contains the models, in `runs`. You can try these commands in this folder:"
    )
    origin.code("\n".join(FURTHER))
    add_words(page)
    page.footer = "The images are a part of Fashion-MNIST, copyright 2017 Zalando SE, MIT licence."


NEXT = (
    "situs pretrain --data photos --out runs/mine",
    "situs audit gradients my_model:build --data photos --out audit",
    "situs export runs/mine --out exported",
    "situs keygen --out owner.key && situs lock exported --key owner.key --out locked",
)
"""What a user can try next, in this order, with their own data."""

NEEDS = (
    "photos: a folder of your images; my_model.py: a file with a function build() that returns your model; "
    "the lock needs pip install 'situs[locks]'"
)

FURTHER = (
    "situs evaluate reconstruct runs/mp3 --out look",
    "situs evaluate knn runs/mp3 --count 500 --out look",
    "situs report runs/after-MP3 runs/from-random-weights --out look",
    "situs audit split runs/after-MP3 --defences none,noise=0.5 --attacks order,linkage --out look",
)
"""What to try with the demo's runs."""

QUICK_NOTE = (
    "--quick trains only a few steps, so the models learn almost nothing. Without --quick the models train longer."
)
