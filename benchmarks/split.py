"""What a step of split training costs beside a local one: steps a second, bytes a sample, the share of the wire.

    python benchmarks/split.py --steps 10     # ViT-S/4 on 32 px, batch 32, on the CPU; the server in a second process
    python benchmarks/split.py --delay 0.05 --accumulate 4     # over a slow link: micro-batches one behind the other

Each row trains the same model on the same random batch. Wire: the time a client waits that the server does not compute,
over all time. CPU: seconds of all threads of both processes a step, which other work on the machine does not change
much; local over it is the share of local steps that is possible where the processor is all that is waited for.
Raw: features of the same size sent there and back with nothing computed.

    python benchmarks/split.py --count --model vit_base_patch16_224 --img-size 224 --patch-size 16 --batch 8

counts operations, bytes and memory of a step with permutations and without (the fourth paper's Figure 8): client and
server stand in one process, and each case runs in a process of its own, which has held nothing before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import queue
import resource
import socket
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from situs.backbones.config import BackboneConfig
from situs.core.when import When
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.locks.key import Key
from situs.locks.veil import parse_veil
from situs.methods.base import Method
from situs.methods.supervised import SupervisedConfig
from situs.split import remote
from situs.split.client import Client
from situs.split.hiding import make_cut
from situs.split.message import Expected, Message
from situs.split.parts import cut, layout, side_names, trained_order
from situs.split.remote import SplitStepper, attach
from situs.split.server import Server, agreed
from situs.split.serving import make_server
from situs.split.transport.certificates import make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.transport.serve import run_server
from situs.train.assemble import RunConfig, make_method
from situs.train.config import TrainConfig
from situs.train.optim import OptimConfig
from situs.train.step import Stepper

CLASSES = tuple(map(str, range(100)))
MIB = 2**20


class Echo(Server):
    """Sends features back unchanged, to measure the wire alone."""

    def answer(self, owner: str, message: Message) -> Message:
        if message.kind != "infer":
            return super().answer(owner, message)
        return Message("ok", {}, {"z": message.tensors["z"]})


def serve(config: RunConfig, out: str, certs: str | None, device: str, lines: Any, echo: bool) -> None:
    server = make_server(config, out, device=device)
    if echo:
        server.__class__ = Echo
    credentials = None if certs is None else read_credentials(certs, "server")
    parent = os.getppid()
    run_server(server, "127.0.0.1:0", credentials, say=lines.put, stopped=lambda: os.getppid() != parent)


def cpu_seconds(process: int) -> float:
    """CPU time of all threads of a process so far; 0 if the system does not provide it."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Served:
    """A server in a process of its own."""

    def __init__(self, config: RunConfig, out: Path, certs: Path | None, device: str, *, echo: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        lines = context.Queue()
        place = None if certs is None else str(certs)
        self.process = context.Process(target=serve, args=(config, str(out), place, device, lines, echo), daemon=True)
        self.process.start()
        line = lines.get(timeout=300)
        while "listening" not in line:
            line = lines.get(timeout=300)
        self.address = line.split()[2]
        self.credentials = None if certs is None else read_credentials(certs, "client")

    def through(self, delay: float) -> None:
        """Puts a slow link between client and server."""
        self.address = Link(self.address, delay).address

    def __enter__(self) -> Connection:
        self.call = Connection(self.address, self.credentials)
        return self.call

    def __exit__(self, *_: object) -> None:
        self.call.close()
        self.process.terminate()
        self.process.join()


class Link:
    """A local proxy that delays every byte by `delay` seconds, in both directions."""

    def __init__(self, address: str, delay: float) -> None:
        self.there, self.delay = address.rpartition(":"), delay
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection((self.there[0], int(self.there[2])))
            for a, b in ((near, far), (far, near)):
                waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
                threading.Thread(target=self._take, args=(a, waiting), daemon=True).start()
                threading.Thread(target=self._give, args=(b, waiting), daemon=True).start()

    def _take(self, near: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        while data := near.recv(1 << 18):
            waiting.put((time.monotonic() + self.delay, data))
        waiting.put((0.0, b""))

    def _give(self, far: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while (item := waiting.get())[1]:
                time.sleep(max(0.0, item[0] - time.monotonic()))
                far.sendall(item[1])
            far.shutdown(socket.SHUT_WR)


def config_of(args: Any) -> RunConfig:
    """What is trained, on random images."""
    shape = {} if args.depth is None else {"depth": args.depth}
    options = {"patch_size": args.patch_size, "num_classes": len(CLASSES), "model_args": shape}
    return RunConfig(
        method=SupervisedConfig(),
        backbone=BackboneConfig(args.model, drop_path=0.1, **options),
        data=DataConfig(path="samples", img_size=args.img_size, batch=args.batch),
        optim=OptimConfig(lr=1e-4, clip=1.0),
        train=TrainConfig(epochs=1, accumulate=args.accumulate),
    )


def random_batch(args: Any) -> Batch:
    """Images and labels from one seed."""
    chance = torch.Generator().manual_seed(0)
    images = torch.randn(args.batch, 3, args.img_size, args.img_size, generator=chance).to(args.device)
    labels = torch.randint(len(CLASSES), (args.batch,), generator=chance).to(args.device)
    return Batch(images, torch.arange(args.batch, device=args.device), {"label": labels})


def stepper_of(kind: Any, method: Method, config: RunConfig, device: str) -> Stepper:
    """The stepper, neither compiled nor recorded."""
    precision, accumulate = config.train.precision_on(torch.device(device)), config.train.accumulate
    fixed: dict[str, Any] = {"parallel": "ddp", "compiled": False, "graph": False}
    return kind(method, config.optim, seed=0, precision=precision, accumulate=accumulate, **fixed)


def timed(
    stepper: Stepper, batch: Batch, steps: int, warmup: int, call: Connection | None = None, server: int | None = None
) -> dict[str, float]:
    for number in range(warmup):
        stepper.update(batch, When(step=number), 1e-4, False)
    if call is not None:
        call.waited = call.served = 0.0
    processes = [os.getpid()] if server is None else [os.getpid(), server]
    before = sum(map(cpu_seconds, processes))
    began = time.perf_counter()
    for number in range(warmup, warmup + steps):
        done = stepper.update(batch, When(step=number), 1e-4, False)
    float(done.norm)
    spent = time.perf_counter() - began
    wire = 0.0 if call is None else (call.waited - call.served) / spent
    cpu = (sum(map(cpu_seconds, processes)) - before) / steps
    return {"steps_s": steps / spent, "wire": wire, "seconds": spent, "cpu": cpu}


def split_row(
    args: Any, config: RunConfig, out: Path, certs: Path | None, batch: Batch, permute: Any, wire: Any
) -> Any:
    served = Served(config, out, certs, args.device)
    if args.delay:
        served.through(args.delay)
    with served as call:
        method = make_method(config, CLASSES).to(args.device)
        client = Client(call, os.urandom(16).hex(), wire=wire)
        stepper = split_stepper(method, client, config, permute, args.device)
        method.train()
        row = timed(stepper, batch, args.steps, args.warmup, call, served.process.pid)
        row["bytes"] = client.traffic / (args.steps + args.warmup) / batch.ids.shape[0]
        rate = row["bytes"] * batch.ids.shape[0] * args.steps / MIB / max(1e-9, row["wire"] * row["seconds"])
        return row | {"mib_s": rate}


def raw_rate(config: RunConfig, out: Path, certs: Path | None, z: torch.Tensor) -> float:
    """MiB per second for a round trip without computation."""
    with Served(config, out, certs, "cpu", echo=True) as call:
        client = Client(call, "0" * 32)
        method = make_method(config, CLASSES)
        client.hello(layout(method.backbone), agreed(config.optim, "fp32"), [])
        expected = {"z": Expected({"F32"}, tuple((side, side) for side in z.shape))}
        count, began = 20, 0.0
        for number in range(count + 2):
            began = time.perf_counter() if number == 2 else began
            client.ask("infer", {}, {"z": z}, expected)
        return 2 * count * z.nbytes / MIB / (time.perf_counter() - began)


def permuting(method: Method, z: torch.Tensor) -> float:
    """Seconds per step for permuting rows and columns, forward and backward."""
    entrance = make_cut(method.backbone, parse_veil("none", ("rows", "columns")), Key(bytes(32)), run="0" * 32)
    z = z.clone().requires_grad_()
    spent = []
    for number in range(12):
        began = time.perf_counter()
        moved, _, back = entrance.enter(z, None, (str(number),))
        back(moved).sum().backward()
        if z.is_cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return sorted(spent)[len(spent) // 2]


def counted_step(args: Any, permute: tuple[str, ...] | None) -> list[float]:
    """Of a step: GFLOP, MiB sent, MiB saved for the backward pass, peak MiB. permute None: without a server."""
    config, batch, saved = config_of(args), random_batch(args), {}
    device, method = args.device, make_method(config, CLASSES).to(args.device).train()

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with tempfile.TemporaryDirectory() as out:
        client, stepper = None, stepper_of(Stepper, method, config, device) if permute is None else None
        if permute is not None:
            server = make_server(config, out, device=device)
            client = Client(lambda message, _: server.answer("me", message), "0" * 32)
            stepper = split_stepper(method, client, config, permute, device)
        assert stepper is not None
        stepper.update(batch, When(), 1e-4, False)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            stepper.update(batch, When(step=1), 1e-4, False)
        for weight in (item for item in gc.get_objects() if type(item) is torch.nn.Parameter):
            saved.pop(weight.untyped_storage().data_ptr(), None)  # not part of a step
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else resident
        before = 0 if client is None else client.traffic
        # The counter does not know every fused attention; as plain products it knows it everywhere.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            stepper.update(batch, When(step=2), 1e-4, False)
        sent = 0 if client is None else client.traffic - before
    return [counter.get_total_flops() / 1e9, sent / MIB, sum(saved.values()) / MIB, peak / MIB]


def count_steps(args: Any) -> None:
    """Prints every case, each from a process of its own."""
    print(f"  {'a step':28}{'GFLOP':>12}{'MiB sent':>12}{'MiB kept':>12}{'MiB held':>12}")
    context = multiprocessing.get_context("spawn")
    for permute in (None, (), ("rows",), ("columns",), ("rows", "columns")):
        with ProcessPoolExecutor(1, context) as fresh:
            row = fresh.submit(counted_step, args, permute).result()
        name = "local" if permute is None else ", ".join(["split", *permute])
        print(f"  {name:28}" + "".join(f"{value:12,.2f}" for value in row), flush=True)


def split_stepper(method: Method, client: Client, config: RunConfig, permute: tuple[str, ...], device: str) -> Stepper:
    """The stepper of a client's part of `method`, whose blocks are replaced by the server."""
    order, theirs = trained_order(method, config.optim), side_names(method, "server")
    entrance = make_cut(method.backbone, parse_veil("none", permute), Key(bytes(32)), run=client.session)
    training = agreed(config.optim, config.train.precision_on(torch.device(device)))
    client.hello(layout(method.backbone), training, [])
    cut(method, "client")
    attach(method.backbone, client, entrance, sum(name in theirs for name in order))
    return stepper_of(partial(SplitStepper, client=client, order=order), method, config, device)


def print_row(name: str, row: dict[str, float], local: dict[str, float]) -> None:
    cpu = f"{row['cpu']:9.2f}{local['cpu'] / row['cpu'] if row['cpu'] else 0.0:8.1%}"
    more = f"{row['bytes'] / 1024:12.1f}{row['wire']:8.1%}{row['mib_s']:9.0f}" if "bytes" in row else ""
    print(f"  {name:28}{row['steps_s']:9.3f}{row['steps_s'] / local['steps_s']:10.1%}{cpu}{more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--patch-size", type=int, default=4)
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--count", action="store_true", help="count operations, bytes and memory instead of time")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that the link takes each way: that row alone")
    args = parser.parse_args()
    if args.count:
        count_steps(args)
        return
    config, batch = config_of(args), random_batch(args)
    method = make_method(config, CLASSES).to(args.device).train()
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{args.model}, {args.batch} samples a step, {args.device}, {threads}")
    print(f"  {'':28}{'steps/s':>9}{'of local':>10}{'CPU s':>9}{'local/':>8}{'KiB/sample':>12}{'wire':>8}{'MiB/s':>9}")
    rows = {"local": timed(stepper_of(Stepper, method, config, args.device), batch, args.steps, args.warmup)}
    print_row("local", rows["local"], rows["local"])
    z = torch.randn(args.batch, method.backbone.num_prefix + method.backbone.num_tokens, method.backbone.dim)
    both, moving = ("rows", "columns"), permuting(method, z.to(args.device))
    with tempfile.TemporaryDirectory() as place:
        certs = Path(place) / "certs"
        make_certificates(certs)
        if args.delay:
            for name, remote.AHEAD in (("TLS, one at a time", 0), ("TLS, one behind the other", 2)):
                print_row(name, split_row(args, config, Path(place) / name, certs, batch, (), None), rows["local"])
            return
        for name, where, permute, wire in (
            ("plaintext", None, (), None),
            ("TLS", certs, (), None),
            ("TLS, rows + columns", certs, both, None),
            ("TLS, rows + columns, bf16", certs, both, torch.bfloat16),
        ):
            row = rows[name] = split_row(args, config, Path(place) / name, where, batch, permute, wire)
            print_row(name, row, rows["local"])
        raw = {
            name: raw_rate(config, Path(place) / f"raw {name}", where, z)
            for name, where in (("plaintext", None), ("TLS", certs))
        }
    print(f"raw: {', '.join(f'{name} {rate:.0f} MiB/s' for name, rate in raw.items())}")
    print(f"rows and columns take {1e3 * moving:.2f} ms a step, {moving * rows['local']['steps_s']:.2%} of a local one")


if __name__ == "__main__":
    main()
