"""transformers' encoders of text as backbones: BERT and models with the same layers.

Each is BERT with other names: where its parts are, from which row of the table its places are numbered, whether it
tells two sentences apart, and its heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Features
from situs.backbones.hf.layers import EncoderBackbone, Head
from situs.backbones.hf.text import TextBackbone
from situs.core.position import Positions
from situs.core.tokens import Grid
from situs.errors import SitusError


class TextEncoder(TextBackbone, EncoderBackbone):
    """BERT, and ELECTRA, whose words and positions may have fewer channels than its layers."""

    special = 1
    segments: ClassVar[bool] = True
    """Whether the model has token types for two sentences; otherwise only a separator divides them."""

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        super().__init__(model, head, size)
        self.token_dim = self.inner.get_input_embeddings().embedding_dim
        if getattr(self.model.config, "is_decoder", False):
            raise SitusError(f"is_decoder=True: {self.name} is supported only as an encoder")

    def layers(self) -> Any:
        return self.inner.encoder.layer

    def widener(self) -> nn.Module | None:
        """The projection of words and positions to the width of the blocks; None where they have it."""
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
                f"pad_token_id=None: {type(model).__name__} numbers positions from pad_token_id on, so it must be set"
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
