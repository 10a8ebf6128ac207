"""A run under torchrun whose ranks are killed: torchrun … restarted.py OUT KIND STEP:RANK …, one kill after another."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from situs.config import from_dict
from situs.progress import notes_to
from situs.train import distributed
from situs.train.assemble import Setup
from situs.train.run import RunConfig, train_run

CONFIG: dict[str, Any] = {
    "method": {"name": "mp3", "mask_ratio": 0.5},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2, "drop_path_rate": 0.2},
    },
    "data": {"path": "samples", "img_size": 28, "channels": 1, "batch": 16},
    "optim": {"lr": 1e-2, "warmup_epochs": 0},
    "train": {"max_steps": 12, "precision": "fp32", "log_every": 2, "save_every": 3},
}


class Killer:
    """Kills a rank at a step; which kills are done stands in a file, for a start may fail by itself."""

    def __init__(self, kills: list[str], done: Path) -> None:
        count = len(done.read_text()) if done.exists() else 0
        self.step, self.rank = map(int, kills[count].split(":")) if count < len(kills) else (-1, -1)
        self.done = done

    def after_step(self, state: Any) -> None:
        if state.step == self.step and distributed.rank() == self.rank:
            with self.done.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)

    def after_epoch(self, state: Any) -> None:
        pass


def tell(line: str) -> None:
    print(line, flush=True)  # before the next kill


def main(out: Path, kind: str, *kills: str) -> None:
    table = CONFIG | {"train": CONFIG["train"] | {"parallel": kind}}
    killer = Killer(list(kills), out.with_suffix(".kills"))
    with notes_to(tell):
        train_run(from_dict(RunConfig, table), Setup(hooks=lambda *_: [killer]), out=out, device="cpu")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
