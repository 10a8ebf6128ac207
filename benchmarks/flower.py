"""Seconds a step of split learning: ours, and by Flower's messages, with the same small model on loopback.

    python benchmarks/flower.py --steps 4     # needs flwr (PyPI) and situs[split]; about three minutes on two cores

Ours: client and server in two processes, with certificates. Flower: a SuperLink and a SuperNode in plaintext, two
messages a step (benchmarks/flower_steps.py), once as Flower's documentation has it (`send_and_receive`) and once
polled as often as its settings and API allow. Last, our client inside a Flower job (examples/split_in_flower.py), data
and checkpoints included. The first step of every row is not counted. Flower's losses must be those of one process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import runpy
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import split
import torch

from situs.config import from_dict
from situs.data.batch import Batch
from situs.split.transport.certificates import make_certificates
from situs.train.assemble import RunConfig, make_method

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "split_in_flower.py"
STEPS = HERE / "flower_steps.py"
FAST = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}
ROWS = ("local", "ours", "flower", "flower, fast", "ours in flower")


def ours(recipe: dict[str, Any], steps: int, place: Path | None) -> float:
    """Seconds a step, in this process alone or with a server in a second one."""
    config = from_dict(RunConfig, recipe)
    images, labels = steps_app()["batch_of"](recipe["data"]["batch"])
    batch = Batch(images, torch.arange(len(images)), {"label": labels})
    split.CLASSES = tuple(map(str, range(10)))
    if place is None:
        method = make_method(config, split.CLASSES).train()
        row = split.timed(split.stepper_of(split.Stepper, method, config, "cpu"), batch, steps, 1)
    else:
        make_certificates(place / "certs")
        options = argparse.Namespace(device="cpu", steps=steps, warmup=1)
        row = split.split_row(options, config, place / "server", place / "certs", batch, (), None)
    return 1 / row["steps_s"]


def steps_app() -> dict[str, Any]:
    return runpy.run_path(str(STEPS))


def by_messages(recipe: dict[str, Any], steps: int, place: Path, fast: bool) -> tuple[float, str]:
    """Seconds a step by Flower's messages, and what its clients said of themselves."""
    app, run_job = steps_app(), runpy.run_path(str(EXAMPLE))["run_job"]
    job = {"recipe": json.dumps(recipe).replace('"', '\\"'), "batch": recipe["data"]["batch"], "steps": steps + 1}
    output = run_job(STEPS, place, {}, {**job, "fast": int(fast)}, **(FAST if fast else {}))
    lines = [line.partition(app["MARK"])[2] for line in output.splitlines() if app["MARK"] in line]
    if not lines:
        raise SystemExit(f"the Flower job did not come to its end:\n{output}")
    results = json.loads(lines[0])
    messages = results["messages"]
    losses = [message["loss"] for message in messages if "loss" in message]
    torch.testing.assert_close(losses, app["local_losses"](recipe, steps + 1), rtol=1e-4, atol=1e-5)
    processes = len({message["process"] for message in messages})
    age, cpu = (statistics.median(message[name] for message in messages) for name in ("age", "cpu"))
    more = f"{len(messages)} messages in {processes} processes of {age:.1f} s, {cpu:.1f} s of the CPU each"
    return statistics.mean(results["seconds"][1:]), more


def inside(place: Path) -> tuple[float, str]:
    """Seconds a step of our client inside a Flower job."""
    example = runpy.run_path(str(EXAMPLE))
    output = example["run_example"](place)
    match = re.search(r"'steps': (\d+).*'seconds': ([\d.]+)", output)
    if match is None:
        raise SystemExit(f"the Flower job did not come to its end:\n{output}")
    return float(match[2]) / int(match[1]), f"{match[1]} steps in one process, one message"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps a row")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    args = parser.parse_args()
    if find_spec("flwr") is None:
        sys.exit("flwr is not installed: pip install flwr, best into an environment of its own")
    recipe = runpy.run_path(str(EXAMPLE))["RECIPE"]
    version = importlib.metadata.version("flwr")
    print(
        f"flwr {version}, torch {torch.__version__}, {torch.get_num_threads()} threads, batch {recipe['data']['batch']}"
    )
    print(f"  {'':24}{'s a step':>9}{'load':>7}  ({os.cpu_count()} cores)")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows:
            place, more = Path(folder) / name.replace(", ", "-").replace(" ", "-"), ""
            if name == "local":
                seconds = ours(recipe, 5 * args.steps, None)
            elif name == "ours":
                seconds = ours(recipe, 5 * args.steps, place)
            elif name == "ours in flower":
                seconds, more = inside(place)
            else:
                seconds, more = by_messages(recipe, args.steps, place, fast=name.endswith("fast"))
            print(f"  {name:24}{seconds:9.4f}{os.getloadavg()[0]:7.1f}  {more}", flush=True)


if __name__ == "__main__":
    main()
