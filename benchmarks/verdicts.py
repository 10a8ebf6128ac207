"""Verdicts of the gate beside attackers who know the training exactly: random setups, and no pass where one is above.

    python benchmarks/verdicts.py --setups 200 --seed 0 --json verdicts.json

A setup is drawn of models × heads (their weights times a factor: samples known by heart) × what the model does to its
images × labels × steps × defences × batches; images are 8 × 8, smooth, 6 of them. The tool audits it as a user would,
with its own attacks. Beside it stand who is told everything of the training: the draws of the augmentation, the
labels, the loss, the defence and its deviation, and the spectrum of the images. All fit the whole upload in float64
with a dense Jacobian:

- newton: linearised again and again from grey;
- bound: is told the image too, and linearises there once;
- near: again and again from the image, where what it comes to fits better than what newton has: an attacker who began
  at more places could find it, and would prefer it.

What they get is held against the limits of the gate (`situs.gate`). Whoever is above a limit tries again
on a control: the same noise without any gradient. Above there too, the picture comes from where the attacker began or
from chance, not from the upload. The status is 1 where one of them is above a limit of a setup that passed, and below
it on the control.

Apart from them, `clean` is told what nobody sends, the position table's gradient before the noise, and solves the patch
embedding's equations with it. No training tells it: it is computed from the image, and by itself may have as many
independent numbers as the image (`told`: what it alone gives, linearised at the image). It is shown where it is above,
and is no part of the status: an upload without noise passes no gate.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from situs.audit import adapt, create_attack, create_defence
from situs.audit.attacks.base import Knowledge
from situs.audit.attacks.matching import simulation
from situs.audit.attacks.prior import cosine_basis
from situs.audit.cases import Case, TestSet
from situs.audit.client import victim_gradients
from situs.audit.defences import Step, method_of
from situs.audit.gradients import attack_gradients
from situs.audit.scores import METRICS, denormalise, measure
from situs.audit.stem import find_stem, flat_weight, patches_of, table_rows
from situs.backbones.base import Backbone
from situs.gate import Held, exposed, parse_limit

COUNT, SIDE, CONTRAST = 6, 8, 5.0

STEPS = 8
"""Steps of Gauss-Newton of the attackers on a setup that passed; 3 on others."""

TOLD = 1e-6
"""The deviation that stands for no noise, where the table's gradient is told."""

HALVES = ([0.5] * 3, [0.5] * 3)

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "flip": lambda x: x.flip(-1) if float(torch.rand(())) < 0.5 else x,
    "shift": lambda x: x.roll(int(torch.randint(3, (1,))), 3),
    "colour": lambda x: x * (0.5 + torch.rand(1, 3, 1, 1)),
    "resize": lambda x: F.interpolate(x[:, :, : 6 + int(torch.randint(3, (1,)))], (SIDE, SIDE), mode="bilinear"),
}
"""What a model does to its images before the first layer, drawn anew in each pass."""


class Net(nn.Module):
    """A ViT of one or two blocks with something before it, perhaps a second path beside it."""

    def __init__(self, change: str, kind: str, depth: int, width: int) -> None:
        super().__init__()
        self.change, self.kind = CHANGES[change], kind
        self.patch = nn.Linear(48, width) if kind == "linear" else nn.Conv2d(3, width, 4, 4)
        self.table = nn.Parameter(0.2 * torch.randn(1, 4, width))
        layers = [nn.TransformerEncoderLayer(width, 2, width, 0.0, batch_first=True) for _ in range(depth)]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width if kind == "tokens" else width, 5)
        self.aside = nn.Linear(192, 5) if kind == "second path" else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(x)
        cut = F.unfold(x, 4, stride=4).mT if self.kind == "linear" else x
        tokens = self.patch(cut) if self.kind == "linear" else self.patch(cut).flatten(2).mT
        stream = self.blocks(tokens + self.table)
        logits = self.head(stream.flatten(1) if self.kind == "tokens" else stream.mean(dim=1))
        return logits if self.aside is None else logits + self.aside(x.flatten(1))


