"""The victim of a text audit: a language model, its tokeniser, its loss, and the gradients that a client sends."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.audit.client import after_steps, mean_gradient, parameter_names, rounded
from situs.audit.defences import Defence, Gradients, NoDefence, Step
from situs.audit.victim import other_loss
from situs.backbones.hf.text import TextBackbone, TextEncoder, open_tokeniser
from situs.core.when import START, When
from situs.data.tokeniser import tokeniser_files
from situs.errors import SitusError, counted
from situs.hub import local_folder
from situs.methods.base import Batch, Method
from situs.methods.measured import HidesPlaces
from situs.models import open_model
from situs.models.data import opened

Task = Literal["classes", "next words", "masked words"]
"""What a client learns: a class of the sentence, or its words."""

IGNORED = -100
"""The target of a place at which nothing is learned."""

MASKED = 0.15
"""Share of a sentence's words that a masked model must guess, one at least."""

Sentence = tuple[int, ...]
"""A sentence as the ids of its tokens, those that the tokeniser adds among them."""


@dataclass(frozen=True)
class TextVictim:
    """A language model as a client trains it. tokeniser: the folder's own. notes: for a reader, by name."""

    backbone: TextBackbone
    tokeniser: Any
    task: Task
    name: str
    notes: dict[str, str] = field(default_factory=dict)
    method: Method | None = None
    """The method that trains it, if it shuffles words and hides their places (MJP)."""

    when: When = START
    """The audited step, on which the shuffling may depend."""

    @property
    def unknown(self) -> Tensor | None:
        """The vector [D] of hidden positions, a part of the model; None where nothing is hidden."""
        learned = None if self.method is None else self.method.unknown_position()
        return None if learned is None else learned.vector

    def coded(self, texts: Sequence[str]) -> list[Sentence]:
        """The texts as ids, cut to the model's length; a sentence with nothing to learn from is refused."""
        coded = self.tokeniser(list(texts), truncation=True, max_length=self.backbone.num_tokens)["input_ids"]
        least = 2 if self.task == "next words" else 1
        known = self.backbone.inner.get_input_embeddings().weight.shape[0]
        for text, ids in zip(texts, coded, strict=True):
            if len(ids) < least:
                raise SitusError(
                    f"{text[:60]!r}: has {counted(len(ids), 'tokens')}, but a training step needs at least {least}",
                    field="texts",
                )
            if max(ids) >= known:
                [word] = self.shown([max(ids)])
                reason = (
                    f"the tokeniser gives {word!r} the token id {max(ids)}, but the model's embedding has only "
                    f"{known} rows"
                )
                raise SitusError(
                    f"{reason}; the embedding must be as large as the tokeniser's vocabulary", field="texts"
                )
            if self.task == "masked words" and not masked_places(self, tuple(ids), 0):
                raise SitusError(
                    f"{text[:60]!r}: has no word that can be masked, because none of its words is in the vocabulary",
                    field="texts",
                )
        return [tuple(ids) for ids in coded]

    def shown(self, ids: Sequence[int]) -> list[str]:
        """Each token as the tokeniser writes it."""
        return [str(token) for token in self.tokeniser.convert_ids_to_tokens(list(ids))]


def open_text_victim(source: Any, *, classes: int = 2, **open_args: Any) -> TextVictim:
    """The victim in a transformers folder with its tokeniser, or a run on text; open_args: of `open_model`.

    classes: of the new classifier that an encoder without a head gets, because a client's loss needs one.
    """
    open_args = {
        **open_args,
        "any_weights": True,
        "as_trained": True,
    }  # a name alone is one of images, which is refused here and not for its weights
    model = opened(open_model(source, **open_args))
    if not isinstance(model.backbone, TextBackbone):
        raise SitusError(f"{model.name}: takes images, not texts", field="texts")
    kind, notes = type(model.backbone.model).__name__, {**model.notes, **other_loss(model.backbone)}
    if isinstance(model.backbone, TextEncoder) and not kind.endswith(("ForMaskedLM", "ForSequenceClassification")):
        if model.method is not None:
            raise SitusError(
                f"{model.name}: the audit supports only models that were trained to predict classes or words; "
                "fine-tune this model, or export it (situs export) and audit the export, which then gets a new "
                "classifier",
                field="texts",
            )
        model = open_model(source, num_classes=classes, **open_args)
        notes["classifier"] = (
            f"new, with {counted(classes, 'classes')}, because the folder has no classifier; the attacker knows the "
            "new classifier"
        )
    elif not kind.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForSequenceClassification")):
        raise SitusError(
            f"{model.name}: {kind} has no head that predicts classes or words, so there is no training step to audit"
        )
    task: Task = "classes"
    if kind.endswith(("LMHeadModel", "ForCausalLM")):
        task = "next words"
    elif kind.endswith("ForMaskedLM"):
        task = "masked words"
    if not any(parameter.requires_grad for parameter in model.backbone.parameters()):
        raise SitusError(f"{model.name}: has no parameters to train, so there is no gradient to audit")
    backbone = model.backbone
    assert isinstance(backbone, TextBackbone)
    if task == "classes" and backbone.model.config.num_labels < 2:
        reason = "it has a single output, and only classifiers with two or more classes are audited"
        raise SitusError(f"{model.name}: {reason}", field="texts")
    read_by = None if model.input is None else model.input.text.tokeniser  # which a run names and does not hold
    with tokeniser_files(local_folder(str(read_by or source))) as folder:
        tokeniser = open_tokeniser(folder)
    if task == "masked words" and tokeniser.mask_token_id is None:
        raise SitusError(
            f"{model.name}: learns to predict masked words, but its tokeniser has no mask token", field="texts"
        )
    hides = model.method if isinstance(model.method, HidesPlaces) else None
    if hides is not None:
        share = f"{hides.hidden_share:g} of the words of a sentence, in spans"
        notes["mjp"] = f"{share}, are shuffled, and one vector replaces all their positions"
    return TextVictim(backbone, tokeniser, task, model.name, notes, hides, model.when)


