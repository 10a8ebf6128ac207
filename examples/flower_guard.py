"""A guard inside Flower: python examples/flower_guard.py (needs flwr[simulation])

Two clients train for three rounds, and the guard attacks each upload before the client sends it. In the first run the
clients send plain weights, and the guard withholds them. In the second run they add noise: no attack proves a leak, and
the clients send the uploads. This is not a pass.
"""

import logging
import sys

import timm
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F

from situs.data.sources.samples import load_samples
from situs.engines.flower import GuardMod

RATE = 0.05


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": 96, "depth": 2, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", **shape, num_classes=10)


def make_guard(noise: float) -> GuardMod:
    defence = f"fedavg=1:{RATE}" + f"+noise={noise / RATE:g}" * (noise > 0)
    return GuardMod(build, defence=defence, attacks=("patchembed",))


def make_client(noise: float, mod: Mod) -> ClientApp:
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        model, number = build(), int(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        image = load_samples().images[number].view(1, 1, 28, 28) / 255
        loss = F.cross_entropy(model(image * 2 - 1), torch.tensor([number]))
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=RATE).step()
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * torch.randn_like(weight)
        sent = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(sent), reply_to=message)

    return app


def make_server(rounds: int = 3) -> ServerApp:
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, _: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
        first = ArrayRecord(build().state_dict())
        strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds, train_config=ConfigRecord({}))

    return app


if __name__ == "__main__":
    for noise in (0.0, 0.01):
        print(f"noise {noise:g} on the weights", flush=True)
        resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1, "include_dashboard": False}}
        run_simulation(make_server(), make_client(noise, make_guard(noise)), num_supernodes=2, backend_config=resources)
