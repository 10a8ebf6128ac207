"""MJP's config: every deviation between its text and its published code is a field; Table 4's rows are `VARIANTS`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from situs.config import Checked
from situs.core.masking import BlockRule
from situs.errors import SitusError
from situs.limits import Count, Natural, NotNegative, Share, Within
from situs.methods.base import epoch_share
from situs.methods.mjp.dal import DalKind


@dataclass(frozen=True)
class MJPConfig(Checked):
    """MJP's own settings; the defaults are the paper's row J."""

    mask_ratio: Share = 0.03
    """γ: share of the patches that are shuffled. Paper: .03 for accuracy, up to .27 for consistency."""

    shuffle: Literal["none", "jigsaw", "spp"] = "jigsaw"
    """jigsaw: the masked patches among themselves (JP). spp: all patches, and the pixels within them (SPP)."""

    positions: bool = True
    """Whether the model is told any place at all; False is row B."""

    unknown: bool = True
    """Whether masked places get one learned vector E_unk instead of their own (UNK)."""

    index: Literal["none", "place", "origin"] = "none"
    """A second learned table (IDX): by the place a patch stands at (published code; on an unshuffled sample it adds
    nothing a table could not hold), or by the place it came from (the other reading of "global index")."""

    dal: DalKind = "nonlinear"
    """DAL's regressor: pca (no weights), linear (LN), nonlinear (NLN) or none."""

    dal_weight: NotNegative = 0.01
    """λ: weight of the DAL loss."""

    dal_depth: Count = 3
    """Linear layers of the nonlinear regressor, ReLU between them; the published code has 2."""

    dal_mean: bool = False
    """Mean over row and column instead of their sum ‖·‖₁, half of it: what the published code runs."""

    dal_normalise: bool = False
    """Targets in [0, 1] on each axis instead of 0-based indices."""

    dal_components: Annotated[int, Within(">= 2")] = 2
    """Principal components of dal="pca"."""

    dal_fit: bool = True
    """dal="pca": bring the components to the grid by least squares. The published code compares them as they are, and
    takes them from the unmasked rows alone."""

    dal_warmup: Natural = 0
    """Epochs over which λ rises from 0 to dal_weight; the published code takes 20."""

    dal_final: float | None = None
    """Where λ ends, by a cosine over the epochs after the warm-up; None is dal_weight. Published code: half."""

    start_epoch: Natural = 0
    """First epoch in which patches are shuffled; the published code starts after the 20 of its warm-up."""

    chance: Share = 1.0
    """Chance that a draw shuffles at all; the published code shuffles half of the batches."""

    draw_per: Literal["sample", "batch"] = "sample"
    """One mask, shuffle and chance a sample, or one for the batch, named by its first sample (each rank and each
    micro-batch has its own): what the published code runs."""

    rule: BlockRule = "paper"
    """How blocks are laid: γ exactly (paper), or as an upper bound (official)."""

    unknown_std: NotNegative = 0.02
    """Spread of E_unk at the start; 1 in the published code."""

    table_std: float | None = None
    """Fills the table anew with this spread, CLS's own row too; None leaves it as the backbone made it (trunc-normal
    .02) or loaded it. 1 in the published code."""

    decay_positions: bool = False
    """Whether weight decay acts on the table and E_unk: a slip of the published code."""

    epochs: Count = 300
    """The run's epochs, for dal_final: a step knows its epoch and its share of the run, not this."""

    pixel_grid: tuple[int, int] = (14, 14)
    """Grid of the patches shuffled where the backbone has no tokens (ResNet)."""

    label_smoothing: Annotated[float, Within("[0, 1)")] = 0.1
    """Mass taken from the true class and spread over all (over yes and no of each class where a sample has any number
    of them); soft labels bring their own and are left as they are."""

    def check(self) -> None:
        if self.dal_final is not None and self.dal_warmup >= self.epochs:
            raise SitusError(field=("dal_warmup", "epochs"), value=self.dal_warmup, allowed=f"in [0, {self.epochs})")
        if self.unknown and (not self.positions or self.shuffle == "spp"):
            allowed = "off where positions are off or all patches are shuffled"
            raise SitusError(field=("unknown", "positions", "shuffle"), value=self.unknown, allowed=allowed)
        if self.dal != "none" and not self.positions:
            raise SitusError(field=("dal", "positions"), value=self.dal, allowed="'none' without positions")

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
