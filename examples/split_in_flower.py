"""Split learning as a Flower job: python examples/split_in_flower.py (needs flwr and situs[split])

One Flower message starts a training, and the reply to this message ends it. During the training client and server talk
over a connection of situs, with its certificates. This file is a complete Flower app. If you run it as a script, it
starts a SuperLink, a SuperNode and the job on this machine.

    node config (the SuperNode's own)    data: the images, tls: its certificates, out: where its part of the run is kept
    run config (of the job)              listen, server: where the blocks are, tls, out: of the server's machine
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from situs.config import from_dict
from situs.split.run import Hide, train_split
from situs.split.serving import make_server
from situs.split.transport.certificates import make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.transport.serve import run_server
from situs.train.run import RunConfig

SMALL = {"embed_dim": 64, "depth": 3, "num_heads": 4}
RECIPE = {
    "method": {"name": "supervised"},
    "backbone": {"name": "vit_tiny_patch16_224", "patch_size": 4, "num_classes": 10, "model_args": SMALL},
    "data": {"img_size": 28, "channels": 1, "batch": 32, "count": 640},
    "optim": {"lr": 1e-3, "clip": 1.0},
    "train": {"epochs": 1, "save_every": 10, "precision": "fp32"},
}

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """The whole training of one client. After a crash it resumes from its checkpoint."""
    own, job = context.node_config, context.run_config
    config = from_dict(RunConfig, RECIPE | {"data": RECIPE["data"] | {"path": own["data"]}})
    folder = "resume" if (Path(str(own["out"])) / "config.json").exists() else "out"
    with Connection(str(job["server"]), read_credentials(str(own["tls"]), "client")) as call:
        began = time.perf_counter()
        result = train_split(config, call, Hide(("rows", "columns")), quiet=True, **{folder: str(own["out"])})
        spent = time.perf_counter() - began
    found = {"steps": result.step, "seconds": spent, **result.metrics}
    return Message(RecordDict({"found": MetricRecord(found)}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Serves the blocks; every client trains with separate blocks."""
    job, done = context.run_config, threading.Event()
    server = make_server(from_dict(RunConfig, RECIPE), str(job["out"]))
    given = (server, str(job["listen"]), read_credentials(str(job["tls"]), "server"))
    thread = threading.Thread(target=run_server, args=given, kwargs={"stopped": done.is_set})
    thread.start()
    try:
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(1)
        week = 7 * 24 * 3600.0
        asked = [Message(RecordDict(), node, "train", ttl=week) for node in nodes]
        for reply in grid.send_and_receive(asked):
            said = reply.error.reason if reply.has_error() else dict(reply.content["found"])
            print(f"node {reply.metadata.src_node_id}: {said}", flush=True)
    finally:
        done.set()
        thread.join()


def run_job(app: Path, place: Path, node: dict[str, str], job: dict[str, object], **env: str) -> str:
    """Runs a file with a `client_app` and a `server_app` as a Flower job on loopback; returns all output."""

    def toml(table: dict[str, object]) -> list[str]:
        return [
            f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in table.items()
        ]

    folder, home, link, runtime = place / "app", place / "flwr", free_address(), free_address()
    folder.mkdir(parents=True)
    home.mkdir()
    (folder / app.name).write_text(app.read_text(encoding="utf-8"), encoding="utf-8")
    lines = ["[project]", 'name = "situs-split"', 'version = "1.0.0"', "dependencies = []"]
    lines += ["[tool.flwr.app]", 'publisher = "situs"', "[tool.flwr.app.components]"]
    lines += toml({f"{side}app": f"{app.stem}:{side}_app" for side in ("server", "client")})
    (folder / "pyproject.toml").write_text("\n".join([*lines, "[tool.flwr.app.config]", *toml(job)]), encoding="utf-8")
    (home / "config.toml").write_text("\n".join(["[superlink.here]", *toml({"address": link}), "insecure = true"]))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Flower finds its programs by name
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    given = os.environ | {"PATH": path, "FLWR_HOME": str(home)} | quiet | env

    def start(log: str, *words: str) -> subprocess.Popen[bytes]:
        with (place / log).open("wb") as file:
            return subprocess.Popen(words, env=given, stdout=file, stderr=subprocess.STDOUT)

    def listens(address: str) -> list[str]:
        host, port = address.split(":")
        return ["--host", host, "--port", port, "--insecure"]

    wait_for = ["flwr", "run", str(folder), "here", "--stream"]
    started = []
    try:
        started.append(
            start("link.log", "flower-superlink", *listens(link), "--disable-runtime-dependency-installation")
        )
        wait_until_open(link)
        config = " ".join(toml(node)).replace(" = ", "=")
        started.append(
            start("node.log", "flower-supernode", *listens(runtime), "--superlink", link, "--node-config", config)
        )
        subprocess.run(
            wait_for,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=(place / "run.log").open("wb"),
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)
    return "".join((place / name).read_text(encoding="utf-8") for name in ("link.log", "node.log", "run.log"))


def free_address() -> str:
    """An unused address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def wait_until_open(address: str) -> None:
    """Waits until the address accepts connections, at most one minute."""
    host, port = address.split(":")
    for _ in range(600):
        with socket.socket() as tried:
            if tried.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on {address}")


def run_example(here: Path) -> str:
    """Runs the job of this file; returns all output."""
    blocks = free_address()
    make_certificates(here / "certs")
    node = {"data": "samples", "tls": str(here / "certs"), "out": str(here / "client")}
    job = {"listen": blocks, "server": blocks, "tls": str(here / "certs"), "out": str(here / "server")}
    return run_job(Path(__file__), here, node, job)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(run_example(Path(place)))
