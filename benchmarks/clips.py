"""Whether training on clips waits for its data: the step of each speech preset on ready tensors, and fed by the loader.

    python benchmarks/clips.py                                    # clips of noise; a GPU where there is one
    python benchmarks/clips.py --data ../shared/data/speech_commands --device cpu --batch 64

The loader does all of it: clips held in 16 bits on the device, shift, background noise, MFCCs, label smoothing. The two
kinds of step take turns, so that a busy machine slows both alike. The status is 1 where a fed step is below 80 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from situs.bench.clock import profile_kernels, wait
from situs.bench.step import describe_machine
from situs.cli.tables import print_table
from situs.config import from_dict
from situs.core.random import uniform
from situs.core.when import When
from situs.data.batch import Batch
from situs.data.loader import Loader, make_loader
from situs.data.modalities.audio import AudioPipeline, NoiseBank
from situs.data.sources.base import Source
from situs.presets import load_preset
from situs.results import Table, percent
from situs.train.assemble import RunConfig, make_method, resolve_config
from situs.train.step import Stepper

PRESETS = ("speech-supervised", "speech-mp3", "speech-droppos")
LEAST = 0.8


class Chance(Source):
    """Clips of noise, of twelve classes."""

    things = "clips"

    def __init__(self, count: int, samples: int) -> None:
        super().__init__("clips of noise", tuple(map(str, range(12))), 1, strict=False)
        self.count, self.samples = count, samples

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> dict[str, Any]:
        wave = uniform(0, 0, torch.tensor([index]), "clips", (self.samples,))[0] - 0.5
        return {"wave": wave, "label": index % 12}


class Row(NamedTuple):
    """Seconds a step, of each repeat: of the step on ready tensors, of one that is fed, of the loader alone."""

    preset: str
    ready: list[float]
    fed: list[float]
    alone: list[float]
    busy: float | None

    @property
    def share(self) -> float:
        return statistics.median(self.ready) / statistics.median(self.fed)


def endless(loader: Loader) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from loader.iterate(epoch)
        epoch += 1


def make_fed(config: RunConfig, args: argparse.Namespace, device: torch.device) -> Loader:
    """The loader of a run on the data given, or on noise with noise."""
    if args.data is not None:
        return make_loader(config.data, config.augment, device)
    audio = config.data.audio
    source = Chance(args.count, audio.samples)
    loader = make_loader(config.data, config.augment, device, source=source)
    hum = uniform(0, 0, torch.tensor([0]), "hum", (60 * audio.rate,))[0] - 0.5
    bank = NoiseBank(hum, torch.tensor([0]), torch.tensor([len(hum)])).to(device)
    assert isinstance(loader.pipeline, AudioPipeline)
    loader.pipeline.bank = bank
    return loader


def measure(preset: str, args: argparse.Namespace, device: torch.device) -> Row:
    config = from_dict(RunConfig, load_preset(preset), where=preset)
    data = replace(config.data, batch=args.batch, path=args.data or "", count=args.count)
    config = replace(config, data=data)
    config = resolve_config(config) if args.data else config
    loader = make_fed(config, args, device)
    torch.manual_seed(0)
    method = make_method(config, loader.classes).to(device).train()
    train, precision = config.train, config.train.precision_on(device)
    compiled = train.compile and device.type == "cuda"
    stepper = Stepper(
        method, config.optim, seed=0, precision=precision, accumulate=1, parallel="ddp", compiled=compiled,
        graph=train.graph,
    )  # fmt: skip
    batches = endless(loader)
    ready, done = next(batches), 0

    def update(batch: Batch) -> None:
        nonlocal done
        stepper.update(batch, When(step=done, epoch=done, progress=0.5), 1e-4, ragged=False)
        done += 1

    def seconds(step: Callable[[], Any]) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(args.steps):
            step()
        wait(device)
        return (time.perf_counter() - began) / args.steps

    kinds: dict[str, Callable[[], Any]] = {
        "ready": lambda: update(ready),
        "fed": lambda: update(next(batches)),
        "alone": lambda: next(batches),
    }
    for step in kinds.values():  # the warm-up, in which a graph is recorded too
        seconds(step)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.repeats):
        for name, step in kinds.items():
            times[name].append(seconds(step))
    busy = None
    if device.type == "cuda":
        seen = profile_kernels(kinds["fed"], device, 20)
        busy = None if seen is None else min(1.0, seen.busy_ms / 1e3 / statistics.median(times["fed"]))
    return Row(preset, times["ready"], times["fed"], times["alone"], busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--data", help="a set of clips; by default clips of noise")
    parser.add_argument("--count", type=int, default=4096, help="clips")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=None, help="steps a repeat; by default 3, on a GPU 200")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    args.steps = args.steps or (200 if device.type == "cuda" else 3)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as a run does
    rows = [measure(preset, args, device) for preset in args.presets]
    cells = []
    for row in rows:
        ready, fed, alone = (statistics.median(times) for times in (row.ready, row.fed, row.alone))
        rates = [f"{args.batch / median:,.0f}" for median in (ready, fed, alone)]
        busy = None if row.busy is None else percent(row.busy)
        cells.append([row.preset, *rates, f"{1 / fed:,.1f}", percent(row.share), busy])
    header = ("preset", "ready, clips/s", "fed, clips/s", "loader alone", "steps/s", "of ready", "GPU busy")
    print_table(Table(f"{describe_machine(device)['device']}, batch {args.batch}", header, cells))
    sys.exit(int(any(row.share < LEAST for row in rows)))


if __name__ == "__main__":
    main()
