"""What a server reads of photographs, honest or choosing the weights: models × what is sent × batch × server.

    python benchmarks/active.py --photos ../shared/data/imagenet-samples --device cuda
    python benchmarks/active.py --photos DIR --models vit-s4 --sent all lora --batches 1 8 --servers active

The last --held-out photographs by name are attacked, on which nothing was tuned; 64 others are the server's own images.
ViT-S/4 sees them at 32 pixels, the others at 224. Weights are random (--dinov2 FILE: those of DINOv2), labels too.
"exact" counts images of 54.15 dB or more. --clients K shows the sum over K clients (secure aggregation): the server
sees one gradient of all their images. --epsilon: DP-SGD's clipping and noise of a run of 10 epochs over 50,000 images
in batches of 64 with that ε at δ = 1e-5. Rows are printed as they come, as Markdown, and appended to --out as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from situs.audit.attacks import create_attack
from situs.audit.attacks.tokens.attack import TokensConfig
from situs.audit.cases import TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Step, create_defence
from situs.audit.gradients import attack_gradients, strength
from situs.backbones import create_backbone
from situs.backbones.adapters import add_adapters
from situs.backbones.base import Backbone
from situs.backbones.lora import add_lora
from situs.findings import ACTIVE, HONEST, SERVERS

MODELS = {
    "vit-s4": ("vit_small_patch16_224", {"img_size": 32, "patch_size": 4, "num_classes": 100}),
    "vit-b16": ("vit_base_patch16_224", {"img_size": 224, "num_classes": 1000}),
    "dinov2-s14": ("vit_small_patch14_dinov2", {"img_size": 224, "num_classes": 1000}),
}
SENT = {
    "all": ("crafted",),
    "embedding frozen": ("crafted",),
    "lora": ("crafted-lora", "crafted-head"),
    "adapters": ("crafted-adapters", "crafted-head"),
    "biases": ("crafted-biases",),
    "head": ("crafted-head",),
}
"""What is sent -> the attacks of a server that chooses the weights; with all, those for less read no more."""

HONEST_ATTACKS = ("patchembed", "tokens")
NORMALISATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NOISE = {1.0: 0.938, 8.0: 0.483, 50.0: 0.300}
"""ε -> noise multiplier of DP-SGD, by Opacus' RDP accountant, for the run that the first lines name."""

CLIP = 1.0
HEADER = ("model", "sent", "batch", "defence", "server", "attack", "exact", "mean dB", "best dB", "seconds", "reasons")


