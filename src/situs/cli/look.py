"""Verbs to look at a model or at runs: `info`, `report`, `play`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import OUT, NamedArgs, check_folder, open_from
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import present
from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table
from situs.errors import SitusError, counted


@dataclass(frozen=True, kw_only=True)
class Info(NamedArgs):
    """What a model is made of, and which methods and locks apply to it (or why not).

    With --verify it is run: which permutations of its tokens (rows, for private split learning) and channels (columns,
    for locks) it obeys, forward, backward and through optimiser steps, in float64 and in the model's own dtype. A part
    that is refused is a finding, not an error.

    For example: situs info vit_base_patch16_224
    """

    verify: bool = False
    """Measure which permutations the model obeys."""

    steps: int = 3
    """verify: steps of AdamW after which the two trainings are compared; 0 for none."""

    tokens: int = 32
    """verify: how many patch tokens take part at most, where the model allows a subset."""

    seed: int = 0
    """verify: of the weights (where none are given), the inputs and the keys."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """verify: cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """verify: for verify.json and verify.html; none: not written."""

    def run(self) -> None:
        if self.verify:
            from situs.locks import verify

            check_folder(self.out)
            model = open_from(self, any_weights=True)
            present(verify(model, steps=self.steps, tokens=self.tokens, seed=self.seed), self.out)
            return
        for name in ("steps", "tokens", "seed", "device", "out"):
            if getattr(self, name) != getattr(Info, name):
                raise SitusError(f"{name}: is for a model that is verified", field=(name, "verify"))
        from situs.models.describe import describe

        info = describe(open_from(self, any_weights=True, device="meta").backbone)
        answer(asdict(info))
        for table in () if as_document() else info.tables():
            print_table(table)


@dataclass(frozen=True)
class Report:
    """Several runs side by side on one page: curves, tables, configs, machine, and results left in their folders.

    For example: situs report runs/mp3 runs/ft
    """

    runs: Annotated[tuple[Path, ...], POSITIONAL, Parameter(metavar="RUN…")]
    """Run folders: finished, going on or broken off."""

    over: Literal["epoch", "step"] = "epoch"
    """What the curves run over."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For the numbers (.json), the page (.html) and its figures; none: not written."""

    def run(self) -> None:
        """Reads, prints a line for each run, and writes the page."""
        from situs.measure.runs import analyze_runs

        check_folder(self.out)
        present(analyze_runs(self.runs, over=self.over), self.out)


@dataclass(frozen=True, kw_only=True)
class Play(NamedArgs):
    """A page that runs a small model in the browser: move the patches of a picture and see what it makes of them.

    For example: situs play runs/ft --out play.html
    """

    out: Annotated[Path, Parameter(metavar="FILE")] = Path("play.html")
    """The page to write, NAME.html."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The pictures in it; by default a run's own, else those that come with Situs. Whoever has the page has them."""

    split: str | None = None
    """train, val or test; by default val, or all of data that is not split."""

    count: Annotated[int, Parameter(metavar="IMAGES")] = 60
    """So many pictures; accuracy is measured on all of them."""

    most_mb: Annotated[float, Parameter(metavar="MB")] = 8.0
    """Size of the page at most, in megabytes; weights are kept in 32 bits where that is enough, else in 16."""

    def run(self) -> None:
        """Writes the page and says what is in it."""
        from situs.play import write_playground

        model = open_from(self, device="cpu")
        made = write_playground(model, self.out, self.data, split=self.split, count=self.count, most_mb=self.most_mb)
        moved = f", which moves its logits by at most {made.error:.1e}" if made.bits < 32 else ""
        print(f"{made.path}: {made.megabytes:.2f} MB, {made.weights:,} weights in {made.bits} bits{moved}")
        holds = f"{counted(made.images, 'pictures')} from {made.data} and the model itself"
        print(f"It holds {holds}: give it to whom you would give both.")
