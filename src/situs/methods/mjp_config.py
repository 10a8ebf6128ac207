"""MJP's config: every deviation between its text and its published code is a field; Table 4's rows are `VARIANTS`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from situs.config import check_choices, check_range, require
from situs.core.masking import BlockRule
from situs.methods.mjp_dal import DalKind
from situs.methods.schedule import epoch_share


@dataclass(frozen=True)
class MJPConfig:
    """MJP's own settings; the defaults are the paper's row J."""

    mask_ratio: float = 0.03
    """γ: share of the patches that are shuffled. Paper: .03 for accuracy, up to .27 for consistency."""

    shuffle: Literal["none", "jigsaw", "spp"] = "jigsaw"
    """jigsaw: the masked patches among themselves (JP). spp: all patches, and the pixels within them (SPP)."""

    positions: bool = True
    """Whether the model is told any place at all; False is row B."""

    unknown: bool = True
    """Whether masked places get one learned vector E_unk instead of their own (UNK)."""

    index: Literal["none", "place", "origin"] = "none"
    """A second learned table (IDX): by the place a patch stands at (published code; on an unshuffled image it adds
    nothing a table could not hold), or by the place it came from (the other reading of "global index")."""

    dal: DalKind = "nonlinear"
    """DAL's regressor: pca (no weights), linear (LN), nonlinear (NLN) or none."""

    dal_weight: float = 0.01
    """λ: weight of the DAL loss."""

    dal_depth: int = 3
    """Linear layers of the nonlinear regressor, ReLU between them; the published code has 2."""

    dal_mean: bool = False
    """Mean over row and column instead of their sum ‖·‖₁, half of it: what the published code runs."""

    dal_normalise: bool = False
    """Targets in [0, 1] on each axis instead of 0-based indices."""

    dal_components: int = 2
    """Principal components of dal="pca"."""

    dal_fit: bool = True
    """dal="pca": bring the components to the grid by least squares. The published code compares them as they are, and
    takes them from the unmasked rows alone."""

    dal_warmup: int = 0
    """Epochs over which λ rises from 0 to dal_weight; the published code takes 20."""

    dal_final: float | None = None
    """Where λ ends, by a cosine over the epochs after the warm-up; None is dal_weight. Published code: half."""

    start_epoch: int = 0
    """First epoch in which patches are shuffled; the published code starts after the 20 of its warm-up."""

    chance: float = 1.0
    """Chance that a draw shuffles at all; the published code shuffles half of the batches."""

    draw_per: Literal["sample", "batch"] = "sample"
    """One mask, shuffle and chance a sample, or one for the batch, named by its first sample (each rank and each
    micro-batch has its own): what the published code runs."""

    rule: BlockRule = "paper"
    """How blocks are laid: γ exactly (paper), or as an upper bound (official)."""

    unknown_std: float = 0.02
    """Spread of E_unk at the start; 1 in the published code."""

    table_std: float | None = None
    """Fills the table anew with this spread, CLS's own row too; None leaves it as the backbone made it (trunc-normal
    .02) or loaded it. 1 in the published code."""

    decay_positions: bool = False
    """Whether weight decay acts on the table and E_unk: a slip of the published code."""

    epochs: int = 300
    """The run's epochs, for dal_final: a step knows its epoch and its share of the run, not this."""

    pixel_grid: tuple[int, int] = (14, 14)
    """Grid of the patches shuffled where the backbone has no tokens (ResNet)."""

    label_smoothing: float = 0.1
    """Mass taken from the true class and spread over all; soft labels bring their own and are left as they are."""

    def __post_init__(self) -> None:
        check_choices(self, "--method")
        check_range("mask_ratio", self.mask_ratio, 0, 1, flag="--method.mask-ratio")
        check_range("label_smoothing", self.label_smoothing, 0, 1, flag="--method.label-smoothing", high_open=True)
        check_range("chance", self.chance, 0, 1, flag="--method.chance")
        check_range("dal_depth", self.dal_depth, 1, flag="--method.dal-depth")
        check_range("dal_components", self.dal_components, 2, flag="--method.dal-components")
        check_range("epochs", self.epochs, 1, flag="--method.epochs")
        for name in ("dal_weight", "unknown_std", "dal_warmup", "start_epoch"):
            check_range(name, getattr(self, name), 0, flag=f"--method.{name.replace('_', '-')}")
        if self.dal_final is not None:
            check_range("dal_warmup", self.dal_warmup, 0, self.epochs, flag="--method.dal-warmup", high_open=True)
        needs = "off where positions are (--method.positions) or all patches are shuffled (--method.shuffle)"
        hidden = self.positions and self.shuffle != "spp"
        require(hidden or not self.unknown, "unknown", self.unknown, needs, "--method.unknown")
        require(self.positions or self.dal == "none", "dal", self.dal, "'none' without positions", "--method.dal")

    @staticmethod
    def paper() -> MJPConfig:
        """What the text says."""
        return MJPConfig()

    @staticmethod
    def official() -> MJPConfig:
        """What the published code runs for 300 epochs."""
        return MJPConfig(
            dal_depth=2,
            dal_mean=True,
            dal_fit=False,
            dal_warmup=20,
            dal_final=0.005,
            start_epoch=20,
            chance=0.5,
            draw_per="batch",
            rule="official",
            unknown_std=1.0,
            table_std=1.0,
            decay_positions=True,
        )


_PLAIN = MJPConfig(shuffle="none", unknown=False, dal="none")
VARIANTS: dict[str, MJPConfig] = {
    "A": _PLAIN,
    "B": replace(_PLAIN, positions=False),
    "C": replace(_PLAIN, shuffle="spp"),
    "D": replace(_PLAIN, dal="nonlinear"),
    "E": replace(_PLAIN, shuffle="jigsaw"),
    "F": replace(_PLAIN, shuffle="jigsaw", index="place"),
    "G": replace(_PLAIN, shuffle="jigsaw", unknown=True),
    "H": replace(_PLAIN, shuffle="jigsaw", unknown=True, dal="pca"),
    "I": replace(_PLAIN, shuffle="jigsaw", unknown=True, dal="linear"),
    "J": MJPConfig(),
}
"""Table 4: A plain, B without positions, C SPP, D DAL, E JP, F + IDX, G + UNK, H to J + DAL (PCA, LN, NLN)."""


def dal_weight_at(config: MJPConfig, epoch: int, progress: float) -> float:
    """λ of an epoch: constant (paper), or risen linearly over the warm-up and then fallen by half a cosine."""
    if epoch < config.dal_warmup:
        # The last epoch of the warm-up has the whole weight, as in the published code.
        return config.dal_weight * epoch / max(config.dal_warmup - 1, 1)
    if config.dal_final is None:
        return config.dal_weight
    done = epoch_share(config.epochs, epoch, progress) * config.epochs
    fall = 0.5 * (1.0 + math.cos(math.pi * (done - config.dal_warmup) / (config.epochs - config.dal_warmup)))
    return config.dal_final + (config.dal_weight - config.dal_final) * fall
