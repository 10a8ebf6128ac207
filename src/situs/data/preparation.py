"""How a model's samples are prepared, as timm, transformers, ONNX and Situs itself write it down: one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from situs.data.config import DataConfig
from situs.data.modalities import MODALITIES
from situs.data.modalities.base import Modality, ModelInput


@dataclass(frozen=True)
class Preparation:
    """How samples become inputs. data: the config that prepares them, None if unknown; its paths are never exported."""

    data: DataConfig | None = None

    @property
    def modality(self) -> Modality:
        """What the samples are; images where it is unknown."""
        return MODALITIES[0] if self.data is None else self.data.modality

    @property
    def multi_label(self) -> bool:
        """Whether a sample has any number of the classes."""
        return self.data is not None and self.data.multi_label

    @property
    def tokeniser(self) -> str | None:
        """The folder whose tokeniser turns sentences into ids."""
        return None if self.data is None or not self.modality.ids else self.data.text.tokeniser

    @property
    def scale(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of each channel of images; empty for other modalities."""
        return self.data.normalisation if self.data is not None and self.modality.pixels else ((), ())

    @property
    def _crop(self) -> float:
        return 1.0 if self.data is None else self.data.crop_share

    def to_timm(self, original: Mapping[str, Any], channels: int) -> dict[str, Any]:
        """Entries of timm's `pretrained_cfg`. original: those that the model came with."""
        mean, std = self.scale
        for_images = self.data is None or self.modality.pixels  # the original entries are for images
        keeps = {name: for_images and len(original[name]) == channels for name in ("mean", "std")}
        mean = mean or (original["mean"] if keeps["mean"] else [0.0] * channels)
        std = std or (original["std"] if keeps["std"] else [1.0] * channels)
        return {"mean": list(mean), "std": list(std), "crop_pct": self._crop}

    def to_hf(self, shape: tuple[int, ...], channels: int) -> dict[str, Any]:
        """transformers' preprocessor_config.json."""
        (height, width), (mean, std) = shape, self.scale
        resized = [round(side / self._crop) for side in shape]
        return {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": resized[0]} if height == width else {"height": resized[0], "width": resized[1]},
            "crop_size": {"height": height, "width": width},
            "image_mean": list(mean or [0.0] * channels),
            "image_std": list(std or [1.0] * channels),
            "do_convert_rgb": channels == 3,
        }

    def to_onnx(self) -> dict[str, Any]:
        """The input's entries in model.json."""
        mean, std = self.scale
        return {"mean": list(mean), "std": list(std), "crop": self._crop} if mean else self.to_situs()

    def to_situs(self) -> dict[str, Any]:
        """Situs' own entries: the modality's table."""
        modality = self.modality
        return {} if self.data is None or not modality.table else {modality.table: modality.prepared(self.data)}

    def facts(self, shape: tuple[int, ...] | None, channels: int) -> list[str]:
        """Lines of a model card."""
        return self.modality.facts(self.data, shape, channels)

    @classmethod
    def read(
        cls,
        model: ModelInput,
        timm: Mapping[str, Any],
        situs: Mapping[str, Any],
        *,
        multi_label: bool = False,
        path: str = "",
    ) -> Preparation:
        """Read from an export. timm: its `pretrained_cfg`. situs: what `to_situs` wrote."""
        if not model.words and not model.channels:
            return cls()
        able = [modality for modality in MODALITIES if modality.ids == bool(model.words)]
        modality = next((modality for modality in able if modality.table in situs), able[0])
        data = DataConfig(path)
        if not model.words:
            size = model.size or tuple(timm.get("input_size", (3, 224, 224))[1:])
            mean, std = (tuple(timm.get(key, ())) for key in ("mean", "std"))
            fits = len(mean) == len(std) == model.channels
            data = DataConfig(
                path=path,
                img_size=(size[0], size[1]),
                channels=model.channels,
                crop_share=min(1.0, timm.get("crop_pct") or 1.0),
                mean=mean if fits else (),
                std=std if fits else (),
                multi_label=multi_label,
            )
        return cls(modality.from_prepared(data, dict(situs.get(modality.table, {})), model))


def timm_words(processor: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' preprocessor_config.json as entries of timm's `pretrained_cfg`."""
    sizes = (processor.get(key) for key in ("size", "crop_size"))
    size, crop = (sides if isinstance(sides, Mapping) else {} for sides in sizes)
    resized, cropped = size.get("shortest_edge", size.get("height")), crop.get("height")
    share = cropped / resized if processor.get("do_center_crop", True) and resized and cropped else 1.0
    return {"mean": processor.get("image_mean") or (), "std": processor.get("image_std") or (), "crop_pct": share}
