"""Trains on a torch Dataset in memory, from its beginning or going on: RUN new|resume."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from memory_kinds import TorchSet, pictures

import situs


class Slow(TorchSet):
    """So that there is time to kill it."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def main() -> None:
    folder, how = sys.argv[1:]
    shape = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    options: dict[str, Any] = {
        "backbone": {"name": "vit_tiny_patch16_224", "patch_size": 8, "model_args": shape},
        "optim": {"warmup_epochs": 0, "ema": 0.9},
        "train": {"max_steps": 60, "save_every": 5},
        "batch": 16,
        "device": "cpu",
        "quiet": True,
    }
    data = Slow(*pictures(64))
    if how == "new":
        table = {"path": data, "img_size": 16, "resident": "never", "workers": 1}
        situs.pretrain(table, out=folder, **options)
    else:
        situs.pretrain(data, resume=folder, device="cpu", quiet=True)


if __name__ == "__main__":
    main()
