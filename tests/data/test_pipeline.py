"""A modality that Situs does not have, from its source to a trained and resumed run: sequences of varying length.

What is written here is all that a new modality takes: a source, a pipeline and a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features, InputSpec, Stream, Taps
from situs.core.position import Positions, sincos
from situs.core.random import uniform
from situs.core.when import When
from situs.data.batch import Batch
from situs.data.loader import Loader
from situs.data.pipeline import Noise, Pipeline
from situs.data.sampler import BatchPlan, LengthBuckets
from situs.data.sources.base import Source
from situs.errors import BrokenSampleError, SitusError
from situs.methods import MAE, MP3, MAEConfig, Method, MP3Config, Supervised, SupervisedConfig
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.loop import fit
from situs.train.optim import OptimConfig

LONGEST, NOTES = 9, 12


class Melodies(Source):
    """Rising runs of notes, from 3 to 9 long, some faster than others: which is their class."""

    def __init__(self, count: int = 48, broken: tuple[int, ...] = ()) -> None:
        super().__init__("melodies", ("slow", "fast"), None, strict=False)
        self.broken = broken
        ids = torch.arange(count)
        self.lengths = 3 + (uniform(0, 0, ids, "length", ()) * (LONGEST - 2)).long()
        self.starts, self.labels = (uniform(0, 0, ids, "start", ()) * 4).long(), ids % 2

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise BrokenSampleError(f"melody {index}: is torn")
        steps = torch.arange(int(self.lengths[index])) * (1 + self.labels[index])
        return {"notes": (self.starts[index] + steps) % NOTES, "label": int(self.labels[index])}


class MelodyPipeline(Pipeline):
    """Padded to the longest in a worker; in training each is moved up by a few notes, on the device."""

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        notes = torch.stack([F.pad(s["notes"], (0, LONGEST - len(s["notes"]))) for s in samples])
        lengths = torch.tensor([len(s["notes"]) for s in samples])
        return {"notes": notes, "length": lengths, "label": torch.tensor([s["label"] for s in samples])}

    def noise(self, ids: Tensor, epoch: int) -> Noise:
        return {"up": uniform(5, epoch, ids, "melody.up", (1,))} if self.training else {}

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        notes = values["notes"] + (noise["up"] * 3).long() if noise else values["notes"]
        mask = torch.arange(LONGEST, device=ids.device) < values["length"][:, None]
        return Batch(notes % NOTES, ids, {"label": values["label"]}, mask)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, z: Tensor, keys: int | None, mask: Tensor | None) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.qkv(self.norm(z)).chunk(3, -1))
        seen = None if mask is None else mask[:, None, None, :keys]
        mixed = F.scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys], attn_mask=seen)
        z = z + self.proj(mixed.transpose(1, 2).flatten(2))
        return z + self.mlp(z)


class MelodyModel(Backbone):
    """Two blocks over notes; sin-cos positions; the mean of the notes for the classes."""

    refusals: ClassVar[dict[str, str]] = {"images": "it reads notes"}

    def __init__(self, dim: int = 16) -> None:
        parts = {"notes": nn.Embedding(NOTES, dim), "blocks": nn.ModuleList(Block(dim) for _ in range(2))}
        super().__init__(nn.ModuleDict({**parts, "head": nn.Linear(dim, 2)}), "melody", (LONGEST,), dim, 0, 2)
        self.input = InputSpec((LONGEST,), 1, (1,))
        self.register_buffer("table", sincos((LONGEST,), dim), persistent=False)

    def embed(self, x: Tensor) -> Tensor:
        return self.model["notes"](x)

    def positions(self, grid: tuple[int, ...] | None = None) -> Positions:
        self.own_grid(grid, "its sines were made for the longest melody")
        return Positions(table=self.table)

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        known = None if positions is None else positions.table
        return Stream(tokens if known is None else tokens + known.to(tokens.dtype), 0, mask=mask)

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        z = stream.z
        for number, block in enumerate(self.model["blocks"], start=1):
            z = block(z, keys, stream.mask)
            for tap in taps:
                tap(number, z)
        return z

    def finish(self, stream: Stream) -> Features:
        return Features(stream.z[:, :0], stream.z)

    def head(self, features: Features) -> Tensor:
        return self.model["head"](features.patches.mean(dim=1))


def loader(source: Melodies, *, rank: int = 0, world: int = 1, workers: int = 0, training: bool = True) -> Loader:
    order = LengthBuckets(source.lengths, 8, pool=3)
    plan = BatchPlan(len(source), 8, 3, rank, world, shuffle=training, drop_last=training, order=order)
    return Loader(MelodyPipeline(source, training=training), plan, torch.device("cpu"), workers)


def method(kind: str = "mp3") -> Method:
    torch.manual_seed(0)
    if kind == "mp3":
        return MP3(MelodyModel(), MP3Config(mask_ratio=0.4))
    return Supervised(MelodyModel(), SupervisedConfig())


def trained(
    folder: Path, kind: str, steps: int, *, stop: int | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights and last metrics of a run. stop: killed after so many steps, and resumed with everything new."""
    config = TrainConfig(epochs=None, max_steps=steps, precision="fp32", log_every=5, save_every=4, accumulate=2)
    optim = OptimConfig(lr=5e-3, warmup_epochs=0)
    if stop is not None:

        class Cut(Loader):
            def iterate(self, epoch: int = 0, start_step: int = 0):
                for number, batch in enumerate(super().iterate(epoch, start_step)):
                    if 6 * epoch + start_step + number == stop:
                        raise KeyError("killed")
                    yield batch

        cut = loader(Melodies())
        cut.__class__ = Cut
        with pytest.raises(KeyError, match="killed"):
            fit(method(kind), cut, config, optim, RunFolder.create(folder, dataclasses.asdict(config)), quiet=True)
    run = RunFolder.create(folder, dataclasses.asdict(config)) if stop is None else RunFolder.open(folder)
    model = method(kind)
    result = fit(model, loader(Melodies()), config, optim, run, quiet=True)
    return model.state_dict(), result.metrics


