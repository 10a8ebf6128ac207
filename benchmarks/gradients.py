"""How fast the closed forms solve, in batches on the device, beside the solve image by image on the CPU.

    python benchmarks/gradients.py --images PHOTOGRAPHS --count 1000 --device cuda --weights dinov2_vits14.safetensors
    python benchmarks/gradients.py --images PHOTOGRAPHS --count 8 --device cpu --model vit_small_patch16_224

The victim's step and the attacker's solve are timed apart. The gradients of single-image steps are autograd's own, for
many images at once (`torch.func.vmap(grad)` over the three tensors that are read); on the first images they are
compared with those of a step on one image alone, and the largest relative difference is printed. The CPU column solves
each image by itself with `numpy.linalg.lstsq` in float64, as tools for one image do, on the same gradients. The row
"bytes" is the attack of one who also knows how images are normalised, and so that pixels are bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from situs.audit.attacks.april import April
from situs.audit.attacks.base import Attack, Knowledge, Ready
from situs.audit.attacks.patchembed import PatchEmbedding
from situs.audit.cases import EXACT
from situs.audit.client import full_float32, victim_gradients
from situs.audit.defences import Gradients
from situs.audit.scores import denormalise, mean_of, psnr
from situs.audit.stem import flat_weight, require_stem, table_rows, to_images
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.open import open_source
from situs.files import write_text

ATTACKS: dict[str, type[Attack]] = {"patchembed": PatchEmbedding, "patchembed, bytes": PatchEmbedding, "april": April}


class Result(NamedTuple):
    """psnr: of each image. seconds: of the solve over all of them."""

    psnr: list[float]
    seconds: float

    @property
    def exact(self) -> int:
        return sum(value >= EXACT for value in self.psnr)


def step_of_each(backbone: Backbone, names: Sequence[str]) -> Callable[[Tensor, Tensor], Gradients]:
    """images [B, C, H, W], labels [B] -> the gradient of a step on each image alone, [B, ...] by name."""
    parameters = {name: p.detach() for name, p in backbone.named_parameters()}
    read = {name: parameters[name] for name in names}

    def loss(read: Gradients, image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(backbone, {**parameters, **read}, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    single_image = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(images: Tensor, labels: Tensor) -> Gradients:
        with full_float32():
            return single_image(read, images, labels)

    return step


def largest_difference(backbone: Backbone, sent: Gradients, images: Tensor, labels: Tensor) -> float:
    """Between these gradients and those of the audit's victim on one image at a time, relative to their norm."""
    worst = 0.0
    for number in range(len(images)):
        one = slice(number, number + 1)
        alone = victim_gradients(backbone, images[one], labels[one])
        for name, g in sent.items():
            worst = max(worst, float((g[number] - alone[name]).norm() / alone[name].norm()))
    return worst


def reads(attack: Attack, backbone: Backbone) -> tuple[str, ...] | None:
    """The gradients that an attack needs; None where it does not apply."""
    prepared = attack.prepare(backbone, [name for name, _ in backbone.named_parameters()], Knowledge())
    return prepared.reads or () if isinstance(prepared, Ready) else None


