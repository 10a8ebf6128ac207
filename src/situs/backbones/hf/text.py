"""transformers' text models as backbones: encoders (BERT and models with the same layers), causal models (GPT-2,
GPT-NeoX, Llama and models with the same layers), their heads and tokenisers.

Their tokens are all ordinary: [CLS] is one of the input ids, so there are no prefix tokens. `grid` is (length,). The
model's own positions hold `length` places; a shorter sentence takes the first ones. Each encoder is BERT with other
names: where its parts are, from which row of the table its places are numbered, whether it tells two sentences apart,
and its heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Features, InputSpec
from situs.backbones.block import Stream, Taps
from situs.backbones.hf.layers import EncoderBackbone, Head, HFBackbone, fit, own_state
from situs.core.position import Positions
from situs.core.selection import Tokens
from situs.core.tokens import Grid
from situs.errors import SitusError
from situs.files import missing_reason

TEXT = {"images": "its input is word ids"}
"""What every text model refuses, and why."""


MADE = (
    *("position_ids", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
"""How tensors of old files end that newer models make themselves: numbers of places, causal masks, rotations."""


class TextBackbone(HFBackbone):
    """What the text models share: ids in, one row of tokens, positions for the first `length` tokens."""

    kinds: tuple[str, ...] = ("table",)
    refusals = TEXT

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        longest = model.config.max_position_embeddings - self.first_row(model)
        height, length = size or (1, longest)
        if height != 1 or not 1 <= length <= longest:
            reason = f"img_size={size}: must be (1, length): {type(model).__name__} takes 1 to {longest} tokens"
            raise SitusError(reason, field="img_size")
        super().__init__(model, head, (length,), 0)
        self.input = InputSpec(words=self.inner.get_input_embeddings().num_embeddings)

    @classmethod
    def first_row(cls, model: Any) -> int:  # noqa: ARG003  (a family that numbers otherwise reads it)
        """The row of the model's table that is its first place's."""
        return 0

    @property
    def num_classes(self) -> int:
        return self.model.config.num_labels if self.name.endswith("ForSequenceClassification") else 0

    @property
    def next_words(self) -> bool:
        """Whether its head gives the words to come."""
        return self.name.endswith(("LMHeadModel", "ForCausalLM"))

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return own_state(self.model, {name: value for name, value in state.items() if not name.endswith(MADE)})

    def _length(self, grid: Grid | None) -> int:
        """The number of positions of a grid, (length,); refused if they are more than the model knows."""
        length = self.num_tokens if grid is None else math.prod(grid)
        if length > self.num_tokens:
            self.own_grid(grid, f"it has only {self.num_tokens} positions")
        return length

    def embed(self, x: Tensor) -> Tensor:
        """Ids [B, N] -> word vectors [B, N, D], without position. Of pairs of sentences [B, 2, N], the ids and which of
        the two they stand in; a decoder reads one behind the other and makes no difference."""
        x = x[:, 0] if x.dim() == 3 and x.shape[1] == 2 else x
        if x.dim() != 2 or x.is_floating_point() or x.shape[1] > self.num_tokens:
            raise SitusError(
                f"ids of shape {list(x.shape)} ({x.dtype}): {self.name} takes integers of shape [B, N], "
                f"and N must be at most {self.num_tokens}",
                field="img_size",
            )
        return self.inner.get_input_embeddings()(x)

    def tokens(self, inputs: Tensor, mask: Tensor | None = None) -> Tokens:
        """Every word of ids as for `embed`, where no mask says which of them are real."""
        ids = inputs[:, 0] if inputs.dim() == 3 else inputs
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        return Tokens(real.shape[1], real, self.special)

    def positions_of(self, tokens: Tokens) -> Positions:
        return self.positions((tokens.total,))

    def ready_to_select(self, kept: int) -> None:
        super().ready_to_select(kept)
        self.require("rows")  # selected tokens stand in random order, which a causal mask would take for theirs

    def ready_to_shuffle(self) -> None:
        self.require("rows")  # a causal mask would give the order away

    def fitted(self, positions: Positions | None, count: int) -> Positions:
        return fit(positions, count, self.num_tokens, self.kinds, self.name)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The wrapped model's own forward: ids as for `embed` -> logits. mask: [B, N] bool, False for padding."""
        return self.classify(self.encode(self.embed(x), self.positions((x.shape[-1],)), mask=mask))

    def before_head(self, features: Features) -> Features:
        """What the head reads of sentences that are filled up behind their ends."""
        return features


TOKENISERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")


def open_tokeniser(folder: Path) -> Any:
    """transformers' tokeniser of a model's folder; nothing is fetched."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENISERS):
        raise SitusError(
            f"{folder}: {missing_reason(folder, TOKENISERS[0])}, so texts cannot be tokenised",
            field="texts",
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokeniser fails in as many ways as there are kinds of them
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SitusError(f"{folder}: its tokeniser cannot be read: {reason}", field="texts") from error


def token_ids(folder: Path, texts: list[str], longest: int) -> list[list[int]]:
    """Each text as the ids of its tokens, those that a model's input begins and ends with among them."""
    return open_tokeniser(folder)(texts, truncation=True, max_length=longest)["input_ids"]


class TextEncoder(TextBackbone, EncoderBackbone):
    """BERT, and ELECTRA, whose words and positions may have fewer channels than its layers."""

    special = 1
    segments: ClassVar[bool] = True
    """Whether the model has token types for two sentences; otherwise only a separator divides them."""

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        super().__init__(model, head, size)
        self.token_dim = self.inner.get_input_embeddings().embedding_dim
        if getattr(self.model.config, "is_decoder", False):
            raise SitusError(
                f"is_decoder=True: {self.name} is supported only as an encoder; if it was trained as one, set "
                "is_decoder=False"
            )

    def layers(self) -> Any:
        return self.inner.encoder.layer

    def widener(self) -> nn.Module | None:
        """The projection of words and positions to the width of the blocks; None if they already have this width."""
        return getattr(self.inner, "embeddings_project", None)

    def embed(self, x: Tensor) -> Tensor:
        """Ids [B, N] -> word vectors plus the first token type's, [B, N, D]; for pairs [B, 2, N] each word's type."""
        segments, words = getattr(self.inner.embeddings, "token_type_embeddings", None), super().embed(x)
        if segments is None:
            return words
        if x.dim() == 2 or not self.segments:
            return words + segments.weight[0]
        if segments.num_embeddings < 2:
            reason = f"{self.name} has no token types (type_vocab_size=1), so it takes no pairs of sentences"
            raise SitusError(reason, field="data.text.pair")
        return words + segments(x[:, 1])

    def positions(self, grid: Grid | None = None) -> Positions:
        first = self.first_row(self.model)
        return Positions(table=self.inner.embeddings.position_embeddings.weight[first : first + self._length(grid)])

    def before_blocks(self, z: Tensor) -> Tensor:
        embeddings = self.inner.embeddings
        z, wider = embeddings.dropout(embeddings.LayerNorm(z)), self.widener()
        return z if wider is None else wider(z)

    def word_head(self) -> MaskedHead | None:
        """The layers before the output embedding of a masked model; None for another head."""
        return MASKED[self.name](self.model) if self.name in MASKED else None


class RobertaBackbone(TextEncoder):
    """RoBERTa, XLM-RoBERTa, CamemBERT: one row of the table is for padding, and positions are numbered after it.

    transformers numbers by the ids: a padding token within a sentence takes no place there, here it is a word.
    """

    segments = False

    @classmethod
    def first_row(cls, model: Any) -> int:
        padding = model.base_model.embeddings.padding_idx
        if padding is None:
            raise SitusError(
                f"pad_token_id=None: must be set, because {type(model).__name__} counts positions from pad_token_id"
            )
        return padding + 1


class DistilBertBackbone(TextEncoder):
    """DistilBERT: BERT without a pooler and without token types."""

    segments = False

    def layers(self) -> Any:
        return self.inner.transformer.layer


class AlbertBackbone(TextEncoder):
    """ALBERT: one or a few layers that are run repeatedly, and words of fewer channels than theirs."""

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        super().__init__(model, head, size)
        self.depth = len(self.layers())

    def layers(self) -> Any:
        groups, count = self.inner.encoder.albert_layer_groups, self.model.config.num_hidden_layers
        turns = (groups[int(turn / (count / len(groups)))] for turn in range(count))
        return [layer for group in turns for layer in group.albert_layers]

    def widener(self) -> nn.Module:
        return self.inner.encoder.embedding_hidden_mapping_in


