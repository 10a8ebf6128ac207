"""Split learning by Flower's messages alone: the app that benchmarks/flower.py runs and times.

Two messages a step: `features` (the gradient of the step before goes to the client, features come back) and `loss`
(what the blocks made of them goes, its gradient comes back). A client's process ends with its reply, so weights and
moments lie in the node's context between two messages. The client needs torch alone, so that its process starts fast.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, layer_norm, linear

PATCH, PLACES, NORM, HEAD = "patch_embed.proj", ("cls_token", "pos_embed"), "norm", "head"
RATE = 1e-3
MARK = "steps measured: "

client_app = ClientApp()
server_app = ServerApp()


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    """Random images [B, 1, 28, 28] and labels of ten classes, the same for all."""
    chance = torch.Generator().manual_seed(0)
    images = torch.randn(size, 1, 28, 28, generator=chance)
    return images, torch.randint(10, (size,), generator=chance)


def embed(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    patches = conv2d(
        images, weights[f"{PATCH}.weight"], weights[f"{PATCH}.bias"], stride=weights[f"{PATCH}.weight"].shape[-1]
    )
    front = weights["cls_token"].expand(len(images), -1, -1)
    return torch.cat([front, patches.flatten(2).mT], dim=1) + weights["pos_embed"]


def loss_of(weights: dict[str, Tensor], left: Tensor, labels: Tensor) -> Tensor:
    features = layer_norm(left, left.shape[-1:], weights[f"{NORM}.weight"], weights[f"{NORM}.bias"], 1e-6)
    return cross_entropy(linear(features[:, 0], weights[f"{HEAD}.weight"], weights[f"{HEAD}.bias"]), labels)


class Adam:
    """AdamW without decay. torch's own imports its compiler at the first step, which a process a message would pay."""

    def __init__(self, weights: dict[str, Tensor], moments: dict[str, Tensor] | None = None) -> None:
        self.weights, self.moments = weights, moments or {}

    @torch.no_grad()
    def step(self) -> None:
        """Moves what has a gradient."""
        for name, tensor in self.weights.items():
            if tensor.grad is None:
                continue
            zero = torch.zeros_like(tensor)
            count, mean, square = (self.moments.get(f"{name} {moment}") for moment in ("count", "mean", "square"))
            count = torch.ones(1) if count is None else count + 1
            mean = (zero if mean is None else mean).lerp(tensor.grad, 0.1)
            square = (zero if square is None else square).lerp(tensor.grad.square(), 0.001)
            scale = (square / (1 - 0.999 ** float(count))).sqrt() + 1e-8
            tensor -= RATE * mean / (1 - 0.9 ** float(count)) / scale
            tensor.grad = None
            self.moments |= {f"{name} count": count, f"{name} mean": mean, f"{name} square": square}


class ClientState:
    """A client's weights and moments, out of its context and back into it."""

    def __init__(self, message: Message, context: Context) -> None:
        self.context = context
        first = message.content.get("weights")
        weights: Any = context.state["weights"] if first is None else first
        self.tensors = {name: tensor.requires_grad_() for name, tensor in weights.to_torch_state_dict().items()}
        moments: Any = context.state.get("moments")
        self.optimiser = Adam(self.tensors, None if moments is None else moments.to_torch_state_dict())
        self.images, self.labels = batch_of(int(context.run_config["batch"]))

    def reply(self, message: Message, name: str, tensor: Tensor, **more: float) -> Message:
        self.context.state["weights"] = ArrayRecord({n: tensor.detach() for n, tensor in self.tensors.items()})
        self.context.state["moments"] = ArrayRecord(self.optimiser.moments)
        facts = {"process": os.getpid(), "age": process_age(), "cpu": time.process_time(), **more}
        return Message(RecordDict({name: record(tensor), "found": MetricRecord(facts)}), reply_to=message)


def record(tensor: Tensor) -> ArrayRecord:
    return ArrayRecord({"tensor": tensor.detach()})


