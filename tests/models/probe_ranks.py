"""A probe between two training steps of a sharded method, on the ranks of torchrun: python probe_ranks.py OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from situs.backbones import create_backbone
from situs.core.when import When
from situs.measure.hooks import OnlineProbe
from situs.methods import MP3, Batch, MP3Config
from situs.train import distributed
from situs.train.contract import RunState
from situs.train.step import Ema


def method() -> MP3:
    torch.manual_seed(0)
    shape = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    return MP3(create_backbone("vit_tiny_patch16_224", img_size=8, patch_size=4, model_args=shape), MP3Config(0.5))


def batches(seed: int) -> list[Batch]:
    torch.manual_seed(seed)
    images, labels = torch.randn(24, 3, 8, 8), torch.randint(3, (24,))
    return [Batch(images + labels.view(-1, 1, 1, 1), torch.arange(24), {"label": labels})]


def gradients(subject: MP3) -> dict[str, torch.Tensor]:
    subject.train()
    batch = batches(3)[0]
    subject(batch, subject.draw(batch, When(seed=0, epoch=0))).loss.backward()
    found = {name: p.grad.full_tensor().clone() for name, p in subject.named_parameters() if p.grad is not None}
    subject.zero_grad()
    return found


def main(out: Path) -> None:
    ranks = distributed.start("cpu")
    probe = OnlineProbe(batches(1), batches(2), every=1, k=5)
    alone = probe.measure(method())
    sharded = method()
    distributed.wrap_fsdp(sharded, "fp32")
    before = gradients(sharded)
    ema = Ema(sharded, 0.9)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.mul_(2.0)  # the probe must look at the mean, which is still what was made
    log: dict[str, float] = {}
    probe.after_epoch(RunState(sharded, ema, 10, 0, 100, 10, log.update))
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.mul_(0.5)
    after = gradients(sharded)
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    facts = {"alone": alone, "sharded": log, "same": same, "count": len(before)}
    (out / f"{ranks.rank}.json").write_text(json.dumps(facts))
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
