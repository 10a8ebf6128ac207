"""The table of `benchmarks/active.py` on one GPU within a time: the most important rows first, each printed at once.

    python benchmarks/server.py --photos PHOTOGRAPHS --weights DINOV2_FILE --device cuda --seconds 200 --out FILE
    python benchmarks/server.py … --texts SENTENCES --text-model MINILM   # a folder of a BERT; GPT-2 gets its tokeniser

Scores are computed here, and not by an audit, which draws and matches pictures: a true image has the PSNR of the
nearest that was read out of its batch, "exact" is 54.15 dB or more. Seconds: the gradient and the attack.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import active
import active_text
import torch
from torch import Tensor

from situs.audit.attacks import create_attack
from situs.audit.attacks.base import Knowledge, Refused
from situs.audit.attacks.tokens.attack import TokensConfig
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.errors import SitusError

PUBLIC = 64
SMALL, LARGE, DINO, LITTLE = "vit-s4", "vit-b16", "dinov2-s14", ("adapters", "lora", "biases", "head")


class Case(NamedTuple):
    """A row. count: of images, in whole batches."""

    model: str
    sent: str
    batch: int
    server: str
    count: int


def cases() -> Iterator[Case]:
    """The rows, the most important first."""
    for model in (SMALL, LARGE, DINO):
        yield Case(model, "adapters", 1, "active", 8)
        yield Case(model, "adapters", 8, "active", 24)
    for batch in (64, 256):
        yield from (Case(model, "all", batch, "active", batch) for model in (LARGE, DINO))
    for model in (DINO, LARGE, SMALL):
        yield Case(model, "all", 1, "honest", 4)
        yield Case(model, "all", 8, "honest", 8)
    for model in (SMALL, LARGE, DINO):
        yield from (Case(model, "adapters", batch, "active", batch) for batch in (64, 256))
        yield from (Case(model, sent, 1, "active", 8) for sent in LITTLE[1:])
        yield from (Case(model, sent, 8, "active", 24) for sent in LITTLE[1:])
    for model in (SMALL, LARGE, DINO):
        yield Case(model, "all", 1, "active", 16)
        yield Case(model, "all", 8, "active", 96)
    yield from (Case(SMALL, "all", batch, "active", 256) for batch in (64, 256))
    for batch in (64, 256):
        yield from (Case(model, sent, batch, "active", batch) for sent in LITTLE[1:] for model in (SMALL, LARGE, DINO))
    for batch in (64, 256):
        yield from (Case(model, "all", batch, "honest", batch) for model in (DINO, LARGE, SMALL))
    for sent in LITTLE:
        yield from (Case(model, sent, 1, "honest", 1) for model in (SMALL, LARGE, DINO))


def figures(case: Case, pixels: Tensor, labels: Tensor, args: argparse.Namespace) -> str:
    """What the strongest attack of the case's server read."""
    model = active.opened(case.model, case.sent, args.weights).to(args.device)
    names = active.SENT[case.sent] if case.server == "active" else active.HONEST_ATTACKS
    known = Knowledge(step=Step(batch=case.batch), public=pixels[:PUBLIC], normalisation=active.NORMALISATION)
    images, best, refused = pixels[PUBLIC:][: case.count], None, list[str]()
    sent = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name in names:
        attack = create_attack(name, TokensConfig(seconds=args.limit))
        ready = attack.prepare(model, sent, known)
        if isinstance(ready, Refused):
            refused.append(f"{name}: {ready.reason}")
            continue
        begun, victim, deadline = time.monotonic(), deepcopy(model), Deadline(lambda _: None, args.limit)
        if attack.active:
            attack.write(victim, sent, known)
        batches = list(zip(images.split(case.batch), labels.split(case.batch), strict=False))
        uploads = [victim_gradients(victim, some, classes) for some, classes in batches]
        recovery = attack.recover(victim, uploads, known, deadline)
        per = len(recovery.images) // len(recovery.facts)
        decibels = torch.cat(
            [scores(recovery.images[n * per :][:per], batches[n][0]) for n in range(len(recovery.facts))]
        )
        separated = sum(int(float(fact.get("separated") or 0)) for fact in recovery.facts)
        exact, seconds = int((decibels >= 54.15).sum()), time.monotonic() - begun
        remark = f"{separated} separated from the others" if attack.active else recovery.facts[0].get("verdict") or ""
        middle = " | ".join(f"{float(x):.1f}" for x in (decibels.mean(), decibels.median(), decibels.max(), seconds))
        row = (exact, float(decibels.mean()), f"{name} | {exact} of {len(decibels)} | {middle} | {remark}")
        best = row if best is None else max(best, row)
    return best[2] if best else f"none applies | – | – | – | – | – | {'; '.join(refused)}"


