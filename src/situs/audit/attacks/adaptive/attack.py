"""The attack on MJP by an informed attacker: the mask, the shown patches, the hidden patches, and then their order.

1. Rows of ∂l/∂E_pos that are all zero, or only the noise that a defence adds, are the hidden places. DAL changes only
   the rows of shown places, and its gradient is known: it is subtracted.
2. Algebra gives every patch up to m - 1 directions that all patches share (`algebra`).
3. The row spaces of the first block's gradients give the rest, for shown and hidden patches alike (`solve`), as long
   as there are fewer tokens than channels.
4. The gradients do not depend on the order of the hidden patches, but their borders do: `ordering` solves the puzzle.

Where no row is zero, nothing is hidden and `patchembed` is all that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.adaptive.algebra import Partly, separate
from situs.audit.attacks.adaptive.ordering import order_hidden
from situs.audit.attacks.adaptive.solve import Effort, FirstBlock, TokenFit, solve_directions
from situs.audit.attacks.base import Attack, Fact, Knowledge, Ready, Recovery, Refused, known_numbers
from situs.audit.attacks.patchembed.attack import PatchEmbedding, patch_rows, see_through
from situs.audit.attacks.patchembed.equations import judge, whiten
from situs.audit.attacks.spans import SOLVED
from situs.audit.attacks.tokens.block import Block, first_matrices, read_block
from situs.audit.client import hidden_places
from situs.audit.deadline import Deadline
from situs.audit.defences import UNKNOWN, Gradients
from situs.audit.stem import Stem, flat_weight, require_stem, table_rows
from situs.backbones.base import Backbone
from situs.methods.base import Method
from situs.methods.measured import HidesPlaces
from situs.methods.mp3 import MP3


@dataclass(frozen=True)
class AdaptiveConfig(Effort):
    """How long it tries for each image, and what helps with the order."""

    predictor: MP3 | None = None
    """A trained MP3, which predicts places: used beside the borders."""


class AdaptiveMJP(Attack):
    """The mask, the shown patches, the hidden ones, and their order."""

    needs: ClassVar[str] = "as patchembed, and gradients of the first block; one image"
    measured: ClassVar[str] = "study mjp-table5"
    knows: ClassVar[str] = "MJP with its weights (E_unk, DAL); optionally an MP3 that predicts places"
    difference: ClassVar[str] = "answers MJP's Table 5 (Ren et al., CVPR 2023), whose attacker does not know MJP"
    name: ClassVar[str] = "adaptive-mjp"
    about: ClassVar[str] = (
        "knows MJP: the mask from rows without gradient, all patches from the patch embedding's gradient and the row "
        "spaces of the first block's, the hidden ones' order from their borders"
    )
    closed_form: ClassVar[bool] = True
    separates_hidden: ClassVar[bool] = True
    slow: ClassVar[bool] = True
    Config: ClassVar[type[AdaptiveConfig]] = AdaptiveConfig
    config: AdaptiveConfig

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        plain = PatchEmbedding().prepare(backbone, sent, known)
        if isinstance(plain, Refused):
            return plain
        caveat, tokens = plain.caveat, backbone.num_tokens + backbone.num_prefix
        if caveat is None and tokens >= backbone.dim:
            caveat = (
                f"{tokens} tokens are not fewer than {backbone.dim} channels: most row spaces of the first block "
                "are full, so patches that the equations do not determine are guessed by smoothness"
            )
        return Ready((*(plain.reads or ()), *first_matrices(backbone)), caveat)

    @torch.no_grad()
    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known, deadline = known or Knowledge(), deadline or Deadline()
        stem, method = require_stem(backbone), known.trained(backbone)
        precise, block = deepcopy(backbone).double().requires_grad_(False).eval(), None
        images, facts, partial = [], [], None
        for number, upload in enumerate(uploads):
            if images and deadline.over():
                break
            hides = isinstance(method, HidesPlaces)
            if hides and known.step.batch == 1:
                upload = _without_noise(upload, stem, known.defence.noise_level(1))
            hidden = hidden_places(table_rows(upload[stem.table], stem))
            if known.step.batch > 1 or not hidden.any() or not hides:
                plain = PatchEmbedding().recover_shown(backbone, [upload], known, deadline)
                images.append(plain.images[0].double())
                partial = partial or plain.partial
                sure = known.step.batch == 1 and not known.blurs  # else a row without zeros may still be hidden
                facts.append({**plain.facts[0], "hidden": int(hidden.sum()) if sure else None})
                continue
            deadline.say(f"{self.name}: upload {known.first + number + 1}, {int(hidden.sum())} patches are hidden")
            block = read_block(precise) if block is None else block
            try:
                image, fact = self._one(precise, block, stem, method, upload, hidden, known, deadline)
            except KeyboardInterrupt:  # this image is lost, those before it are kept
                if not images:
                    raise
                deadline.interrupt()
                break
            images.append(image)
            facts.append(fact)
        cut = deadline.over() and facts[-1].get("patches_that_fit") not in (None, backbone.num_tokens)
        partial = "a part of the last image's search" if cut else partial
        return Recovery(torch.stack(images).float(), facts, partial=partial)

    def _one(
        self,
        backbone: Backbone,
        read: Block | str,
        stem: Stem,
        method: Method,
        upload: Gradients,
        hidden: Tensor,
        known: Knowledge,
        deadline: Deadline,
    ) -> tuple[Tensor, dict[str, Fact]]:
        """One image of an MJP step: [C, H, W], and what the attacker can say of it."""
        sent, sigma = known.type_of(upload[stem.table]), known.noise_on(upload[stem.table])
        equations = _equations(method, stem, upload, known)
        partly = separate(*equations, hidden, sent, sigma)
        learned = method.unknown_position()
        vector = None if learned is None else learned.vector
        unknown = torch.zeros_like(partly.base[0, :1]) if vector is None else vector.double()
        block = FirstBlock(read, stem, upload, hidden, unknown)
        solution = solve_directions(block, partly, backbone.grid, stem.patch_size, self.config, deadline)
        patches = partly.patches(solution.at)
        patches = order_hidden(patches, hidden, backbone.grid, stem.patch_size, predictor=self.config.predictor)
        fact = _facts(partly, solution, block) | _fit(partly, solution, equations, sent, sigma)
        return see_through(patches.unsqueeze(0), backbone, stem, known, [fact])[0], fact


def _without_noise(upload: Gradients, stem: Stem, sigma: float) -> Gradients:
    """The upload with zeros in those rows of the table's gradient that noise of deviation σ explains.

    Where it explains all rows, they do not show the mask, and stay.
    """
    if sigma == 0:
        return upload
    table = upload[stem.table].clone()
    rows = table_rows(table, stem)
    size = rows.double().square().mean(dim=-1).sqrt()
    noise = size <= sigma * (1 + 4 / (2 * rows.shape[-1]) ** 0.5)  # four deviations of what noise alone has
    if noise.all():
        return upload
    rows[noise] = 0
    return {**upload, stem.table: table}


def _equations(method: Method, stem: Stem, upload: Gradients, known: Knowledge) -> tuple[Tensor, Tensor, Tensor | None]:
    """The table's rows [N, D], ∂l/∂W [D, K] and ∂l/∂E_unk [D] on those channels where none of them overflowed."""
    rows = patch_rows(method, stem, upload, known)
    weight = flat_weight(known_numbers(upload[stem.weight]), stem)
    total = None
    if UNKNOWN in upload:
        total = known_numbers(upload[UNKNOWN])
    elif stem.bias in upload:
        total = known_numbers(upload[stem.bias]) - rows.sum(dim=0)  # the bias has the sum over all patches
    finite = rows.isfinite().all(dim=0) & weight.isfinite().all(dim=1)
    finite = finite if total is None else finite & total.isfinite()
    return rows[:, finite], weight[finite], None if total is None else total[finite]


