"""Whether one who has candidates for a sentence picks the true one: the least that any attack must be denied.

What was sent is compared with the gradients of the batch as it is and as it would be with another word in one of its
sentences. Noise of deviation σ hides which of two it was only where their gradients are nearer than a few σ over
*all* numbers that are sent, far later than an attack that must find words loses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence
from situs.audit.text.victim import Sentence, TextVictim, text_gradients

DECOYS, SURE = 3, 0.99
"""Candidates beside the true sentence, each with one other word, and how sure one who picks must be."""


def pick(
    victim: TextVictim,
    upload: Gradients,
    truth: Sequence[Sentence],
    asked: Sequence[int],
    *,
    labels: Sequence[int],
    bound: Defence | None = None,
    seed: int = 0,
    deadline: Deadline | None = None,
) -> dict[int, bool]:
    """Which of the sentences `asked` [their numbers in the batch] one picks for sure among their decoys.

    bound: what is done to gradients before noise. He knows the rest of the batch, labels and masked places; the noise
    is what the likeliest candidate leaves.
    """

    def left(batch: Sequence[Sentence]) -> float:
        made = text_gradients(victim, batch, labels=labels, defence=bound or NoDefence(), seed=seed)
        return sum(float((sent - made[name].to(sent.dtype)).double().square().sum()) for name, sent in upload.items())

    picked, count = dict[int, bool](), sum(sent.numel() for sent in upload.values())
    chance = torch.Generator().manual_seed(seed)
    real = left(truth) if asked else 0.0
    for number in asked:
        if deadline is not None and deadline.over():
            break
        near = decoys(victim, truth[number], chance)
        others = [left([*truth[:number], other, *truth[number + 1 :]]) for other in near]
        variance = max(min([real, *others]) / count, 1e-300)
        odds = sum(math.exp(max(min((real - other) / (2 * variance), 700.0), -700.0)) for other in others)
        picked[number] = bool(others) and 1 / (1 + odds) > SURE
    return picked


def decoys(victim: TextVictim, sentence: Sentence, chance: torch.Generator) -> list[Sentence]:
    """The sentence with one other word, at another place each time where it has several."""
    special = set(victim.tokeniser.all_special_ids)
    own = [place for place, word in enumerate(sentence) if word not in special]
    size = victim.backbone.inner.get_input_embeddings().weight.shape[0]
    made = []
    for at in torch.randperm(len(own), generator=chance).tolist() * DECOYS:
        words = torch.randint(size, (16,), generator=chance).tolist()
        word = next((each for each in words if each not in special and each != sentence[own[at]]), None)
        if word is not None and len(made) < DECOYS:
            made.append((*sentence[: own[at]], word, *sentence[own[at] + 1 :]))
    return made
