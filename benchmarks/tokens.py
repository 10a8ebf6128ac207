"""The attack on tokens over families of models, positions and batches: what is open, what came back, and how long.

    python benchmarks/tokens.py --data FOLDER --case dinov2-98 --weights FILE --images 3
    python benchmarks/tokens.py --data FOLDER --case vit-s4 --positions sincos --batch 2 --seconds 600

The gradients of positions are withheld in every row. Images: every tenth by name (`--held-out`), or the others, on
which limits may be set. Prints one row of a Markdown table for each upload, with its head.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from situs.audit import Knowledge
from situs.audit.attacks.base import Refused
from situs.audit.attacks.tokens.attack import TokensConfig, TokenSpans
from situs.audit.client import DTYPES, victim_gradients
from situs.audit.defences import NoPositionGradient
from situs.audit.scores.metrics import denormalise
from situs.audit.scores.scoring import pictures_of
from situs.models import open_model

CASES: dict[str, dict[str, Any]] = {
    "vit-s4": {"source": "vit_small_patch16_224", "img_size": 32, "patch_size": 4},
    "vit-s16": {"source": "vit_small_patch16_224"},
    "vit-b16": {"source": "vit_base_patch16_224"},
    "dinov2-98": {"source": "vit_small_patch14_dinov2", "img_size": 98},
    "dinov2-140": {"source": "vit_small_patch14_dinov2", "img_size": 140},
    "dinov2-224": {"source": "vit_small_patch14_dinov2", "img_size": 224},
    "rope-s4": {"source": "vit_small_patch16_rope_224", "img_size": 32, "patch_size": 4},
}
NORMALISATION = ((0.5,) * 3, (0.5,) * 3)
HEAD = ("model", "positions", "batch", "sent in", "open", "patches that fit", "PSNR, dB", "exact", "fits", "s")


def photographs(folder: Path, size: int, held_out: bool) -> Iterator[torch.Tensor]:
    """Normalised photographs [3, size, size] by name: every tenth, or the others."""
    from PIL import Image
    from torchvision.transforms import v2

    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    cut = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()])
    for number, path in enumerate(files):
        if (number % 10 == 0) == held_out:
            with Image.open(path) as image:
                yield (cut(image.convert("RGB")).float() / 255 - 0.5) / 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--positions")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--images", type=int, default=1, help="uploads")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--seconds", type=float, default=TokensConfig.seconds)
    parser.add_argument("--held-out", action="store_true")
    args = parser.parse_args()
    fields = dict(CASES[args.case])
    if args.positions is not None:
        fields["positions"] = args.positions
    backbone = open_model(fields.pop("source"), weights=args.weights, num_classes=100, **fields).backbone.float()
    assert backbone.input.shape is not None
    size = backbone.input.shape[0]
    pictures = photographs(args.data, size, args.held_out)
    defence = NoPositionGradient()
    known = Knowledge(defence, args.batch, normalisation=NORMALISATION)
    attack = TokenSpans(TokensConfig(seconds=args.seconds, rounds=100))
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for _ in range(args.images):
        x = torch.stack([next(pictures) for _ in range(args.batch)])
        sent = victim_gradients(backbone, x, torch.arange(args.batch), defence=defence, dtype=DTYPES[args.precision])
        begun = time.monotonic()
        ready = attack.prepare(backbone, sent, known)
        row: list[Any] = [args.case, args.positions or "its own", args.batch, args.precision]
        if isinstance(ready, Refused):
            print("| " + " | ".join(map(str, [*row, ready.reason])) + " |")
            return
        found = attack.recover(backbone, [sent], known)
        taken, real = time.monotonic() - begun, denormalise(x, *NORMALISATION)
        pixels = pictures_of(found, real, args.batch, NORMALISATION)
        psnr = -10 * (pixels - real).square().mean(dim=(1, 2, 3)).log10()
        fact = found.facts[0]
        fit = f"{fact['patches_that_fit']} of {args.batch * backbone.num_tokens}"
        row += [fact["open_directions"], fit, " ".join(f"{value:.1f}" for value in psnr.tolist())]
        row += [int((psnr >= 54.15).sum()), fact["fits"], f"{taken:.1f}"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
