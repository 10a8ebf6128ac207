"""APRIL (Lu et al., CVPR 2022, arXiv 2112.14087), the attack of MJP's Table 5: its closed form and its optimisation.

For a first block that is attention alone, without a norm before it and a residual around it, A = ∂l/∂z = ∂l/∂E_pos and
A^T z = Wq^T ∂Wq + Wk^T ∂Wk + Wv^T ∂Wv. Solve for z, then x = E⁺(z - E_pos - bias). Unique when there are no more tokens
than channels, and no more pixels in a patch than channels. On a standard block (norm first, residual around) the
equation does not hold: the residual of the solve shows it, and the verdict says so. No model that Situs opens by name
has the paper's block, and where it would, `patchembed` reads the same image: so no audit runs APRIL by default.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import FAILED, Attack, Fact, Knowledge, Ready, Recovery, Refused, absent, stack
from situs.audit.attacks.equations import Solution, solve_pixels
from situs.audit.attacks.matching import Matching, gradient_distances
from situs.audit.attacks.patchembed import facts_of, see_through
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients, Step
from situs.audit.stem import Stem, find_stem, flat_weight, noise_for, require_stem, table_rows
from situs.backbones.base import Backbone


def solve_tokens(
    table: Tensor,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sent: torch.dtype = torch.float32,
    sigma: float = 0.0,
) -> Solution:
    """z [B, S, D] of A^T z = Σ W^T ∂W. table: A, [B, S, D]. weights: [·, D] each. gradients: [B, ·, D] each.

    Channels of z with a number that is not finite in any ∂W have no equations: they come out as 0.
    """
    pairs = [(w.double(), g.double()) for w, g in zip(weights, gradients, strict=True)]
    right = sum((w.T @ g for w, g in pairs), torch.zeros(()))
    # Rounding and noise on each ∂W pass through its W.
    step = torch.finfo(sent).eps / 2
    errs = [(step**2 * g.square().nanmean(dim=-1) + sigma**2) @ w.square() for w, g in pairs]
    return solve_pixels(right.nan_to_num(0.0), table, sent, sigma, torch.stack(errs).sum(dim=0))


class April(Attack):
    """The closed form: exact on the paper's block, and inexact by its own residual on all others."""

    paper: ClassVar[str] = "APRIL (Lu et al., CVPR 2022)"
    needs: ClassVar[str] = "gradients of the first attention and of a learned position table"
    difference: ClassVar[str] = "the residual shows whether the model's first block violates APRIL's equation"
    measured: ClassVar[str] = "study mjp-table5"
    name: ClassVar[str] = "april"
    closed_form: ClassVar[bool] = True
    about: ClassVar[str] = (
        "solves for the tokens with the gradients of the first attention, then for the pixels by a pseudo-inverse"
    )

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        attention = _first_attention(backbone)
        if not attention:
            return Refused(
                "this attack does not know the names of the query, key and value weights of the model's first block"
            )
        if stem.first != backbone.num_prefix:
            return Refused("some prefix tokens (registers) have no row in the position table, so equations are missing")
        reads = (stem.table, *attention)
        return absent(sent, reads) or Ready(reads, _caveat(backbone, known.step.batch))

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge,
        deadline: Deadline,  # noqa: ARG002
    ) -> Recovery:
        stem, names = require_stem(backbone), _first_attention(backbone)
        parameters = {name: p.detach() for name, p in backbone.named_parameters()}
        rows = [{stem.table: table_rows(upload[stem.table], stem, prefix=True)} for upload in uploads]
        table, gradients = stack(rows, stem.table), [stack(uploads, name) for name in names]
        sent, sigma = known.type_of(uploads[0][stem.table]), known.noise_on(uploads[0][stem.table])
        solution = solve_tokens(table, [parameters[name] for name in names], gradients, sent, sigma)
        finite = torch.stack([g.isfinite().all(dim=-2) for g in gradients]).all(dim=0)
        tokens = zip(solution.patches[:, stem.first :], finite, strict=True)
        patches = torch.stack([_pixels(z, parameters, stem, channels) for z, channels in tokens])
        holds = known.step.batch == 1 and _holds(backbone)
        facts = [_with_verdict(facts_of(solution, index, table.shape[1]), holds) for index in range(len(uploads))]
        return Recovery(see_through(patches, backbone, stem, known, facts).float(), facts)