def drawn(number: int, seed: int) -> dict[str, Any]:
    """One setup by its number."""
    chance = random.Random(seed * 100_003 + number)
    sigma = 10 ** chance.uniform(-4, 3)
    noise = f"noise={sigma:.2g}"
    beside = [f"{noise}+{other}" for other in ("clip-batch=1", "no-pe-gradient", "fedavg=2")]
    defence = chance.choice([noise, noise, noise, f"clip=1:{sigma:.2g}", *beside, "none", "fp16", "bf16", "clip-batch"])
    return {
        "model": chance.choice(["timm", "conv", "linear", "second path", "tokens"]),
        "depth": chance.choice([1, 2]),
        "width": chance.choice([24, 48]),
        "head": chance.choice([1.0, 1.0, 10.0, 100.0]),
        "augmentation": chance.choice(["nothing", "nothing", *CHANGES]),
        "labels": chance.choice(["drawn", "predicted"]),
        "defence": defence,
        "batch": chance.choice([1, 1, 1, 2]),
        "limit": chance.choice(["blind", "psnr=20"]),
        "seed": chance.randrange(10**6),
    }


def built(setup: dict[str, Any]) -> tuple[Backbone, TestSet]:
    torch.manual_seed(setup["seed"])
    if setup["model"] == "timm":
        from situs.backbones import create_backbone

        args = {"depth": setup["depth"], "embed_dim": setup["width"], "num_heads": 2}
        asked = {"img_size": SIDE, "patch_size": 4, "num_classes": 5, "model_args": args}
        backbone: Backbone = create_backbone("vit_tiny_patch16_224", **asked).eval()
    else:
        net = Net(setup["augmentation"], setup["model"], setup["depth"], setup["width"])
        backbone = adapt(net, SIDE, normalisation=HALVES)
    with torch.no_grad():
        dict(backbone.named_modules())["model.head"].weight.mul_(setup["head"])
    smooth = torch.randn(COUNT, 3, SIDE, SIDE) / (1 + torch.arange(SIDE).view(-1, 1) + torch.arange(SIDE)) ** 1.2
    rows = cosine_basis(SIDE, smooth)
    pixels = (rows.T @ smooth @ rows) * CONTRAST + 0.5 * torch.randn(COUNT, 3, 1, 1)
    pixels = (((pixels.clamp(-1, 1) + 1) / 2 * 255).round() / 255 - 0.5) / 0.5
    with torch.no_grad():
        labels = backbone(pixels).argmax(1) if setup["labels"] == "predicted" else torch.randint(5, (COUNT,))
    return backbone, TestSet(pixels, labels, HALVES)


def deviations() -> Tensor:
    """What an attacker knows of the images: the size of each coefficient of the cosine transform, [H, W]."""
    at = 1 + torch.arange(SIDE, dtype=torch.float64).view(-1, 1) + torch.arange(SIDE)
    spread = CONTRAST / at**1.2
    spread[0, 0] += 0.5 * SIDE
    return spread


def root(images: Tensor) -> Tensor:
    """Λ^½ of [.., H, W]."""
    rows = cosine_basis(SIDE, images)
    return rows.T @ (deviations().to(images) * (rows @ images @ rows.T)) @ rows


def clean(backbone: Backbone, before: dict[str, Tensor], sent: dict[str, Tensor], sigma: float) -> Tensor | None:
    """X of ∂W = GᵀX + noise with G as it was before the noise, and the images' spectrum, of a batch of one."""
    stem = find_stem(backbone)
    if isinstance(stem, str) or stem.table not in before or stem.weight not in sent:
        return None
    g = table_rows(before[stem.table], stem).double()
    right = flat_weight(sent[stem.weight].double(), stem)
    units = torch.eye(3 * SIDE * SIDE, dtype=torch.float64).view(-1, 3, SIDE, SIDE)
    offset = patches_of(torch.zeros_like(units[:1]), backbone, stem)
    if offset.shape[1] != len(g):
        return None
    columns = torch.cat(
        [(g.T @ (patches_of(root(u)[None], backbone, stem) - offset)[0]).flatten()[None] for u in units]
    )
    aim = (right - g.T @ offset[0]).flatten()
    matrix = columns @ columns.T / sigma**2 + torch.eye(len(columns), dtype=torch.float64)
    z = torch.linalg.solve(matrix, columns @ aim / sigma**2)
    return root(z.view(1, 3, SIDE, SIDE))


