"""MJP's config; Table 4's rows are `VARIANTS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from situs.config import Checked
from situs.errors import SitusError
from situs.limits import NotNegative, Share, Within
from situs.methods.mjp.dal import DalKind

PUBLISHED = "the method mjp-official is what the published code runs"
_PUBLISHED: dict[str, Any] = {
    "dal_depth": 3, "dal_mean": False, "dal_fit": True, "dal_warmup": 0, "dal_final": None, "start_epoch": 0,
    "chance": 1.0, "draw_per": "sample", "rule": "paper", "unknown_std": 0.02, "table_std": None,
    "decay_positions": False,
}  # fmt: skip
"""Fields of an earlier version, with their values by the paper."""


@dataclass(frozen=True)
class MJPConfig(Checked):
    """MJP's own settings; the defaults are the paper's row J."""

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        **{name: (value, PUBLISHED) for name, value in _PUBLISHED.items()},
        "dal_normalise": (False, "targets are indices"),
        "dal_components": (2, "there are as many as axes"),
        "epochs": (300, "the run's own number is taken"),
    }

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

    pixel_grid: tuple[int, int] = (14, 14)
    """Grid of the patches shuffled where the backbone has no tokens (ResNet)."""

    label_smoothing: Annotated[float, Within("[0, 1)")] = 0.1
    """Mass taken from the true class and spread over all (over yes and no of each class where a sample has any number
    of them); soft labels bring their own and are left as they are."""

    def check(self) -> None:
        if self.unknown and (not self.positions or self.shuffle == "spp"):
            allowed = "off where positions are off or all patches are shuffled"
            raise SitusError(field=("unknown", "positions", "shuffle"), value=self.unknown, allowed=allowed)
        if self.dal != "none" and not self.positions:
            raise SitusError(field=("dal", "positions"), value=self.dal, allowed="'none' without positions")


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
