"""The GPU minutes of studies against the rates of docs/results/speed.md: images times epochs over images per second."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from situs.config import from_dict
from situs.measure.finetune import FinetuneConfig
from situs.studies.form import PAPER, VERBS, Job, Study
from situs.studies.plan import Jobs, data_of, planned, recipe_of, study_names
from situs.train.run import RunConfig

RATES = {
    "small": {"supervised": 27679, "mjp": 27067, "mp3": 27423, "mae": 18400, "droppos": 30000, "part": 28350},
    "base": {
        "supervised": 3874,
        "mjp": 3855,
        "mp3": 4457,
        "mae": 5643,
        "droppos": 6032,
        "part": 4457 * 28350 / 27423,
        "segmentation": 982,
        "detection": 690,
    },
}
"""Images a second on one H200: ViT-S/4 at 32 px and batch 256, ViT-B/16 at 224 px. DropPos on ViT-S and PART on
ViT-B are not measured (PART: as much faster than MP3 as on ViT-S);
segmentation and detection are, at 512 and 1,024 px (188 and 33 images per second), and stand here by their patches."""

SMALL_AT_224 = 11000 / 3874
"""ViT-S/16 over ViT-B/16, as the studies take it; Swin-T and ResNet-50 as half of that, ViT-L by its operations."""

IMAGES = {"cifar10": 50_000, "cars": 8_144, "celeba": 162_770, "tiny-imagenet": 100_000, "cifar100": 50_000}
IMAGES |= {"photographs": 1_814, "pets": 814}
ELSE = ("mjp-table2", "mjp-table5", "mjp-table10", "mp3-table5", "mp3-table6", "st-", "lock", "text-")
"""Where evaluations, or attacks on a CPU, take as long as the trainings; models of speech and text, of other rates; and
tiny models on embedded images."""


def rate(config: RunConfig) -> float:
    """Images a second of a training, by its number of patches."""
    side = config.data.img_size if isinstance(config.data.img_size, int) else 224
    small = side <= 64 and "small" in config.backbone.name
    patch = config.backbone.patch_size if isinstance(config.backbone.patch_size, int) else 4 if small else 16
    known = RATES["small" if small else "base"][config.method_name]
    if "large" in config.backbone.name:
        return known / 3.4
    if "swin" in config.backbone.name or "resnet" in config.backbone.name:
        return known * SMALL_AT_224 / 2 * (224 / side) ** 2
    known *= SMALL_AT_224 if not small and "small" in config.backbone.name else 1
    return known * (64 if small else 196) / (side // patch) ** 2


def config_of(job: Job, jobs: Jobs) -> RunConfig:
    """A training's config; a fine-tuning has the model of its pretraining."""
    kind = FinetuneConfig if job.verb in ("finetune", "split train") else RunConfig
    config = from_dict(kind, recipe_of(job, kind))
    if job.verb == "finetune" and job.models:
        config = replace(config, backbone=config_of(jobs[job.models[0]], jobs).backbone)
    return config


def minutes(study: Study, scale: str) -> float:
    """Of all trainings of a study."""
    jobs, total = planned(study, scale), 0.0
    for job in (job for job in jobs.values() if VERBS[job.verb].trains):
        config, data = config_of(job, jobs), data_of(study, job)[0]
        images = IMAGES.get(data, 50_000 if job.preset.startswith("cifar") else 1_281_167)
        steps = config.train.max_steps or math.inf
        total += min((config.train.epochs or math.inf) * images, steps * (config.data.batch or 256)) / rate(config)
    return total / 60


@pytest.mark.parametrize("name", [name for name in study_names() if not name.startswith(ELSE)])
def test_the_minutes_of_a_study_follow_from_measured_rates(name: str, every: dict[str, Study]) -> None:
    study = every[name]
    if not study.runs or not (need := minutes(study, PAPER)):
        return
    cost = study.cost.minutes[PAPER]
    count = len(planned(study))  # half a minute of compiling and evaluation each
    assert 0.7 * need < cost < 1.5 * (need + count / 2), f"{need:.0f} minutes of training, and its cost is {cost:g}"
