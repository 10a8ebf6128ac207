"""transformers' causal models as backbones: GPT-2, GPT-NeoX, and Llama with models of the same layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Features
from situs.backbones.block import Stream, Taps
from situs.backbones.hf.layers import Head
from situs.backbones.hf.text import TEXT, TextBackbone
from situs.core.position import Positions
from situs.core.tokens import Grid
from situs.errors import SitusError

CAUSAL = {
    **TEXT,
    "rows": "its causal mask would have to be permuted too (P M Pᵀ), and the mask's row sums reveal the order",
    "context": "each token of a causal model has its own context already, the tokens before it",
}
"""What every causal model refuses, and why."""

FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose angles depend on the position alone, not on the length of the sentence."""


class DecoderBackbone(TextBackbone):
    """A causal model. It never has a context, so its layers run through transformers' own code."""

    refusals = CAUSAL

    def before_head(self, features: Features) -> Features:
        """A classifier takes the last token: the last real one, not padding."""
        if not self.num_classes or (mask := features.real) is None:
            return features
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
        return features._replace(patches=features.patches[torch.arange(len(last), device=mask.device), last][:, None])

    def _masks(self, stream: Stream) -> dict[bool, Any]:
        """The attention masks in the form of the model's attention: {sliding window or not: mask}."""
        from transformers import masking_utils

        makers = {
            False: masking_utils.create_causal_mask,
            True: masking_utils.create_sliding_window_causal_mask,
        }
        config = self.model.config
        return {
            sliding: makers[sliding](
                config=config, inputs_embeds=stream.z, attention_mask=stream.mask, past_key_values=None
            )
            for sliding in set(self._sliding())
        }

    def _sliding(self) -> list[bool]:
        """Which layers attend only to a window of the tokens before them."""
        return [False] * self.depth

    def layer_inputs(self, stream: Stream) -> dict[str, Any]:  # noqa: ARG002  (a model that rotates uses it)
        """Inputs of every layer beside the tokens and the mask."""
        return {}

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        assert keys is None  # `blocks` has refused a context
        z, masks, inputs = stream.z, self._masks(stream), self.layer_inputs(stream)
        for number, (layer, sliding) in enumerate(zip(self.layers(), self._sliding(), strict=True), start=1):
            z = layer(z, attention_mask=masks[sliding], **inputs)
            for tap in taps:
                tap(number, z)
        return z

    def branches(self, prefix: Tensor, words: Tensor) -> Tensor:
        """The first block's output for each of `words` [m] after the sentence `prefix` [t], [m, D].

        As one sequence: all stand at place t and see the prefix, as far as a window lets them, and themselves.
        """
        t, m = len(prefix), len(words)
        index = torch.cat([torch.arange(t), torch.full((m,), t)]).to(words.device)
        places = self.positions((t + 1,)).take(index.unsqueeze(0))
        tokens = self.inner.get_input_embeddings()(torch.cat([prefix, words]).unsqueeze(0))
        stream = self.assemble(tokens, places)
        seen = torch.eye(t + m, dtype=torch.bool, device=words.device)
        seen[:, :t] = torch.ones_like(seen[:, :t]).tril()
        if self._sliding()[0]:
            seen &= index > index.unsqueeze(1) - self.model.config.sliding_window
        mask = torch.zeros_like(seen, dtype=stream.z.dtype).masked_fill(~seen, torch.finfo(stream.z.dtype).min)
        return self.layers()[0](stream.z, attention_mask=mask[None, None], **self.layer_inputs(stream))[0, t:]


class GPT2Backbone(DecoderBackbone):
    """GPT2Model, GPT2LMHeadModel: a learned table, dropout behind it, and a causal mask."""

    def layers(self) -> Any:
        return self.inner.h

    def positions(self, grid: Grid | None = None) -> Positions:
        return Positions(table=self.inner.wpe.weight[: self._length(grid)])

    def before_blocks(self, z: Tensor) -> Tensor:
        return self.inner.drop(z)

    def final_norm(self, z: Tensor) -> Tensor:
        return self.inner.ln_f(z)