def tensor_of(message: Message, name: str) -> Tensor:
    record_: Any = message.content[name]
    return record_.to_torch_state_dict()["tensor"]


def process_age() -> float:
    """Seconds since this process started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


@client_app.train("features")
def features(message: Message, context: Context) -> Message:
    """Applies the gradient of the step before, and sends the features of this one."""
    client = ClientState(message, context)
    if "gradient" in message.content:  # the features' graph went with the process that made them: they come again
        embed(client.tensors, client.images).backward(tensor_of(message, "gradient"))
        client.optimiser.step()
    return client.reply(message, "z", embed(client.tensors, client.images))


@client_app.train("loss")
def loss(message: Message, context: Context) -> Message:
    """Computes the loss of what the blocks made, moves norm and head, and sends the gradient."""
    client = ClientState(message, context)
    left = tensor_of(message, "z").requires_grad_()
    value = loss_of(client.tensors, left, client.labels)
    value.backward()
    client.optimiser.step()
    assert left.grad is not None
    return client.reply(message, "gradient", left.grad, loss=value.item())


class Asking:
    """One node's answers. fast: pulls every 50 ms, where Flower's own `send_and_receive` does every 3 s."""

    def __init__(self, grid: Grid, fast: bool) -> None:
        self.grid, self.fast, self.replies = grid, fast, []
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.1)
        self.node = nodes[0]

    def __call__(self, kind: str, **records: ArrayRecord | ConfigRecord) -> Message:
        asked = Message(RecordDict(records), self.node, f"train.{kind}")
        if self.fast:
            ids = list(self.grid.push_messages([asked]))
            while not (replies := list(self.grid.pull_messages(ids))):
                time.sleep(0.05)
        else:
            replies = list(self.grid.send_and_receive([asked]))
        [reply] = replies
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        self.replies.append(dict(reply.content["found"]))
        return reply


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains the blocks, and prints the seconds of each step with what the clients said of themselves."""
    job: Any = context.run_config
    blocks, weights = parts_of(json.loads(job["recipe"]))
    mover = torch.optim.AdamW(blocks.parameters(), lr=RATE, weight_decay=0.0)
    ask, seconds, back = Asking(grid, bool(job["fast"])), [], {}
    back["weights"] = ArrayRecord(weights)
    for _ in range(int(job["steps"])):
        began = time.perf_counter()
        entered = tensor_of(ask("features", **back), "z").requires_grad_()
        left = blocks(entered)
        mover.zero_grad()
        left.backward(tensor_of(ask("loss", z=record(left)), "gradient"))
        mover.step()
        assert entered.grad is not None
        back = {"gradient": record(entered.grad)}
        seconds.append(time.perf_counter() - began)
    print(MARK + json.dumps({"seconds": seconds, "messages": ask.replies}), flush=True)


def parts_of(recipe: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """(the blocks, the client's tensors by name) of the model that a recipe starts with."""
    from situs.config import from_dict
    from situs.train.assemble import RunConfig, make_method

    model: Any = make_method(from_dict(RunConfig, recipe), tuple(map(str, range(10)))).backbone.model
    state = model.state_dict()
    return model.blocks, {name: state[name] for name in state if not name.startswith("blocks.")}


def local_losses(recipe: dict[str, Any], steps: int) -> list[float]:
    """The losses of the same steps in one process."""
    blocks, weights = parts_of(recipe)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    movers = [torch.optim.AdamW(blocks.parameters(), lr=RATE, weight_decay=0.0)]
    movers.append(torch.optim.AdamW(weights.values(), lr=RATE, weight_decay=0.0))
    images, labels = batch_of(recipe["data"]["batch"])
    losses = []
    for _ in range(steps):
        value = loss_of(weights, blocks(embed(weights, images)), labels)
        for mover in movers:
            mover.zero_grad()
        value.backward()
        for mover in movers:
            mover.step()
        losses.append(value.item())
    return losses