def word_weight(backbone: TextBackbone) -> str:
    """The name of the word embedding's weight."""
    weight = backbone.inner.get_input_embeddings().weight
    return next(name for name, parameter in backbone.named_parameters() if parameter is weight)


def is_tied(backbone: TextBackbone) -> bool:
    """Whether the head that names words has the same weight: every row of its gradient is then non-zero."""
    head = backbone.model.get_output_embeddings()
    return head is not None and head.weight is backbone.inner.get_input_embeddings().weight


def padded(sentences: Sequence[Sentence], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Sentences as ids [B, N], filled up behind their ends, and the mask [B, N], False for what was filled up."""
    longest = max(map(len, sentences))
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sentences], device=device)
    mask = torch.tensor([[place < len(ids) for place in range(longest)] for ids in sentences], device=device)
    return ids, mask


def text_gradients(
    victim: TextVictim,
    sentences: Sequence[Sentence],
    *,
    labels: Sequence[int] = (),
    defence: Defence | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Gradients:
    """What a client sends for one batch of sentences: the mean gradient of its loss, by parameter name.

    labels: of the sentences, where classes are learned. The step is made without dropout. Under MJP what it trains
    beside the model, E_unk and DAL's parameters, is sent as well. k > 1 local steps, each on all sentences, send the
    mean of the k updates of the weights, in units of the rate.
    """
    defence = NoDefence() if defence is None else defence
    step = defence.step(Step(len(sentences), dtype=dtype))
    if step.local_steps > 1:
        method = deepcopy(victim.method)
        victim = replace(victim, method=method, backbone=method.backbone if method else deepcopy(victim.backbone))
    count, trained = len(sentences), victim.backbone if victim.method is None else victim.method

    def loss(span: slice) -> Tensor:
        return _loss(victim, sentences[span], labels[span], seed + span.start)

    sent = after_steps(parameter_names(trained), lambda _: mean_gradient(trained, defence, count, loss), step)
    chance = torch.Generator().manual_seed(seed)
    return {name: rounded(g, step.dtype) for name, g in defence.upload(sent, count, chance).items()}


def _loss(victim: TextVictim, sentences: Sequence[Sentence], labels: Sequence[int], seed: int) -> Tensor:
    device = next(victim.backbone.parameters()).device
    ids, mask = padded(sentences, device=device)
    if victim.method is not None:
        rows = seed + torch.arange(len(sentences), device=device)
        batch = Batch(ids, rows, {"label": torch.tensor(list(labels), device=device)}, mask)
        return victim.method(batch, victim.method.draw(batch, victim.when._replace(seed=seed))).loss
    if victim.task == "classes":
        return F.cross_entropy(victim.backbone(ids, mask), torch.tensor(list(labels), device=device))
    if victim.task == "next words":
        targets = F.pad(ids, (0, 1))[:, 1:].masked_fill(~F.pad(mask, (0, 1))[:, 1:], IGNORED)
    else:
        chosen = [masked_places(victim, sentence, seed + number) for number, sentence in enumerate(sentences)]
        hidden = torch.zeros_like(mask)
        for row, places in enumerate(chosen):
            hidden[row, places] = True
        targets = ids.masked_fill(~hidden, IGNORED)
        ids = ids.masked_fill(hidden, victim.tokeniser.mask_token_id)
    return F.cross_entropy(victim.backbone(ids, mask).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def masked_places(victim: TextVictim, sentence: Sentence, seed: int) -> list[int]:
    """The places whose words a masked model must guess: a share of those that the tokeniser did not add itself."""
    words = [place for place, word in enumerate(sentence) if word not in victim.tokeniser.all_special_ids]
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(words[at] for at in order[: max(1, round(MASKED * len(words)))])
