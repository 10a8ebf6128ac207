"""Runs on several gloo ranks: python ranks.py OUT SCENARIO .... The ranks are forks of this process, as in kill.py."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
from toy import ToyLoader, toy

from situs.backbones import block as runs
from situs.backbones import create_backbone
from situs.methods import MP3, MP3Config
from situs.train import distributed
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.loop import NotFiniteError, fit
from situs.train.optim import OptimConfig
from situs.train.step import Stepper

TRAIN = TrainConfig(epochs=2, precision="fp32", log_every=4, save_every=4, keep=9, accumulate=2)
OPTIM = OptimConfig(lr=5e-3, warmup_epochs=1, layer_decay=0.8, clip=0.5, ema=0.9)
COUNT, BATCH = 29, 8  # the last batch has 5 samples: 3 and 2 on two ranks; 2, 1, 1 and 1 on four


class StopOne:
    """Asks the last rank alone to stop."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, state) -> None:
        if state.step == self.step and distributed.rank() == distributed.world() - 1:
            signal.raise_signal(signal.SIGTERM)

    def after_epoch(self, state) -> None:
        pass


def train(
    out: Path,
    parallel: str = "ddp",
    *,
    drop_path: float = 0.0,
    poison: int | None = None,
    stop: int | None = None,
    real: bool = False,
    stepper: Callable[..., Stepper] = Stepper,
):
    config = dataclasses.replace(TRAIN, parallel=parallel, epochs=1 if real else TRAIN.epochs)
    main = distributed.rank() == 0
    resumed = (out / "config.json").exists()
    distributed.barrier()
    run = RunFolder.open(out, writer=main) if resumed else RunFolder.create(out, {}, writer=main)
    # Another seed on each rank: rank 0's weights are the ones that count.
    method = toy(seed=distributed.rank(), dtype=torch.float64, drop_path=drop_path, poison=poison)
    loader = ToyLoader(COUNT, BATCH, dtype=torch.float64)
    if real:
        method, loader.images = vit(distributed.rank()), torch.randn(COUNT, 3, 8, 8, generator=seeded()).double()
    hooks = [] if stop is None else [StopOne(stop)]
    return fit(method, loader, config, OPTIM, run, hooks=hooks, stepper=stepper)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def vit(seed: int) -> MP3:
    """timm's blocks under our own runner."""
    torch.manual_seed(seed)
    shape = {"depth": 4, "embed_dim": 16, "num_heads": 2}
    return MP3(
        create_backbone("vit_tiny_patch16_224", img_size=8, patch_size=4, model_args=shape), MP3Config(0.5)
    ).double()


def blocks(out: Path, parallel: str) -> None:
    """Writes down how many bytes of blocks are whole on a rank at once, while one is run and on its way back."""
    found: dict[str, set[int]] = {"forward": set(), "backward": set()}
    made: list[Any] = []

    def whole_bytes() -> int:
        held = [p for block in made[0].backbone.model.blocks for p in block.parameters()]
        return sum(p.numel() * p.element_size() for p in held if not isinstance(p, torch.distributed.tensor.DTensor))

    def watched(attn: Any, x: Any, *more: Any) -> Any:
        found["forward"].add(whole_bytes())
        if x.requires_grad:
            x.register_hook(lambda _: found["backward"].add(whole_bytes()))
        return attend(attn, x, *more)

    real = globals()["vit"]
    attend = runs.attend_block
    runs.attend_block = watched
    globals()["vit"] = lambda seed: made.append(real(seed)) or made[0]
    try:
        train(out, parallel, real=True)
    finally:
        runs.attend_block, globals()["vit"] = attend, real
    one = sum(p.numel() * 8 for p in real(0).backbone.model.blocks[0].parameters())
    facts = {name: sorted(sizes) for name, sizes in found.items()} | {"block": one}
    (out / f"whole.{distributed.rank()}.json").write_text(json.dumps(facts))


def interrupted(out: Path, parallel: str) -> None:
    first = train(out, parallel, stop=5, drop_path=0.3)
    assert first.interrupted
    assert 5 <= first.step <= 7, first.step
    second = train(out, parallel, drop_path=0.3)
    assert second.step == second.total


def not_finite(out: Path, parallel: str) -> None:
    """A sample of rank 1's part is bad: both ranks must stop."""
    ids = list(ToyLoader(COUNT, BATCH).iterate(0, 0))[2].ids
    try:
        train(out, parallel, poison=int(ids[-1]) if distributed.rank() == 1 else -1)
    except NotFiniteError:
        return
    raise AssertionError("the run went on")


def compiled(out: Path, parallel: str) -> None:
    """A run compiles on a GPU alone, so its stepper is made to here."""
    train(out, parallel, stepper=lambda *given, **named: Stepper(*given, **(named | {"compiled": True})))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


SCENARIOS: dict[str, Callable[[Path, str], object]] = {
    "plain": train,
    "drop_path": lambda out, parallel: train(out, parallel, drop_path=0.3),
    "interrupted": interrupted,
    "not_finite": not_finite,
    "compiled": compiled,
    "blocks": blocks,
    "half": lambda out, parallel: train(out, parallel, stop=5),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forked(world: int, action: Callable[[], object], log: Path) -> list[int]:
    port = free_port()
    children = []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            sys.stderr = log.with_suffix(f".{rank}").open("w", buffering=1)
            facts = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": rank,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            if world > 1:
                os.environ |= {name: str(value) for name, value in facts.items()}
            torch.set_num_threads(1)
            distributed.start("cpu")
            action()
            distributed.stop()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc(file=sys.stderr)
            raise
        finally:
            sys.stderr.flush()
            os._exit(status)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(out: Path, *names: str) -> None:
    """Scenarios one after another, as many of as many ranks as come in a row in the same processes.

    names: SCENARIO/ddp/2, or SCENARIO@FOLDER/ddp/2 for one that goes on in the folder of another.
    """
    asked = [name.split("/") for name in names]

    def run(these: list[list[str]]) -> None:
        for scenario, parallel, world in these:
            name, _, folder = scenario.partition("@")
            SCENARIOS[name](out / (folder or f"{scenario}-{parallel}-{world}"), parallel)

    codes = []
    for world, group in groupby(asked, key=lambda each: each[2]):
        these = list(group)
        codes += forked(int(world), lambda these=these: run(these), out / f"{len(codes)}.log")
    print(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