def alone_on_cpu(name: str, backbone: Backbone, upload: Gradients) -> Tensor:
    """One image by `numpy.linalg.lstsq` in float64: patches [1, N, K]."""
    stem = require_stem(backbone)
    parameters = {key: p.detach().cpu().double() for key, p in backbone.named_parameters()}
    table = table_rows(upload[stem.table], stem, prefix=name == "april").double().numpy()
    if name == "patchembed":
        patches = np.linalg.lstsq(table.T, flat_weight(upload[stem.weight]).double().numpy(), rcond=None)[0]
        return torch.from_numpy(patches).unsqueeze(0)
    weights = [key for key in reads(April(), backbone) or () if key != stem.table]
    right = sum((parameters[key].T @ upload[key].double() for key in weights), torch.zeros(())).numpy()
    z = torch.from_numpy(np.linalg.lstsq(table.T, right, rcond=None)[0])[stem.first :]
    z = z - table_rows(parameters[stem.table], stem) - (0.0 if stem.bias is None else parameters[stem.bias])
    return (z @ torch.from_numpy(np.linalg.pinv(flat_weight(parameters[stem.weight]).numpy())).T).unsqueeze(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, help="a folder of photographs")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--model", default="vit_small_patch14_dinov2")
    parser.add_argument("--weights", help="a weight file; random weights without it")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--alone", type=int, default=50, help="images that are also solved one by one on the CPU")
    parser.add_argument("--bytes", type=int, default=1000, help="images that are also read to the byte")
    parser.add_argument("--check", type=int, default=3, help="images whose gradients are compared with a step alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    options = {"img_size": args.size, "num_classes": args.classes, "weights": args.weights}
    backbone = create_backbone(args.model, **options).to(args.device).eval()
    stem = require_stem(backbone)
    names = sorted({name for kind in ATTACKS.values() for name in reads(kind(), backbone) or ()})
    data = DataConfig(path=args.images, img_size=(args.size, args.size), batch=args.batch, workers=0, resident="never")
    step, seen = step_of_each(backbone, names), 0
    solved: dict[str, list[Result]] = {name: [] for name in ATTACKS}
    single: dict[str, list[Result]] = {name: [] for name in ATTACKS}
    victim, apart = 0.0, None
    for batch in make_loader(data, None, args.device, source=open_source(args.images, None)):
        images = batch.inputs[: args.count - seen]
        if not len(images):
            break
        labels = (torch.arange(len(images), device=images.device) + seen) % args.classes
        if seen == 0:  # what comes first pays for kernels and memory
            _run(args.device, lambda x=images, y=labels: step(x, y))
        sent, seconds = _run(args.device, lambda x=images, y=labels: step(x, y))
        victim += seconds
        if apart is None:
            apart = largest_difference(backbone, sent, images[: args.check], labels[: args.check])
        uploads = [{name: g[i] for name, g in sent.items()} for i in range(len(images))]
        real = denormalise(images, *data.normalisation)
        for name, kind in ATTACKS.items():
            byte = name.endswith("bytes")
            if reads(kind(), backbone) is None or (byte and seen >= args.bytes):
                continue
            known = Knowledge(normalisation=data.normalisation if byte else None)
            solve = partial(kind().recover, backbone, uploads, known)
            if seen == 0:
                _run(args.device, solve)
            guess, seconds = _run(args.device, solve)
            solved[name].append(Result(psnr(denormalise(guess.images, *data.normalisation), real).tolist(), seconds))
            for i in range(0 if byte else min(len(images), args.alone - seen)):
                upload = {key: g.cpu() for key, g in uploads[i].items()}
                patches, seconds = _run("cpu", lambda n=name, u=upload: alone_on_cpu(n, backbone, u))
                image = denormalise(to_images(patches, backbone, stem), *data.normalisation)
                single[name].append(Result(psnr(image, real[i : i + 1].cpu()).tolist(), seconds))
        seen += len(images)
    report(args, backbone, seen, victim, apart or 0.0, solved, single)


def _run(device: str, call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and its seconds, the device waited for on both sides."""
    wait = torch.cuda.synchronize if str(device).startswith("cuda") else (lambda: None)
    wait()
    begin = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - begin


def report(
    args: argparse.Namespace,
    backbone: Backbone,
    seen: int,
    victim: float,
    apart: float,
    solved: dict[str, list[Result]],
    single: dict[str, list[Result]],
) -> None:
    """Prints the table and writes the file."""
    machine = torch.cuda.get_device_name() if str(args.device).startswith("cuda") else "CPU"
    shape = f"{backbone.num_tokens} patches, {backbone.dim} channels"
    print(f"{args.model} ({(args.weights and Path(args.weights).name) or 'random weights'}), {args.size} px, {shape}")
    print(f"{machine}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads, batches of {args.batch}")
    print(f"victim: {seen} single-image steps in {victim:.2f} s, {seen / victim:.1f} images/s; against a step on one")
    print(f"image alone its gradients differ by {apart:.1e} at most (relative, {args.check} images)")
    print(f"{'attack':18} {'where':28} {'images':>7} {'images/s':>10} {'mean PSNR':>10} {'exact':>7}")
    rows = []
    for where, results in ((f"{machine}, batched", solved), ("CPU, numpy lstsq, one by one", single)):
        for name, parts in results.items():
            if not parts:
                continue
            values = [value for part in parts for value in part.psnr]
            seconds, exact = sum(part.seconds for part in parts), sum(part.exact for part in parts)
            row = {
                "attack": name,
                "where": where,
                "images": len(values),
                "images_per_s": len(values) / seconds,
                "psnr": mean_of(values)._asdict(),
                "exact_share": exact / len(values),
            }
            rows.append(row)
            rate, mean = row["images_per_s"], row["psnr"]["mean"]
            print(f"{name:18} {where[:28]:28} {len(values):7d} {rate:10.1f} {mean:7.1f} dB {exact / len(values):7.3f}")
    if args.out is not None:
        facts = {
            "model": args.model,
            "machine": machine,
            "torch": torch.__version__,
            "victim_images_per_s": seen / victim,
        }
        write_text(args.out, json.dumps({**facts, "gradient_difference": apart, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
