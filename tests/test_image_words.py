"""Above `backbones` and `data` a sample is a sample: where a file still says image or pixel, the reason is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.core.when import When
from situs.methods import METHODS, Batch, create_method

SRC = Path(__file__).parents[1] / "src" / "situs"

WORD = re.compile(r"image(?!net)|pixel|\bheight\b|\bchannels?\b", re.IGNORECASE)

KEPT = {
    "methods/detection.py": "finds objects in images",
    "methods/mae.py": "guesses the numbers of a patch, the paper's pixels",
    "methods/mjp.py": "SPP shuffles pixels, and a network without tokens has a grid of them",
    "methods/retired.py": "a setting about pixels that is gone",
    "methods/mp3.py": "what the paper does on images and in speech",
    "train/export/card.py": "the model card of an image model",
    "train/export/write.py": "the files of timm and transformers, whose input is an image",
    "train/log.py": "a key of metrics.jsonl",
    "train/loop.py": "keys of metrics.jsonl and of a checkpoint's state",
    "train/nan.py": "a key of steps that were saved before",
    "train/inputs.py": "the size of a model's images, and what it takes in place of them",
    "train/run.py": "the data of a run, images or clips; any number of classes is for images alone",
    "evaluate/finetune.py": "channels, a field of the data's config; of clips always 1",
    "evaluate/probe/position.py": "the height of a grid of places, 1 of frames in a row",
    "evaluate/segments/windows.py": "windows of an image whose pixels have classes",
    "methods/segmentation.py": "channels of its convolutions; the class of every pixel",
    "methods/upernet.py": "channels of its convolutions",
    "methods/pyramid.py": "the same, and pixels between places",
    "methods/regions.py": "regions of images",
    "evaluate/adapt/__init__.py": "images or clips that a model is adapted to",
    **{f"evaluate/adapt/{name}.py": "the same" for name in ("bench", "plan", "result", "run", "ways")},
    "evaluate/by_class.py": "its example is one of images",
    "evaluate/ending.py": "the same",
    "evaluate/predict.py": "images, clips or sentences",
    "evaluate/consistency.py": "a convolutional network's patches are pixels",
    "evaluate/probe/linear.py": "a key of its JSON",
    "evaluate/probe/segments.py": "a mask gives each pixel its class",
    "evaluate/objects/found.py": "objects in the pixels of an image's file",
    "evaluate/objects/measure.py": "the same",
    "evaluate/objects/scores.py": "the same",
    "evaluate/segments/__init__.py": "the same",
    "evaluate/segments/measure.py": "the same",
    "evaluate/segments/scores.py": "the same",
}
"""file -> why it speaks of them."""


def test_only_these_files_speak_of_images() -> None:
    found = set()
    for package in ("methods", "train", "evaluate"):
        for file in sorted((SRC / package).rglob("*.py")):
            name = file.relative_to(SRC).as_posix()
            if not name.startswith(("evaluate/robustness/", "evaluate/corruptions/")):
                text = file.read_text(encoding="utf-8")
                found |= {name} if WORD.search(text) else set()
    assert found == KEPT.keys()


SMALL: dict[str, dict[str, Any]] = {
    "mae": {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1},
    "droppos": {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1},
}


@pytest.mark.parametrize("patch", [(8, 1), (4, 3)])
@pytest.mark.parametrize("name", ["mp3", "droppos", "mae", "mjp", "supervised"])
def test_every_method_learns_from_clips(name: str, patch: tuple[int, int]) -> None:
    """One channel, frames in a row or squares of a spectrogram: a loss, and a gradient for the embedding."""
    torch.manual_seed(0)
    positions = "learned" if name == "mjp" else "sincos"
    classes = 3 if "label" in METHODS[name].needs_targets else 0
    backbone = small_vit((8, 12), patch_size=patch, in_chans=1, positions=positions, depth=1, num_classes=classes)  # type: ignore[arg-type]
    method = create_method(name, backbone, METHODS[name].Config(**SMALL.get(name, {})))
    batch = Batch(torch.randn(3, 1, 8, 12), torch.arange(3), {"label": torch.arange(3)})
    loss = method(batch, method.draw(batch, When(seed=0, epoch=0))).loss
    loss.backward()
    assert 0.1 < float(loss.detach()) < 10
    assert float(backbone.model.patch_embed.proj.weight.grad.abs().sum()) > 0
