"""Split learning as an NVFlare job: python examples/split_in_nvflare.py (needs nvflare and situs[split])

One NVFlare task starts a training at every site, and the result of this task ends it. During the training clients and
server talk over a connection of situs; a site's name is the name of its certificate. NVFlare also runs this file at the
sites (--server). Without flags the file serves the blocks, and NVFlare's simulator runs two sites on this machine.
"""

import argparse
import tempfile
import threading
from pathlib import Path
from queue import Queue

from situs.config import from_dict
from situs.split.run import Hide, train_split
from situs.split.serving import make_server
from situs.split.transport.certificates import make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.transport.serve import run_server
from situs.train.run import RunConfig

RECIPE = {
    "method": {"name": "supervised"},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 4,
        "num_classes": 10,
        "model_args": {"embed_dim": 64, "depth": 3, "num_heads": 4},
    },
    "data": {"path": "samples", "img_size": 28, "channels": 1, "batch": 32, "count": 320},
    "optim": {"lr": 1e-3, "clip": 1.0},
    "train": {"epochs": 1, "save_every": 10},
}


def site(server: str, tls: str, out: str) -> None:
    """The whole training at a site, started by one task. After a crash it resumes from its checkpoint."""
    import nvflare.client as flare

    flare.init()
    name = flare.get_site_name()
    folder = Path(out) / name
    given = {"resume": folder} if (folder / "config.json").exists() else {"out": folder}
    while flare.is_running():
        task = flare.receive()
        if task is None:
            break
        with Connection(server, read_credentials(tls, name)) as call:
            result = train_split(from_dict(RunConfig, RECIPE), call, Hide(("rows", "columns")), quiet=True, **given)
        print(f"{name}: {result.step} steps, {result.metrics}", flush=True)
        flare.send(flare.FLModel(params={}, metrics={"steps": result.step, **result.metrics}))


def main() -> None:
    from nvflare.recipe import FedTaskRecipe, SimEnv

    said, done = Queue(), threading.Event()
    with tempfile.TemporaryDirectory() as place:
        here, sites = Path(place), ["site-1", "site-2"]
        make_certificates(here / "certs", clients=sites)
        server = make_server(from_dict(RunConfig, RECIPE), here / "server")
        given = (server, "127.0.0.1:0", read_credentials(here / "certs", "server"))
        thread = threading.Thread(target=run_server, args=given, kwargs={"say": said.put, "stopped": done.is_set})
        thread.start()
        try:
            address = said.get(timeout=60).split()[2]
            words = f"--server {address} --tls {here / 'certs'} --out {here / 'clients'}"
            recipe = FedTaskRecipe(name="split", min_clients=2, task_script=__file__, task_args=words)
            recipe.execute(SimEnv(clients=sites, workspace_root=str(here / "nvflare")))
            for folder in sorted((here / "clients").iterdir()):
                print(f"{folder.name} keeps {', '.join(sorted(each.name for each in folder.iterdir()))}")
        finally:
            done.set()
            thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("server", "tls", "out"):
        parser.add_argument(f"--{name}")
    args = parser.parse_args()
    main() if args.server is None else site(args.server, args.tls, args.out)
