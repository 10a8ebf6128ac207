"""The patch embedding's equations solved for the image, with its bytes where the equations bear them out.

Where the layer is fed the image's patches, that is `solve_patches`. Where the model does something to the image before
(`inverse.View`), the equations give what the layer was fed, and `solve_through` goes back from there to the image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.base import Fact, Knowledge, Normalisation
from situs.audit.attacks.patchembed.bytes import byte_values, read_bytes
from situs.audit.attacks.patchembed.equations import Solution, judge, solve_pixels, whiten
from situs.audit.stem import Stem, to_images, view_of
from situs.audit.stem.inverse import Scaled, View, fill
from situs.backbones.base import Backbone
from situs.findings import FIT

NEAR = 0.25
"""A recovered number is taken for a byte if it is no farther from it than this share of the step between bytes."""

UNDONE = 1e-3
"""What the model does to an image is undone if no more than this share of the layer's input is left."""


class System(NamedTuple):
    """∂l/∂W [B, D, K] and G [B, N, D], the type they were sent in, and the deviation of the noise on them."""

    weight: Tensor
    table: Tensor
    sent: torch.dtype
    sigma: float


def solve_patches(
    system: System, normalisation: Normalisation | None, errs: Tensor | None = None
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """The solution, more facts an upload, and the patches [B, N, K], channels last within K, read to their bytes."""
    found = solve_pixels(*system, errs)
    if normalisation is None:
        return found, [{} for _ in system.weight], found.patches
    white, right = whiten(*system, errs)
    patches, read = read_bytes(white, right, found.patches, found.rank, normalisation)
    shares = read.double().mean(dim=1).tolist()
    return found, [{"bytes": share == 1, "bytes_share": share} for share in shares], patches


def solve_through(
    view: View, system: System, normalisation: Normalisation | None
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """The solution, more facts an upload, and the images [B, C, H, W]; both of the first where the view was stopped."""
    system, errs = _in_its_units(view, system)
    columns = None if view.scaled is None or normalisation is None else _by_channel(view.scaled, view.shape)
    if columns is not None and normalisation is not None:
        found, facts, images = _scaled(view, columns, system, normalisation, errs)
    else:
        found = solve_pixels(*system, errs)
        unseen = view.unseen() if view.affine else None
        undone = list[tuple[Tensor, float]]()
        for patches in found.patches:
            if view.stopped:
                break
            undone.append(view.image(view.spread * patches + view.centre))
        images = torch.stack([image for image, _ in undone])
        kind = "affine" if view.affine else "not affine"
        facts = [{"input": kind, "unseen": unseen, "input_residual": left} for _, left in undone]
    for index, fact in enumerate(facts):
        if view.loose and normalisation is not None:
            images[index] = fill(images[index], view.loose, normalisation)
        elif normalisation is not None and not fact.get("bytes"):
            here = slice(index, index + 1)
            one = system._replace(weight=system.weight[here], table=system.table[here])
            byte = _rounded(view, images[index], one, normalisation, errs[here])
            fact["bytes"] = byte is not None
            images[index] = images[index] if byte is None else byte
        left, off = fact.get("input_residual"), float(found.residual[index])
        verdict = None if fact.get("bytes") else _doubt(view, left, off, system.sigma)
        if verdict is not None:
            fact.update(fits=False, verdict=verdict)
    return found, facts, images


def see_through(
    patches: Tensor, backbone: Backbone, stem: Stem, known: Knowledge, facts: list[dict[str, Fact]]
) -> Tensor:
    """The images [B, C, H, W] behind patches that another attack found, the same number for each of its facts.

    Patches may be right, and the layer that was fed them not see all of an image: that is told in the facts.
    """
    view, normalisation = view_of(backbone, stem), known.normalisation
    if view is None:
        return to_images(patches, backbone, stem)
    noise = known.defence.noise_level(known.batch)
    undone = [view.image(each.double()) for each in patches]
    unseen, each = view.unseen() if view.affine else None, len(patches) // len(facts)
    for number, fact in enumerate(facts):
        fact["unseen"] = unseen
        said = _doubt(view, max(left for _, left in undone[number * each : (number + 1) * each]), 0.0, noise)
        if said is not None and fact.get("fits"):
            fact.update(dict.fromkeys(fact.keys() & {"proof"}), fits=False, verdict=said)
    if view.loose and normalisation is not None:
        return torch.stack([fill(image, view.loose, normalisation) for image, _ in undone])
    return torch.stack([image for image, _ in undone])


def _in_its_units(view: View, system: System) -> tuple[System, Tensor]:
    """The equations in units of what is usual for the layer's input, so that it is near 0 with a deviation near 1, as
    pixels are; and the variance [B, D] of what that adds to their errors."""
    table = torch.where(system.table.isfinite(), system.table, 0.0)
    moved = (system.weight - table.mT @ view.centre) / view.spread
    step, far = torch.finfo(system.sent).eps / 2, float(view.centre.square().mean()) / view.spread**2
    errs = (step**2 * system.weight.square().nanmean(dim=-1) + system.sigma**2) / view.spread**2
    errs = errs + far * (step**2 * table.square().sum(dim=1) + system.sigma**2 * table.shape[1])
    return system._replace(weight=moved), errs.nan_to_num(0.0)


def _doubt(view: View, left: Fact, residual: float, noise: float) -> str | None:
    """Why an image may not be the one, although the layer's input is known; or why it is one of many. noise: its
    deviation in what was sent."""
    if view.loose:
        whose = "of each channel" if "channel" in view.loose else "of the image"
        return (
            f"solved up to gain and offset {whose}, which the model's own normalisation takes away: they are chosen so "
            "that the picture fills black to white, and its figures understate what is seen in it"
        )
    if not view.affine and isinstance(left, float) and left > max(UNDONE, FIT * residual):
        return "what the model does to an image before its patch embedding could not be undone: the attack failed"
    if not view.affine:
        return (
            "what the model does to an image before its patch embedding is not affine: the picture is one of those "
            "that its layer sees alike, and need not be the right one"
        )
    if noise and view.scaled is None:
        return "undoing what the model does before its patch embedding makes the noise larger: others may come closer"
    return None


def _rounded(view: View, image: Tensor, system: System, normalisation: Normalisation, errs: Tensor) -> Tensor | None:
    """The image [C, H, W] on its bytes, if it is near them everywhere, all are seen, and they meet the equations."""
    values = byte_values(*normalisation, device=image.device)
    low, step = values[:, :1, None], ((values[:, 255] - values[:, 0]) / 255)[:, None, None]
    number = ((image - low) / step).round().clamp(0, 255)
    made = values.gather(1, number.long().flatten(1)).view_as(image)
    if float(((image - made) / step).abs().max()) > NEAR:
        return None
    inputs, _, against = view.feed.derivative(made.unsqueeze(0))
    chance = torch.Generator().manual_seed(0)
    if not bool(against(torch.randn(inputs.shape, generator=chance, dtype=inputs.dtype).to(inputs.device)).all()):
        return None  # what the layer does not see is left at 0, which may be a byte by chance
    white, right = whiten(*system, errs)
    return made if bool(judge(white, right, (inputs - view.centre) / view.spread, system.sent).fits) else None


# --- maps that only move and scale: bytes are read as if the patches were plain ------------------------------------


class _Columns(NamedTuple):
    """Numbers of a patch, [K], in an order with the channels last, and factor and offset of each in that order."""

    order: Tensor
    scale: Tensor
    shift: Tensor


def _by_channel(scaled: Scaled, shape: tuple[int, int, int]) -> _Columns | None:
    """The columns, where each holds one channel with the same factor and offset in every patch, and all of them as
    often; None else."""
    channel = scaled.index // (shape[1] * shape[2])
    same = bool((channel == channel[:1]).all())
    for part in (scaled.scale, scaled.shift):
        same = same and bool((part - part[:1]).abs().max() <= 1e-9 * part.abs().max())
    scale, owner = scaled.scale[0], channel[0]
    counts = torch.bincount(owner, minlength=shape[0])
    if not same or not bool((scale != 0).all()) or not bool((counts == counts[0]).all()):
        return None
    rank = torch.zeros_like(owner)
    for c in range(shape[0]):
        rank[owner == c] = torch.arange(int(counts[0]), device=owner.device)
    order = (rank * shape[0] + owner).argsort()
    return _Columns(order, scale[order], scaled.shift[0][order])


def _scaled(
    view: View, columns: _Columns, system: System, normalisation: Normalisation, errs: Tensor
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """As `solve_through`, in the pixels themselves."""
    assert view.scaled is not None
    factor = columns.scale / view.spread
    pixels = system._replace(weight=system.weight[..., columns.order] / factor)
    errs = errs / float(factor.abs().min()) ** 2
    found, facts, patches = solve_patches(pixels, normalisation, errs)
    where = view.scaled.index[:, columns.order].flatten()
    size = int(torch.tensor(view.shape).prod())
    images = patches.new_zeros(len(patches), size).index_add_(1, where, patches.flatten(1))
    times = torch.bincount(where, minlength=size).to(images)
    images = (images / times.clamp(min=1)).view(-1, *view.shape)
    unseen = int((times == 0).sum())
    told = [fact | {"input": "affine", "unseen": unseen, "bytes": fact["bytes"] and not unseen} for fact in facts]
    return found, told, images
