"""The kinds of samples that there are. A new one is a file here and a line in `MODALITIES`."""

from __future__ import annotations

from situs.data.modalities.audio import Audio
from situs.data.modalities.base import Modality
from situs.data.modalities.image import Image
from situs.data.modalities.mask import Mask
from situs.data.modalities.objects import Objects
from situs.data.modalities.series import Series
from situs.data.modalities.text import Text
from situs.errors import SitusError

MODALITIES: tuple[Modality, ...] = (Image(), Mask(), Objects(), Audio(), Text(), Series())
KINDS: dict[str, Modality] = {each.kind: each for each in MODALITIES if "class" in each.targets}
"""kind -> the modality whose samples have a class each."""

TARGETS = tuple(dict.fromkeys(target for each in MODALITIES for target in each.targets))


def modality_of(kind: str | None, target: str = "class") -> Modality:
    """The modality of a kind of samples of which the target is known; without a kind the first that has the target."""
    for each in MODALITIES:
        if kind in (None, each.kind) and target in each.targets:
            return each
    able = [name for each in MODALITIES if each.kind == kind for name in each.targets]
    allowed = f"{' or '.join(able)}, which is known of {KINDS[kind or 'image'].things}"
    raise SitusError(field="target", value=target, allowed=allowed)