class LlamaBackbone(DecoderBackbone):
    """LlamaModel, LlamaForCausalLM: rotary positions, grouped queries, RMSNorm.

    The rotation holds plain sines and cosines: [1, 1, 1, N, 2d] = cat(sin, cos), each with two equal halves.
    YaRN's factor on both is kept out of it and put back in the layers, for it is no part of a token's place.
    """

    kinds = ("rotary",)

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        super().__init__(model, head, size)
        kind = self.inner.rotary_emb.rope_type
        if kind not in FIXED_ROTATIONS:
            raise SitusError(
                f"rope_type={kind!r}: its angles change with the length; {self.name} may have: "
                f"{', '.join(FIXED_ROTATIONS)}"
            )
        # As float32, the number by which transformers really multiplies: dividing leaves place 0 the exact identity.
        self._factor = float(torch.tensor(self.inner.rotary_emb.attention_scaling, dtype=torch.float32, device="cpu"))

    def layers(self) -> Any:
        return self.inner.layers

    def positions(self, grid: Grid | None = None) -> Positions:
        weight = self.inner.get_input_embeddings().weight
        places = torch.arange(self._length(grid), device=weight.device).unsqueeze(0)
        cosine, sine = self.inner.rotary_emb(weight, places)
        return Positions(rotary=torch.cat([sine, cosine], dim=-1)[None, :, None] / self._factor)

    def layer_inputs(self, stream: Stream) -> dict[str, Any]:
        return {"position_embeddings": self._rotation(stream)}

    def _rotation(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """(cosine, sine), each [B or 1, N, d]; the identity where there are no positions."""
        if stream.rotary is None:
            cosine = stream.z.new_ones(1, stream.z.shape[1], 2 * self.inner.rotary_emb.inv_freq.numel())
            sine = torch.zeros_like(cosine)
        else:
            sine, cosine = stream.rotary[0, :, 0].chunk(2, dim=-1)
        if self._factor != 1:
            # transformers scales in float32 whatever the model's dtype; the detour returns its very numbers.
            cosine, sine = ((x * self._factor).float() for x in (cosine, sine))
        return cosine.to(stream.z.dtype), sine.to(stream.z.dtype)

    def final_norm(self, z: Tensor) -> Tensor:
        return self.inner.norm(z)


class MistralBackbone(LlamaBackbone):
    """MistralModel, MistralForCausalLM: Llama, some with a sliding window (in tokens as they come)."""

    def _sliding(self) -> list[bool]:
        return [self.model.config.sliding_window is not None] * self.depth


class QwenBackbone(LlamaBackbone):
    """Qwen2 and Qwen3: Llama with biases on q, k, v or norms over each head's, and a sliding window in some layers."""

    def _sliding(self) -> list[bool]:
        return [kind == "sliding_attention" for kind in self.model.config.layer_types[: self.depth]]


class GPTNeoXBackbone(LlamaBackbone):
    """GPT-NeoX: rotary positions on some channels of each head, LayerNorm; most run attention and MLP in parallel."""

    def before_blocks(self, z: Tensor) -> Tensor:
        return self.inner.emb_dropout(z)

    def final_norm(self, z: Tensor) -> Tensor:
        return self.inner.final_layer_norm(z)


def hidden(_: Any, features: Features) -> Tensor:
    """A decoder without a head gives its last hidden states, as its own forward does."""
    return features.patches


def last_classes(model: Any, features: Features) -> Tensor:
    """A linear layer on the last token."""
    return model.score(features.patches[:, -1])


def next_words(model: Any, features: Features) -> Tensor:
    """Logits of the next word at each position, [B, N, V]."""
    return model.get_output_embeddings()(features.patches)
