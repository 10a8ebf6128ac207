"""Train a method on your images: a preset, a TOML file and flags, each laid over the one before.

For example: situs pretrain --preset samples-mp3 --out runs/mp3

On many GPUs: torchrun --nproc-per-node 8 -m situs pretrain and the same flags.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from situs.api import NAMED, SHORT, train_pretraining
from situs.cli.parser.arguments import Recipe, configured
from situs.cli.result import INTERRUPTED
from situs.cli.shell import answer, beside, next_line
from situs.errors import counted
from situs.methods import METHODS
from situs.progress import note
from situs.train.assemble import RunConfig
from situs.train.checkpoint import RunFolder
from situs.train.contract import TrainResult
from situs.train.rehearse import Rehearsal

EVERYDAY = {"data": (NAMED["data"],), "backbone": (NAMED["backbone"],), **SHORT}
"""Everyday flags, each for fields of the run's config."""


JUDGES = {"label": "accuracy", "mask": "segments", "objects": "objects", "words": "perplexity"}
"""What a method learns -> the verb of evaluate that judges it."""


@dataclass(frozen=True, kw_only=True)
class Training(Recipe):
    """What every training verb takes."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {"seldom": ("key", "withheld", "dry_run", "print_config")}

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """A new folder for the run."""

    resume: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """A run to go on with, after a crash, a Ctrl-C or a full disk; --epochs or --steps makes it longer."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key of a locked folder that the training starts from."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts of that folder were withheld."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    dry_run: bool = False
    """Check data, model, one batch and the length, and write nothing (shards of a remote set go to its cache)."""

    def place(self) -> dict[str, Any]:
        """What is no part of the config, by the names of `situs.api.PLACE`."""
        from situs.cli.locks.passphrase import read_key

        own = {name: getattr(self, name) for name in ("out", "resume", "device", "withheld", "dry_run")}
        return {**own, "key": None if self.key is None else read_key(self.key)}


@dataclass(frozen=True, kw_only=True)
class Args(Training):
    """Pretrain a backbone."""

    config: RunConfig = configured(RunConfig, short=EVERYDAY)


def run(args: Args) -> int:
    """Trains; exit status 130 where it was interrupted (and can be resumed)."""
    return tell(args.out or args.resume, args.config, train_pretraining(args.config, **args.place()))


def tell(run: Path | None, config: RunConfig, result: TrainResult | Rehearsal) -> int:
    """Says what was reached and what can be done with it, or what would be; gives the exit status."""
    if isinstance(result, Rehearsal):
        answer(asdict(result), *(result.lines() if os.environ.get("RANK", "0") == "0" else ()))
        return 0
    answer({"run": run, "steps": result.step, "interrupted": result.interrupted, "metrics": result.metrics})
    if result.interrupted:
        return INTERRUPTED
    if os.environ.get("RANK", "0") == "0":
        told = {name: value for name, value in result.metrics.items() if name != "gradient_norm"}
        facts = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in told.items())
        learned = next((each for each in METHODS[config.method_name].needs_targets if each in JUDGES), None)
        note(f"done: {counted(result.step, 'steps')}{facts}; the run is in {run}")
        assert run is not None
        note(next_line(_follow(run, learned), ["export", run, "--out", beside(run, "exported")]))
    return 0


def _follow(run: Path, learned: str | None) -> list[str | Path]:
    """What a run is for, as the words of a verb: what has learned labels is judged, what has not learns those of its
    data, or where there are none gives features."""
    if learned:
        return ["evaluate", JUDGES[learned], run]
    if len(RunFolder.open(run, writer=False).classes() or ()) > 1:
        return ["finetune", "--from", run, "--out", beside(run, "tuned")]
    return ["features", run, "--out", f"{beside(run, 'features')}.safetensors"]
