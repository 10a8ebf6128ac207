"""Runs the python blocks of a page in an empty folder: python readme.py README.md

Needs nothing but situs, so that an installed wheel can run it. Photographs are made up, and models and trainings are
small enough to wait for; everything else is as a reader would have it.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
from PIL import Image

import situs

TINY = """
optim = {warmup_epochs = 0}
train = {epochs = 1}
data = {img_size = 32, batch = 8, workers = 0}
backbone = {patch_size = 8, model_args = {depth = 1, embed_dim = 16, num_heads = 2}}
"""


def fill(folder: Path) -> None:
    """Writes photos/ and the settings of the small models."""
    chance = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / "photos" / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = chance.integers(0, 256, (32, 32, 3), dtype="uint8")
                Image.fromarray(pixels).save(folder / "photos" / split / name / f"{number}.png")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "rest.toml").write_text(TINY.replace("patch_size = 8, ", "").partition("backbone")[0])


def smaller() -> list[tuple[Any, str, Any]]:
    """What is replaced: (module, name, value)."""
    quiet = {"device": "cpu", "quiet": True}
    return [
        (situs, "pretrain", partial(situs.pretrain, config="tiny.toml", **quiet)),
        (situs, "finetune", partial(situs.finetune, config="rest.toml", **quiet)),
        (situs, "audit_gradients", partial(situs.audit_gradients, count=1, attacks=["patchembed"])),
        (timm, "create_model", partial(timm.create_model, depth=1)),  # where no depth is asked for
        (situs, "verify", partial(situs.verify, steps=1)),
    ]


def run_blocks(page: Path) -> dict[str, Any]:
    """Runs the python blocks in order, as a reader would; gives their names back."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": page.stem}
    for match in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        line = text[: match.start(1)].count("\n")
        # Blank lines in front make a traceback name the page's own line.
        exec(compile("\n" * line + match[1], str(page), "exec"), names)
    return names


if __name__ == "__main__":
    fill(Path.cwd())
    for module, name, value in smaller():
        setattr(module, name, value)
    names = run_blocks(Path(sys.argv[1]))
    print(f"situs of {Path(situs.__file__).parent}; {len(names)} names; gate passed: {names['passed']}")
