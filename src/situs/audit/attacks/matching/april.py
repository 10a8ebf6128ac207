"""APRIL's optimisation form (Lu et al., CVPR 2022, arXiv 2112.14087): matching, with the position table counted again.

The paper adds the cosine distance of ∂l/∂E_pos to the squared distance of all gradients, because that one gradient has
a row for each patch. Here it stands beside the distance of `matching`, table included, with a weight of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar

from torch import Tensor

from situs.audit.attacks.base import Knowledge, Ready, Refused, absent
from situs.audit.attacks.matching.attack import Matching
from situs.audit.attacks.matching.search import gradient_distances
from situs.audit.defences import Gradients
from situs.audit.stem import find_stem, require_stem
from situs.backbones.base import Backbone


class AprilOptimisation(Matching):
    """Gradient matching with a second, weighted term for ∂l/∂E_pos."""

    name: ClassVar[str] = "april-optimisation"
    about: ClassVar[str] = "gradient matching that counts the gradient of the position table a second time"

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        return absent(sent, [stem.table]) or super().prepare(backbone, sent, known)

    def measure(self, target: Gradients, backbone: Backbone, noise: float) -> Callable[[Gradients], Tensor]:
        table, plain = require_stem(backbone).table, super().measure(target, backbone, noise)
        sent = {table: target[table]}

        def distance(guess: Gradients) -> Tensor:
            rows = gradient_distances({table: guess[table]}, sent, "cosine").mean(dim=1)
            return plain(guess) + self.config.table * rows

        return distance
