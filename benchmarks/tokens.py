"""The attack on tokens over families of models, positions and batches: what is open, what came back, and how long.

    python benchmarks/tokens.py --data FOLDER --weights DINOV2_FILE --trained RUN_OR_EXPORT --images 2
    python benchmarks/tokens.py --data FOLDER --only vit-s4/withheld --batches 2 --seconds 600

One row of a Markdown table for each upload of (family, positions, batch): with the position table's gradient sent
`patchembed` is made, else `tokens`. "open": the directions that linear equations leave a token, as counted beforehand
and as measured on gradients of a float64 step. Seconds are those of the processor. A photograph is exact from 54.15 dB
on: every byte is the nearest.
Images: every tenth by name (`--held-out`), or the others, on which limits may be set.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from situs.audit import Knowledge, create_attack
from situs.audit.attacks.base import Refused
from situs.audit.attacks.tokens.attack import TokensConfig
from situs.audit.attacks.tokens.block import Block, NoBlockError
from situs.audit.attacks.tokens.linear import Equations, count, read_spans
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, NoDefence, NoPositionGradient, Step
from situs.audit.scores import denormalise, match_patches, pictures_of, psnr
from situs.backbones import create_backbone
from situs.models import open_model

SMALL = {"img_size": 32, "patch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "vit-s4": {"source": "vit_small_patch16_224", **SMALL},
    "vit-s4-trained": {"source": "TRAINED"},
    "vit-s16": {"source": "vit_small_patch16_224"},
    "vit-b16": {"source": "vit_base_patch16_224"},
    "dinov2-98": {"source": "vit_small_patch14_dinov2", "img_size": 98, "weights": "WEIGHTS"},
    "dinov2-140": {"source": "vit_small_patch14_dinov2", "img_size": 140, "weights": "WEIGHTS"},
    "dinov2-224": {"source": "vit_small_patch14_dinov2", "img_size": 224, "weights": "WEIGHTS"},
    "dinov2-p4": {"source": "vit_small_patch14_dinov2", **SMALL, "weights": "WEIGHTS"},
    "eva02-98": {"source": "eva02_small_patch14_224", "img_size": 98},
    "clip-b32": {"source": "vit_base_patch32_clip_224"},
    "aimv2-98": {"source": "aimv2_large_patch14_224", "img_size": 98, "args": {"embed_dim": 384, "num_heads": 6}},
    "rms-swiglu-s4": {"source": "RMS"},
    "dinov3-plus-s4": {"source": "vit_small_plus_patch16_dinov3", **SMALL},
    "rope-s4": {"source": "vit_small_patch16_rope_224", **SMALL},
    "relpos-s4": {"source": "vit_relpos_small_patch16_224", **SMALL},
}
"""Those with random weights have `DEPTH` blocks. dinov2-p4: its patch embedding resampled to 4 pixels; eva02: SwiGLU,
table and rotary; clip: a norm before the first block; aimv2: a norm inside the patch embedding; rms-swiglu: RMS norms,
SwiGLU, queries without bias; dinov3-plus: SwiGLU, rotary, registers."""

DEPTH = 4

POSITIONS = ("sent", "withheld", "sincos", "none", "own")
"""sent, withheld: the gradient of the learned table; sincos, none: instead of it; own: rotary or relative ones."""

NORMALISATION = ((0.5,) * 3, (0.5,) * 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
HEAD = (
    "model", "positions", "batch", "open: counted", "measured", "patches that fit", "PSNR, dB", "exact", "in order",
    "proved", "CPU s", "why",
)  # fmt: skip


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


def opened(case: str, positions: str, args: argparse.Namespace) -> Any:
    """The victim, or None where it has no such positions or its weights were not given."""
    weight_files = {"TRAINED": args.trained, "WEIGHTS": args.weights}
    fields = {
        name: weight_files.get(value, value) if isinstance(value, str) else value for name, value in CASES[case].items()
    }
    has_own, other = case.startswith(("rope", "relpos", "dinov3")), positions in ("sincos", "none")
    if (
        None in fields.values()
        or has_own != (positions == "own")
        or (other and case not in ("vit-s4", "vit-s16", "vit-b16"))
    ):
        return None
    source, weights = fields.pop("source"), fields.pop("weights", None)
    if source == args.trained:
        return open_model(source).backbone.float()
    if weights is not None:
        weights = resampled(weights, fields["patch_size"]) if "patch_size" in fields else weights
        return open_model(source, weights=weights, num_classes=100, **fields).backbone.float()
    torch.manual_seed(0)
    if source == "RMS":
        from timm.layers.mlp import SwiGLU
        from timm.layers.norm import RmsNorm
        from timm.models import VisionTransformer

        parts = {"norm_layer": RmsNorm, "mlp_layer": SwiGLU, "qkv_bias": False}
        model = VisionTransformer(**SMALL, embed_dim=384, num_heads=6, depth=DEPTH, num_classes=100, **parts)
        return create_backbone(model).float().eval()
    fields |= {"positions": positions} if other else {}
    shape = {"depth": DEPTH, **fields.pop("args", {})}
    return create_backbone(source, num_classes=100, model_args=shape, **fields).float().eval()


def resampled(weights: str, side: int) -> str:
    """A copy of a file of weights whose patch embedding is one of `side` pixels."""
    from safetensors.torch import load_file, save_file
    from timm.layers import resample_patch_embed

    state, name = load_file(weights), "patch_embed.proj.weight"
    state[name] = resample_patch_embed(state[name].float(), [side, side]).contiguous()
    copy = str(Path(tempfile.mkdtemp()) / f"p{side}.safetensors")
    save_file(state, copy)
    return copy


@torch.no_grad()
def measured(backbone: Any, x: torch.Tensor, defence: Defence) -> tuple[Any, int | str]:
    """What is counted, and the directions that the equations of a float64 step leave open."""
    precise = deepcopy(backbone).double()
    with torch.enable_grad():
        sent = victim_gradients(
            precise, x.double(), torch.arange(len(x)), step=Step(dtype=torch.float64), defence=defence
        )
    block = Block(precise.requires_grad_(False).eval())
    counts = count(block, len(x))
    if counts.full:
        return counts, "-"
    equations = Equations(block, read_spans(block, sent, counts))
    values = equations.family(counts.open).values
    return counts, int((values < 1e-9 * values[0]).sum()) + len(equations.content) + int(
        equations.scales.any(dim=1).sum()
    ) - len(values)


def row(backbone: Any, x: torch.Tensor, positions: str, args: argparse.Namespace) -> list[Any]:
    defence = NoDefence() if positions == "sent" else NoPositionGradient()
    known = Knowledge(defence, Step(len(x)), normalisation=NORMALISATION)
    name = "patchembed" if positions == "sent" else "tokens"
    attack = create_attack(name, TokensConfig(seconds=args.seconds, rounds=args.rounds))
    counts, real = None, denormalise(x, *NORMALISATION)
    predicted: list[Any] = ["-", "-"]
    if name == "tokens":
        try:
            counts, guess = measured(backbone, x, defence) if args.measure else (None, "-")
            predicted = ["-" if counts is None or counts.full else counts.open, guess]
        except NoBlockError:
            pass
    sent = victim_gradients(backbone, x, torch.arange(len(x)), step=Step(dtype=DTYPES[args.precision]), defence=defence)
    begun = time.process_time()
    ready = attack.prepare(backbone, sent, known)
    if isinstance(ready, Refused):
        return [*predicted, "-", "-", "-", "-", "-", "-", ready.reason]
    guess = attack.recover(backbone, [sent], known, Deadline())
    taken, fact = time.process_time() - begun, guess.facts[0]
    pixels = pictures_of(guess, real, len(x), NORMALISATION)
    values = psnr(pixels, real)
    order = match_patches(pixels, real, (x.shape[-2] // backbone.grid[0], x.shape[-1] // backbone.grid[1])).order
    fit = fact.get("patches_that_fit")
    fit = "-" if fit is None else f"{fit} of {len(x) * backbone.num_tokens}"
    sure = bool(fact.get("fits")) and "hidden" not in fact and fact.get("sharp") is not False
    verdict, reason = str(fact.get("verdict") or ""), counts.reason if counts is not None else ""
    reasons = [verdict, "" if reason in verdict else reason]
    cells = [fit, " ".join(f"{value:.1f}" for value in values.tolist()), int((values >= 54.15).sum())]
    cells += [f"{float(order.mean()):.2f}", "yes" if sure else "no", f"{taken:.1f}"]
    return [*predicted, *cells, "; ".join(part for part in reasons if part)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of family/positions, as vit-s4/withheld")
    parser.add_argument("--weights", help="of DINOv2 ViT-S/14: a file")
    parser.add_argument("--trained", help="a ViT-S/4: a run or an export")
    parser.add_argument("--batches", type=int, nargs="*", default=[1])
    parser.add_argument("--images", type=int, default=1, help="uploads")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--seconds", type=float, default=TokensConfig.seconds)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    for case in CASES:
        for positions in POSITIONS:
            if not any(part in f"{case}/{positions}" for part in args.only):
                continue
            backbone = opened(case, positions, args)
            if backbone is None:
                continue
            backbone = backbone.to(args.device)
            for batch in args.batches:
                pictures = photographs(args.data, backbone.input.shape[0], args.held_out)
                for _ in range(args.images):
                    x = torch.stack([next(pictures) for _ in range(batch)]).to(args.device)
                    cells = [case, positions, batch, *row(backbone, x, positions, args)]
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
