"""Uploads after several local steps (FedAvg): sums of gradients that were taken at weights on a path."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

import torch

from situs.audit.attacks.base import Knowledge, known_numbers
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.count import Counts, count
from situs.audit.defences import Gradients
from situs.backbones.base import Backbone


def times_counted(block: Block, known: Knowledge, sent: Collection[str]) -> list[Counts]:
    """The ranks for ever more inputs a token, as far as that leaves nothing open; at least those of one input.

    The sum over k steps holds k inputs of every token, in its row space all of them: that of the first step belongs to
    the weights that were sent out, which are known exactly. One input is enough for one step alone.
    """
    found: list[Counts] = []
    for times in range(1, known.local_steps + 1):
        here = count(block, known.batch, sent, times)
        if times > 1 and (here.full or here.open):
            break
        found.append(here)
    return found[1:] or found


@torch.no_grad()
def halfway(backbone: Backbone, upload: Gradients, known: Knowledge) -> Backbone:
    """A copy with the mean of the weights over a client's steps of SGD, as far as the upload tells it.

    Gradients of one input a token are then off by what the path bends, and not by its whole length.
    """
    copy, back = deepcopy(backbone), known.training.lr * (known.local_steps - 1) / 2
    for name, parameter in copy.named_parameters():
        if name in upload and not known.training.adam:
            parameter -= back * known_numbers(upload[name]).nan_to_num().to(parameter)
    return copy
