"""The usual augmentations of images, by name."""

from __future__ import annotations

from situs.data.augment.recipes import NONE, AugmentConfig

RECIPES: dict[str, AugmentConfig] = {
    "none": NONE,
    "crop": AugmentConfig(scale=(0.2, 1.0)),
    "deit-pretrain": AugmentConfig(operations=2),
    "deit": AugmentConfig(operations=2, erasing=0.25, mixup=0.8, cutmix=1.0, label_smoothing=0.1, repeated=3),
    "cifar": AugmentConfig(crop="pad", pad=4),
    "cifar-deit": AugmentConfig(
        crop="pad", pad=4, operations=2, erasing=0.25, mixup=0.8, cutmix=1.0, label_smoothing=0.1
    ),
}
recipe = RECIPES.__getitem__
