"""The first block of a model (`tokens.block`) as it is in a step that hides places: no attention is computed.

    m = z + A o + b          the stream between attention and MLP: z the token, o what enters the attention's last layer
    h = norm(m)              what enters the MLP's first layer
    a = late(m)              what enters its last layer

Tokens whose places are hidden have E_unk instead of their row of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from situs.audit.attacks.spans import Norm, Span
from situs.audit.attacks.tokens.block import Block
from situs.audit.defences import Gradients
from situs.audit.stem import Stem, table_rows


class FirstBlock:
    """block: what the weights tell, or the reason why nothing. hidden: [N] bool. unknown: E_unk, [D].

    reason: None, or why the block's tokens cannot be solved for; the rest is then not there.
    """

    proj: Span
    fc1: Span
    fc2: Span
    norm: Norm

    def __init__(self, block: Block | str, stem: Stem, upload: Gradients, hidden: Tensor, unknown: Tensor) -> None:
        self.reason = block if isinstance(block, str) else None
        if isinstance(block, str):
            return
        self.block, self.weight, self.into, self.shift = block, block.weight, block.into, block.shift
        self.norm, self.tokens = block.norm2, block.places + len(block.prefix)
        table = table_rows(dict(block.backbone.named_parameters())[stem.table], stem)
        self.base = torch.where(hidden.unsqueeze(-1), block.base - table + unknown.to(table), block.base)
        self.reason = self._read(upload)

    def embed(self, patches: Tensor) -> Tensor:
        """z of the image's patch tokens [N, D] for patches [N, K], hidden ones with E_unk."""
        return patches @ self.weight.T + self.base

    def late(self, m: Tensor) -> Tensor:
        """What enters the MLP's last layer for streams m [..., D]: [..., H]."""
        return self.block.late(m)

    def middle(self, patches: Tensor) -> Tensor:
        """m of the image's patch tokens [N, D], with the attention that they pay to each other."""
        tokens = self.embed(patches) - self.block.base
        return self.block.through(tokens.unsqueeze(0))[0][0, len(self.block.prefix) :]

    def _read(self, upload: Gradients) -> str | None:
        """Finds the spans; the reason where that fails."""
        layers = self.block.layers
        if self.block.norm0 is not None:
            return "a norm stands before its first block"
        for role, name in (("proj", layers.proj), ("fc1", next(iter(layers.fc1))), ("fc2", layers.fc2)):
            if name not in upload or not Span.exists(upload[name], self.tokens):
                return f"the gradient of {name} has no directions beside those of {self.tokens} tokens, or is not sent"
            setattr(self, role, Span(upload[name], self.tokens))
        return None
