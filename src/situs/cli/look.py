"""Verbs that show a model or runs: `info`, `report`, `play`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import OUT, NamedArgs, check_folder, open_from, open_one_of
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import present
from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table
from situs.errors import SitusError, counted


@dataclass(frozen=True, kw_only=True)
class Info(NamedArgs):
    """Show a model's parts, and which methods and locks apply to it (or why not).

    With --verify, run the model and test two equivariances. Equivariance to permuted tokens (rows) is necessary for
    private split learning. Equivariance to permuted channels (columns) is necessary for locks. The test covers forward,
    backward and optimiser steps, in float64 and in the model's dtype. If a part of the model cannot be tested, the
    reason is shown.

    With --like, test whether a server crafted the weights so that gradients reveal single samples. The exit status is 3
    if the test finds signs of this. Finding no signs proves nothing: weights can be crafted to pass the test.

    For example: situs info vit_base_patch16_224
    """

    verify: bool = False
    """Measure whether the model is equivariant to permutations of its tokens and of its channels."""

    steps: int = 3
    """With --verify: compare this many AdamW steps with and without permutations. With 0, skip this comparison."""

    tokens: int = 32
    """With --verify: test with at most this many patch tokens per image, if the model can run on a part of its
    tokens."""

    seed: int = 0
    """With --verify: random seed of inputs and keys. Without --weights it is also the seed of the weights."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """With --verify or --like: cpu, cuda, cuda:N or mps. Default: a GPU if there is one."""

    like: Annotated[str | None, Parameter(metavar="PUBLIC|random")] = None
    """Test whether a server crafted the weights so that gradients reveal single samples. PUBLIC is a public model of
    the same architecture to compare with. If there is no such model, give the word random."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """With --verify or --like: folder for the numbers (.json) and the page (.html). With --out none, no files are
    written."""

    def run(self) -> int | None:
        if self.verify and self.like is not None:
            raise SitusError("verify and like cannot be used together; give one of them", field=("verify", "like"))
        if self.verify:
            from situs.locks import verify

            check_folder(self.out)
            model = open_from(self, any_weights=True)
            present(verify(model, steps=self.steps, tokens=self.tokens, seed=self.seed), self.out)
            return None
        for name in ("steps", "tokens", "seed", *(("device", "out") if self.like is None else ())):
            if getattr(self, name) != getattr(Info, name):
                raise SitusError(f"{name}: needs verify", field=(name, "verify"))
        if self.like is not None:
            return self._check(self.like)
        from situs.models.describe import describe

        info = describe(open_from(self, any_weights=True, device="meta").backbone)
        answer(asdict(info))
        for table in () if as_document() else info.tables():
            print_table(table)
        return None

    def _check(self, like: str) -> int:
        """Whether the weights look chosen, as an exit status."""
        from situs.audit.chosen import check_weights
        from situs.models import RANDOM

        check_folder(self.out, "chosen")
        model = open_from(self)
        result = check_weights(model, RANDOM if like == RANDOM else open_one_of(like, self))
        present(result, self.out)
        return result.status


@dataclass(frozen=True)
class Report:
    """Compare several runs on one page: curves, tables, configs and speed.

    For example: situs report runs/mp3 runs/ft
    """

    runs: Annotated[tuple[Path, ...], POSITIONAL, Parameter(metavar="RUN…")]
    """Run folders: finished, running or interrupted."""

    over: Literal["epoch", "step"] = "epoch"
    """Unit of the curves' horizontal axis."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Output folder: numbers (JSON), page (HTML). With --out none, no files are written."""

    def run(self) -> None:
        """Prints a line for each run and writes the page."""
        from situs.measure.runs import analyze_runs

        check_folder(self.out)
        present(analyze_runs(self.runs, over=self.over), self.out)


@dataclass(frozen=True, kw_only=True)
class Play(NamedArgs):
    """Make a page that runs a small model in the browser. On the page you move patches of an image and see the
    predictions.

    For example: situs play runs/ft --out play.html
    """

    out: Annotated[Path, Parameter(metavar="FILE")] = Path("play.html")
    """Output file, NAME.html."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images on the page. Default: the images of the run, or the sample images of Situs. Everybody who gets the page
    also gets these images."""

    split: str | None = None
    """Split of the images: train, val or test. Default: val, or all images if the data has no splits."""

    count: Annotated[int, Parameter(metavar="IMAGES")] = 60
    """Number of images on the page. The page measures accuracy on all of them."""

    most_mb: Annotated[float, Parameter(metavar="MB")] = 8.0
    """Largest size of the page in megabytes. Weights are stored in 32 bits if the page then fits, and otherwise in 16
    bits."""

    def run(self) -> None:
        """Writes the page and prints what it contains."""
        from situs.play import write_playground

        model = open_from(self, device="cpu")
        page = write_playground(model, self.out, self.data, split=self.split, count=self.count, most_mb=self.most_mb)
        error = f" (the rounding changes the logits by at most {page.error:.1e})" if page.bits < 32 else ""
        print(f"{page.path}: {page.megabytes:.2f} MB, {page.weights:,} weights in {page.bits} bits{error}")
        images = f"{counted(page.images, 'images')} from {page.data}"
        print(f"The page contains {images} and the model: share the page only with people who may have both.")
