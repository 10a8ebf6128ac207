"""Tokens a second of a fine-tuning step on text: ours, beside the same model in transformers' own Trainer.

    python benchmarks/text.py --model MiniLM/ --device cuda --batch 32 64 256 --length 32 128
    python benchmarks/text.py --model MiniLM/config.json --device cpu --batch 4 --length 16 --steps 2 --warmup 1

Every row is BertForSequenceClassification (or the classifier of another family) with AdamW, gradients clipped at 1, and
bf16 autocast on a GPU, on sentences of one length without padding, which are on the device already where the way allows
it. `situs` is the step of `situs finetune`, recorded as a CUDA graph where there is a GPU; `loop` a plain loop over
transformers' model; `Trainer` transformers' Trainer, with its logging and saving off, which needs `accelerate`: without
it that row says so. Each is measured for `--steps` updates behind `--warmup`; the best of `--repeats` counts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from situs.backbones import create_backbone
from situs.core.when import When
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.methods import Supervised, SupervisedConfig
from situs.train.optim import OptimConfig
from situs.train.step import Stepper, autocast

CLASSES, RATE = 2, 1e-5
Fed = tuple[Tensor, Tensor]
"""Ids [B, N] and labels [B]."""


def model_of(name: str) -> Any:
    """The backbone around transformers' own classifier, as a new fine-tuning has it."""
    return create_backbone(name, num_classes=CLASSES)


def batches(args: argparse.Namespace, batch: int, length: int, words: int) -> list[Fed]:
    """Some batches of random words, the same for every way."""
    chance = torch.Generator().manual_seed(0)
    drawn = [torch.randint(words, (batch, length), generator=chance) for _ in range(8)]
    return [(ids.to(args.device), torch.randint(CLASSES, (batch,), generator=chance).to(args.device)) for ids in drawn]


def precision(device: str) -> str:
    return "bf16" if device.startswith("cuda") else "fp32"


def timed(args: argparse.Namespace, step: Callable[[int], Any]) -> float:
    """Seconds an update, of the best of several measurements."""
    wait = torch.cuda.synchronize if args.device.startswith("cuda") else (lambda: None)
    for number in range(args.warmup):
        step(number)
    seconds = []
    for _ in range(args.repeats):
        wait()
        began = time.perf_counter()
        for number in range(args.steps):
            step(number)
        wait()
        seconds.append((time.perf_counter() - began) / args.steps)
    return min(seconds)


def ours(args: argparse.Namespace, fed: list[Fed]) -> float:
    """The step of a run."""
    method = Supervised(model_of(args.model), SupervisedConfig(label_smoothing=0.0)).to(args.device).train()
    asked = {"seed": 0, "precision": precision(args.device), "accumulate": 1, "parallel": "ddp", "compiled": False}
    stepper = Stepper(method, OptimConfig(lr=RATE, clip=1.0), graph=True, **asked)
    rows = [
        Batch(ids, torch.arange(len(ids), device=ids.device), {"label": labels}, torch.ones_like(ids, dtype=torch.bool))
        for ids, labels in fed
    ]
    return timed(args, lambda number: stepper.update(rows[number % len(rows)], When(step=number), RATE, False))


def loop(args: argparse.Namespace, fed: list[Fed]) -> float:
    """A plain loop over transformers' model."""
    model = model_of(args.model).model.to(args.device).train()
    fused = {"fused": True} if args.device.startswith("cuda") else {}
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, **fused)

    def step(number: int) -> None:
        ids, labels = fed[number % len(fed)]
        with autocast(ids.device, precision(args.device)):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return timed(args, step)


def trainer(args: argparse.Namespace, fed: list[Fed]) -> float:
    """transformers' Trainer, timed between two of its own steps."""
    if importlib.util.find_spec("accelerate") is None:
        raise SitusError("needs the package accelerate")
    import transformers

    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}
        for batch, labels in fed
        for ids, label in zip(batch.cpu(), labels.cpu(), strict=True)
    ]
    total = args.warmup + args.steps

    class Clock(transformers.TrainerCallback):
        """When the warm-up ended, and all."""

        marks: tuple[float, ...] = ()

        def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
            if state.global_step in (args.warmup, total):
                if args.device.startswith("cuda"):
                    torch.cuda.synchronize()
                self.marks = (*self.marks, time.perf_counter())

    clock = Clock()
    with tempfile.TemporaryDirectory() as place:
        arguments = transformers.TrainingArguments(
            output_dir=place, max_steps=total, per_device_train_batch_size=len(fed[0][0]), learning_rate=RATE,
            max_grad_norm=1.0, bf16=args.device.startswith("cuda"), use_cpu=args.device == "cpu", save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True, dataloader_num_workers=0,
        )  # fmt: skip
        model = model_of(args.model).model
        transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock]).train()
    return (clock.marks[1] - clock.marks[0]) / args.steps


WAYS: dict[str, Callable[[argparse.Namespace, list[Fed]], float]] = {"situs": ours, "loop": loop, "Trainer": trainer}


def measured(args: argparse.Namespace) -> Iterator[tuple[int, int, str, float | str]]:
    """Batch, length, way, and seconds or why not."""
    words = model_of(args.model).input.words
    for batch in args.batch:
        for length in args.length:
            fed = batches(args, batch, length, words)
            for way in args.ways:
                try:
                    yield batch, length, way, WAYS[way](args, fed)
                except (SitusError, torch.OutOfMemoryError) as error:
                    yield batch, length, way, str(error).partition("\n")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of transformers, or its config.json alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--length", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    with contextlib.suppress(ImportError):
        import transformers

        transformers.logging.set_verbosity_error()
    name = args.model.rstrip("/").rpartition("/")[2]
    print(f"{name}, {args.device}, {precision(args.device)}, torch {torch.__version__}")
    print(f"  {'batch':>5} {'length':>6}  {'way':8} {'ms a step':>10} {'tokens/s':>10}")
    failed = 0
    for batch, length, way, seconds in measured(args):
        if isinstance(seconds, str):
            failed += 1
            print(f"  {batch:5} {length:6}  {way:8} {seconds}")
        else:
            print(
                f"  {batch:5} {length:6}  {way:8} {1e3 * seconds:10.2f} {batch * length / seconds:10,.0f}", flush=True
            )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