def photographs(folder: Path, count: int, size: int) -> Tensor:
    """The last photographs by name, cropped to a square: [count, 3, size, size] in [0, 1]."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    pictures = []
    for file in files[-count:]:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        pictures.append(torch.tensor(np.asarray(square)).permute(2, 0, 1))
    return torch.stack(pictures).float() / 255


def opened(name: str, sent: str, dinov2: Path | None) -> Backbone:
    """A model of which so much is trained."""
    torch.manual_seed(0)
    timm_name, options = MODELS[name]
    shape: dict[str, Any] = dict(options)
    model = create_backbone(timm_name, **shape).eval()
    if name == "dinov2-s14" and dinov2 is not None:
        load_dinov2(model, dinov2)
    if sent == "lora":
        add_lora(model, 8, 16.0, ("qkv",))
    if sent == "adapters":
        add_adapters(model, 64)
    stem = ("model.patch_embed", "model.pos_embed", "model.cls_token")
    for parameter_name, parameter in model.named_parameters():
        trained = {
            "all": True,
            "embedding frozen": not parameter_name.startswith(stem),
            "lora": ".parametrizations.weight.0." in parameter_name or ".head." in parameter_name,
            "adapters": ".adapter." in parameter_name or ".head." in parameter_name,
            "biases": parameter_name.endswith("bias"),
            "head": ".head." in parameter_name,
        }
        parameter.requires_grad_(trained[sent])
    return model


def load_dinov2(model: Backbone, file: Path) -> None:
    """DINOv2's weights, but for the classifier, which it has none of; the table is resampled to the grid."""
    from timm.layers.pos_embed import resample_abs_pos_embed

    state = {name: value.float() for name, value in load_file(file).items()}
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], list(model.grid), num_prefix_tokens=1)
    model.model.load_state_dict(state, strict=False)  # type: ignore[operator]


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each case; of several attacks the strongest."""
    for name in args.models:
        size = MODELS[name][1]["img_size"]
        wanted = max([args.held_out, *args.batches])
        pictures = photographs(args.photos, wanted + 64, size)
        mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in NORMALISATION)
        pixels = ((pictures - mean) / deviation).to(args.device)
        chance = torch.Generator().manual_seed(1)
        labels = torch.randint(MODELS[name][1]["num_classes"], (wanted,), generator=chance).to(args.device)
        for sent in args.sent:
            model = opened(name, sent, args.dinov2).to(args.device)
            for batch in args.batches:
                count = max(args.held_out // batch, 1) * batch
                if args.count is not None:
                    count = max(args.count // batch, 1) * batch
                test = TestSet(pixels[64:][:count], labels[:count], NORMALISATION, public=pixels[:64])
                for defence in defences(args, batch):
                    for server in args.servers:
                        attacks = SENT[sent] if server == "active" else HONEST_ATTACKS
                        yield {
                            "model": name,
                            "sent": sent,
                            "batch": batch,
                            "defence": defence.label,
                            "server": server,
                            **row(model, test, batch, defence, attacks, args.limit),
                        }


def defences(args: argparse.Namespace, batch: int) -> list[Defence]:
    """No defence; where asked for, the sum over clients, and clipping with noise."""
    if args.epsilon:
        return [create_defence(f"clip={CLIP:g}:{NOISE[epsilon]:g}") for epsilon in args.epsilon]
    if args.clients > 1 and batch % args.clients == 0:
        return [create_defence(f"accumulate={args.clients}")]
    return [create_defence("none")]


def row(
    model: Backbone, test: TestSet, batch: int, defence: Defence, attacks: Sequence[str], limit: float
) -> dict[str, object]:
    """What the strongest attack of a server read."""
    created = [create_attack(attack, TokensConfig(seconds=10.0)) for attack in attacks]
    parts = defence.step(Step()).parts
    begun = time.monotonic()
    audit = attack_gradients(
        model,
        test,
        created,
        [defence],
        step=Step(batch=batch // parts),
        threat=HONEST if attacks == HONEST_ATTACKS else ACTIVE,
        deadline=Deadline(lambda _: None, limit),
    )
    seconds = time.monotonic() - begun
    refused = {pair.attack: pair.why("refused") for pair in audit.pairs if pair.status == "refused"}
    best = max(audit.attacked, key=strength, default=None)
    if best is None:
        reasons = "; ".join(f"{attack}: {reason}" for attack, reason in refused.items()) or str(audit.stopped)
        return {"attack": "none applies", "exact": None, "seconds": round(seconds, 1), "reasons": reasons}
    separated = sum(int(float(fact.get("separated") or 0)) for fact in best.facts[::batch])
    return {
        "attack": best.attack,
        "exact": f"{best.exact} of {best.count}",
        "mean dB": round(best.mean_psnr, 1),
        "best dB": round(best.worst_psnr, 1),
        "seconds": round(seconds, 1),
        "reasons": f"{separated} separated from the others" if audit.threat == ACTIVE else best.why("stopped") or "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sent", nargs="+", choices=SENT, default=list(SENT))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--count", type=int, help="attack fewer of them")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--epsilon", nargs="+", type=float, choices=NOISE, default=[])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of attacks for a row")
    parser.add_argument("--dinov2", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    for line in measured(args):
        print(f"| {' | '.join(str(line.get(key, '–')) for key in HEADER)} |", flush=True)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