class MaskedHead(NamedTuple):
    """words(norm(act(dense(z)))): a logit for each word, by the model's output embedding."""

    dense: nn.Module
    act: Callable[[Tensor], Tensor]
    norm: nn.Module

    def tail(self, x: Tensor) -> Tensor:
        """What is done between `dense` and the words."""
        return self.norm(self.act(x))


def _bert_head(model: Any) -> MaskedHead:
    change = model.cls.predictions.transform
    return MaskedHead(change.dense, change.transform_act_fn, change.LayerNorm)


def _roberta_head(model: Any) -> MaskedHead:
    return MaskedHead(model.lm_head.dense, F.gelu, model.lm_head.layer_norm)


MASKED: dict[str, Callable[[Any], MaskedHead]] = {
    "AlbertForMaskedLM": lambda model: MaskedHead(
        model.predictions.dense, model.predictions.activation, model.predictions.LayerNorm
    ),
    "BertForMaskedLM": _bert_head,
    **dict.fromkeys(("RobertaForMaskedLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"), _roberta_head),
    "DistilBertForMaskedLM": lambda model: MaskedHead(model.vocab_transform, model.activation, model.vocab_layer_norm),
    "ElectraForMaskedLM": lambda model: MaskedHead(
        model.generator_predictions.dense, model.generator_predictions.activation, model.generator_predictions.LayerNorm
    ),
}
"""Class of a masked model -> its head."""


def masked_words(model: Any, features: Features) -> Tensor:
    """A logit for each word at each position, [B, N, V]."""
    head = MASKED[type(model).__name__](model)
    return model.get_output_embeddings()(head.tail(head.dense(features.patches)))


def pooled(model: Any, features: Features) -> Tensor:
    """The pooler's output, or the first token where the model has none."""
    pooler = getattr(model.base_model, "pooler", None)
    if isinstance(pooler, nn.Linear):  # ALBERT's, without what comes behind it
        return model.base_model.pooler_activation(pooler(features.patches[:, 0]))
    return features.patches[:, 0] if pooler is None else pooler(features.patches)


def bert_classes(model: Any, features: Features) -> Tensor:
    """A linear layer on the pooler's output."""
    return model.classifier(model.dropout(pooled(model, features)))


def first_classes(model: Any, features: Features) -> Tensor:
    """The model's own two layers on the first token."""
    return model.classifier(features.patches)


def distilbert_classes(model: Any, features: Features) -> Tensor:
    """Two layers on the first token."""
    return model.classifier(model.dropout(F.relu(model.pre_classifier(features.patches[:, 0]))))


def replaced(model: Any, features: Features) -> Tensor:
    """ELECTRA's own task: a logit for each word, whether it was replaced, [B, N]."""
    return model.discriminator_predictions(features.patches)


CAUSAL = {
    **TEXT,
    "rows": "its causal mask would have to be permuted too (P M Pᵀ), and the mask's row sums reveal the order",
    "context": "each token of a causal model already has a fixed context, the tokens before it",
}
"""What every causal model refuses, and why."""

FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose angles depend on the position alone, not on the length of the sentence."""


class PromptCache:
    """Keys and values of the words of a prompt so far, by layer. length: how many words.

    Words that could come next are computed side by side; `add` takes one of them into the prompt.
    """

    def __init__(self) -> None:
        self.length = 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """The prompt's keys and values [1, H, t + m, d] with those of the m next words: what an attention asks for."""
        self._new[layer] = keys, values
        return self._joined(layer, slice(None))

    def add(self, number: int) -> None:
        """The next word is that with this number among those computed last."""
        self._kept = {layer: self._joined(layer, slice(number, number + 1)) for layer in self._new}
        self.length += 1

    def _joined(self, layer: int, some: slice) -> tuple[Tensor, Tensor]:
        keys, values = (part[:, :, some] for part in self._new[layer])
        if layer not in self._kept:
            return keys, values
        return torch.cat([self._kept[layer][0], keys], dim=2), torch.cat([self._kept[layer][1], values], dim=2)