def _caveat(backbone: Backbone, batch: int) -> str | None:
    if batch > 1:
        return (
            f"in a batch of {batch}, the rows of the position table's gradient are sums over the images, so the "
            "equations mix the images"
        )
    tokens = backbone.num_tokens + backbone.num_prefix
    if tokens > backbone.dim:
        return f"there are more tokens ({tokens}) than channels ({backbone.dim}), so the tokens have no unique solution"
    if backbone.patch_values > backbone.dim:
        return (
            f"a patch has more values ({backbone.patch_values}) than a token has channels ({backbone.dim}), so the "
            "pseudo-inverse of the patch embedding loses some values"
        )
    return None


def _pixels(z: Tensor, parameters: dict[str, Tensor], stem: Stem, channels: Tensor) -> Tensor:
    """x = E⁺(z - E_pos - bias) by the channels that were solved for [D] bool: tokens [N, D] -> patches [N, K]."""
    tokens = z - table_rows(parameters[stem.table], stem).double()
    if stem.bias is not None:
        tokens = tokens - parameters[stem.bias].double()
    weight = flat_weight(parameters[stem.weight], stem).double()
    return tokens[:, channels] @ torch.linalg.pinv(weight[channels]).T


def _holds(backbone: Backbone) -> bool:
    """Whether the block-0 equation holds for this model: tried on noise, where nothing hides a misfit."""
    like = next(backbone.parameters())
    stem, names = require_stem(backbone), _first_attention(backbone)
    assert backbone.input.shape is not None
    images = noise_for(backbone, 1, backbone.input.channels, *backbone.input.shape)
    labels = torch.zeros(1, dtype=torch.int64, device=like.device)
    gradients = victim_gradients(backbone, images, labels, step=Step(dtype=like.dtype))
    weights = [dict(backbone.named_parameters())[name].detach() for name in names]
    table = table_rows(gradients[stem.table], stem, prefix=True)[None]
    return bool(solve_tokens(table, weights, [gradients[name][None] for name in names], like.dtype).fits)


def _with_verdict(fact: dict[str, Fact], holds: bool) -> dict[str, Fact]:
    """The facts with their verdict. holds: whether the equation is one of the model, whatever noise hides."""
    fact["fits"] = holds and bool(fact["fits"])
    if not holds:
        fact["verdict"] = "not exact: the norm and the residual connection of the first block violate APRIL's equation"
    elif not fact["fits"]:
        fact["verdict"] = FAILED
    elif fact["rank"] != fact["unknowns"]:
        fact["verdict"] = "not unique: there are more tokens than independent equations"
    else:
        fact["verdict"] = "exact: APRIL's equation holds for the first block"
    return fact


def _first_attention(backbone: Backbone) -> tuple[str, ...]:
    """The weights of queries, keys and values in block 0: one fused, or three."""
    names = [name for name, role in backbone.roles().items() if role == ("qkv", 1) and name.endswith("weight")]
    return tuple(names) if len(names) in (1, 3) else ()


class AprilOptimisation(Matching):
    """The optimisation form: gradient matching that counts the gradient of the position table a second time.

    The paper adds the cosine distance of ∂l/∂E_pos to the squared distance of all gradients, because that one gradient
    has a row for each patch. Here it is added to the distance of `matching`, with a weight of its own.
    """

    paper: ClassVar[str] = "APRIL's optimisation (Lu et al., CVPR 2022)"
    needs: ClassVar[str] = "any gradients, if they include the gradient of a learned position table"
    difference: ClassVar[str] = (
        "like the attack `matching`, but the loss also includes the cosine distance of the position table's gradient"
    )
    name: ClassVar[str] = "april-optimisation"
    about: ClassVar[str] = "gradient matching with an extra loss term for the gradient of the position table"

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
