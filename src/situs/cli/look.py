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
    """Show the parts of a model, which training methods the model supports, and whether it supports secret permutations
    of tokens or channels (locks). If a method or lock is not supported, the output says why.

    With --verify, Situs runs the model and tests two kinds of equivariance. Private split learning needs equivariance
    to permuted tokens (rows). Locked models need equivariance to permuted channels (columns). The test covers the
    forward pass, the backward pass and optimiser steps, in float64 and in the dtype of the model. If a part of the
    model cannot be tested, the output says why.

    With --like, Situs tests whether a server crafted the weights so that gradients reveal single samples. Exit status 3
    means that the weights look crafted. Exit status 0 does not prove that the weights are honest, because weights can
    be crafted to pass the test.

    For example: situs info vit_base_patch16_224
    """

    verify: bool = False
    """Test whether the model is equivariant to permutations of tokens and of channels."""

    steps: int = 3
    """With --verify: run this many AdamW steps with and without permutations, and compare. 0 skips this comparison."""

    tokens: int = 32
    """With --verify: use at most this many patch tokens per image. For a model that needs all tokens, this limit has no
    effect."""

    seed: int = 0
    """With --verify: random seed of the test inputs and of the permutation keys. Without --weights, this seed also sets
    the random weights of the model."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """With --verify or --like: cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    like: Annotated[str | None, Parameter(metavar="PUBLIC|random")] = None
    """Test whether a server crafted the weights so that gradients reveal single samples. PUBLIC is a public model of
    the same architecture, for comparison. If you have no public model, use --like random."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """With --verify or --like: folder for the results (JSON and HTML). With --out none, no files are written."""

    def run(self) -> int | None:
        if self.verify and self.like is not None:
            reason = "--verify and --like cannot be used together; give only one of them"
            raise SitusError(reason, field=("verify", "like"))
        if self.verify:
            from situs.locks import verify

            check_folder(self.out)
            model = open_from(self, any_weights=True)
            present(verify(model, steps=self.steps, tokens=self.tokens, seed=self.seed), self.out)
            return None
        for name in ("steps", "tokens", "seed", *(("device", "out") if self.like is None else ())):
            if getattr(self, name) != getattr(Info, name):
                needed = "--verify or --like" if name in ("device", "out") else "--verify"
                reason = f"--{name} applies only with {needed}; leave --{name} out"
                raise SitusError(reason, field=(name, "verify"))
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
    """Compare several training runs on one page: curves, tables, configs and speed.

    For example: situs report runs/mp3 runs/ft
    """

    runs: Annotated[tuple[Path, ...], POSITIONAL, Parameter(metavar="RUN…")]
    """Folders of training runs (finished, running or interrupted)."""

    over: Literal["epoch", "step"] = "epoch"
    """Horizontal axis of the curves: epoch or step."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for the results (JSON and HTML). With --out none, no files are written."""

    def run(self) -> None:
        """Prints a line for each run and writes the page."""
        from situs.measure.runs import analyze_runs

        check_folder(self.out)
        present(analyze_runs(self.runs, over=self.over), self.out)


@dataclass(frozen=True, kw_only=True)
class Play(NamedArgs):
    """Make a page that runs a small model in the browser. On the page, you can move the patches of an image and see how
    the predictions change.

    For example: situs play runs/ft --out play.html
    """

    out: Annotated[Path, Parameter(metavar="FILE")] = Path("play.html")
    """Output file, NAME.html."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images on the page. Default: the images of the training run, or the sample images of Situs. The page contains
    these images, so share the page only with people who are allowed to have the images."""

    split: str | None = None
    """Split of the images: train, val or test. Default: val. For data without splits, the default is all images."""

    count: Annotated[int, Parameter(metavar="IMAGES")] = 60
    """Number of images on the page. The page measures the accuracy on all these images."""

    most_mb: Annotated[float, Parameter(metavar="MB")] = 8.0
    """Largest size of the page in megabytes. If the page with 32-bit weights would be larger than this limit, the
    weight matrices are stored in 16 bits."""

    def run(self) -> None:
        """Writes the page and prints what it contains."""
        from situs.play import write_playground

        model = open_from(self, device="cpu")
        page = write_playground(model, self.out, self.data, split=self.split, count=self.count, most_mb=self.most_mb)
        error = f" (the rounding changes the logits by at most {page.error:.1e})" if page.bits < 32 else ""
        print(f"{page.path}: {page.megabytes:.2f} MB, {page.weights:,} weights in {page.bits} bits{error}")
        images = f"{counted(page.images, 'images')} from {page.data}"
        print(
            f"The page contains the model and {images}. Share the page only with people who are allowed to have the "
            "model and the images."
        )
