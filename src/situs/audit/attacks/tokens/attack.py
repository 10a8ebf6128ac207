"""The attack on tokens: exact pixels without a gradient of positions.

What enters the layers of the first block lies in the row spaces of their gradients. For one image and a table that
tells every place apart that is one linear solve (`linear`); attention, labels and loss do not matter, nor whether the
table is trained, sent or fixed. How much stays open is counted beforehand (`count`) and told.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import FAILED, Attack, Fact, Knowledge, Ready, Recovery, Refused, absent
from situs.audit.attacks.spans import SOLVED, TELLING
from situs.audit.attacks.tokens.block import Block, NoBlockError
from situs.audit.attacks.tokens.count import Counts, count
from situs.audit.attacks.tokens.linear import Family, Misfit, Spans, family_of, misfit, read_spans, weigh
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import to_images
from situs.backbones.base import Backbone

BLURRED = "rounding and noise blur the row spaces so far that a wrong token passes like a right one: nothing is proved"


class TokenSpans(Attack):
    """The tokens of the first block, from the row spaces of its gradients."""

    name: ClassVar[str] = "tokens"
    about: ClassVar[str] = (
        "pixels from the row spaces of the first block's gradients: no gradient of positions is needed, and it does "
        "not matter whether they are learned or fixed"
    )
    closed_form: ClassVar[bool] = True

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        self._read: tuple[weakref.ref[Backbone], list[int], Block | str] | None = None

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        block = self._block(backbone)
        if isinstance(block, str):
            return Refused(block)
        if known.trained(backbone).hidden_share is not None:
            return Refused("patches whose places are hidden are what adaptive-mjp separates")
        layers, stem = block.layers, block.stem
        reads = (*layers.qkv, layers.proj, *layers.fc1)
        patches = (stem.weight,) if stem.weight in sent else ()
        if refused := absent(sent, reads):
            return refused
        counts = count(block, known.batch, bool(patches))
        if counts.full:
            return Refused(counts.full)
        if counts.open:
            return Refused(counts.reason)
        return Ready((*patches, *reads), _caveat(known))

    @torch.no_grad()
    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known, deadline = known or Knowledge(), deadline or Deadline()
        block = self._block(backbone)
        assert isinstance(block, Block), block
        images: list[Tensor] = []
        facts: list[dict[str, Fact]] = []
        for upload in uploads:
            if images and deadline.over():
                break
            counts = count(block, known.batch, block.stem.weight in upload)
            spans = read_spans(block, upload, counts, known.defence.noise_level(known.batch) > 0)
            found = solve(block, spans, counts)
            images.append(to_images(found.fixed.x.unsqueeze(0), block.backbone, block.stem)[0])
            facts.append(_facts(counts, misfit(block, spans, found.fixed)))
        return Recovery(torch.stack(images).float(), facts)

    def _block(self, backbone: Backbone) -> Block | str:
        """What the weights tell, or the reason why nothing; read once for as long as they stay."""
        versions = [p._version for p in backbone.parameters()]
        if self._read is None or self._read[0]() is not backbone or self._read[1] != versions:
            try:
                with torch.no_grad():
                    found: Block | str = Block(deepcopy(backbone).double().requires_grad_(False).eval())
            except NoBlockError as error:
                found = str(error)
            self._read = (weakref.ref(backbone), versions, found)
        return self._read[2]


def solve(block: Block, spans: Spans, counts: Counts) -> Family:
    """The tokens of all places, solved twice: the first time tells what the equations are worth beside each other."""
    found = family_of(block, spans, counts.open)
    return family_of(block, spans, counts.open, weigh(block, spans, found.fixed))


def _caveat(known: Knowledge) -> str | None:
    if known.local_steps > 1:
        return (
            f"{known.local_steps} local steps: the weights move between them, and the first step's gradient is not sent"
        )
    return None


def _facts(counts: Counts, found: Misfit) -> dict[str, Fact]:
    """residual: how many times more of the tokens sticks out than rounding and noise explain, over all places."""
    ratio = float(found.worst.square().mean().sqrt())
    fits = ratio <= SOLVED and bool((found.share <= TELLING).all())
    return {
        "open_directions": counts.open,
        "patches_that_fit": int(((found.worst <= SOLVED) & (found.share <= TELLING)).sum()),
        "residual": ratio,
        "expected_residual": 1.0,
        "fits": fits,
        "proof": "every token lies in the row spaces of the first block's gradients up to rounding" if fits else None,
        "verdict": None if fits else BLURRED if ratio <= SOLVED else FAILED,
    }
