"""Making a server for the blocks of a config's model, new or with existing weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from situs.errors import SitusError
from situs.files import make_folder
from situs.locks.manifest import read_manifest
from situs.locks.owner import open_without_key
from situs.methods.base import Method
from situs.models.open import is_locked
from situs.models.start import initialise
from situs.split.parts import server_names
from situs.split.server import Limits, Server
from situs.train.assemble import RunConfig, fitted, make_method


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

    New blocks equal those of local training with the same seed if `config.backbone.num_classes` is the number of the
    client's classes. shared: all clients train the same blocks, step by step in turn.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if config.train.precision == "fp16":
        raise SitusError("precision='fp16': split training supports bf16 and fp32", field="train.precision")
    config = replace(config, data=fitted(config.data, config.backbone, config.method_name))
    out = Path(out)
    make_folder(out)
    precision = config.train.precision_on(where)
    return Server(
        lambda: served_method(config, say).to(where),
        config.optim, out, seed=config.train.seed, precision=precision, limits=limits, shared=shared, say=say,
    )  # fmt: skip


def served_method(config: RunConfig, say: Callable[[str], None] = lambda _: None) -> Method:
    """The method whose blocks are served. A locked folder stays locked: the server has no key."""
    classes = tuple(map(str, range(config.backbone.num_classes or 0)))
    method = make_method(config, classes)
    backbone = method.backbone
    if config.init is None:
        say(f"the blocks of {backbone.name} are new (random weights from seed {config.train.seed})")
    elif is_locked(config.init):
        locked, absent = open_without_key(Path(config.init), read_manifest(Path(config.init), None))
        names = server_names(backbone)
        missing = sorted(names & {f"model.{name}" for name in absent})
        if missing:
            raise SitusError(
                f"{config.init}: the lock withholds the tensor {missing[0]}, so a block of the server is incomplete; "
                "use a lock that does not withhold this tensor",
                field="init",
            )
        state = locked.state_dict()
        wrong = [name for name in names if name not in state or state[name].shape != backbone.state_dict()[name].shape]
        if wrong:
            raise SitusError(
                f"{config.init}: does not fit {backbone.name}: {min(wrong)} is missing or has another shape",
                field="init",
            )
        backbone.load_state_dict({name: state[name] for name in names}, strict=False)
        say(f"the blocks are those of {config.init}, locked")
    else:
        for line in initialise(backbone, config.init, positions=config.init_positions):
            say(line)
    return method
