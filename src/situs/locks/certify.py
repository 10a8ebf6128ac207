"""The check before every lock: the column law on a model of the same layout, with the keys of the lock.

The law depends on the layout, not on the weights. The check builds the model that config.json describes with random
weights (ones and zeros could hide a mistake), permutes it as the files will be permuted, and compares the two in
float64. A large model is checked on one block; its other blocks must have the same layout.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group, Member
from situs.errors import SitusError
from situs.locks.equivariance.experiment import Experiment
from situs.locks.equivariance.findings import TOLERANCES
from situs.locks.equivariance.sample import sample_of
from situs.locks.folder import structure_of
from situs.locks.groups import within
from situs.models.inference import evaluating

LARGE = 5_000_000
"""Parameters above which one block is checked for all: float64 copies of more would cost more than the lock."""


def certify(backbone: Backbone, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> float:
    """The largest error in float64, forward and backward, of the blocks with all `groups` keyed against the clear ones.

    Raises if it is above the tolerance, or if the check would not notice a wrong key. groups, keys: under the model's
    names. The weights of `backbone` are used as they are.
    """
    with evaluating(backbone):
        sample = sample_of(backbone, None, 32, torch.Generator().manual_seed(0))
        experiment = Experiment(backbone, sample, torch.float64, 0)
        error = max(experiment.column(groups, keys).values())
        control = experiment.control(groups, keys)
    limit = TOLERANCES[torch.float64]
    if not error <= limit:
        raise SitusError(
            f"{backbone.name}: permuting the channels changes its output by {error:.1e} (allowed: {limit:.0e})"
        )
    if control is None or not control > limit:
        raise SitusError(
            f"{backbone.name}: a wrong key, which leaves one axis of a tensor unpermuted, also passes the test, so the "
            "test proves nothing"
        )
    return error


def certify_folder(
    folder: Path, structure: Backbone, groups: Sequence[Group], keys: Mapping[str, Tensor], *, large: int = LARGE
) -> float:
    """Certifies the layout of a model's folder. structure: the model of its config.json; groups: under its names."""
    changed = {}
    if sum(parameter.numel() for parameter in structure.model.parameters()) > large:
        changed = structure.one_block_args()
        if changed:
            _check_blocks_alike(groups, structure.name)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        model = _randomised(structure_of(folder, "cpu", changed))
        return certify(model, within(groups, model.model.state_dict()), keys)


@torch.no_grad()
def _randomised(backbone: Backbone) -> Backbone:
    """The backbone with random weights, in place; an initialisation's ones and zeros could hide a mistake."""
    generator = torch.Generator().manual_seed(0)
    for parameter in backbone.parameters():
        width = parameter.shape[-1] if parameter.dim() > 1 else 4
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return backbone


def _check_blocks_alike(groups: Sequence[Group], name: str) -> None:
    """Refuses a layout in which blocks differ in the axes that a key moves."""
    axes_by_block: dict[str, set[tuple[str, Member]]] = defaultdict(set)
    for group in groups:
        for member in group.members:
            parts = re.split(r"(?:^|(?<=\.))(\d+)(?=\.)", member.tensor, maxsplit=1)
            if len(parts) == 3:  # else it is in no block: a table that all blocks share
                axes_by_block[parts[1]].add((group.kind, replace(member, tensor=f"{parts[0]}*{parts[2]}")))
    if len({frozenset(axes) for axes in axes_by_block.values()}) != 1:
        raise SitusError(f"{name}: its blocks have different layouts, so a check of one block does not hold for all")
