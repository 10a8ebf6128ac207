"""MP3: masked patch position prediction (Zhai et al., 2022, arXiv 2207.07611).

Take the positions away from every patch, let a random context of patches serve as keys and values, and ask every
patch, context included, where it was: one linear classifier over all N places.

Deviations, each from an error in the paper's Algorithm 1: the context is N - int(ηN) patches as the text says (its
`M = int(N*eta)` would leave none at η = 0), and the first of a random order (its indexing composes the order with
itself, which is biased). Of sentences, filled up to a common length, each has its context among its real tokens. Their
[CLS] is an ordinary token of the model: it is always in the context, told its place where hints are, and never asked.
A word that stands twice is the same token both times, so that the best answer to either is half right: accuracy on
sentences does not reach 1.
CLS bears no loss and is always in the context, so that it exists for fine-tuning; the paper
does not say whether it is, and `cls` has the two other readings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone, Features
from situs.config import Checked
from situs.core.masking import count_of
from situs.core.permutation import random_permutation
from situs.core.position import Positions
from situs.core.random import uniform
from situs.core.tokens import take
from situs.errors import SitusError
from situs.limits import Natural, Within
from situs.methods.base import Batch, Draws, Method, Output, Puzzle
from situs.methods.heads import place_ranks, position_accuracy, position_loss


@dataclass(frozen=True)
class MP3Config(Checked):
    """MP3's own settings."""

    mask_ratio: Annotated[float, Within("[0, 1)")] = 0.75
    """η: the share of patches that serve only as queries. Paper: .5 on CIFAR-100, .8 Tiny ImageNet, .75 ImageNet."""

    anchor_ratio: Annotated[float, Within("[0, 1)")] = 0.0
    """Share of patches that are told their place. 0 on images; .05 in speech, where the task is too hard without."""

    cls: Literal["always", "never", "drawn"] = "always"
    """Whether CLS and other prefix tokens serve as keys and values: always, never, or as they are drawn, like patches,
    of which there are as many fewer in the context then."""

    window: Natural = 0
    """0: a token says its place. W: it says how far it stands before or behind another one, drawn at random, up to W
    places either way. For running text, which is cut anywhere, so that a place in a piece of it means nothing."""