class KeysAndValues:
    """A `Past` in transformers' cache. Layers with a sliding window keep only the window."""

    def __init__(self, config: Any) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=config)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """The size of keys and values in memory."""
        kept = (part.untyped_storage() for layer in self._held() for part in (layer.keys, layer.values))
        return sum(storage.nbytes() for storage in kept)

    def trim(self) -> None:
        """Frees what lies before the windows: of a long prompt, whose window is only a view."""
        for layer in self._held():
            if layer.keys.untyped_storage().nbytes() > 2 * layer.keys.nbytes:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def _held(self) -> list[Any]:
        return [layer for layer in self.cache.layers if getattr(layer, "is_initialized", False)]


class DecoderBackbone(TextBackbone):
    """A causal model. It never has a context, so its layers run through transformers' own code."""

    refusals = CAUSAL
    causal = True
    past_name: ClassVar[str] = "past_key_values"
    """The argument of its layers for the keys and values of earlier tokens."""

    def before_head(self, features: Features) -> Features:
        """A classifier takes the last token: the last real one, not padding."""
        if not self.num_classes or (mask := features.real) is None:
            return features
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
        return features._replace(patches=features.patches[torch.arange(len(last), device=mask.device), last][:, None])

    def _masks(self, stream: Stream, past: Any = None) -> dict[bool, Any]:
        """The attention masks in the form of the model's attention: {sliding window or not: mask}."""
        from transformers import masking_utils

        makers = {
            False: masking_utils.create_causal_mask,
            True: masking_utils.create_sliding_window_causal_mask,
        }
        config = self.model.config
        return {
            sliding: makers[sliding](
                config=config, inputs_embeds=stream.z, attention_mask=stream.mask, past_key_values=past
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

    def new_past(self) -> KeysAndValues:
        return KeysAndValues(self.model.config)

    def extend(self, stream: Stream, past: Any) -> Tensor:
        z, masks = stream.z, self._masks(stream, past.cache)
        inputs = self.layer_inputs(stream) | {self.past_name: past.cache}
        for layer, sliding in zip(self.layers(), self._sliding(), strict=True):
            z = layer(z, attention_mask=masks[sliding], **inputs)
        past.length += z.shape[1]
        past.trim()
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

    def next_states(self, words: Tensor, cache: PromptCache, depth: int) -> Tensor:
        """The state after `depth` blocks of each of `words` [m] as the next word after the prompt in `cache`, [m, D].

        All stand at the same place and see the prompt, as far as a window lets them, and themselves.
        """
        t, m = cache.length, len(words)
        places = self.positions((t + 1,)).take(torch.full((1, m), t, device=words.device))
        stream = self.assemble(self.inner.get_input_embeddings()(words[None]), places)
        seen = torch.cat([torch.ones(m, t, dtype=torch.bool), torch.eye(m, dtype=torch.bool)], dim=1).to(words.device)
        z, inputs = stream.z, self.layer_inputs(stream)
        for layer, sliding in zip(self.layers()[:depth], self._sliding(), strict=False):
            near = seen.clone()
            if sliding:
                near[:, : max(0, t + 1 - self.model.config.sliding_window)] = False
            mask = torch.zeros_like(near, dtype=z.dtype).masked_fill(~near, torch.finfo(z.dtype).min)
            z = layer(z, attention_mask=mask[None, None], **{self.past_name: cache}, **inputs)
        return z[0]


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
                f"rope_type={kind!r}: {self.name} supports only rotary angles that do not depend on the length of the "
                f"text; supported types: {', '.join(FIXED_ROTATIONS)}"
            )
        # As float32, the number by which transformers really multiplies: dividing leaves place 0 the exact identity.
        self._factor = float(torch.tensor(self.inner.rotary_emb.attention_scaling, dtype=torch.float32, device="cpu"))

    def layers(self) -> Any:
        return self.inner.layers

    def positions(self, grid: Grid | None = None) -> Positions:
        frequencies = self.inner.rotary_emb.inv_freq  # where the model is: of a part of it the words may be absent
        like = frequencies.new_empty(0, dtype=self.inner.get_input_embeddings().weight.dtype)
        places = torch.arange(self._length(grid), device=frequencies.device).unsqueeze(0)
        cosine, sine = self.inner.rotary_emb(like, places)
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

    past_name = "layer_past"

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