@pytest.mark.parametrize("kind", ["mp3", "supervised"])
def test_a_new_modality_is_trained_and_resumed_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole, metrics = trained(tmp_path / "whole", kind, 15)
    again, same = trained(tmp_path / "again", kind, 15, stop=10)
    assert whole.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert metrics == same


def test_it_learns(tmp_path: Path) -> None:
    _, early = trained(tmp_path / "early", "mp3", 5)
    _, late = trained(tmp_path / "late", "mp3", 100)
    assert late["loss"] < 0.8 * early["loss"]
    assert late["position_accuracy"] > 0.3


def test_workers_and_ranks_change_nothing() -> None:
    source = Melodies(broken=(5,))
    alone = list(loader(source).iterate(1, 2))
    assert len(alone) == 4
    assert [entry.index for entry in source.skipped] in ([], [5])
    ranks = [list(loader(Melodies(broken=(5,)), rank=rank, world=2).iterate(1, 2)) for rank in range(2)]
    for step, batch in enumerate(alone):
        assert batch.mask is not None
        parts = [share[step] for share in ranks]
        assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
        assert torch.equal(torch.cat([part.ids for part in parts]), batch.ids)
        assert torch.equal(torch.cat([part.mask for part in parts if part.mask is not None]), batch.mask)
    for one, two in zip(alone, loader(Melodies(broken=(5,)), workers=1).iterate(1, 2), strict=True):
        assert torch.equal(one.inputs, two.inputs) and torch.equal(one.targets["label"], two.targets["label"])
    seen = torch.cat([batch.ids for batch in loader(Melodies(broken=(5,)), training=False)])
    assert seen.tolist() == [n for n in range(48) if n != 5]


def test_padding_takes_no_part_in_mp3() -> None:
    """Slowly: each melody alone and unpadded, its context its own, and the mean over all real notes."""
    model = method().double()
    assert isinstance(model, MP3)
    batch = next(loader(Melodies()).iterate(0))
    assert batch.mask is not None and not batch.mask.all()
    draws = model.draw(batch, When(seed=1, epoch=0))
    output = model(batch, draws)
    total, right, count = 0.0, 0, 0
    for notes, mask, order in zip(batch.inputs, batch.mask, draws["order"], strict=True):
        length = int(mask.sum())
        own = order[:length]
        assert sorted(own.tolist()) == list(range(length))
        tokens = model.backbone.embed(notes[None, own])
        features = model.backbone.encode(tokens, None, context=length - int(0.4 * length + 1e-6))
        logits = model.position_head(features.patches[0])
        total += float(F.cross_entropy(logits, own, reduction="sum"))
        right, count = right + int((logits.argmax(-1) == own).sum()), count + length
    assert float(output.loss) == pytest.approx(total / count, rel=1e-6)  # the loss is reckoned in float32
    assert float(output.metrics["position_accuracy"]) == pytest.approx(right / count)
    garbage = batch._replace(inputs=torch.where(batch.mask, batch.inputs, NOTES - 1))
    assert torch.equal(model(garbage, draws).loss, output.loss)


def test_padding_is_no_token_to_droppos_and_pixels_are_needed_by_mae() -> None:
    backbone = MelodyModel()
    with pytest.raises(SitusError, match="images"):
        MAE(backbone, MAEConfig())
    from situs.methods import DropPos, DropPosConfig

    drop = DropPos(backbone, DropPosConfig(mask_ratio=0.0, decoder_width=16, decoder_heads=2))
    batch = next(loader(Melodies()).iterate(0))
    assert batch.mask is not None
    draws = drop.draw(batch, When(seed=0, epoch=0))
    garbage = batch._replace(inputs=torch.where(batch.mask, batch.inputs, NOTES - 1))
    assert torch.equal(drop(garbage, draws).loss, drop(batch, draws).loss)
    whole = batch._replace(mask=None)
    assert drop(whole, drop.draw(whole, When(seed=0, epoch=0))).loss.isfinite()