def newton(
    flat: Callable[[Tensor], Tensor], sent: Tensor, like: Tensor, sigma: float, start: Tensor, steps: int
) -> tuple[Tensor, float]:
    """The image that fits all gradients best, by Gauss-Newton from `start`, in units of the spectrum, and how badly it
    fits: minus twice the logarithm of its posterior, but for a constant."""
    x, eye = start.double(), torch.eye(like.numel(), dtype=torch.float64)
    best = (float("inf"), x)
    basis = torch.stack([root(u.view_as(like)).flatten() for u in eye], dim=1)
    z = torch.linalg.solve(basis, x.flatten())
    damping = 0.0 if steps == 1 else 1.0
    for _ in range(steps):
        x = (basis @ z).view_as(like)
        here = flat(x)
        jacobian = torch.func.jacfwd(flat, randomness="same")(x).reshape(-1, like.numel()) @ basis / sigma
        left = (sent - here) / sigma
        cost = float(left.square().sum() + z.square().sum())
        if cost < best[0]:
            best, damping = (cost, x), damping / 3
        else:
            z, damping = torch.linalg.solve(basis, best[1].flatten()), damping * 10
            continue
        z = z + torch.linalg.solve(jacobian.T @ jacobian + (1 + damping) * eye, jacobian.T @ left - z)
    last = (basis @ z).view_as(like)
    cost = float(((sent - flat(last)) / sigma).square().sum() + z.square().sum())
    return (last, cost) if steps == 1 or cost < best[0] else (best[1], best[0])


def attackers(
    setup: dict[str, Any], backbone: Backbone, test: TestSet, at: int, steps: int
) -> tuple[dict[str, Tensor], float, Callable[[str], Tensor]]:
    """Pictures, normalised, of one upload by who knows everything of the training; the nats that the upload can hold
    of its images: |g|² / 2σ²; and what an attacker by name has of the control, the noise of this upload alone. steps:
    of Gauss-Newton."""
    defence, size = create_defence(setup["defence"]), setup["batch"]
    here = slice(at * size, (at + 1) * size)
    x, y = test.pixels[here], test.labels[here]
    sigma = max(defence.noise_level(size), 1e-6)
    torch.manual_seed(7)  # the draws of an augmentation, which he knows: the audit's feed draws so too
    sent = victim_gradients(backbone, x, y, defence=defence, ids=torch.arange(here.start, here.stop))
    torch.manual_seed(7)
    before = victim_gradients(backbone, x, y, ids=torch.arange(here.start, here.stop))
    pictures = {}
    if (
        size == 1
        and setup["augmentation"] == "nothing"
        and (picture := clean(backbone, before, sent, sigma)) is not None
    ):
        pictures["clean"] = picture
    known = Knowledge(defence, defence.step(Step(size)), method=method_of(defence, backbone))
    from copy import deepcopy

    method = method_of(defence, deepcopy(backbone).double())
    run = simulation(method, known, list(sent))

    def flat(images: Tensor) -> Tensor:
        torch.manual_seed(7)
        gradients = run(images, y, {})
        return torch.cat([gradients[name].flatten() for name in sent])

    target = torch.cat([g.double().flatten() for g in sent.values()])
    with sdpa_kernel(SDPBackend.MATH):
        pictures["newton"], cost = newton(flat, target, x, sigma, torch.zeros_like(x), steps)
        pictures["bound"], _ = newton(flat, target, x, sigma, x, 1)
        near, better = newton(flat, target, x, sigma, x, steps)
        if better < cost:
            pictures["near"] = near
        if "clean" in pictures:
            stem = find_stem(backbone)
            assert not isinstance(stem, str)
            gradients_of = simulation(method, known, [stem.table])

            def table(images: Tensor) -> Tensor:
                return gradients_of(images, y, {})[stem.table].flatten()

            pictures["told"], _ = newton(table, table(x.double()), x, TOLD, x, 1)
        gradient = flat(x.double()).detach()

    def control(name: str) -> Tensor:
        if name == "clean":
            noise = {key: value - before[key] for key, value in sent.items()}
            picture = clean(backbone, before, noise, sigma)
            assert picture is not None
            return picture
        start = torch.zeros_like(x) if name == "newton" else x
        with sdpa_kernel(SDPBackend.MATH):
            return newton(flat, target - gradient, x, sigma, start, 1 if name == "bound" else steps)[0]

    return pictures, float(gradient.square().sum()) / (2 * sigma**2), control


