"""transformers' text models as backbones: BERT, GPT-2 and the Llama-like decoders.

Their tokens are all ordinary: [CLS] is one of the input ids, so there are no prefix tokens. `grid` is
(length,). The model's own positions hold `length` places; a shorter sentence takes the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Features, InputSpec, Stream, Taps
from situs.backbones.hf.layers import EncoderBackbone, Head, HFBackbone, fit
from situs.backbones.hf.layout import write_bert, write_gpt2, write_llama
from situs.backbones.hf.names import own_state
from situs.backbones.layout import LayoutBuilder
from situs.core.position import Positions
from situs.core.tokens import Grid
from situs.errors import SitusError

TEXT = {"images": "it reads the ids of words"}
"""What every text model refuses, and why."""

CAUSAL = {
    **TEXT,
    "rows": "its causal mask would have to move along, P M Pᵀ, and that mask's row sums reveal the order",
    "context": "each token of a causal model has its own context already, the tokens before it",
}
"""What every causal model refuses, and why."""

FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose angles depend on the place alone, not on how long the sentence is."""


class Linear(NamedTuple):
    """A linear layer's tensors: [out, in] and [out]."""

    weight: Tensor
    bias: Tensor


class EncoderLayer(NamedTuple):
    """A block with its norms behind: norm(z + out(o)), and MLP(·) of it with the activation `act` behind `fc1`."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    fc1: Linear
    norm: nn.LayerNorm
    act: Callable[[Tensor], Tensor]
    heads: int
    scale: float


class TextBackbone(HFBackbone):
    """What the text models share: ids in, one row of tokens, positions for the first `length` places."""

    kinds: tuple[str, ...] = ("table",)
    refusals = TEXT

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        longest = model.config.max_position_embeddings
        height, length = size or (1, longest)
        if height != 1 or not 1 <= length <= longest:
            said = f"img_size={size}: {type(model).__name__} reads a row of 1 to {longest} tokens: give (1, length)"
            raise SitusError(said, field="img_size")
        super().__init__(model, head, (length,), 0)
        self.input = InputSpec(words=self.inner.get_input_embeddings().num_embeddings)

    @property
    def num_classes(self) -> int:
        return self.model.config.num_labels if self.name.endswith("ForSequenceClassification") else 0

    @property
    def next_words(self) -> bool:
        """Whether its head gives the words to come."""
        return self.name.endswith(("LMHeadModel", "ForCausalLM"))

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Old files hold the numbers of the places and causal masks, which newer models make themselves.
        kept = {
            name: value
            for name, value in state.items()
            if not name.endswith(("position_ids", ".attn.bias", ".attn.masked_bias"))
        }
        return own_state(self.model, kept)

    def _length(self, grid: Grid | None) -> int:
        """How many places a grid has, (length,); refused where they are more than the model knows."""
        length = self.num_tokens if grid is None else math.prod(grid)
        if length > self.num_tokens:
            self.own_grid(grid, f"it knows the first {self.num_tokens} places")
        return length

    def embed(self, x: Tensor) -> Tensor:
        """Ids [B, N] -> word vectors [B, N, D], without position. Of pairs of sentences [B, 2, N], the ids and which of
        the two they stand in; a decoder reads one behind the other and makes no difference."""
        x = x[:, 0] if x.dim() == 3 and x.shape[1] == 2 else x
        if x.dim() != 2 or x.is_floating_point() or x.shape[1] > self.num_tokens:
            raise SitusError(
                f"ids of shape {list(x.shape)} ({x.dtype}): {self.name} takes integers [B, N] "
                f"with N <= {self.num_tokens}",
                field="img_size",
            )
        return self.inner.get_input_embeddings()(x)

    def fitted(self, positions: Positions | None, count: int) -> Positions:
        return fit(positions, count, self.num_tokens, self.kinds, self.name)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The wrapped model's own forward: ids as for `embed` -> logits. mask: [B, N] bool, False for padding."""
        features = self.encode(self.embed(x), self.positions((x.shape[-1],)), mask=mask)
        return self.head(features if mask is None else self.before_head(features, mask))

    def before_head(self, features: Features, mask: Tensor) -> Features:  # noqa: ARG002  (a decoder uses it)
        """What the head reads of sentences that are filled up behind their ends."""
        return features