class MP3(Method):
    """`draw` orders the tokens, context first; `forward` reads like Figure 1."""

    Config: ClassVar[type[MP3Config]] = MP3Config
    needs: ClassVar[tuple[str, ...]] = ("tokens", "context")
    puzzle_ratios: ClassVar[tuple[str, ...]] = ("mask_ratio",)
    names_places: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def __init__(self, backbone: Backbone | nn.Module, config: MP3Config | None = None) -> None:
        config = config or MP3Config()
        super().__init__(backbone, config)
        backbone = self.backbone
        if config.window:
            self.position_head = nn.Linear(2 * backbone.out_dim, 2 * config.window + 1)
        else:
            self.position_head = nn.Linear(backbone.out_dim, backbone.num_tokens)
        nn.init.trunc_normal_(self.position_head.weight, std=0.02)
        nn.init.zeros_(self.position_head.bias)

    @property
    def context(self) -> int:
        """M: how many patches serve as keys and values; at most, where prefix tokens are drawn with them."""
        return self._context(self.backbone.num_tokens)

    def _context(self, patches: int) -> int:
        """M of so many patches."""
        count = patches + (self.backbone.num_prefix if self.config.cls == "drawn" else 0)
        return min(patches, count - count_of(self.config.mask_ratio, count))

    @classmethod
    def uses_positions(cls, config: MP3Config) -> bool:
        return config.anchor_ratio > 0

    def at(self, *ratios: float) -> MP3:
        """The same weights with another η, for evaluations."""
        (mask_ratio,) = ratios
        return self._under(replace(self.config, mask_ratio=mask_ratio))

    @property
    def told(self) -> float:
        return self.config.anchor_ratio

    def telling(self, share: float) -> MP3:
        """The same weights with another share of hints, for evaluations; 0: none."""
        return self._under(replace(self.config, anchor_ratio=share))

    def _under(self, config: MP3Config) -> MP3:
        with torch.device("meta"):  # the head made here gives way to this one's, and must draw no random numbers
            other = MP3(self.backbone, config)
        other.position_head, other.training = self.position_head, self.training
        return other

    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """The context stands first; every patch is asked for."""
        self._need_places()
        self.refuse_padding(self.with_mask(batch))
        extras = self(batch, self.draw(batch, seed=seed, epoch=0)).extras
        logits, places = extras["logits"], extras["places"]
        ranks = place_ranks(logits, places)
        return Puzzle(places, logits.argmax(dim=-1), self.context, 0, self.grid, self.told, ranks)

    def _need_places(self) -> None:
        if self.config.window:
            said = f"window={self.config.window}: it learned how far tokens are apart, and names no places"
            raise SitusError(said, field="window")

    def place_logits(self, inputs: Tensor) -> Tensor:
        self._need_places()
        tokens = self.backbone.embed(inputs)
        return self.position_head(self._encode(tokens, None, None).patches)

    def draw(self, batch: Batch, *, seed: int, epoch: int, progress: float = 0.0) -> Draws:
        """order: [B, N], the context's places first. anchors: [B, N] bool in that order, where anchors are used.

        prefix: [B, p] bool, where prefix tokens are drawn: which of them are in the context. Of a padded sample the
        padding stands last, and its context is chosen among its real tokens.
        """
        batch = self.with_mask(batch)
        count = self.backbone.num_tokens if batch.mask is None else batch.mask.shape[1]
        noise = uniform(seed, epoch, batch.ids, "mp3.context", (count,))
        if batch.mask is not None:
            noise = noise.masked_fill(~batch.mask, 1.0)  # noise is below 1, and equal numbers keep their order
        if lead := self.backbone.lead:
            noise[:, :lead] = -1.0
        draws = {"order": random_permutation(noise)}
        if self.config.anchor_ratio:
            chance = uniform(seed, epoch, batch.ids, "mp3.anchors", (count,))
            told = random_permutation(chance) < count_of(self.config.anchor_ratio, count)
            if batch.mask is not None:  # a share of each sentence's own tokens, one at least
                length, slot = batch.mask.sum(dim=1, keepdim=True), torch.arange(count, device=chance.device)
                ranks = random_permutation(random_permutation(torch.where(slot < length, chance, 2.0)))
                told = ranks < (self.config.anchor_ratio * length + 1e-6).long().clamp(min=1)
            told[:, :lead] = True
            draws["anchors"] = told
        if self.config.cls == "drawn":
            own = uniform(seed, epoch, batch.ids, "mp3.prefix", (self.backbone.num_prefix,))
            ranks = random_permutation(random_permutation(torch.cat([own, noise], dim=1)))[:, : own.shape[1]]
            draws["prefix"] = ranks < self._drawn(batch)
        return draws

    def forward(self, batch: Batch, draws: Draws) -> Output:
        batch, order = self.with_mask(batch), draws["order"]
        # Without positions the order of the tokens means nothing, so the context may stand in front: every layer's
        # keys and values are then a slice of its tokens instead of a gather. Patches are put in that order before they
        # are embedded: inputs need no gradient, so nothing has to be scattered back.
        tokens = self.backbone.embed_at(batch.inputs, order)
        places = None
        if "anchors" in draws:
            places = self.backbone.positions().take(order).forget(~draws["anchors"])
        real, keys = self._real(batch)
        if "prefix" in draws:  # as many patches fewer
            slots = torch.arange(order.shape[1], device=order.device)
            keys = slots < self._drawn(batch) - draws["prefix"].sum(dim=1, keepdim=True)
        features = self._encode(tokens, places, self._context(order.shape[1]), keys, draws.get("prefix"))
        asked = self._asked(real, order)
        if self.config.window:
            logits, truth, paired = self._apart(features.patches, order, real)
            asked = paired if asked is None else asked & paired
        else:
            logits, truth = self.position_head(features.patches), order
        metrics = {"position_accuracy": position_accuracy(logits, truth, asked)}
        return Output(position_loss(logits, truth, asked), metrics, {"logits": logits.detach(), "places": truth})

    def _asked(self, real: Tensor | None, order: Tensor) -> Tensor | None:
        """Which tokens, in the order drawn, bear the loss [B, N]: the real ones but the model's own; None: all."""
        if not self.backbone.lead:
            return real
        own = torch.arange(order.shape[1], device=order.device) < self.backbone.lead
        return ~own.expand_as(order) if real is None else real & ~own

    def _apart(self, patches: Tensor, order: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Each token beside the next in the order drawn, the last beside the first: logits [B, N, 2 W + 1], how far
        they are apart in truth, -W to W, counted from 0, and whether it is beside another one: one alone has none."""
        lead, slot = self.backbone.lead, torch.arange(order.shape[1], device=order.device)
        length = order.shape[1] if real is None else real.sum(dim=1, keepdim=True)
        other = torch.where(slot + 1 < length, slot + 1, lead).expand_as(order).clamp(max=order.shape[1] - 1)
        logits = self.position_head(torch.cat([patches, take(patches, other)], dim=-1))
        far = order - order.gather(1, other)
        return logits, far.clamp(-self.config.window, self.config.window) + self.config.window, other != slot

    def _encode(
        self, tokens: Tensor, places: Positions | None, context: int | None, keys: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> Features:  # fmt: skip
        """`Backbone.encode`, with prefix tokens among the keys as the config says, or as they are drawn [B, p]."""
        if self.config.cls == "always":
            return self.backbone.encode(tokens, places, context, keys)
        stream = self.backbone.assemble(tokens, places, keys)
        p, count = stream.prefix, tokens.shape[1]
        if self.config.cls == "never" and keys is None and stream.rotary is None and stream.bias is None:
            # Behind the patches they are outside of the slice of keys; a mask would rule out the fastest kernels.
            z = torch.cat([stream.z[:, p:], stream.z[:, :p]], dim=1)
            z = self.backbone.blocks(replace(stream, z=z, prefix=0), count if context is None else context).z
            return self.backbone.finish(replace(stream, z=torch.cat([z[:, count:], z[:, :count]], dim=1)))
        if self.config.cls == "never":
            drawn = stream.z.new_zeros(len(tokens), p, dtype=torch.bool)
        if drawn is not None:
            own = stream.z.new_ones(tokens.shape[:2], dtype=torch.bool) if keys is None else keys
            stream = replace(stream, mask=torch.cat([drawn, own], dim=1))
        return self.backbone.finish(self.backbone.blocks(stream, context))

    def _drawn(self, batch: Batch) -> Tensor | int:
        """How many of a sample's tokens serve as keys, where prefix tokens are drawn with its patches; [B, 1]."""
        if batch.mask is not None:
            return self._visible(batch.mask.sum(dim=1, keepdim=True) + self.backbone.num_prefix)
        count = self.backbone.num_tokens + self.backbone.num_prefix
        return count - count_of(self.config.mask_ratio, count)

    def _visible(self, length: Tensor) -> Tensor:
        """Of so many tokens the keys, as `count_of` reckons."""
        return length - (self.config.mask_ratio * length + 1e-6).long()

    def _real(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Of padded samples: which tokens, in the order drawn, are real [B, N], and which serve as keys."""
        if batch.mask is None:
            return None, None
        slot, length = torch.arange(batch.mask.shape[1], device=batch.mask.device), batch.mask.sum(dim=1, keepdim=True)
        return slot < length, slot < self._visible(length)
