"""MJP's Table 5 on two models of ours, plain and MJP: settings a, b, c, static attackers and one who knows MJP.

    python benchmarks/table5.py --plain RUN --mjp RUN --images CIFAR --split test --count 64 --device cuda --out table5
    python benchmarks/table5.py --count 2 --plain random --mjp random --images CIFAR      # a try with random weights
    python benchmarks/table5.py --mjp vit_small_patch14_dinov2 --weights FILE --size 224 --images FOLDER --split train

RUN is a run or export folder; an export has no E_unk of its own, so it gets one from the seed. For each γ of --ratio
it prints the table with 95 % intervals and writes OUT/table5-γ.json (every image) and OUT/table5-γ.html.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from situs.audit.attacks.adaptive.attack import AdaptiveConfig, AdaptiveMJP
from situs.audit.attacks.april import April
from situs.audit.attacks.base import Attack
from situs.audit.attacks.patchembed.attack import PatchEmbedding
from situs.audit.cases import Step, TestSet
from situs.audit.deadline import Deadline
from situs.audit.scores.lpips import Lpips
from situs.audit.settings import Comparison, Contestant, compare_settings, verdict
from situs.audit.tables import settings_table
from situs.audit.victim import Victim, labels_for, open_predictor, open_victim
from situs.backbones import create_backbone
from situs.data.loader import DataConfig
from situs.methods.base import Method
from situs.models import Model
from situs.models.data import load_set
from situs.pages import publish
from situs.results import Provenance


def opened_victim(source: str, args: argparse.Namespace) -> Victim:
    """A run, an export, a timm name, or "random": ViT-S/4 at 32 pixels with 100 classes and random weights."""
    if source != "random":
        size = None if args.size is None else (args.size, args.size)
        return open_victim(source, weights=args.weights, img_size=size, seed=args.seed, device=args.device)
    torch.manual_seed(args.seed)
    backbone = create_backbone("vit_small_patch16_224", img_size=32, patch_size=4, num_classes=100)
    data = DataConfig(img_size=(32, 32), mean=(0.5071, 0.4866, 0.4409), std=(0.2673, 0.2564, 0.2762))
    facts = {"kind": "name", "weights": "random"}
    model = Model("random ViT-S/4", backbone.to(args.device).eval(), None, data, None, facts, classifier=False)
    return Victim(model, model.backbone)


def contestant(victim: Victim, mjp: bool) -> Contestant:
    """A run with its own method where that is MJP or not, as asked; else its bare backbone."""
    own = (isinstance(victim.trains, Method) and victim.trains.hidden_share is not None) == mjp
    return Contestant(victim.trains if own else victim.model.backbone, mjp)


def attacks(args: argparse.Namespace, victim: Victim) -> list[Attack]:
    predictor = None if args.predictor is None else open_predictor(args.predictor, victim.model.backbone, args.device)
    adaptive = AdaptiveMJP(AdaptiveConfig(rounds=args.rounds, predictor=predictor))
    return [PatchEmbedding(), April(), adaptive]


def show(comparison: Comparison, seconds: float) -> None:
    """The table on the terminal, with 95 % intervals."""
    header, rows = settings_table(comparison)
    print(f"\ngamma {comparison.ratio:g}: {comparison.hidden} of {comparison.patches} patches hidden, {seconds:.0f} s")
    short = [[("" if cell is None else str(cell)) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in short) for i in range(len(header))]
    for row in short:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(verdict(comparison), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", help="run or export folder of plain training, or random")
    parser.add_argument("--mjp", help="run or export folder of MJP, or random")
    parser.add_argument("--weights", help="for a timm name: a weight file")
    parser.add_argument("--size", type=int, help="for a timm name: image size in pixels")
    parser.add_argument("--images", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.27])
    parser.add_argument("--settings", default="a,b,c")
    parser.add_argument("--predictor", help="a run of MP3 that helps with the order")
    parser.add_argument("--rounds", type=int, default=AdaptiveConfig().rounds)
    parser.add_argument("--lpips", type=Path)
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("table5"))
    args = parser.parse_args()
    if args.plain is None and args.mjp is None:
        parser.error("give --plain, --mjp or both")
    opened = {name: opened_victim(source, args) for name, source in _models(args).items()}
    models = {name: contestant(victim, name == "MJP") for name, victim in opened.items()}
    first = next(iter(opened.values())).model
    batch = next(iter(load_set(first, args.images, split=args.split, batch=args.count, count=args.count)))
    labels = labels_for(first, batch.targets.get("label"), len(batch.inputs))
    lpips = None if args.lpips is None else Lpips(args.lpips)
    facts: dict[str, Any] = {
        "models": ", ".join(
            f"{name}: {victim.model.name} ({victim.model.facts['kind']})" for name, victim in opened.items()
        ),
        "images": f"{len(batch.inputs)} of {Path(args.images).name} ({args.split})",
        "order": "borders" + ("" if args.predictor is None else f" and MP3 ({Path(args.predictor).name})"),
        "gradients": "fp32, batch 1",
        "machine": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "seed": args.seed,
    }
    for ratio in args.ratio:
        begin = time.perf_counter()
        deadline = Deadline(lambda line: print(line, file=sys.stderr, flush=True), args.time_limit)
        found = compare_settings(
            models,
            TestSet(batch.inputs, labels, first.data.normalisation, [str(i) for i in batch.ids.tolist()]),
            attacks(args, next(iter(opened.values()))),
            settings=args.settings.split(","),
            ratio=ratio,
            step=Step(seed=args.seed),
            lpips=lpips,
            deadline=deadline,
        )
        seconds = time.perf_counter() - begin
        show(found, seconds)
        stated = {**facts, "seconds": round(seconds, 1)}
        publish(replace(found, provenance=Provenance(stated)), args.out / f"table5-{ratio:g}.html")


def _models(args: argparse.Namespace) -> dict[str, str]:
    return {name: source for name, source in (("plain", args.plain), ("MJP", args.mjp)) if source is not None}


if __name__ == "__main__":
    main()
