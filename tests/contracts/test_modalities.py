"""What every modality must keep to on its way from a set to batches: nobody who reads a sample changes it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import write_folder

sys.path.append(str(Path(__file__).parent.parent / "golden"))
import sets

from situs.config import from_dict
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader

STRONG = AugmentConfig(operations=2, jitter=0.3, erasing=0.25, label_smoothing=0.1)
KINDS: dict[str, tuple[dict[str, Any], AugmentConfig]] = {
    "images": ({"img_size": 16, "resident": "always"}, STRONG),
    "photos": ({"img_size": 16}, STRONG),
    "masks": (
        {"img_size": 24, "target": "mask", "masks": {"first": 1, "void": [0]}},
        AugmentConfig(crop="scaled", jitter=0.3),
    ),
    "objects": ({"img_size": 32, "target": "objects"}, AugmentConfig(crop="fitted", scales=(0.5, 2.0), jitter=0.3)),
    "clips": ({"audio": {"seconds": 0.2, "mels": 12, "coefficients": 12}, "resident": "never"}, AugmentConfig()),
    "series": ({"kind": "series", "series": {"steps": 32}}, AugmentConfig()),
    "sentences": ({"kind": "text", "text": {"longest": 16}}, AugmentConfig()),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    sets.write_images(root / "images", (16,), train=12)
    sets.write_images(root / "photos", (18, 25, 33), train=12)
    sets.write_masks(root / "masks", train=9)
    sets.write_objects(root / "objects", train=9)
    sets.write_clips(root / "clips")
    sets.write_series(root / "series", count=12)
    sets.write_sentences(root / "sentences", train=12)
    write_folder(root / "words", "bert", width=8, num_attention_heads=2)
    return root


def loader(
    world: Path, kind: str, *, training: bool = True, rank: int = 0, world_size: int = 1, **fields: Any
) -> Loader:
    given, augment = KINDS[kind]
    table = {"path": str(world / kind), "batch": 4, "workers": 0, **given}
    if kind == "sentences":
        table["text"] = {**table["text"], "tokeniser": str(world / "words")}
    config = replace(from_dict(DataConfig, table), **fields)
    return make_loader(config, augment if training else None, rank=rank, world=world_size)


def rows(batches: list[Batch]) -> dict[int, list[torch.Tensor]]:
    """What a batch holds of each sample, without what fills it up."""
    held = {}
    for batch in batches:
        for at, number in enumerate(batch.ids.tolist()):
            real = slice(None) if batch.mask is None else batch.mask[at]
            targets = [value[at] for name, value in sorted(batch.targets.items())]
            held[number] = [batch.inputs[at][real], *targets]
    return held


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """As far as both are filled up: objects of an image stand before what pads them."""
    for a, b in zip(one, other, strict=True):
        sides = tuple(slice(0, min(x, y)) for x, y in zip(a.shape, b.shape, strict=True))
        if not torch.allclose(a[sides].double(), b[sides].double(), rtol=0, atol=2e-5):
            return False
    return True


def agree(one: list[Batch], other: list[Batch]) -> bool:
    here, there = rows(one), rows(other)
    return [*here] == [*there] and all(same(here[number], there[number]) for number in here)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_ranks_and_resume_change_nothing(kind: str, world: Path) -> None:
    whole = [*loader(world, kind).iterate(1)]
    assert len(whole) >= 2
    workers = loader(world, kind, workers=2)
    assert agree(whole, [*workers.iterate(1)])
    workers.close()
    assert agree(whole[1:], [*loader(world, kind).iterate(1, 1)])
    ranks = [[*loader(world, kind, rank=rank, world_size=2).iterate(1)] for rank in range(2)]
    assert agree(whole, [part for step in zip(*ranks, strict=True) for part in step])
    assert [*rows(whole)] != [*rows([*loader(world, kind).iterate(2)])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_in_any_batch(kind: str, world: Path) -> None:
    made = loader(world, kind)
    for number, held in rows([*made.iterate(1)]).items():
        part = made.pipeline.read(1, [number])
        moved = made.pipeline.join([part.values])
        alone = made.pipeline.finish(moved, part.ids, made.pipeline.noise(part.ids, 1))
        assert same(rows([alone])[number], held)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_sees_every_sample_once_in_order(kind: str, world: Path) -> None:
    made = loader(world, kind, training=False)
    ids = torch.cat([batch.ids for batch in made])
    assert ids.tolist() == [*range(len(made.source))]
    assert made.shown(next(made.iterate()).inputs).dim() == 4 if kind != "sentences" else True


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_takes_about_what_its_pipeline_says(kind: str, world: Path) -> None:
    """By which workers are held back, and small batches are joined on a GPU."""
    pipeline = loader(world, kind).pipeline
    part = pipeline.read(1, [0, 1, 2, 3])
    held = sum(value.nbytes for name, value in part.values.items() if name != "label") / len(part.ids)
    assert held / 1.6 < pipeline.row_bytes < 1.6 * held
