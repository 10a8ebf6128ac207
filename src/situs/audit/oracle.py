"""The oracle: how close an attacker could come who knew the image. A bound that a pass must respect, and no attack.

Noise hides an image from the attacks that are run here; others may come closer, through other layers, another path
from the pixels to the logits or a better prior. So a gate needs an oracle before it passes anything. It knows the image
x and linearises the whole upload g there, every tensor that is sent, with all that the training does:

    x̂ = argmin |upload - g(a) - J (x̂ - a)|² / σ² + x̂ᵀ Λ⁻¹ x̂,     J = ∂g/∂x at a = x, then once more at a = x̂

Λ is diagonal in the cosine transform, with the image's own energy in rings of frequency: the best prior of that form.
Without information x̂ is grey, far from x, where the upload is another function: so the upload is linearised at x̂
too (a second step of Gauss-Newton). Both are scored like any recovered picture. The solve is by conjugate gradients
with products of J (differences) and Jᵀ (the second derivative), in float64.

`consult` gives the findings that a pass needs beside the attacks: the same attacks with the labels of the largest
gradient, and the oracle. Both run only where no attack is above what a blind guess has: they cost more than the
attacks, and could change no other verdict.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery, Refused
from situs.audit.attacks.matching import simulation
from situs.audit.attacks.prior import ImagePrior
from situs.audit.cases import Case, ImageFinding, TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients, Step
from situs.audit.engine import Client, trials_of
from situs.audit.run import take_turns
from situs.audit.scores import Blind, Scores, closer, denormalise, extend, measure, too_few
from situs.backbones.base import Backbone
from situs.errors import counted
from situs.findings import Remark
from situs.gate import BLIND, Limit, exposed, hold
from situs.methods.base import Batch, Draws, Method

ITERATIONS, LEFT = 60, 0.1
"""Steps of the solve at most, and the residual at which it ends, in units of the prior's deviation."""

LINEARISED = 2
"""Linearisations of the upload: at the image, and at the picture that the first one gives."""

ASK = 3
"""Steps of the solve between two looks at the picture."""

RINGS = 12
"""Rings of frequency whose energy the prior has, beside the mean."""

STEP = 1e-6
"""Of the differences for a product of J, in units of the image's size over that of the direction."""

IMAGES = 4
"""Images that the oracle is run on: those that came nearest to a limit."""


class Oracle(Attack):
    """A bound in the form of an attack: it knows the images."""

    name: ClassVar[str] = "oracle"
    is_bound: ClassVar[bool] = True
    about: ClassVar[str] = (
        "a bound, not an attack. The oracle knows the image, linearises the upload around this image, and computes "
        "how much of the image can be recovered despite the noise. If the oracle's result is above the limit of "
        "a gate, the result of an unknown attack may be above this limit too"
    )

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:  # noqa: ARG002
        return Ready(None)

    def recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        del backbone, uploads, known, deadline
        raise AssertionError("the oracle needs the images: see `estimate`")


class Estimate(NamedTuple):
    """pictures: x̂ of each linearisation, [B, C, H, W], normalised. ended: whether the solves converged, or ended at a
    picture that was enough."""

    pictures: tuple[Tensor, ...]
    ended: bool


