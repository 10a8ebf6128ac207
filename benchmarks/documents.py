"""Pages of text behind noise: what the gate says of them, and the pictures.

    python benchmarks/documents.py --weights vit_small_patch14_dinov2.safetensors --out documents

Ten pages are drawn (black on white, lines of words), audited at each deviation of noise as a user would, and what the
strongest attack gets stands in a picture: a row for each deviation, a column for each page. The table has for each
deviation the verdict, the plain and the aligned PSNR of the most exposed page, and in how many pages nine pixels of ten
are right at two levels, by a threshold on what came back.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from torchvision.utils import save_image

from situs.audit import create_attack, create_defence
from situs.audit.cases import TestSet
from situs.audit.gradients import attack_gradients
from situs.audit.scores import two_levels
from situs.audit.victim import open_victim

WORDS = ["patient", "seen", "on", "monday", "dose", "ten", "mg", "invoice", "paid", "account", "secret", "signed", "by"]
NOISES = (0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def page(number: int, side: int) -> Tensor:
    """A page of words, [3, side, side] in [0, 1]."""
    chance, sheet = random.Random(number), Image.new("RGB", (2 * side, 2 * side), "white")
    drawing = ImageDraw.Draw(sheet)
    for line in range(4, 2 * side - 14, 16):
        drawing.text((6, line), " ".join(chance.choices(WORDS, k=5)), fill="black", font_size=14)
    small = sheet.resize((side, side), Image.Resampling.LANCZOS)
    return (pil_to_tensor(small).float() / 255 > 0.6).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch14_dinov2")
    parser.add_argument("--weights")
    parser.add_argument("--img-size", type=int, default=98)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--attacks", default="patchembed,patchembed-prior")
    parser.add_argument("--noises", type=float, nargs="+", default=NOISES)
    parser.add_argument("--out", type=Path, default=Path("documents"))
    args = parser.parse_args()
    victim = open_victim(args.model, weights=args.weights, img_size=args.img_size)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in victim.model.data.normalisation)
    pages = torch.stack([page(number, args.img_size) for number in range(args.pages)])
    test = TestSet((pages - mean) / std, torch.arange(args.pages), victim.model.data.normalisation)
    attacks, rows = [create_attack(name) for name in args.attacks.split(",")], [pages[:8]]
    args.out.mkdir(parents=True, exist_ok=True)
    print(
        "| σ | gate psnr=20 | most exposed: PSNR / aligned, dB | pages with 9 pixels of 10 right at two levels | why |"
    )
    print("|---|---|---|---|---|")
    for sigma in args.noises:
        audit = attack_gradients(victim.trains, test, attacks, [create_defence(f"noise={sigma}")])
        [judged] = audit.judge(psnr=20).judgements
        best = max(audit.attacked, key=lambda pair: max(pair.scores["aligned_psnr"] or [0.0]))
        assert best.shown is not None
        read = sum(
            float((two_levels(shown) == real.double()).double().mean()) > 0.9
            for shown, real in zip(best.shown.double(), pages, strict=False)
        )
        plain, aligned = (max(best.scores[name] or [0.0]) for name in ("psnr", "aligned_psnr"))
        shown = f"{plain:.1f} / {aligned:.1f} ({best.attack})"
        print(
            f"| {sigma:g} | {judged.outcome} | {shown} | {read} of {len(best.shown)} | {judged.reason[:90]} |",
            flush=True,
        )
        rows.append(best.shown.float())
        save_image(torch.cat(rows), args.out / "documents.png", nrow=8, pad_value=0.5)


if __name__ == "__main__":
    main()
