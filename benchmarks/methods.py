"""Our training step beside what others would write, in one run: `situs bench`'s clock around both.

    python benchmarks/methods.py --cases supervised mp3:0.75 mae --peers timm vit-pytorch-mp3 transformers-mae-eager
    python benchmarks/methods.py --model vit_small_patch16_224 --img-size 32 --patch-size 4 --batch 64

A case is that of `situs bench`, a peer one of PEERS below. All have the same images of noise, precision, clipping
and fused AdamW. Where one fails the others are still measured, and the status is 1.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.bench.cases import StepCase, StepConfig, Timing, make_cases
from situs.bench.clock import Times, measure_ceiling, time_steps
from situs.bench.measure import measure_case, precision_on, step_flops
from situs.bench.step import describe_machine
from situs.results import Table, percent
from situs.train.step import autocast


class Row(NamedTuple):
    name: str
    times: Times
    flops: int


class Peer(NamedTuple):
    """A model of others: the loss of a batch of images and labels, compiled where `module` is."""

    module: nn.Module
    loss: Callable[[Any, Tensor, Tensor], Tensor]


def shape_of(case: StepCase) -> tuple[Any, dict[str, int]]:
    """timm's model of a case, and width, depth and heads of it for the others."""
    settings = {"img_size": case.img_size, "patch_size": case.patch_size, **case.model_args}
    asked = {name: value for name, value in settings.items() if value is not None}
    model: Any = timm.create_model(case.model, num_classes=case.num_classes, drop_path_rate=case.drop_path, **asked)
    return model, {"dim": model.embed_dim, "depth": len(model.blocks), "heads": model.blocks[0].attn.num_heads}


def timm_loop(case: StepCase) -> Peer:
    """The loop of timm's own examples with its label smoothing."""

    def loss(run: Any, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(run(images).float(), labels, label_smoothing=0.1)

    return Peer(shape_of(case)[0], loss)


def vit_pytorch_mp3(case: StepCase) -> Peer:
    """MP3 of the package vit-pytorch at η = .75, its own attention, from a mean over tokens without CLS."""
    from vit_pytorch.mp3 import MP3, ViT  # pyright: ignore[reportMissingImports]

    model, shape = shape_of(case)
    side, patch = model.patch_embed.img_size, model.patch_embed.patch_size
    vit = ViT(image_size=side, patch_size=patch, num_classes=1000, mlp_dim=4 * shape["dim"], **shape)
    return Peer(MP3(vit=vit, masking_ratio=0.75), lambda run, images, _: run(images))


def transformers_mae(case: StepCase) -> Peer:
    """MAE of transformers at its default mask ratio of .75, attention by torch's fused kernels."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    model, shape = shape_of(case)
    config = ViTMAEConfig(
        hidden_size=shape["dim"], num_hidden_layers=shape["depth"], num_attention_heads=shape["heads"],
        intermediate_size=4 * shape["dim"], image_size=model.patch_embed.img_size[0],
        patch_size=model.patch_embed.patch_size[0], norm_pix_loss=True,
    )  # fmt: skip
    return Peer(ViTMAEForPreTraining(config), lambda run, images, _: run(images).loss)


def measure_peer(name: str, case: StepCase, timing: Timing, device: torch.device) -> Row:
    """A plain loop around it: bf16 autocast, clipping, fused AdamW; compiled on a GPU unless the name says eager."""
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()
    model, loss = PEERS[name.removesuffix("-eager")](case)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    sides = shape_of(case)[0].patch_embed.img_size
    images = torch.randn(case.batch, 3, *sides, device=device)
    labels = torch.randint(case.num_classes, (case.batch,), device=device)

    def loss_of(run: Any, size: int) -> Tensor:
        with autocast(device, precision_on(case, device)):
            return loss(run, images[:size], labels[:size])

    flops = step_flops(lambda size: loss_of(model, size), case.batch)
    run = torch.compile(model) if device.type == "cuda" and not name.endswith("-eager") else model

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(run, case.batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Row(name, time_steps(update, device, timing), flops)


PEERS: dict[str, Callable[[StepCase], Peer]] = {
    "timm": timm_loop,
    "vit-pytorch-mp3": vit_pytorch_mp3,
    "transformers-mae": transformers_mae,
}
NAMES = sorted([*PEERS, *(f"{name}-eager" for name in PEERS)])


def measure_all(args: argparse.Namespace, timing: Timing, device: torch.device) -> tuple[list[Row], list[str]]:
    """Rows, and the names of those that failed, which are told as they fail."""
    config = StepConfig(
        models=(args.model,), batches=(args.batch,), img_size=args.img_size, patch_size=args.patch_size,
        num_classes=args.classes, model_args={} if args.depth is None else {"depth": args.depth},
    )  # fmt: skip

    def ours(word: str) -> Row:
        [case] = make_cases([word], config)
        row = measure_case(case, timing, device)
        return Row(case.label, row.times, row.flops)

    [plain] = make_cases(["supervised"], config)
    tasks = [(word, lambda word=word: ours(word)) for word in args.cases]
    tasks += [(name, lambda name=name: measure_peer(name, plain, timing, device)) for name in args.peers]
    rows, failed = [], []
    for name, task in tasks:
        try:
            rows.append(task())
            print(f"{name}: {args.batch / rows[-1].times.median:,.0f} img/s", file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001  (whatever it was: it is printed, and the command fails in the end)
            traceback.print_exc()
            failed.append(name)
    return rows, failed


def table(rows: list[Row], args: argparse.Namespace, device: torch.device) -> Table:
    precision = "bf16" if device.type == "cuda" else "fp32"
    ceiling = measure_ceiling(device, precision, 1.0 if device.type == "cuda" else 0.05)
    cells = []
    for name, times, flops in rows:
        spread = 500 * (max(times.seconds) - min(times.seconds))
        cells.append([
            name, f"{args.batch / times.median:,.0f}", f"{1e3 * times.median:.2f}", f"{spread:.2f}",
            f"{times.median / rows[0].times.median:.2f}", None if times.gib is None else f"{times.gib:.2f}",
            percent(flops / times.median / ceiling), None if times.busy is None else percent(times.busy),
        ])  # fmt: skip
    machine = describe_machine(device)
    title = f"{args.model}, batch {args.batch}, {precision}: {machine['device']}, torch {machine['torch']}"
    return Table(title, ["case", "img/s", "ms", "±", "time/first", "GiB", "of ceiling", "busy"], cells)


def main() -> int:
    """0, or 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["supervised", "mp3", "mae"])
    parser.add_argument("--peers", nargs="*", default=["timm"], choices=NAMES)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--img-size", type=int, default=None)
    parser.add_argument("--patch-size", type=int, default=None)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    rows, failed = measure_all(args, Timing(args.warmup, args.steps, args.repeats), device)
    if rows:
        print(table(rows, args, device))
    if failed:
        print(f"failed, see above: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
