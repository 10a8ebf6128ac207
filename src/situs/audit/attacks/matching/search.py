"""The search for images by descent: distances of gradients, priors of images, and the optimiser with its best guess.

Everything runs over P independent searches at once (uploads × restarts): no number of one reaches another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.config import Checked
from situs.limits import Count, NotNegative, Positive
from situs.progress import tracked

FAINT, NOISY = 1e-2, 10.0
"""Names count alike in a distance, but for those whose squared norm is below this share of the largest, or of this many
times the noise that is on all gradients together: they count by their size (measured; see `name_weights`)."""


@dataclass(frozen=True)
class MatchingConfig(Checked):
    """How the optimisation attacks search."""

    distance: Literal["l2", "cosine"] = "l2"
    """Of a guessed gradient from the one sent: relative squared error, or cosine distance; weighted mean over names."""

    iterations: Count = 1000
    """Steps of the optimiser. The step size falls to a tenth after 3/8, 5/8 and 7/8 of them, or of the time limit."""

    restarts: Count = 1
    """Starts from other noise; the one with the least loss is kept, and nobody looks at the truth for that."""

    lr: Positive = 0.1
    """Step size, in standard deviations of the pixels."""

    signed: bool = True
    """Whether Adam sees the sign of the pixels' gradient alone."""

    smooth: NotNegative = 1e-4
    """Weight of the total variation: images are smooth."""

    border: NotNegative = 1e-4
    """Weight of the squared steps across the borders of patches."""

    table: NotNegative = 1.0
    """april-optimisation alone: weight of the cosine distance of the position table's gradient."""

    parallel: Count = 8
    """Searches (uploads × restarts) run at once."""


class BestGuesses(NamedTuple):
    """The best guesses: loss and distance [P], images [P, B, C, H, W]. done: iterations made."""

    loss: Tensor
    distance: Tensor
    images: Tensor
    done: int


# --- distances and priors, all [P] ----------------------------------------------------------------------------


def name_weights(target: Gradients, noise: float = 0.0) -> Tensor:
    """How much each name counts, [P, names] in [0, 1]: t² / (t² + FAINT · max t² + NOISY · σ² · all numbers).

    t: the norm of what was sent, σ: `noise`, the deviation on each number. Names count alike, so that the largest
    drowns none, but faint ones (a key's bias is all rounding) mislead no one. Under noise that swamps the names every
    number counts alike, as Gaussian noise asks for: on a small ViT with σ = 1e-3, 21.6 dB instead of 13.5.
    """
    sent = torch.stack([t.flatten(1).square().sum(dim=1) for t in target.values()], dim=1)
    numbers = sum(t[0].numel() for t in target.values())
    return sent / (sent + FAINT * sent.amax(dim=1, keepdim=True) + NOISY * noise**2 * numbers).clamp(min=1e-30)


def gradient_distances(guess: Gradients, target: Gradients, kind: str) -> Tensor:
    """Distance of each name by itself, [P, names]: its relative squared error (l2), or 1 - cosine.

    guess, target: [P, ...] by name.
    """
    pairs = [(guess[name].flatten(1), target[name].flatten(1)) for name in target]
    sent = torch.stack([t.square().sum(dim=1) for _, t in pairs], dim=1).clamp(min=1e-30)
    if kind == "l2":
        return torch.stack([(g - t).square().sum(dim=1) for g, t in pairs], dim=1) / sent
    dots = torch.stack([(g * t).sum(dim=1) for g, t in pairs], dim=1)
    made = torch.stack([g.square().sum(dim=1) for g, _ in pairs], dim=1).clamp(min=1e-30)
    return 1 - dots / (made * sent).sqrt()


def variation(images: Tensor) -> Tensor:
    """Total variation: mean absolute step to the next pixel, down and across. images: [P, B, C, H, W]."""
    down, across = images.diff(dim=-2).abs(), images.diff(dim=-1).abs()
    return down.flatten(1).mean(dim=1) + across.flatten(1).mean(dim=1)


def border_steps(images: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Mean squared step over the borders between patches of `grid`, down and across. images: [P, B, C, H, W]."""
    total = images.new_zeros(images.shape[0])
    for dim, count in ((-2, grid[0]), (-1, grid[1])):
        if count > 1:
            side = images.shape[dim] // count
            before = torch.arange(side - 1, side * (count - 1), side, device=images.device)
            edges = images.index_select(dim, before + 1) - images.index_select(dim, before)
            total = total + edges.square().flatten(1).mean(dim=1)
    return total


# --- the optimiser --------------------------------------------------------------------------------------------


def optimise(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    config: MatchingConfig,
    deadline: Deadline,
    what: str,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> BestGuesses:
    """The images with the least loss on the way from `start` [P, B, C, H, W].

    objective: images -> loss [P] and, of it, the distance [P]. bounds: what pixels can be. When the deadline says
    so, or on Ctrl-C, it stops with the best guess so far. One iteration is always made; a Ctrl-C before its
    end is raised.
    """
    images = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([images], lr=config.lr)
    nothing = torch.full((start.shape[0],), torch.inf, dtype=start.dtype, device=start.device)
    best, told = BestGuesses(nothing, nothing, start, 0), time.monotonic()
    try:
        for done in tracked(range(1, config.iterations + 1), what):
            with torch.enable_grad():
                loss, distance = objective(images)
                [gradient] = torch.autograd.grad(loss.sum(), [images])
            best = _better(best, BestGuesses(loss.detach(), distance.detach(), images.detach(), done))
            optimiser.param_groups[0]["lr"] = config.lr * _decay(max(done / config.iterations, deadline.progress()))
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            images.grad = gradient.sign() if config.signed else gradient
            optimiser.step()
            if bounds is not None:
                with torch.no_grad():
                    images.clamp_(*bounds)
            if done % max(1, config.iterations // 10) == 0 or time.monotonic() - told > 10:
                deadline.say(
                    f"{what}: iteration {done:,} of {config.iterations:,}, distance {best.distance.mean():.3g}"
                )
                told = time.monotonic()
            if deadline.over():
                break
    except KeyboardInterrupt:
        deadline.interrupt()
        if not best.done:  # mere noise is no guess
            raise
    return best


def _better(best: BestGuesses, now: BestGuesses) -> BestGuesses:
    """For each search the guess with the lesser loss."""
    wins = now.loss < best.loss
    images = torch.where(wins.view(-1, 1, 1, 1, 1), now.images, best.images)
    loss, distance = (torch.where(wins, a, b) for a, b in ((now.loss, best.loss), (now.distance, best.distance)))
    return BestGuesses(loss, distance, images, now.done)


def _decay(share: float) -> float:
    """The factor on the step size when this share of the iterations is done."""
    return 0.1 ** sum(share > end for end in (3 / 8, 5 / 8, 7 / 8))