def _facts(partly: Partly, solution: TokenFit, block: FirstBlock) -> dict[str, Fact]:
    """proof: how the attacker knows that the image is right; verdict: why it may be wrong."""
    fits = int((solution.fit <= SOLVED).sum())
    proof = verdict = None
    if not len(partly.z) and not partly.base[partly.hidden].any():
        verdict = "the hidden patches are weaker than rounding and noise: they are left grey"
    elif not len(partly.z) and int(partly.hidden.sum()) > 1:
        proof = "every patch is determined: up to rounding and noise all hidden patches are equal"
    elif not len(partly.z):
        proof = "every patch is determined: one hidden patch is solved with the others"
    elif block.reason is not None:
        verdict = f"{len(partly.z)} directions of each patch were guessed by smoothness: {block.reason}"
    elif fits == len(solution.fit):
        proof = "every patch agrees with the gradients of the first block up to rounding"
    else:
        verdict = "for some images the gradients of the first block do not confirm every patch"
    return {
        "hidden": int(partly.hidden.sum()),
        "open_directions": len(partly.z),
        "patches_that_fit": fits if block.reason is None and len(partly.z) else None,
        "proof": proof,
        "verdict": verdict,
    }


def _fit(
    partly: Partly, solution: TokenFit, equations: tuple[Tensor, Tensor, Tensor | None], sent: torch.dtype, sigma: float
) -> dict[str, Fact]:
    """Whether the solution meets its equations.

    Where directions were searched: the largest ratio of a token's residual outside the first block's spans to what
    noise explains. Else the residual of ∂l/∂W without the shown patches and the one that stands for all hidden ones.
    """
    if len(partly.z):
        worst = float(solution.fit.max())
        size = worst if math.isfinite(worst) else None
        return {"residual": size, "expected_residual": 1.0, "fits": worst <= SOLVED}
    rows, weight, total = equations
    shown, patches = rows[~partly.hidden], partly.base[~partly.hidden]
    if total is not None:
        shown = torch.cat([shown, total[None]])
        patches = torch.cat([patches, partly.base[partly.hidden][:1]])
    white, right = whiten(weight[None], shown[None], sent, sigma)
    residual, expected, fits = (float(part) for part in judge(white, right, patches[None], sent))
    return {"residual": residual, "expected_residual": expected, "fits": bool(fits)}