def scores(recovered: Tensor, images: Tensor) -> Tensor:
    """PSNR [B] of the nearest recovered image to each image, both clipped to [0, 1]."""
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1).to(images) for values in active.NORMALISATION)
    shown, truth = ((part.to(images) * deviation + mean).clamp(0, 1) for part in (recovered.nan_to_num(), images))
    errors = torch.stack([(shown - one).square().mean(dim=(1, 2, 3)).min() for one in truth])
    return (-10 * errors.clamp(min=1e-20).log10()).cpu()


def image_rows(args: argparse.Namespace) -> Iterator[str]:
    pixels: dict[str, Tensor] = {}
    for case in cases():
        if args.models and case.model not in args.models:
            continue
        count = min(case.count, args.most // case.batch * case.batch)
        if not count:
            continue
        if case.model not in pixels:
            size = active.MODELS[case.model][1]["img_size"]
            mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in active.NORMALISATION)
            pixels[case.model] = ((active.photographs(args.photos, args.most + PUBLIC, size) - mean) / deviation).to(
                args.device
            )
        chance = torch.Generator().manual_seed(1)
        labels = torch.randint(active.MODELS[case.model][1]["num_classes"], (count,), generator=chance).to(args.device)
        case = case._replace(count=min(count, len(pixels[case.model]) - PUBLIC))
        try:
            outcome = figures(case, pixels[case.model], labels, args)
        except (RuntimeError, SitusError) as error:
            outcome = f"failed | – | – | – | – | – | {str(error).splitlines()[0][:200]}"
        yield f"| {case.model} | {case.sent} | {case.batch} | {case.server} | {outcome} |"


def text_rows(args: argparse.Namespace) -> Iterator[str]:
    lines = [line.strip() for line in args.texts.read_text().splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        models = {"minilm": random_text_model(args.text_model, Path(folder) / "minilm", None)}
        models["gpt2"] = random_text_model(args.text_model, Path(folder) / "gpt2", "gpt2")
        for name, batch in (("minilm", 256), ("gpt2", 64), ("minilm", 64), ("gpt2", 256)):
            for sent in active_text.SENT:
                if name == "gpt2" and sent not in ("all", "lora", "adapters"):
                    continue
                begun = time.monotonic()
                try:
                    outcome = active_text.row(models[name], sent, lines[:batch], "active", 60.0, args.device)
                except (RuntimeError, SitusError) as error:
                    outcome = f"failed: {str(error).splitlines()[0][:200]}"
                yield f"| {name} | {sent} | {batch} | active | {outcome} | {time.monotonic() - begun:.1f} |"


def random_text_model(source: Path, folder: Path, kind: str | None) -> str:
    """A model of the shape of `source`, or a GPT-2 of 12 blocks with its tokeniser: the server writes its weights."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokeniser = AutoTokenizer.from_pretrained(source)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokeniser), bos_token_id=None, eos_token_id=None))
    else:
        model = AutoModel.from_config(AutoConfig.from_pretrained(source))
    model.save_pretrained(folder)
    tokeniser.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a folder; the last ones by name are attacked")
    parser.add_argument("--weights", type=Path, help="DINOv2's")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--text-model", type=Path, help="config and tokeniser of a BERT")
    parser.add_argument("--models", nargs="*", choices=active.MODELS, default=[])
    parser.add_argument("--most", type=int, default=256, help="images attacked at most")
    parser.add_argument("--limit", type=float, default=6.0, help="seconds of one attack")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    end = time.monotonic() + args.seconds
    header = ("model", "sent", "batch", "server", "attack", "exact", "mean dB", "median dB", "best dB", "s", "remarks")
    show(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", args.out)
    rows = image_rows(args)
    if args.texts:
        rows = alternating(rows, text_rows(args))
    for line in rows:
        show(line, args.out)
        if time.monotonic() > end:
            show("stopped: the seconds are over", args.out)
            break


def alternating(images: Iterator[str], texts: Iterator[str]) -> Iterator[str]:
    """Sixteen rows of images, then one of texts for each three."""
    for number, line in enumerate(images):
        yield line
        if number > 16 and number % 3 == 0 and (text := next(texts, None)):
            yield text
    yield from texts


def show(line: str, out: Path | None) -> None:
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
