"""Runs on several gloo ranks: python ranks.py OUT SCENARIO .... The ranks are forks of this process, as in kill.py."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
from toy import ToyLoader, toy

from situs.train import distributed, loop
from situs.train.checkpoint import RunFolder
from situs.train.loop import TrainConfig, fit
from situs.train.nan import NotFiniteError
from situs.train.optim import OptimConfig
from situs.train.step import Stepper

TRAIN = TrainConfig(epochs=3, precision="fp32", log_every=4, save_every=5, keep=9, accumulate=2)
OPTIM = OptimConfig(lr=5e-3, warmup_epochs=1, layer_decay=0.8, clip=0.5, ema=0.9)
COUNT, BATCH = 43, 8  # the last batch has 3 samples: 2 on one rank and 1 on the other


class StopOne:
    """Asks rank 1 alone to stop."""

    def after_step(self, state) -> None:
        if state.step == 7 and distributed.rank() == 1:
            signal.raise_signal(signal.SIGTERM)

    def after_epoch(self, state) -> None:
        pass


def train(
    out: Path,
    parallel: str = "ddp",
    *,
    drop_path: float = 0.0,
    poison: int | None = None,
    stop: bool = False,
    compiled: bool = False,
):
    config = dataclasses.replace(TRAIN, parallel=parallel)
    main = distributed.rank() == 0
    resumed = (out / "config.json").exists()
    distributed.barrier()
    run = RunFolder.open(out, writer=main) if resumed else RunFolder.create(out, {}, writer=main)
    # Another seed on each rank: rank 0's weights are the ones that count.
    method = toy(seed=distributed.rank(), dtype=torch.float64, drop_path=drop_path, poison=poison)
    loader = ToyLoader(COUNT, BATCH, dtype=torch.float64)
    return fit(method, loader, config, OPTIM, run, hooks=[StopOne()] if stop else [])


def interrupted(out: Path, parallel: str) -> None:
    first = train(out, parallel, stop=True, drop_path=0.3)
    assert first.interrupted
    assert 7 <= first.step <= 9, first.step
    second = train(out, parallel, drop_path=0.3)
    assert second.step == second.total


def not_finite(out: Path, parallel: str) -> None:
    """A sample of rank 1's part is bad: both ranks must stop."""
    ids = list(ToyLoader(COUNT, BATCH).iterate(0, 0))[2].ids
    try:
        train(out, parallel, poison=int(ids[-1]))
    except NotFiniteError:
        return
    raise AssertionError("the run went on")


def compiled(out: Path, parallel: str) -> None:
    """A run compiles on a GPU alone, so its stepper is made to here."""
    loop.Stepper = lambda *given, **named: Stepper(*given, **(named | {"compiled": True}))
    train(out, parallel)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


SCENARIOS: dict[str, Callable[[Path, str], object]] = {
    "plain": train,
    "drop_path": lambda out, parallel: train(out, parallel, drop_path=0.3),
    "interrupted": interrupted,
    "not_finite": not_finite,
    "compiled": compiled,
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
    """Scenarios of as many ranks run one after another in the same processes."""
    worlds: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        scenario, parallel, world = name.split("/")
        worlds.setdefault(world, []).append((scenario, parallel))

    def run(world: str) -> None:
        for scenario, parallel in worlds[world]:
            SCENARIOS[scenario](out / f"{scenario}-{parallel}-{world}", parallel)

    print(json.dumps({world: forked(int(world), lambda w=world: run(w), out / f"{world}.log") for world in worlds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