def estimate(
    method: Method,
    upload: Gradients,
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    known: Knowledge,
    enough: Callable[[Tensor], bool] = lambda _: False,
    stop: Callable[[], bool] = lambda: False,
) -> Estimate:
    """x̂ of one upload of images [B, C, H, W] with these labels and draws.

    enough: asked about the picture every few steps; where it is true the rest is skipped.
    """
    sigma = known.defence.noise_level(known.step.batch)
    assert sigma > 0, "the oracle computes a bound only under noise"
    x, root, pictures, ended = images.double(), own_prior(images.double()).root, list[Tensor](), True
    names = [name for name in upload if upload[name].numel()]
    run = simulation(deepcopy(method).double(), known, names)
    noisy = torch.cat([upload[name].double().flatten() for name in names])
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the second derivative of some operators

        def flat(at: Tensor) -> Tensor:
            gradients = run(at, labels, draws)
            return torch.cat([gradients[name].flatten() for name in names])

        def around(at: Tensor) -> tuple[Tensor, bool]:
            here, back, *_ = torch.func.vjp(flat, at)

            def along(v: Tensor) -> Tensor:
                h = STEP * float(x.norm()) / max(float(v.norm()), 1e-30)
                with torch.no_grad():
                    return (flat(at + h * v) - here) / h

            def against(u: Tensor) -> Tensor:
                return root(back(u)[0].detach() / sigma**2)

            right = against((noisy - here + along(at)).detach())

            def product(z: Tensor) -> Tensor:
                return against(along(root(z))) + z

            z, ended = _solve(product, right, lambda z: enough(root(z)), stop)
            return root(z), ended

        for _ in range(LINEARISED):
            picture, ended = around(pictures[-1] if pictures else x)
            pictures.append(picture)
            if not ended or enough(picture):
                break
    return Estimate(tuple(pictures), ended)


def _solve(
    product: Callable[[Tensor], Tensor], right: Tensor, enough: Callable[[Tensor], bool], stop: Callable[[], bool]
) -> tuple[Tensor, bool]:
    """z of product(z) = right by conjugate gradients, and whether it converged."""
    z, residual = torch.zeros_like(right), right
    direction, size = residual, float(residual.square().sum())
    for number in range(ITERATIONS):
        if size <= LEFT**2 * right.numel() or (number and number % ASK == 0 and enough(z)):
            return z, True
        if stop():
            break
        moved = product(direction)
        bent = float((direction * moved).sum())
        if not (math.isfinite(bent) and bent > 0):
            break
        z, residual = z + size / bent * direction, residual - size / bent * moved
        before, size = size, float(residual.square().sum())
        direction = residual + size / before * direction
    return z, enough(z)


def own_prior(images: Tensor) -> ImagePrior:
    """The prior of images [B, C, H, W]: each image's own energy, by rings of frequency and by colour against grey."""
    channels, height, width = images.shape[1:]
    flat = ImagePrior(images.new_zeros(()), _colours(images).T, images.new_ones(channels, height, width))
    down, across = (torch.arange(n, dtype=images.dtype, device=images.device) / n for n in (height, width))
    radius = (down[:, None] ** 2 + across[None] ** 2).sqrt()
    lowest = float(radius[radius > 0].min()) if radius.numel() > 1 else 1.0
    ring = (radius.clamp(min=lowest) / lowest).log() / math.log(2**0.5 / lowest) * (RINGS - 1)
    ring = torch.where(radius > 0, 1 + ring.long(), 0).flatten()
    energy = flat.cosines(images).square().flatten(2)
    count = torch.bincount(ring, minlength=RINGS + 1)
    sums = energy.new_zeros(*energy.shape[:2], RINGS + 1).index_add_(2, ring, energy)
    return replace(flat, variance=(sums / count)[..., ring].view(-1, channels, height, width))


def _colours(like: Tensor) -> Tensor:
    """Grey and two colours of three channels, orthonormal; any other number of channels as they are."""
    if like.shape[1] != 3:
        return torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    rows = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]], dtype=like.dtype, device=like.device)
    return rows / rows.norm(dim=1, keepdim=True)


# --- the findings that a pass needs -----------------------------------------------------------------------------------


