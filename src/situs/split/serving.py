"""What a server serves: the blocks of a config's model, new or of weights that exist, for each client or for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from situs.errors import SitusError
from situs.locks.manifest import read_manifest
from situs.locks.owner import left_of
from situs.methods.base import Method
from situs.models.open import is_locked
from situs.models.start import initialise
from situs.split.parts import server_names
from situs.split.server import Limits, Server
from situs.train.assemble import RunConfig, make_method
from situs.train.inputs import fitted


def make_server(
    config: RunConfig,
    out: str | Path,
    *,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    shared: bool = False,
    device: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Server:
    """A server for the blocks of `config`'s model; its trainings are kept in `out`.

    Where they are new, they are those of local training with the same seed if `config.backbone.num_classes` is the
    number of the client's classes. shared: all clients train the same blocks, their steps in turn.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if config.train.precision == "fp16":
        raise SitusError("precision='fp16': split training takes bf16 or fp32", field="train.precision")
    data = config.data
    data = fitted(data, config.backbone, config.method_name)
    config = replace(config, data=data)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SitusError(f"{out}: cannot be made: {(error.strerror or str(error)).lower()}", field="out") from None
    precision = config.train.precision_on(where)
    return Server(
        lambda: served_method(config, say).to(where),
        config.optim, out, seed=config.train.seed, precision=precision, limits=limits, shared=shared, say=say,
    )  # fmt: skip


def served_method(config: RunConfig, say: Callable[[str], None] = lambda _: None) -> Method:
    """The method whose blocks are served. A locked folder is taken as it lies there: the server has no key."""
    classes = tuple(map(str, range(config.backbone.num_classes or 0)))
    method = make_method(config, classes)
    backbone = method.backbone
    if config.init is None:
        say(f"the blocks of {backbone.name} are new, from seed {config.train.seed}")
    elif is_locked(config.init):
        locked, gone = left_of(Path(config.init), read_manifest(Path(config.init), None))
        held = server_names(backbone)
        missing = sorted(held & {f"model.{name}" for name in gone})
        if missing:
            raise SitusError(
                f"{config.init}: {missing[0]} is withheld, and so the server has no such block", field="init"
            )
        state = locked.state_dict()
        wrong = [name for name in held if name not in state or state[name].shape != backbone.state_dict()[name].shape]
        if wrong:
            raise SitusError(f"{config.init}: does not fit {backbone.name}: {min(wrong)}", field="init")
        backbone.load_state_dict({name: state[name] for name in held}, strict=False)
        say(f"the blocks are those of {config.init}, locked")
    else:
        for line in initialise(backbone, config.init, positions=config.init_positions):
            say(line)
    return method