class BertBackbone(TextBackbone, EncoderBackbone):
    """BertModel, BertForSequenceClassification, BertForMaskedLM, as encoders."""

    lead = 1

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        super().__init__(model, head, size)
        if self.model.config.is_decoder:
            raise SitusError(f"is_decoder=True: {self.name} is known here as an encoder only")

    def layers(self) -> Any:
        return self.inner.encoder.layer

    def write_layout(self, layout: LayoutBuilder) -> None:
        write_bert(layout, self.dim, self.layers())

    def attentions(self) -> list[nn.Module]:
        return [layer.attention.self for layer in self.layers()]

    def embed(self, x: Tensor) -> Tensor:
        """Ids [B, N] -> word vectors and that of the first sentence, [B, N, D]; of pairs [B, 2, N] each its own's."""
        segments = self.inner.embeddings.token_type_embeddings
        if x.dim() == 3 and segments.num_embeddings < 2:
            said = f"{self.name} tells no two sentences apart (type_vocab_size=1), and pairs are given"
            raise SitusError(said, field="data.text.pair")
        return super().embed(x) + (segments(x[:, 1]) if x.dim() == 3 else segments.weight[0])

    def positions(self, grid: Grid | None = None) -> Positions:
        return Positions(table=self.inner.embeddings.position_embeddings.weight[: self._length(grid)])

    def before_blocks(self, z: Tensor) -> Tensor:
        embeddings = self.inner.embeddings
        return embeddings.dropout(embeddings.LayerNorm(z))

    def first_layer(self) -> EncoderLayer:
        """The first block's own tensors."""
        layer = self.layers()[0]
        attn, norm = layer.attention.self, layer.attention.output.LayerNorm
        parts = (attn.query, attn.key, attn.value, layer.attention.output.dense, layer.intermediate.dense)
        q, k, v, out, fc1 = (Linear(part.weight.detach(), part.bias.detach()) for part in parts)
        act = layer.intermediate.intermediate_act_fn
        scale = (q.weight.shape[0] // attn.num_attention_heads) ** -0.5
        return EncoderLayer(q, k, v, out, fc1, norm, act, attn.num_attention_heads, scale)

    def word_head(self) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
        """The last layer before the words of a masked model, and what is done between; None for another head."""
        if type(self.model).__name__ != "BertForMaskedLM":
            return None
        change = self.model.cls.predictions.transform
        return change.dense, lambda x: change.LayerNorm(change.transform_act_fn(x))


class DecoderBackbone(TextBackbone):
    """A causal model. It is never asked for a context, so its layers run through transformers' own code."""

    refusals = CAUSAL

    def before_head(self, features: Features, mask: Tensor) -> Features:
        """A classifier reads the last token: the last real one, in the place of what fills a sentence up."""
        if not self.num_classes:
            return features
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
        return features._replace(patches=features.patches[torch.arange(len(last), device=mask.device), last][:, None])

    def _masks(self, stream: Stream) -> dict[bool, Any]:
        """The attention masks in whatever form the model's attention wants: {sliding window or not: mask}."""
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
        """Which layers see only a window of the tokens before them."""
        return [False] * self.depth

    def given(self, stream: Stream) -> dict[str, Any]:  # noqa: ARG002  (a model that rotates uses it)
        """What every layer is given beside the tokens and the mask."""
        return {}

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        assert keys is None  # `blocks` has refused a context
        z, masks, given = stream.z, self._masks(stream), self.given(stream)
        for number, (layer, sliding) in enumerate(zip(self.layers(), self._sliding(), strict=True), start=1):
            z = layer(z, attention_mask=masks[sliding], **given)
            for tap in taps:
                tap(number, z)
        return z

    def branches(self, prefix: Tensor, words: Tensor) -> Tensor:
        """What the first block makes of each of `words` [m] behind the sentence `prefix` [t], [m, D].

        As one sequence: all stand at place t and see the prefix and themselves.
        """
        t, m = len(prefix), len(words)
        index = torch.cat([torch.arange(t), torch.full((m,), t)]).to(words.device)
        places = self.positions((t + 1,)).take(index.unsqueeze(0))
        tokens = self.inner.get_input_embeddings()(torch.cat([prefix, words]).unsqueeze(0))
        stream = self.assemble(tokens, places)
        seen = torch.eye(t + m, dtype=torch.bool, device=words.device)
        seen[:, :t] = torch.ones_like(seen[:, :t]).tril()
        mask = torch.zeros_like(seen, dtype=stream.z.dtype).masked_fill(~seen, torch.finfo(stream.z.dtype).min)
        return self.layers()[0](stream.z, attention_mask=mask[None, None], **self.given(stream))[0, t:]


class GPT2Backbone(DecoderBackbone):
    """GPT2Model, GPT2LMHeadModel: a learned table, dropout behind it, and a causal mask."""

    def layers(self) -> Any:
        return self.inner.h

    def write_layout(self, layout: LayoutBuilder) -> None:
        write_gpt2(layout, self.dim, self.layers())

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

    def write_layout(self, layout: LayoutBuilder) -> None:
        write_llama(layout, self.dim, self.layers())

    def positions(self, grid: Grid | None = None) -> Positions:
        weight = self.inner.embed_tokens.weight
        places = torch.arange(self._length(grid), device=weight.device).unsqueeze(0)
        cosine, sine = self.inner.rotary_emb(weight, places)
        return Positions(rotary=torch.cat([sine, cosine], dim=-1)[None, :, None] / self._factor)

    def given(self, stream: Stream) -> dict[str, Any]:
        return {"position_embeddings": self._rotation(stream)}

    def _rotation(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """(cosine, sine), each [B or 1, N, d]; the identity where there are no positions."""
        if stream.rotary is None:
            cosine = stream.z.new_ones(1, stream.z.shape[1], self.inner.layers[0].self_attn.head_dim)
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


class Qwen2Backbone(LlamaBackbone):
    """Qwen2Model, Qwen2ForCausalLM: Llama with biases on q, k, v and, in some layers, a sliding window."""

    def _sliding(self) -> list[bool]:
        return [kind == "sliding_attention" for kind in self.model.config.layer_types[: self.depth]]


def bert_pooled(model: Any, features: Features) -> Tensor:
    """The pooler's output, or the first token where the model has none."""
    return features.patches[:, 0] if model.pooler is None else model.pooler(features.patches)


def bert_classes(model: Any, features: Features) -> Tensor:
    """A linear layer on the pooler's output."""
    return model.classifier(model.dropout(model.bert.pooler(features.patches)))


def bert_words(model: Any, features: Features) -> Tensor:
    """A logit for each word at each place, [B, N, V]."""
    return model.cls(features.patches)


def hidden(_: Any, features: Features) -> Tensor:
    """A decoder without a head gives its last hidden states, as its own forward does."""
    return features.patches


def last_classes(model: Any, features: Features) -> Tensor:
    """A linear layer on the last token."""
    return model.score(features.patches[:, -1])


def next_words(model: Any, features: Features) -> Tensor:
    """A logit for each word to come after each place, [B, N, V]."""
    return model.lm_head(features.patches)


TOKENISERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")


def open_tokeniser(folder: Path) -> Any:
    """transformers' tokeniser of a model's folder; nothing is fetched."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENISERS):
        raise SitusError(f"{folder}: holds no tokeniser, so texts cannot be turned into its words", field="texts")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged tokeniser fails in as many ways as there are kinds of them
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SitusError(f"{folder}: its tokeniser cannot be read: {reason}", field="texts") from error


def token_ids(folder: Path, texts: list[str], longest: int) -> list[list[int]]:
    """Each text as the ids of its tokens, those that a model's input begins and ends with among them."""
    return open_tokeniser(folder)(texts, truncation=True, max_length=longest)["input_ids"]