def consult(
    model: Backbone | Method,
    test: TestSet,
    findings: Sequence[ImageFinding],
    blind: Blind,
    step: Step,
    deadline: Deadline,
) -> Iterator[ImageFinding]:
    """The further findings that a pass needs, for each defence with noise under which nothing is above; a later finding
    of a case replaces those before."""
    if too_few(len(test), step.batch):
        return
    for defence in dict.fromkeys(finding.case.defence for finding in findings):
        attacks = [finding for finding in findings if finding.case.defence == defence and finding.attacked]
        proved = any(finding.closed and finding.why("doubt") is None for finding in attacks)  # else nothing could pass
        if not proved or any(map(exposed, attacks)) or deadline.spent():
            continue
        cases = [Case("", model, defence, attack.case.attack, hardest=True, batch=step.batch) for attack in attacks]
        harder: dict[Case, ImageFinding] = {}
        for finding in take_turns(trials_of(cases, test, step), deadline):
            assert isinstance(finding, ImageFinding)
            harder[finding.case] = finding.against(blind, test.names)
            yield harder[finding.case]
        if any(map(exposed, harder.values())):
            continue
        for hardest in (False, True):
            case = Case("", model, defence, Oracle(), hardest=hardest, batch=step.batch)
            findings_so_far = [*attacks, *harder.values()]
            bound = bound_of(case, test, step, deadline, lambda one: one.against(blind, test.names), findings_so_far)
            yield bound
            if exposed(bound):
                break


def bound_of(
    case: Case,
    test: TestSet,
    step: Step,
    deadline: Deadline,
    against: Callable[[ImageFinding], ImageFinding],
    findings: Sequence[ImageFinding] = (),
    limit: Limit = BLIND,
) -> ImageFinding:
    """The oracle's finding on the images that came nearest to a limit. against: gives a finding its exposures.
    findings: of the attacks. limit: above it the search ends."""
    client, size = Client(case, test, step, None), case.defence.step(step).batch
    excess = torch.full((len(test),), -torch.inf)
    for finding in findings:
        numbers_of = dict(zip(finding.samples, finding.numbers, strict=True))
        for one in hold(finding):
            if one.limit is not None:
                number = numbers_of[one.exposure.sample]
                excess[number] = max(float(excess[number]), one.excess)
    uploads = excess.view(-1, size).amax(dim=1).argsort(descending=True)[: max(1, IMAGES // size)].tolist()
    numbers: list[int] = []
    scores: Scores = {}
    ended, over = True, False
    for at, upload in enumerate(uploads):
        deadline.say(f"{case.defence.label}: the oracle, upload {at + 1} of {len(uploads)}")
        deadline.begin(len(uploads) - at)
        here = slice(upload * size, (upload + 1) * size)

        def scored(images: Tensor, here: slice = here) -> Scores:
            pictures = denormalise(images, *test.normalisation, clip=False)
            return measure(pictures, test.real(case.compared_with), case.backbone, None, here.start)

        def enough(images: Tensor, here: slice = here, scored: Callable[[Tensor], Scores] = scored) -> bool:
            values = scored(images)
            part = case.finding("done", range(here.start, here.stop), scores=values | {"reidentified": None})
            return bool(exposed(against(part), limit))

        x, y = client.pixels[here], client.labels[here]
        batch = Batch(x, torch.arange(here.start, here.stop, device=x.device), {"label": y})
        draws = client.method.draw(batch, client.step.when._replace(seed=client.step.seed))
        known = replace(client.known(True, upload), labels=None)
        result = estimate(client.method, client.upload(upload), x, y, draws, known, enough, deadline.over)
        numbers += range(here.start, here.stop)
        extend(scores, reduce(closer, map(scored, result.pictures)))
        ended = ended and result.ended
        over = bool(exposed(against(case.finding("done", numbers, scores=scores)), limit))
        if over or not ended or deadline.spent():
            break
    whole = ended and (over or len(numbers) == len(uploads) * size)
    partial = f"{len(numbers)} of {counted(len(uploads) * size, test.things)}"
    partial += "" if ended else ", the last ones unfinished"
    remarks = [] if whole else [Remark("stopped", partial)]
    return against(case.finding("done" if whole else "stopped", numbers, scores=scores, remarks=remarks))
