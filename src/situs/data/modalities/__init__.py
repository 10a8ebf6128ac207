"""The kinds of samples. A new one is a file here and a line in `MODALITIES`."""

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
KINDS: dict[str, Modality] = {modality.kind: modality for modality in MODALITIES if "class" in modality.targets}
"""kind -> the modality whose samples have a class each."""

TARGETS = tuple(dict.fromkeys(target for modality in MODALITIES for target in modality.targets))


def modality_of(kind: str | None, target: str = "class") -> Modality:
    """The modality of a kind of samples with this target; without a kind the first that has the target."""
    for modality in MODALITIES:
        if kind in (None, modality.kind) and target in modality.targets:
            return modality
    able = [name for modality in MODALITIES if modality.kind == kind for name in modality.targets]
    allowed = f"{' or '.join(able)} for {KINDS[kind or 'image'].things}"
    raise SitusError(field="target", value=target, allowed=allowed)
