"""The attack on tokens: exact pixels without a gradient of positions, from batches and without a table.

The inputs of the first block's layers lie in the row spaces of their gradients. For one image and a table that tells
every place apart that is one linear solve (`linear`); attention, labels and loss do not matter, nor whether the table
is trained, sent or fixed. How many directions stay open is counted beforehand (`linear.count`) and reported; they are
searched token by token through the MLP's activation (`search`), and the attention's outputs then show which tokens are
of the same image (`images`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from situs.audit.attacks.base import FAILED, Attack, Fact, Knowledge, Ready, Recovery, Refused, absent, known_numbers
from situs.audit.attacks.patchembed import see_through
from situs.audit.attacks.solver import SOLVED, TELLING, Range, Tokens
from situs.audit.attacks.tokens.block import Block, read_block
from situs.audit.attacks.tokens.images import agree, distinct_images, make_images, order_by_attention
from situs.audit.attacks.tokens.linear import Counts, Misfit, Spans, count, misfit, read_spans, solve
from situs.audit.attacks.tokens.search import SHARP, Effort, Search, find_roots
from situs.audit.deadline import Deadline, first_ctrl_c
from situs.audit.defences import Gradients
from situs.audit.stem import patches_of
from situs.backbones.base import Backbone
from situs.backbones.lora import low_rank_names
from situs.methods.measured import HidesPlaces
from situs.methods.mp3 import MP3

BLURRED = (
    "rounding and noise change the row spaces so much that wrong tokens also lie in them. The attack therefore proves "
    "nothing"
)

PROOF = "up to rounding, every token lies in the row spaces of the first block's gradients"

SPEED = (5e9, 1e12)
"""Products in float64 a second on one core, and on a device."""

LONG = 4.0
"""A search is begun if one round of it takes no longer than this many times the seconds it is given."""


@dataclass(frozen=True)
class TokensConfig(Effort):
    """How long the attack searches if the linear equations have more than one solution."""

    seconds: float = 60.0
    """Time limit of the search for one upload, in seconds. If one round of the search would take more than 4 times this
    limit, the attack does not start, and the results give the reason."""

    predictor: MP3 | None = None
    """A trained MP3 run that predicts positions. The attack needs the predictions only if nothing else gives the order
    of the patches. It then orders the patches by these predictions and by how well their borders match."""


TURN = 2.0
"""All uploads of one client together are searched no longer than this many times the seconds of one."""


class TokenSpans(Attack):
    """The tokens of the first block, from the row spaces of its gradients."""

    needs: ClassVar[str] = "gradients of the patch embedding and the first block; fewer tokens than channels"
    difference: ClassVar[str] = (
        "uses row spaces of gradients, as DAGER does. But patches are continuous, so the attack solves for them "
        "instead of testing candidates"
    )
    measured: ClassVar[str] = "benchmarks/tokens.py"
    name: ClassVar[str] = "tokens"
    about: ClassVar[str] = (
        "recovers pixels from the row spaces of the first block's gradients; works for learned and fixed positions, "
        "and needs no gradient of the positions"
    )
    closed_form: ClassVar[bool] = True
    slow: ClassVar[bool] = True
    Config: ClassVar[type[TokensConfig]] = TokensConfig
    config: TokensConfig

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        self._read: tuple[weakref.ref[Backbone], list[int], Block | str] | None = None

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        if (reason := _low_rank(backbone, known.step.batch)) is not None:
            return Refused(reason)
        block = self._block(backbone)
        if isinstance(block, str):
            return Refused(block)
        if isinstance(known.trained(backbone), HidesPlaces):
            return Refused(
                "the training hides the positions of some patches, and only the attack `adaptive-mjp` separates these "
                "patches from the others"
            )
        counts = count(block, known.step.batch, sent)
        if (reason := _refusal(block, counts, sent, known.step.batch, self.config)) is not None:
            return Refused(reason)
        limit = TURN * self.config.seconds if counts.open else None
        return Ready(_reads(block, counts, sent), _caveat(block, known, counts, sent), limit)

    @torch.no_grad()
    def recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        with first_ctrl_c(deadline, keeps=True):
            return self._recover(backbone, uploads, known, deadline)

    def _recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        block = self._block(backbone)
        assert isinstance(block, Block), block
        solved: list[Tensor] = []
        facts: list[dict[str, Fact]] = []
        for upload in uploads:
            if solved and deadline.over():
                break
            distinct = distinct_images(block, upload, known.step.batch, known.even(upload, block.names))
            counts, behind = count(block, distinct, upload), replace(known, step=replace(known.step, batch=distinct))
            try:
                if counts.open:
                    patches, fact = _searched(block, upload, counts, behind, self.config, deadline)
                else:
                    patches, fact = _solved(block, upload, behind)
            except (np.linalg.LinAlgError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
                patches = block.weight.new_zeros(distinct, block.places, block.weight.shape[1])
                fact = _unsolved(block, upload, counts.open)
            if 1 < distinct < known.step.batch:
                repeated = f"the batch of {known.step.batch} images contains only {distinct} different images"
                verdict = f"{repeated}, and the gradients do not reveal which images occur several times"
                fact |= {"fits": False, "proof": None, "verdict": verdict}
            solved.append(patches[torch.arange(known.step.batch, device=patches.device) % len(patches)])
            facts.append(fact)
        last, partial = facts[-1], None
        if deadline.over() and last["fits"] is not True and last["open_directions"] != 0:
            proved = f"proving {last.get('patches_that_fit')} of {last.get('patches')} patches in the last search"
            partial = proved if "patches" in last else "a part of the last search"
        images = see_through(torch.cat(solved), block.backbone, block.stem, known, facts)
        return Recovery(images.float(), facts, partial=partial)

    def _block(self, backbone: Backbone) -> Block | str:
        """The first block, or the reason why it cannot be read; read once for the same weights."""
        versions = [p._version for p in backbone.parameters()]
        if self._read is None or self._read[0]() is not backbone or self._read[1] != versions:
            block = read_block(deepcopy(backbone).double().requires_grad_(False).eval())
            self._read = (weakref.ref(backbone), versions, block)
        return self._read[2]


# --- whether it can be made ------------------------------------------------------------------------------------------


def _reads(block: Block, counts: Counts, sent: Collection[str]) -> tuple[str, ...]:
    """The gradients of those sent that it needs."""
    layers = block.layers
    reads = [block.stem.weight] if block.stem.weight in sent else []
    reads += layers.qkv if counts.informs or counts.open else ()
    reads += (layers.proj, *layers.fc1) if counts.second else ()
    return (*reads, layers.fc2) if counts.open else tuple(reads)


def _refusal(block: Block, counts: Counts, sent: Collection[str], batch: int, config: TokensConfig) -> str | None:
    """Why the tokens can be neither solved nor searched for; None where they can."""
    if counts.full:
        return counts.full
    if counts.open or not (counts.informs or counts.second):
        lacking = absent(sent, block.names[1:])
        if lacking is not None:
            return f"{lacking.reason}; {_left(block, counts, batch, block.stem.weight in sent)}"
    if not counts.open:
        return None
    if block.norm0 is not None:
        return (
            f"{counts.reason}. The attack does not search for the remaining unknowns, because a norm stands before the "
            "first block"
        )
    cost = counts.work * config.steps / SPEED[block.weight.device.type != "cpu"]
    if cost > LONG * config.seconds:
        return (
            f"{counts.reason}. A search for the remaining unknowns is too slow: one round takes about {cost / 60:.0f} "
            f"min on this device, and the limit for one upload is {config.seconds:g} s"
        )
    return None


def _left(block: Block, counts: Counts, batch: int, patches: bool) -> str:
    """What an attacker still has without the gradients of the first block: one clause."""
    values = block.weight.shape[1]
    embedding = f"the gradient of {block.stem.weight} has full rank, so alone it determines no patch"
    if not patches:
        embedding = f"the gradient of {block.stem.weight} is not sent either"
    elif counts.x < values:
        embedding = (
            f"the row space of the gradient of {block.stem.weight} still contains every patch (it spans {counts.x} of "
            f"{values} directions)"
        )
    tokens = batch * (block.places + len(block.prefix))
    return (
        f"{embedding}. The gradients of later blocks contain the {tokens} tokens that enter those blocks. But these "
        "tokens are not linear functions of the pixels, so only a search (the attack `matching`) can use them"
    )


def _low_rank(backbone: Backbone, batch: int) -> str | None:
    """Why the tokens of a model with LoRA (products of low rank beside frozen matrices) are not solved for."""
    parameters = dict(backbone.named_parameters())
    ranks = {parameters[name].shape[0] for name in low_rank_names(backbone) if name.endswith("down")}
    if not ranks:
        return None
    tokens = batch * (backbone.num_tokens + backbone.num_prefix)
    shown = f"at most {max(ranks)}" if max(ranks) < tokens else "all"
    return (
        f"the model's matrices are frozen. The tokens span {tokens} directions, and the gradient of a LoRA matrix "
        f"(rank {max(ranks)}) reveals {shown} of these directions. This attack does not solve for the tokens, but "
        "another attack may"
    )


def _caveat(block: Block, known: Knowledge, counts: Counts, sent: Collection[str]) -> str | None:
    steps = known.step.local_steps
    if steps == 1 or (not counts.open and _times_counted(block, known, sent)[-1].times == steps):
        return None
    return (
        f"the weights change between the {steps} local steps, so each step has other inputs. The equations cannot "
        "separate the inputs of all steps, and rounding hides some inputs"
    )


# --- one image by linear equations alone -----------------------------------------------------------------------------


def _solved(block: Block, upload: Gradients, known: Knowledge) -> tuple[Tensor, dict[str, Fact]]:
    """The image [1, N, K] of one upload by linear equations alone, and what the attacker can say of it.

    After local steps each token has an input for every step, and that of the first step belongs to the weights that the
    server sent out. The path is smooth, so that a few inputs a token span all of them: the fewest that fit are used.
    """
    best: tuple[Tensor, dict[str, Fact]] | None = None
    even = known.even(upload, block.names)
    for counts in _times_counted(block, known, upload):
        spans = read_spans(block, upload, counts, even, known.forward)
        tokens = solve(block, spans, counts)
        fact = _by_misfit(counts, misfit(block, spans, tokens))
        if not even:  # stated noise may move pixels, rounding may not
            fact |= _sharpness(block, upload, spans, counts, tokens, _pixels(block, known).width)
        if best is None or _rank(fact) < _rank(best[1]):
            best = tokens.x.unsqueeze(0), fact
        if fact["fits"] is True and fact.get("sharp") is not False:
            break
    assert best is not None
    return best


def _times_counted(block: Block, known: Knowledge, sent: Collection[str]) -> list[Counts]:
    """The ranks for more and more inputs a token, as long as no direction is open; at least those of one input.

    The row space of the sum over k steps holds k inputs of every token: that of the first step belongs to the weights
    that the server sent out, which are known exactly. One input is enough for one step alone.
    """
    ranks: list[Counts] = []
    for times in range(1, known.step.local_steps + 1):
        counts = count(block, known.step.batch, sent, times)
        if times > 1 and (counts.full or counts.open):
            break
        ranks.append(counts)
    return ranks[1:] or ranks


def _rank(fact: dict[str, Fact]) -> tuple[bool, float]:
    """Order of solutions, the best first: whether they fit, then the residual."""
    residual = fact["residual"]
    return fact["fits"] is not True, residual if isinstance(residual, float) else torch.inf


def _sharpness(
    block: Block, upload: Gradients, spans: Spans, counts: Counts, tokens: Tokens, width: float
) -> dict[str, Fact]:
    """sharp: whether the patches stay where they are under further rounding; if not, others fit as well as these."""
    again = solve(block, read_spans(block, _perturbed(block, upload, spans), counts), counts)
    sharp = float((again.x - tokens.x).square().mean().sqrt()) <= SHARP * width
    return {"sharp": True} if sharp else {"sharp": False, "proof": None}


def _perturbed(block: Block, upload: Gradients, spans: Spans) -> Gradients:
    """The upload with as much further rounding as a fitting solution may have."""
    layers, generator = block.layers, torch.Generator().manual_seed(0)
    groups = zip(((block.stem.weight,), layers.qkv, (layers.proj,), layers.fc1), spans, strict=True)
    sizes = {name: SOLVED * float(span.noise) for names, span in groups if span is not None for name in names}
    noise = {name: torch.randn(upload[name].shape, generator=generator, dtype=torch.float64) for name in sizes}
    factors = {name: 1 + size * noise[name].to(block.weight) for name, size in sizes.items()}
    return {**upload, **{name: known_numbers(upload[name]) * factor for name, factor in factors.items()}}


def _fact(free: int, residual: float | None, fits: bool, verdict: str | None, **more: Fact) -> dict[str, Fact]:
    """What the attacker can say of an upload. free: number of open directions. residual: in multiples of what rounding
    and noise explain."""
    fact: dict[str, Fact] = {"open_directions": free, "residual": residual, "expected_residual": 1.0, "fits": fits}
    return {**fact, "proof": PROOF if fits else None, "verdict": verdict, **more}


def _by_misfit(counts: Counts, residuals: Misfit) -> dict[str, Fact]:
    """The fact of a solution by its residuals over all places."""
    ratio, near = float(residuals.worst.square().mean().sqrt()), residuals.share <= TELLING
    fits = ratio <= SOLVED and bool(near.all())
    verdict = None if fits else BLURRED if ratio <= SOLVED else FAILED
    count = int(((residuals.worst <= SOLVED) & near).sum())
    return _fact(counts.open, ratio, fits, verdict, patches_that_fit=count)


def _unsolved(block: Block, upload: Gradients, free: int) -> dict[str, Fact]:
    """The facts of an upload whose equations broke down. free: number of open directions.

    A classifier that is sure, or one of zeros, gives gradients of zero; so does a type too coarse for small gradients.
    That is one upload and no defence: the next one may hold the image.
    """
    zeros = [name for name in block.names if name in upload and not known_numbers(upload[name]).nan_to_num().any()]
    if not zeros:
        return _fact(free, None, False, FAILED)
    reason = f"the gradient of {zeros[0]} is all zeros or not finite, so nothing can be recovered from this upload"
    return _fact(free, None, False, f"{reason}; other uploads may still reveal their images")


# --- tokens that must be searched for --------------------------------------------------------------------------------


def _searched(
    block: Block, upload: Gradients, counts: Counts, known: Knowledge, config: TokensConfig, deadline: Deadline
) -> tuple[Tensor, dict[str, Fact]]:
    """The different images [B, N, K] of one upload, and what the attacker can say of them."""
    batch, end = known.step.batch, time.monotonic() + config.seconds
    if known.step.local_steps > 1:
        block = Block(_halfway(block.backbone, upload, known))
    errors = (known.even(upload, block.names), known.forward)
    search = Search(
        block,
        upload,
        read_spans(block, upload, counts, *errors),
        counts,
        _pixels(block, known),
        config,
        lambda: deadline.over() or time.monotonic() > end,
        deadline.say,
        errors,
    )
    roots = find_roots(search, batch)
    patches, proved = make_images(block, roots, batch, config.predictor, deadline.over)
    solved, ordered = bool(proved.all()), int(roots.wanted.max()) <= batch
    if solved and not ordered:  # rotary and relative positions show in attention alone
        deadline.say("tokens: finding the order by attention")
        ordered = True
        for number, image in enumerate(patches):
            tokens = roots.tokens.at(torch.cdist(image, roots.tokens.x).argmin(dim=1))
            order = order_by_attention(block, image, tokens.o, search.stop)
            patches[number], ordered = image[order.at], ordered and order.proved
    fits = solved and agree(block, patches, roots.tokens)
    verdict = None
    if not solved:
        verdict = f"the gradients of the first block do not prove that every patch is right: {counts.reason}"
    elif not fits:
        verdict = (
            "every patch is proved right. It is not proved which patches belong to the same image, and in which order"
        )
    elif not ordered:
        predicted = "" if config.predictor is None else " and from the positions that an MP3 run predicts"
        verdict = f"every patch is proved right. The order of the patches is a guess from their borders{predicted}"
    residual = float(roots.fit.max()) if len(roots.fit) and bool(roots.fit.isfinite().all()) else None
    more: dict[str, Fact] = {} if ordered else {"hidden": block.places}
    more |= {"patches_that_fit": int((roots.fit <= SOLVED).sum()), "patches": int(roots.wanted.sum())}
    return patches, _fact(counts.open, residual, fits, verdict, **more)


@torch.no_grad()
def _halfway(backbone: Backbone, upload: Gradients, known: Knowledge) -> Backbone:
    """A copy with the mean of the weights over a client's steps of SGD, as far as the upload shows it.

    Gradients of one input a token then err by the curvature of the path, and not by its whole length.
    """
    copy, back = deepcopy(backbone), known.step.lr * (known.step.local_steps - 1) / 2
    for name, parameter in copy.named_parameters():
        if name in upload and not known.step.adam:
            parameter -= back * known_numbers(upload[name]).nan_to_num().to(parameter)
    return copy


def _pixels(block: Block, known: Knowledge) -> Range:
    """The range of a patch's values: black to white; two deviations where the normalisation is not known."""
    shape, channels = block.backbone.input.shape, block.backbone.input.channels
    assert shape is not None
    normalisation = known.normalisation or ([0.5] * channels, [0.25] * channels)
    mean, std = (torch.tensor(part, dtype=torch.float64) for part in normalisation)
    ends = torch.stack([(0 - mean) / std, (1 - mean) / std]).to(block.weight)
    rows = patches_of(ends.view(2, channels, 1, 1).expand(-1, -1, *shape), block.backbone, block.stem)
    return Range(rows.amin(dim=(0, 1)), rows.amax(dim=(0, 1)))
