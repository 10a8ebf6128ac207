"""Attacks of the literature beside ours: the same victims, the same images, PSNR and seconds.

    python benchmarks/attacks.py --photographs FOLDER --small CIFAR --trained EXPORT --weights DINOV2 --device cuda
    python benchmarks/attacks.py --small CIFAR --victims untrained sin-cos --iterations 100

One image a step, float32 gradients, labels known to whoever asks for them; on a CPU seconds are processor time.
"inverting gradients" is the attack of Geiping et al. (arXiv 2003.14053) with the settings that the tool breaching gives
it: cosine of all gradients together, signed Adam of 0.1 that falls to a tenth after 3/8, 5/8 and 7/8, total variation,
pixels kept in their range. It is our own writing of the method, not that tool; 24,000 iterations are published, and
the table says how many were made.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.april import April, AprilOptimisation
from situs.audit.attacks.base import Attack, Knowledge, Refused
from situs.audit.attacks.matching import Matching, MatchingConfig
from situs.audit.attacks.patchembed import PatchEmbedding
from situs.audit.attacks.tokens.attack import TokensConfig, TokenSpans
from situs.audit.cases import EXACT
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence, NoPositionGradient
from situs.audit.scores import denormalise, psnr
from situs.audit.victim import open_victim
from situs.backbones.base import Backbone
from situs.data.loader import make_loader
from situs.data.open import open_source
from situs.files import write_text
from situs.models import Model

HEAD = ("victim", "attack", "images", "PSNR, dB", "exact", "s an image", "remark")
PUBLISHED = MatchingConfig(distance="cosine", smooth=0.1, border=0.0)
"""Its weight 0.2 of the mean over both directions is 0.1 of their sum; it knows no borders of patches."""


class InvertingGradients(Matching):
    """The cosine of all gradients together, as published; `Matching` takes it name by name."""

    name: ClassVar[str] = "inverting gradients"

    def measure(self, target: Gradients, backbone: Backbone, noise: float) -> Callable[[Gradients], Tensor]:  # noqa: ARG002
        sent = sum((t.flatten(1).square().sum(dim=1) for t in target.values()), torch.zeros(()))

        def distance(guess: Gradients) -> Tensor:
            dots = sum(((guess[n] * t).flatten(1).sum(dim=1) for n, t in target.items()), torch.zeros(()))
            guess_norm = sum((guess[n].flatten(1).square().sum(dim=1) for n in target), torch.zeros(()))
            return 1 - dots / (sent * guess_norm).sqrt().clamp(min=1e-30)

        return distance


def attacks_of(args: argparse.Namespace) -> dict[str, Attack]:
    """By the name of their row."""
    ours = MatchingConfig(iterations=args.iterations)
    tokens = TokensConfig(seconds=args.seconds)
    return {
        "patchembed": PatchEmbedding(),
        "tokens": TokenSpans(tokens),
        WITHHELD: TokenSpans(tokens),
        "APRIL, closed form": April(),
        "inverting gradients": InvertingGradients(replace(PUBLISHED, iterations=args.iterations)),
        "APRIL, optimisation": AprilOptimisation(ours),
        "matching": Matching(ours),
    }


WITHHELD = "tokens, position gradient withheld"


def victims_of(args: argparse.Namespace) -> dict[str, tuple[Callable[[], Model], str | None]]:
    """By name: how it is opened, and where its images are."""
    small: dict[str, Any] = {"img_size": 32, "patch_size": 4, "num_classes": 100}

    def named(source: Any, **asked: Any) -> Callable[[], Model]:
        return lambda: open_victim(source, device=args.device, **asked).model

    return {
        "trained": (named(args.trained), args.small),
        "untrained": (named("vit_small_patch16_224", **small), args.small),
        "sin-cos": (named("vit_small_patch16_224", positions="sincos", **small), args.small),
        "dinov2": (named("vit_small_patch14_dinov2", img_size=98, weights=args.weights), args.photographs),
    }


def images_of(model: Model, data: str, split: str | None, count: int) -> list[tuple[Tensor, Tensor]]:
    """Normalised images [1, C, H, W] with a label [1] each; of photographs, which have no split, every tenth is left
    out, since those are held out elsewhere."""
    source = open_source(data, split, channels=model.data.channels)
    config = replace(model.data, path=data, batch=1, workers=0, resident="never")
    loader = make_loader(config, None, model.device, source=source)
    kept = (batch for number, batch in enumerate(loader) if split is not None or number % 10)
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    return [(batch.inputs, batch.targets.get("label", zero)) for batch in islice(kept, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", help="small labelled images: CIFAR-100")
    parser.add_argument("--split", default="test", help="of them")
    parser.add_argument("--photographs", help="a folder of them, for dinov2")
    parser.add_argument("--trained", help="an export or a run of a ViT-S/4")
    parser.add_argument("--weights", help="of DINOv2's ViT-S/14")
    parser.add_argument("--victims", nargs="+", default=["trained", "untrained", "sin-cos", "dinov2"])
    parser.add_argument("--attacks", nargs="+", help="the beginnings of their names; all without this")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=2400, help="of the searches")
    parser.add_argument("--seconds", type=float, default=150.0, help="of search by tokens for an image")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    torch.manual_seed(0)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}\n\n| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    rows: list[dict[str, Any]] = []
    for victim, (opened, data) in victims_of(args).items():
        if victim not in args.victims:
            continue
        if data is None:
            parser.error(f"{victim}: say where its images are")
        torch.manual_seed(0)
        model = opened()
        pairs = images_of(model, data, None if data == args.photographs else args.split, args.images)
        for name, attack in attacks_of(args).items():
            if args.attacks and not name.startswith(tuple(args.attacks)):
                continue
            row = {"victim": victim, "attack": name, **try_one(attack, name == WITHHELD, model, pairs)}
            rows.append(row)
            print("| " + " | ".join(cells(row)) + " |", flush=True)
            if args.out is not None:
                write_text(args.out, json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def try_one(attack: Attack, withheld: bool, model: Model, pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """One attack on one victim, an upload an image, all together; processor time on a CPU, which others may share."""
    defence: Defence = NoPositionGradient() if withheld else NoDefence()
    sent = [victim_gradients(model.backbone, x, y, defence=defence) for x, y in pairs]
    x, labels = torch.cat([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    size = (x.shape[2], x.shape[3])
    known = Knowledge(defence, labels=labels, size=size, normalisation=model.data.normalisation)
    ready = attack.prepare(model.backbone, sent[0], known)
    if isinstance(ready, Refused):
        return {"psnr": [], "seconds": 0.0, "remark": f"does not apply: {ready.reason}"}
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    wait = torch.cuda.synchronize if model.device.type == "cuda" else (lambda: None)
    wait()
    begun = clock()
    got = attack.recover(model.backbone, sent, known, Deadline())
    wait()
    seconds = clock() - begun
    real, picture = (denormalise(part.to(x), *model.data.normalisation) for part in (x, got.images))
    fact = got.facts[0]
    made_by = f"{fact['iterations']} iterations" if "iterations" in fact else ""
    remark = str(fact.get("verdict") or made_by)
    return {"psnr": psnr(picture, real).tolist(), "seconds": seconds / len(pairs), "remark": remark}


def cells(row: dict[str, Any]) -> list[str]:
    """As the table shows them."""
    values = row["psnr"]
    if not values:
        return [row["victim"], row["attack"], "0", "", "", "", row["remark"]]
    spread = f"{min(values):.1f} to {max(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"
    exact = sum(value >= EXACT for value in values)
    return [row["victim"], row["attack"], str(len(values)), spread, str(exact), f"{row['seconds']:.1f}", row["remark"]]


if __name__ == "__main__":
    main()
