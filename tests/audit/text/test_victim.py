"""The victim: its gradients are those of transformers' own losses, padding adds nothing, and wrong files are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import sentences, victim, write_folder

from situs.audit.defences import Clip, Noise
from situs.audit.text.victim import (
    IGNORED,
    is_tied,
    masked_places,
    open_text_victim,
    padded,
    text_gradients,
    word_weight,
)
from situs.errors import SitusError
from situs.models import open_model

TEXTS = ("3 7 1 9", "4 4 8", "11 12 13 14 15 16")


@pytest.mark.parametrize("kind", ["bert", "masked", "gpt2", "llama"])
def test_gradients_are_those_of_the_models_own_loss(kind: str, tmp_path: Path) -> None:
    made = victim(tmp_path, kind)
    batch = sentences(made, *TEXTS)
    found = text_gradients(made, batch, labels=[1, 0, 1], seed=5)
    ids, mask = padded(batch)
    model: Any = made.backbone.model
    labels = torch.tensor([1, 0, 1])
    if kind == "masked":
        labels, ids = ids.clone(), ids.clone()
        hidden = torch.zeros_like(mask)
        for row, sentence in enumerate(batch):
            hidden[row, masked_places(made, sentence, 5 + row)] = True
        labels[~hidden], ids[hidden] = IGNORED, made.tokeniser.mask_token_id
    elif kind != "bert":
        labels = ids.masked_fill(~mask, IGNORED)
    model.zero_grad()
    model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss.backward()
    own = {name: p.grad for name, p in made.backbone.named_parameters()}
    assert found.keys() == own.keys()
    for name, gradient in found.items():
        expected = torch.zeros_like(gradient) if own[name] is None else own[name]
        assert torch.allclose(gradient, expected.float(), atol=1e-7), name


def test_a_share_of_the_words_is_masked_and_one_at_least(tmp_path: Path) -> None:
    """15 %, rounded; never what the tokeniser adds itself, and other places for another seed."""
    made = victim(tmp_path, "masked")
    special = made.tokeniser.all_special_ids
    plain = [word for word in range(60) if word not in special]
    for words, hidden in ((1, 1), (3, 1), (9, 1), (11, 2), (14, 2), (40, 6)):
        sentence = (special[0], *plain[:words], special[1])
        drawn = [masked_places(made, sentence, seed) for seed in range(8)]
        for places in drawn:
            assert places == sorted(set(places)) and len(places) == hidden and 0 < places[0] <= places[-1] <= words
        assert masked_places(made, sentence, 3) == drawn[3] and (words == 1 or len({*map(tuple, drawn)}) > 1)
    assert masked_places(made, tuple(special), 0) == []


def test_a_batch_is_the_mean_of_its_sentences_and_padding_adds_nothing(tmp_path: Path) -> None:
    made = victim(tmp_path / "bert", "bert")
    batch, labels = sentences(made, *TEXTS), [1, 0, 1]
    whole = text_gradients(made, batch, labels=labels, dtype=torch.float64)
    alone = [text_gradients(made, [b], labels=[y], dtype=torch.float64) for b, y in zip(batch, labels, strict=True)]
    for name, gradient in whole.items():
        mean = sum(one[name] for one in alone) / 3
        assert torch.allclose(gradient, torch.as_tensor(mean), atol=1e-12), name
    norm = torch.stack([g.norm() for g in alone[0].values()]).norm()
    clipped = text_gradients(made, batch[:1], labels=labels, dtype=torch.float64, defence=Clip(float(norm) / 2, 0.0))
    assert all(torch.allclose(clipped[name], alone[0][name] / 2, atol=1e-12) for name in whole)


def test_what_is_rounded_or_noisy(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama")
    batch = sentences(made, *TEXTS)
    sent = text_gradients(made, batch)
    coarse = text_gradients(made, batch, dtype=torch.bfloat16)
    assert all(gradient.dtype == torch.bfloat16 for gradient in coarse.values())
    noisy = text_gradients(made, batch, defence=Noise(0.1))
    gap = torch.cat([(noisy[name] - sent[name]).flatten() for name in sent])
    assert abs(float(gap.std()) - 0.1) < 2e-3


def test_tied_or_not(tmp_path: Path) -> None:
    for kind, tie in (("llama", True), ("llama", False), ("bert", False), ("gpt2", True)):
        fields = {"tie_word_embeddings": tie} if kind == "llama" else {}
        made = victim(tmp_path / f"{kind}{tie}", kind, **fields)
        assert is_tied(made.backbone) == tie
        assert made.task == ("classes" if kind == "bert" else "next words")
        rows = text_gradients(made, sentences(made, *TEXTS), labels=[0, 1, 0])[word_weight(made.backbone)]
        used = {
            word for sentence in sentences(made, *TEXTS) for word in (sentence if kind == "bert" else sentence[:-1])
        }
        assert tie or set(rows.any(dim=1).nonzero()[:, 0].tolist()) == used  # the words of the batch, and no others


def test_an_encoder_without_a_head_gets_one_and_a_decoder_without_is_refused(tmp_path: Path) -> None:
    import transformers

    folder = write_folder(tmp_path / "bert", "bert")
    transformers.BertModel.from_pretrained(folder).save_pretrained(folder)
    made = open_text_victim(folder, classes=3, seed=4)
    assert made.backbone.model.classifier.out_features == 3 and "3 classes" in made.notes["classifier"]
    assert torch.equal(open_text_victim(folder, classes=3, seed=4).backbone.model.classifier.weight,
                       made.backbone.model.classifier.weight)  # fmt: skip
    bare = write_folder(tmp_path / "llama", "llama")
    transformers.LlamaModel.from_pretrained(bare).save_pretrained(bare)
    with pytest.raises(SitusError, match="LlamaModel has no head"):
        open_text_victim(bare)


def test_a_model_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    model = open_model(write_folder(tmp_path / "bert", "bert"), any_weights=True)
    model.backbone.requires_grad_(False)
    with pytest.raises(SitusError, match="has no parameters to train, so there is no gradient to audit"):
        open_text_victim(model)


def test_too_short_a_sentence_is_one_sentence(tmp_path: Path) -> None:
    made = victim(tmp_path, "gpt2")
    with pytest.raises(SitusError, match="'w1': has 1 token, but a training step needs at least 2"):
        sentences(made, "3 4", "1")
    assert len(sentences(made, " ".join(["7"] * 40))[0]) == 16  # cut to the model's length
    assert made.shown([5, 6]) == ["w0", "w1"]


def test_what_the_model_cannot_learn_from_is_one_sentence(tmp_path: Path) -> None:
    masked = victim(tmp_path / "masked", "masked")
    with pytest.raises(SitusError, match=r"'zzz qqq': has no word that can be masked"):
        masked.coded(["w3 w4", "zzz qqq"])
    for kind in ("masked", "llama"):
        made = victim(tmp_path / kind, kind)
        made.tokeniser.add_tokens(["unheard"])
        with pytest.raises(SitusError, match=r"'unheard' the token id 60, .* only 60 rows"):
            made.coded(["w3 w4", "w3 unheard"])
    with pytest.raises(SitusError, match="it has a single output, and only classifiers with two or more classes are"):
        victim(tmp_path / "regression", "bert", num_labels=1)
    folder = write_folder(tmp_path / "maskless", "masked")
    written = folder / "tokenizer_config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), "mask_token": None}))
    with pytest.raises(SitusError, match="its tokeniser has no mask"):
        open_text_victim(folder)