def tried(setup: dict[str, Any], images: int) -> dict[str, Any]:
    """The tool's verdict on a setup, and how much the attackers have of its first images."""
    backbone, test = built(setup)
    began = time.perf_counter()
    attacks = [create_attack(name) for name in ("patchembed", "april", "tokens", "patchembed-prior")]
    limit = parse_limit(setup["limit"], METRICS)
    audit = attack_gradients(
        backbone,
        test,
        attacks,
        [create_defence(setup["defence"])],
        step=Step(setup["batch"]),
        bounded=True,
        limit=limit,
    )
    assert audit.ruling is not None
    [judged] = audit.ruling.judgements
    took = time.perf_counter() - began
    row = {**setup, "verdict": judged.outcome, "why": judged.reason, "seconds": round(took, 1)}
    steps = STEPS if judged.outcome == "passed" else 3
    if judged.outcome != "passed":
        images = min(images, setup["batch"])
    best: dict[str, float] = {}
    above, clean_above, by_control = list[str](), list[str](), list[str]()

    def over(pictures: Tensor, first: int) -> tuple[list[float], list[Held]]:
        shown = denormalise(pictures.detach(), *HALVES, clip=False)
        scores = measure(shown, test.real(), backbone, None, first) | {"reidentified": None}
        case = Case("", backbone, create_defence(setup["defence"]), attacks[0], batch=setup["batch"])
        part = case.finding("done", range(first, first + setup["batch"]), scores=scores)
        return list(scores["aligned_psnr"] or []), exposed(part.against(audit.baselines, audit.names), limit)

    for at in range(min(images, COUNT) // setup["batch"] or 1):
        pictures, nats, control = attackers(setup, backbone, test, at, steps)
        for name, picture in pictures.items():
            psnr, exceeded = over(picture, at * setup["batch"])
            best[name] = max([best.get(name, 0.0), *psnr])
            if exceeded and name != "told":
                chance = judged.outcome == "passed" and over(control(name), at * setup["batch"])[1]
                rows = by_control if chance else clean_above if name == "clean" else above
                rows.append(f"{name}: {exceeded[0].worst}, {nats:.2g} nats")
    oracle = {name: round(value, 1) for name, value in best.items()}
    return {**row, "oracle": oracle, "above": above, "clean_above": clean_above, "by_control": by_control}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=COUNT, help="of a setup that passed, for the attackers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in range(args.first, args.first + args.setups):
        setup = drawn(number, args.seed)
        rows.append({"number": number, **tried(setup, args.images)})
        row = rows[-1]
        shown = " ".join(
            f"{name}={setup[name]}" for name in ("model", "head", "augmentation", "labels", "defence", "batch")
        )
        print(
            f"{number:4} {row['verdict']:12} {shown} limit={setup['limit']} {row['oracle']} {row['seconds']} s",
            flush=True,
        )
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1))
    kind = [row for row in rows if row["verdict"] == "passed" and row["above"]]
    print(dict(Counter(row["verdict"] for row in rows)))
    reasons = Counter(row["why"].split(";")[0].split(":")[0][:70] for row in rows if row["verdict"] == "inconclusive")
    for reason, count in reasons.most_common():
        print(f"  {count:4} inconclusive: {reason}")
    print(f"passed with an attacker above a limit: {len(kind)}")
    for row in kind:
        print(f"  {row['number']}: {row['above']}")
    for row in rows:
        if row["verdict"] == "passed" and row["by_control"]:
            print(f"  {row['number']}, from the noise alone too: {row['by_control']}")
    apart = [row for row in rows if row["verdict"] == "passed" and row["clean_above"]]
    print(f"passed with clean, who is told what is not sent, above: {len(apart)}")
    for row in apart:
        print(f"  {row['number']}: {row['clean_above']}; the table's gradient alone: {row['oracle']['told']} dB")
    return int(bool(kind))


if __name__ == "__main__":
    sys.exit(main())
