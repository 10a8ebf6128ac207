"""transformers is the oracle: each wrapped model against its own forward, in float64, with random weights."""

from __future__ import annotations

import builtins
import json
import sys
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from situs.backbones import create_backbone
from situs.backbones.base import join
from situs.backbones.hf.blocks import reader_of
from situs.backbones.hf.create import FAMILIES, KINDS
from situs.backbones.hf.text import DecoderBackbone, PromptCache, open_tokeniser
from situs.core import attention
from situs.core.position import resample_table, sincos
from situs.errors import SitusError

transformers = pytest.importorskip("transformers")

EXACT = 1e-10
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
VIT = {**SMALL, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
DINO = {**SMALL, "image_size": 16, "patch_size": 4, "mlp_ratio": 2}
AST = {
    **SMALL,
    "intermediate_size": 48,
    "num_mel_bins": 8,
    "max_length": 12,
    "patch_size": 4,
    "frequency_stride": 4,
    "time_stride": 4,
}
BERT = {**SMALL, "intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 20}
GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 20,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROBERTA = {**BERT, "max_position_embeddings": 22, "pad_token_id": 1, "type_vocab_size": 1}
DISTIL = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 50, "max_position_embeddings": 20}
ELECTRA = {**BERT, "embedding_size": 32}
ALBERT = {**BERT, "embedding_size": 12}
LLAMA = {**BERT, "num_key_value_heads": 2, "pad_token_id": None}
QWEN3 = {**LLAMA, "head_dim": 8}
NEOX = {
    **BERT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 5}

# name -> (class, config entries, img_size)
IMAGES = {
    "vit": ("ViTModel", VIT, None),
    "vit_classes": ("ViTForImageClassification", {**VIT, "num_labels": 7}, None),
    "vit_rectangular": ("ViTForImageClassification", {**VIT, "image_size": [12, 20], "patch_size": 4}, None),
    "vit_resized": ("ViTForImageClassification", {**VIT, "num_labels": 7, "qkv_bias": False}, (12, 24)),
    "dinov2": ("Dinov2Model", DINO, None),
    "dinov2_swiglu": (
        "Dinov2ForImageClassification",
        {**DINO, "use_swiglu_ffn": True, "num_labels": 5},
        None,
    ),
    "dinov2_rectangular": ("Dinov2ForImageClassification", {**DINO, "num_labels": 5}, (8, 28)),
    "dinov2_resized": ("Dinov2Model", DINO, 24),
    "ast": ("ASTModel", AST, None),
    "ast_classes": ("ASTForAudioClassification", {**AST, "num_labels": 5}, (8, 12)),
    "registers": ("Dinov2WithRegistersForImageClassification", {**DINO, "num_register_tokens": 3}, (20, 12)),
}
TEXTS = {
    "bert": ("BertModel", BERT, None),
    "bert_classes": ("BertForSequenceClassification", {**BERT, "num_labels": 5}, None),
    "bert_words": ("BertForMaskedLM", BERT, (1, 15)),
    "roberta": ("RobertaModel", ROBERTA, None),
    "roberta_classes": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 5}, None),
    "roberta_words": ("RobertaForMaskedLM", ROBERTA, (1, 15)),
    "xlm_classes": ("XLMRobertaForSequenceClassification", {**ROBERTA, "num_labels": 5}, None),
    "camembert_words": ("CamembertForMaskedLM", ROBERTA, None),
    "distilbert": ("DistilBertModel", DISTIL, None),
    "distilbert_classes": ("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 5}, None),
    "distilbert_words": ("DistilBertForMaskedLM", {**DISTIL, "activation": "relu"}, (1, 15)),
    "electra": ("ElectraModel", ELECTRA, None),
    "electra_classes": ("ElectraForSequenceClassification", {**ELECTRA, "embedding_size": 12, "num_labels": 5}, None),
    "electra_words": ("ElectraForMaskedLM", {**ELECTRA, "embedding_size": 12}, (1, 15)),
    "electra_replaced": ("ElectraForPreTraining", ELECTRA, None),
    "albert": ("AlbertModel", ALBERT, None),
    "albert_classes": ("AlbertForSequenceClassification", {**ALBERT, "num_hidden_groups": 2, "num_labels": 5}, None),
    "albert_words": ("AlbertForMaskedLM", {**ALBERT, "inner_group_num": 2, "embedding_size": 32}, (1, 15)),
    "gpt2": ("GPT2Model", GPT2, None),
    "gpt2_words": ("GPT2LMHeadModel", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, (1, 15)),
    "gpt2_classes": ("GPT2ForSequenceClassification", {**GPT2, "num_labels": 5, "pad_token_id": 0}, None),
    "llama": ("LlamaModel", LLAMA, None),
    "llama_words": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True}, (1, 15)),
    "llama_yarn": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": YARN}, None),
    "mistral": ("MistralModel", {**LLAMA, "sliding_window": None}, None),
    "mistral_window": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4}, None),
    "qwen2": ("Qwen2Model", LLAMA, None),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        None,
    ),
    "qwen3": ("Qwen3Model", QWEN3, None),
    "qwen3_window": (
        "Qwen3ForCausalLM",
        {**QWEN3, "head_dim": 12, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        None,
    ),
    "neox": ("GPTNeoXModel", NEOX, None),
    "neox_words": ("GPTNeoXForCausalLM", {**NEOX, "use_parallel_residual": False}, (1, 15)),
    "neox_classes": ("GPTNeoXForSequenceClassification", {**NEOX, "num_labels": 5, "pad_token_id": 0}, None),
}
DECODERS = [name for name, (kind, *_) in TEXTS.items() if issubclass(FAMILIES[kind][0].adapter, DecoderBackbone)]
ENCODERS = [
    *IMAGES,
    "bert",
    "bert_classes",
    "roberta_classes",
    "distilbert_classes",
    "electra_classes",
    "albert_classes",
]
HEADED = ("bert_words", "roberta_classes", "roberta_words", "xlm_classes", "camembert_words", "distilbert_classes")
HEADED += ("electra_words", "electra_replaced", "gpt2_classes", "llama_words", "neox_classes")
BODIES = [pytest.param(name, marks=pytest.mark.slow if name in HEADED else ()) for name in TEXTS]
"""Each body once, for laws in which a head takes no part; with other heads too among the slow."""
ROTARY = [name for name in DECODERS if not name.startswith("gpt2")]
ROUNDED = [name for name in ROTARY if not name.startswith("neox")]
"""Those whose RMSNorm rounds to float32 whatever the weights are."""


def make_model(name):
    """A model whose every weight is random: zeros and ones of the initialisation would hide mistakes."""
    return deepcopy(made_once(name))


@cache
def made_once(name):
    kind, entries, _ = {**IMAGES, **TEXTS}[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    model = kind(kind.config_class(**entries)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def make(name):
    return create_backbone(make_model(name), img_size={**IMAGES, **TEXTS}[name][2])


def inputs(backbone, name, count=9):
    torch.manual_seed(1)
    if name in TEXTS:
        return torch.randint(3, 50, (2, count))
    return torch.randn(2, backbone.input.channels, *backbone.input.shape, dtype=torch.float64)


def own_input(model, x):
    """transformers' spectrograms are [B, frames, mels]."""
    return x[:, 0].mT if model.main_input_name == "input_values" else x


def own_features(model, x, **arguments):
    return model.base_model(own_input(model, x), **arguments).last_hidden_state


def own_answer(model, x, **arguments):
    out = model(own_input(model, x), **arguments)
    if "logits" in out:
        return out.logits
    if model.config.model_type in ("distilbert", "electra"):  # which have no pooler
        return out.last_hidden_state[:, 0]
    return out.pooler_output if out.get("pooler_output") is not None else out.last_hidden_state


def gap(a, b):
    assert a.shape == b.shape
    assert a.isfinite().all()
    return (a - b).abs().max().item()


# --- the model's own forward ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*IMAGES, *TEXTS])
def test_equals_the_models_own_forward(name):
    b = make(name)
    x = inputs(b, name)
    tokens = b.embed(x)
    assert b.dim == 32 and tokens.shape[2] == b.token_dim
    features = b.encode(tokens, positions=b.positions())
    assert features.patches.shape[1] == tokens.shape[1]
    assert features.prefix.shape[1] == b.num_prefix
    assert gap(join(features), own_features(b.model, x)) < EXACT
    assert gap(b(x), own_answer(b.model, x)) < EXACT


def test_every_class_in_the_dict_is_tested_or_its_kin_is():
    tested = {FAMILIES[kind][0].adapter for kind, _, _ in [*IMAGES.values(), *TEXTS.values()]}
    assert tested == {family.adapter for family in KINDS.values()}
    heads = {FAMILIES[kind][1] for kind, _, _ in [*IMAGES.values(), *TEXTS.values()]}
    assert heads == {head for _, head in FAMILIES.values()}
    for kind in FAMILIES:
        assert getattr(transformers, kind).__name__ == kind
        assert getattr(transformers, kind).config_class.model_type in KINDS


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", BODIES)
def test_a_sentence_of_any_length_takes_the_first_places(name):
    b = make(name)
    for count in (1, 6, 15):
        x = inputs(b, name, count)
        expected = own_features(b.model, x)
        forgetful = b.positions().forget(torch.zeros(2, b.num_tokens, dtype=torch.bool))  # per sample, whole length
        chosen = b.positions().take(torch.arange(count))
        for positions in (b.positions(), b.positions((count,)), chosen, forgetful):
            assert gap(b.encode(b.embed(x), positions).patches, expected) < EXACT, count


def test_resized_dinov2_equals_the_model_that_was_not_resized():
    for name in ("dinov2_resized", "dinov2_rectangular", "registers"):
        b = make(name)
        x = inputs(b, name)
        assert gap(join(b.encode(b.embed(x), b.positions())), own_features(make_model(name), x)) < EXACT
        assert b.table_grid == ((6, 6) if name == "dinov2_resized" else (4, 4))


@pytest.mark.parametrize("size", [16, 24])
def test_the_square_table_of_a_dinov2_takes_sines(size):
    b = create_backbone(transformers.Dinov2Config(**DINO), img_size=size, positions="sincos")
    assert torch.equal(b.positions().table, sincos((size // 4,) * 2, 32))


def test_resized_vit_has_the_resampled_table_as_its_parameter():
    before, b = make_model("vit_resized"), make("vit_resized")
    old, new = before.vit.embeddings.position_embeddings, b.model.vit.embeddings.position_embeddings
    assert b.grid == (3, 6)
    assert isinstance(new, torch.nn.Parameter)
    assert torch.equal(new[0, 0], old[0, 0])
    assert torch.equal(new[0, 1:], resample_table(old[0, 1:].detach(), (4, 4), (3, 6)))
    assert torch.equal(b.positions().table, new[0, 1:])


def test_a_table_that_is_no_square_is_for_its_own_grid_alone():
    b = create_backbone(transformers.ViTConfig(**VIT | {"image_size": (8, 16)}))
    assert b.positions(b.grid).table.shape[0] == b.num_tokens
    with pytest.raises(SitusError, match=r"no positions for a grid of 4x4: .* this table is not square$"):
        b.positions((4, 4))


def test_dinov2s_whose_patches_are_no_square_are_for_their_own_size_alone():
    config = transformers.Dinov2Config(**DINO | {"patch_size": (2, 4)})
    assert create_backbone(config).grid == create_backbone(config, img_size=16).grid == (8, 4)
    for size in ((8, 16), 32):
        with pytest.raises(SitusError, match=r"^image_size=16x16: must be square in the config, because transf"):
            create_backbone(config, img_size=size)


def test_attention_to_a_second_model_is_refused():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=6)
    config.add_cross_attention = True
    with pytest.raises(SitusError, match=r"^GPT2Block: has cross-attention to the features of a second model; Situs"):
        create_backbone(config).parts()


def test_the_exported_rectangle_loads_in_transformers(tmp_path):
    b = make("vit_resized").float()
    b.model.save_pretrained(tmp_path)
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path, local_files_only=True).eval()
    x = inputs(b, "vit_resized").float()
    assert gap(again(x).logits, b(x)) < 1e-5
    assert create_backbone(tmp_path).grid == (3, 6)


@pytest.mark.parametrize("name", [*IMAGES, *BODIES])
def test_the_parts_of_a_block_say_of_heads_and_rotation_what_the_model_does(name):
    b = make(name)
    config, attentions = b.model.base_model.config, [part.attention for part in b.parts()]
    heads = config.num_attention_heads
    assert {a.heads for a in attentions} == {heads}
    assert {a.shared for a in attentions} == {heads // (getattr(config, "num_key_value_heads", None) or heads)}
    assert {a.rotary for a in attentions} == {b.positions().rotary is not None}
    assert {a.by_head for a in attentions} == {name.startswith("neox")}


# --- padding -------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", TEXTS)
def test_padding_agrees_with_the_models_attention_mask(name):
    b = make(name)
    x = inputs(b, name)
    for padding in (slice(5, None), slice(3)):  # behind the sentence, or before it
        check_padding(b, name, x, padding)


def check_padding(b, name, x, padding):
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, padding] = False
    found = b.encode(b.embed(x), b.positions(), mask=mask).patches
    expected = own_features(b.model, x, attention_mask=mask.long())
    assert gap(found[mask], expected[mask]) < EXACT
    places = torch.arange(9)[mask[1]]
    alone = b.encode(b.embed(x[1:, places]), b.positions().take(places)).patches  # as if the padding were not there
    assert gap(found[1, places], alone[0]) < (1e-5 if name in ROUNDED else EXACT)
    other = x.clone()
    other[1, padding] = 3
    assert torch.equal(b.encode(b.embed(other), b.positions(), mask=mask).patches[mask], found[mask])
    if name not in DECODERS or name in ("gpt2_words", "neox_words"):
        logits = own_answer(b.model, x, attention_mask=mask.long())
        words = logits.shape[:2] == mask.shape
        kept = mask if words else mask[:, 0]  # where padding stands first, a classifier reads it
        assert gap(b(x, mask=mask)[kept], logits[kept]) < EXACT


@pytest.mark.parametrize("name", ["roberta_classes", "roberta_words", "xlm_classes"])
def test_roberta_numbers_the_places_of_words_alone(name):
    """transformers gives its padding no place; behind a sentence that is the same, and before it none are asked for."""
    b = make(name)
    x = inputs(b, name)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    x[~mask] = b.model.config.pad_token_id
    expected, found = own_answer(b.model, x, attention_mask=mask.long()), b(x, mask)
    kept = mask if found.shape[:2] == mask.shape else slice(None)
    assert gap(found[kept], expected[kept]) < EXACT
    assert gap(b(x[1:, :5])[0], found[1][:5] if found.dim() == 3 else found[1]) < EXACT
    left = own_answer(b.model, x[1:].roll(4, 1), attention_mask=mask[1:].roll(4, 1).long())
    if found.dim() == 3:
        assert gap(left[0, 4:], found[1, :5]) < EXACT
    assert b.num_tokens == (15 if name == "roberta_words" else 20)  # of 22 rows
    with pytest.raises(SitusError, match=r"img_size=\(1, 21\): .* takes 1 to 20 tokens"):
        create_backbone(make_model(name), img_size=(1, 21))


def test_roberta_without_a_padding_token_is_refused():
    with pytest.raises(SitusError, match="pad_token_id=None: must be set"):
        create_backbone(transformers.RobertaConfig(**{**ROBERTA, "pad_token_id": None}))


@pytest.mark.parametrize("name", ["roberta", "distilbert"])
def test_pairs_are_told_apart_by_what_stands_between_them(name):
    b = make(name)
    x = inputs(b, name)
    assert torch.equal(b.embed(torch.stack([x, x % 2], 1)), b.embed(x))


def test_bert_segments():
    b = make("bert")
    x = inputs(b, "bert")
    types = torch.zeros_like(x)
    types[:, 5:] = 1
    found = b.encode(b.embed(torch.stack([x, types], 1)), b.positions()).patches
    assert gap(found, own_features(b.model, x, token_type_ids=types)) < EXACT
    del b.model.embeddings.token_type_embeddings
    b.model.embeddings.token_type_embeddings = torch.nn.Embedding(1, b.dim).double()
    with pytest.raises(SitusError, match=r"has no token types \(type_vocab_size=1\), so it takes no pairs"):
        b.embed(torch.stack([x, types], 1))


# --- context -------------------------------------------------------------------------------------------


def own_with_mask(b, x, allowed):
    """transformers' own layers on its own embedding, with an explicit mask [B, S, S] in every one of them."""
    inner, bias = b.model.base_model, torch.zeros(allowed.shape, dtype=torch.float64)
    bias = bias.masked_fill(~allowed, float("-inf")).unsqueeze(1)
    z = inner.embeddings(own_input(b.model, x))
    wider = b.widener() if b.input.words else None
    z = z if wider is None else wider(z)
    for layer in b.layers():
        z = layer(z, bias)
    return z if b.input.words else inner.layernorm(z)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("shared", [True, False])
def test_context_equals_an_explicit_attention_mask(name, shared):
    b = make(name)
    x = inputs(b, name, 12)
    tokens = b.embed(x)
    count, p = tokens.shape[1], b.num_prefix
    generator = torch.Generator().manual_seed(2)
    context = torch.stack([torch.randperm(count, generator=generator)[:4] for _ in range(2)])
    context = context[0] if shared else context
    seen = torch.zeros(2, p + count, dtype=torch.bool)
    seen[:, :p] = True
    seen.scatter_(1, (context + p).expand(2, 4), True)
    expected = own_with_mask(b, x, seen.unsqueeze(1).expand(-1, p + count, -1))
    found = b.encode(tokens, b.positions(), context=context)
    assert gap(join(found), expected) < EXACT
    assert gap(join(b.encode(tokens, b.positions())), expected) > 1e-3  # the context does matter
    everything = b.encode(tokens, b.positions(), context=torch.arange(count).flip(0))
    assert gap(join(everything), own_features(b.model, x)) < EXACT


def test_context_and_padding_together():
    b = make("bert")
    x = inputs(b, "bert", 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 7:] = False
    context = torch.tensor([[1, 3, 8, 11], [0, 6, 9, 2]])
    seen = torch.zeros(2, 12, dtype=torch.bool).scatter(1, context, True) & mask
    expected = own_with_mask(b, x, seen.unsqueeze(1).expand(-1, 12, -1))
    assert gap(b.encode(b.embed(x), b.positions(), context, mask).patches, expected) < EXACT


def test_attention_dropout_is_honoured_in_training(monkeypatch):
    b = create_backbone(transformers.BertConfig(**BERT, attention_probs_dropout_prob=0.25))
    seen = []

    def spy(*args, dropout_p, **kwargs):
        seen.append(dropout_p)
        return F.scaled_dot_product_attention(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(attention, "F", type("F", (), {"scaled_dot_product_attention": staticmethod(spy)}))
    tokens = b.embed(inputs(b, "bert"))
    b.train().encode(tokens)
    b.eval().encode(tokens)
    assert seen == [0.25] * 3 + [0.0] * 3


def test_an_unknown_attention_class_is_refused_by_name():
    class OtherAttention(torch.nn.Module):
        pass

    model = make_model("vit")
    model.layers[1].attention = OtherAttention()
    with pytest.raises(SitusError, match=r"OtherAttention is not among .*BertSelfAttention, .*Dinov2Attention"):
        create_backbone(model)
    with pytest.raises(SitusError, match=r"^ViTModel: its Sequential is not among the attention classes"):
        reader_of("ViTModel", [torch.nn.Sequential(torch.nn.Linear(2, 2))])


# --- the laws of position ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_are_equivariant(name):
    b = make(name)
    b.require("rows")
    tokens = b.embed(inputs(b, name, 12))
    mask = torch.ones(2, tokens.shape[1], dtype=torch.bool)
    mask[1, -3:] = False
    stream = b.assemble(tokens, b.positions(), mask)
    order = torch.stack([torch.randperm(tokens.shape[1]) for _ in range(2)])
    assert gap(b.blocks(stream.take(order)).z, b.blocks(stream).take(order).z) < EXACT


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [*IMAGES, *BODIES])
def test_no_positions_means_no_order(name):
    """Without positions, moving tokens moves the features; a causal model is held to its last token."""
    b = make(name)
    tokens = b.embed(inputs(b, name))
    order = torch.randperm(tokens.shape[1] - 1)
    order = torch.cat([order, order.new_tensor([tokens.shape[1] - 1])])
    found, moved = b.encode(tokens), b.encode(tokens[:, order])
    if name in DECODERS:
        # One layer: below the last layer a causal token's own features depend on what came before it.
        b = one_layer(b, name)
        found, moved = b.encode(tokens), b.encode(tokens[:, order])
        if "window" not in name:
            assert (found.patches[:, -1] - moved.patches[:, -1]).abs().max() < 1e-5
        placed = b.encode(tokens[:, order], b.positions()).patches[:, -1]
        assert (placed - b.encode(tokens, b.positions()).patches[:, -1]).abs().max() > 1e-3
    else:
        assert gap(moved.patches, found.patches[:, order]) < EXACT
        assert torch.allclose(moved.prefix, found.prefix, rtol=0, atol=EXACT)


def one_layer(b, name):
    inner = b.model.base_model
    layers = "h" if name.startswith("gpt2") else "layers"
    setattr(inner, layers, getattr(inner, layers)[:1])
    b.depth = 1
    return b


@pytest.mark.parametrize("name", ROTARY)
def test_a_forgotten_rotary_token_is_not_token_zero(name):
    b = make(name)
    tokens = b.embed(inputs(b, name))
    where = torch.zeros(9, dtype=torch.bool)
    where[5] = True
    unknown = torch.randn(32, dtype=torch.float64)
    places = b.positions((9,))
    turned = {"neox": 4, "qwen3_window": 12}.get(name.removesuffix("_words").removesuffix("_classes"), 8)
    assert places.rotary.shape == (1, 1, 1, 9, 2 * turned)
    assert places.rotary[0, 0, 0, 0].tolist() == [0.0] * turned + [1.0] * turned  # place 0 is the identity, YaRN or not
    claims_zero = places.take(torch.tensor([0, 1, 2, 3, 4, 0, 6, 7, 8]))
    forgotten = b.encode(tokens, places.forget(where, unknown)).patches
    for other in (places, claims_zero):
        assert (forgotten - b.encode(tokens, other).patches)[:, 5:].abs().max() > 1e-3
        assert torch.equal(forgotten[:, :5], b.encode(tokens, other).patches[:, :5])  # causal: the past is untouched
    per_sample = torch.stack([where, torch.zeros_like(where)])
    found = b.encode(tokens, places.forget(per_sample, unknown)).patches
    assert gap(found[0], forgotten[0]) < 1e-5
    assert gap(found[1], b.encode(tokens, places).patches[1]) < 1e-5


def test_rotation_without_positions_keeps_yarns_factor():
    b = make("llama_yarn")
    assert b.model.model.rotary_emb.attention_scaling != 1
    tokens = b.embed(inputs(b, "llama_yarn"))
    all_forgotten = b.positions((9,)).forget(torch.ones(9, dtype=torch.bool))
    assert torch.equal(b.encode(tokens).patches, b.encode(tokens, all_forgotten).patches)
    all_at_zero = b.positions((9,)).take(torch.zeros(9, dtype=torch.long))
    assert gap(b.encode(tokens).patches, b.encode(tokens, all_at_zero).patches) < EXACT


@pytest.mark.parametrize("name", [*IMAGES, "bert", "bert_words", "roberta", "distilbert", "electra_classes", "gpt2"])
def test_gradients_reach_the_position_table(name):
    b = make(name)
    features = b.encode(b.embed(inputs(b, name)), b.positions())
    features.patches.square().sum().backward()
    inner = b.model.base_model
    if name in IMAGES:
        table = inner.embeddings.position_embeddings
        assert (table.grad[0].abs().sum(-1) > 0).all()
    else:
        table = inner.wpe.weight if name == "gpt2" else inner.embeddings.position_embeddings.weight
        first = 2 if name == "roberta" else 0  # the padding's row, and one that no place has
        assert (table.grad.abs().sum(-1) > 0).tolist() == [False] * first + [True] * 9 + [False] * 11
    if name not in (
        "dinov2_rectangular",
        "registers",
    ):  # those resample it in every forward, as transformers does
        assert b.positions().table.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        assert len(b.positions().table) == b.num_tokens


def test_the_cls_row_stays_without_positions():
    b = make("vit")
    tokens = b.embed(inputs(b, "vit"))
    embeddings = b.model.embeddings
    expected = embeddings.cls_token[0, 0] + embeddings.position_embeddings[0, 0]
    for positions in (None, b.positions(), b.positions().take(torch.arange(16).flip(0))):
        assert torch.equal(b.assemble(tokens, positions).z[0, 0], expected)


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral_window", "qwen2", "neox"])
def test_causal_models_refuse_rows_and_context(name):
    b = make(name)
    with pytest.raises(SitusError, match=r"does not support permuting the tokens .*row sums reveal the order"):
        b.require("rows")
    for context in (3, torch.arange(3)):
        with pytest.raises(SitusError, match="does not support attending to a chosen"):
            b.encode(b.embed(inputs(b, name)), b.positions(), context=context)
    b.require("take")
    b.require("columns")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral_window", "qwen2", "qwen3", "neox"])
@torch.no_grad()
def test_states_of_next_words_are_those_of_the_whole_sentence(name):
    """Windows hold 4 words, so that the first of 9 are out of sight."""
    b = make(name)
    words, others = inputs(b, name)[0], torch.tensor([7, 3, 11])
    whole = b.model.base_model(words[None], output_hidden_states=True).hidden_states
    cache = PromptCache()
    for place in range(len(words)):
        sentences = torch.cat([words[:place].expand(3, -1), others[:, None]], dim=1)
        own = b.model.base_model(sentences, output_hidden_states=True).hidden_states
        assert gap(b.branches(words[:place], others), own[1][:, -1]) < EXACT
        found = b.next_states(torch.cat([words[place : place + 1], others]), cache, 2)
        assert gap(found, torch.cat([whole[2][0, place : place + 1], own[2][:, -1]])) < EXACT
        cache.add(0)
    assert cache.length == 9


@pytest.mark.parametrize("name", ["gpt2", "mistral_window", "qwen3_window"])
@torch.no_grad()
def test_a_sentence_in_parts_is_the_sentence_and_of_a_long_one_a_window_holds_its_words_alone(name):
    b = make(name)
    words, past, parts, held = inputs(b, name, 16), b.new_past(), [], []
    whole = b.run_layers(b.assemble(b.embed(words), b.positions((16,))), None)
    assert past.nbytes == past.length == 0
    for first, last in ((0, 12), (12, 13), (13, 16)):
        places = b.positions((last,)).take(torch.arange(first, last))
        parts.append(b.extend(b.assemble(b.embed(words[:, first:last]), places), past))
        held.append(past.nbytes)
        assert past.length == last
    assert gap(torch.cat(parts, dim=1), whole) < EXACT
    heads, width = past.cache.layers[0].keys.shape[1::2]
    windows = sum(b._sliding())
    # Of a window of 4, the 3 words that the next one sees; keys and values of 2 sentences, 8 bytes a number.
    assert held[0] == 2 * 2 * 8 * heads * width * (3 * windows + 12 * (b.depth - windows))
    assert windows == {"gpt2": 0, "mistral_window": 3, "qwen3_window": 2}[name]


def test_positions_that_do_not_fit_are_refused():
    vit, bert, llama = make("vit"), make("bert"), make("llama")
    with pytest.raises(SitusError, match="16 positions do not fit 5 tokens"):
        vit.encode(vit.embed(inputs(vit, "vit"))[:, :5], vit.positions())
    with pytest.raises(SitusError, match="7 positions do not fit 9 tokens"):
        bert.encode(bert.embed(inputs(bert, "bert")), bert.positions((7,)))
    with pytest.raises(SitusError, match="ViTModel has no rotary positions"):
        vit.encode(vit.embed(inputs(vit, "vit")), llama.positions())


def test_inputs_that_do_not_fit_are_refused():
    vit, bert = make("vit"), make("bert")
    with pytest.raises(
        SitusError, match=r"ViTModel: images must have the shape \[B, 3, 16, 16\], not \[2, 1, 16, 16\]"
    ):
        vit.embed(torch.zeros(2, 1, 16, 16))
    with pytest.raises(SitusError, match="N must be at most 20"):
        bert.embed(torch.zeros(1, 21, dtype=torch.long))
    with pytest.raises(SitusError, match="takes integers"):
        bert.embed(torch.zeros(1, 4))
    with pytest.raises(SitusError, match="img_size=15x16: must be a multiple of the patch size 4x4"):
        create_backbone(make_model("vit"), img_size=(15, 16))
    with pytest.raises(SitusError, match=r"img_size=\(1, 21\): .*BertModel takes 1 to 20 tokens"):
        create_backbone(make_model("bert"), img_size=(1, 21))
    with pytest.raises(SitusError, match=r"must be \(1, length\)"):
        create_backbone(make_model("gpt2"), img_size=(2, 5))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.T5Config,
            "unknown transformers model type 't5'; choose one of: albert, audio-spectrogram-transformer, bert",
        ),
        (
            lambda: transformers.BertConfig(**BERT, is_decoder=True),
            "is_decoder=True: BertModel is supported only as an encoder; if it was trained as one",
        ),
        (
            lambda: transformers.Dinov2Config(**{**DINO, "image_size": [8, 16]}),
            "image_size=8x16: .*as a square",
        ),
        (
            lambda: transformers.LlamaConfig(
                **LLAMA, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_type='dynamic': .*angles",
        ),
        (
            lambda: transformers.BertConfig(**BERT, architectures=["BertForQuestionAnswering"]),
            "unknown Hugging Face model class 'BertForQuestionAnswering'; choose one of: ASTFor",
        ),
    ],
)
def test_configs_that_are_refused(config, message):
    with pytest.raises(SitusError, match=message):
        create_backbone(config())


def test_a_subclass_is_refused():
    class ViTModel(transformers.ViTModel):
        pass

    with pytest.raises(SitusError, match="its class ViTModel is not among the classes that Situs supports"):
        create_backbone(ViTModel(transformers.ViTConfig(**VIT)))


def test_missing_transformers_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SitusError, match=r"pip install 'situs\[hf\]'"):
        create_backbone("hf:anything")


# --- where a model comes from --------------------------------------------------------------------------


def test_a_name_that_is_no_folder_is_refused(tmp_path):
    for name in ("hf:bert-base-uncased", f"hf:{tmp_path}"):
        with pytest.raises(SitusError, match=r"is not a folder with a config.json of the library transformers"):
            create_backbone(name)


def test_a_folder_a_config_file_and_weights(tmp_path):
    model = make_model("vit_classes").float()
    model.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 16, 16)
    expected = model(x).logits
    state = tmp_path / "weights.pt"
    torch.save(dict(model.state_dict()), state)  # today's names; the folder has older
    file = tmp_path / "config.json"
    for source, weights in ((tmp_path, None), (f"hf:{tmp_path}", None), (file, tmp_path), (model.config, state)):
        b = create_backbone(source, weights=weights)
        assert b.training
        assert b.model.training
        assert gap(b.eval()(x), expected) < 1e-5
    fresh = create_backbone(tmp_path / "config.json").eval()
    assert gap(fresh(x), expected) > 1e-2
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (b"", whole[:-100], b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(SitusError, match=r"cannot be loaded as ViTForImageClassification \(SafetensorError: "):
            create_backbone(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SitusError, match="the folder has no weights"):
        create_backbone(tmp_path)
    file.write_text(file.read_text().replace('"hidden_size": ', '"hidden_size": "x", "other": '))
    with pytest.raises(
        SitusError, match=r"config.json: transformers cannot read this file \(.*'hidden_size' expected int"
    ):
        create_backbone(file)


def test_an_unknown_folder_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}')
    with pytest.raises(
        SitusError,
        match=r"unknown model_type in .*config.json 'evil'; choose one of: albert, audio-spectrogram-transformer, bert",
    ):
        create_backbone(tmp_path)


def test_code_that_lies_in_a_folder_is_not_run(tmp_path):
    """Though the folder's own config and tokeniser ask transformers for it, and their kinds are known."""
    ran = tmp_path / "ran"
    for name in ("config", "tokeniser"):
        (tmp_path / f"evil_{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise ImportError\n")
    config = BERT | {"model_type": "bert", "auto_map": {"AutoConfig": "evil_config.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]))
    tokeniser = {"tokenizer_class": "BertTokenizer", "auto_map": {"AutoTokenizer": ["evil_tokeniser.Words", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokeniser))
    assert create_backbone(tmp_path / "config.json").input.words == 50
    assert open_tokeniser(tmp_path)("word")["input_ids"] == [2, 5, 3]
    assert not ran.exists()


def test_a_folder_that_does_not_fit_names_the_keys(tmp_path):
    from safetensors.torch import save_file

    model = make_model("vit").float()
    model.save_pretrained(tmp_path)
    file, state = tmp_path / "model.safetensors", dict(model.state_dict())
    del state["layers.1.mlp.fc1.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(
        SitusError, match=r"does not fit ViTModel: 1 tensor missing \(first: layers.1.mlp.fc1.weight\)$"
    ):
        create_backbone(tmp_path)
    state["odd"] = torch.zeros(1)
    state["layernorm.weight"] = torch.zeros(3)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(SitusError) as caught:
        create_backbone(tmp_path, weights=file)
    assert str(caught.value).endswith(
        "does not fit ViTModel: 1 tensor missing (first: layers.1.mlp.fc1.weight); 1 tensor not in the model "
        "(first: odd); 1 tensor of another shape (first: layernorm.weight)"
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith("_words")])
def test_tied_weights_load_from_a_file_that_holds_them_once(tmp_path, name):
    model = make_model(name).float()
    model.save_pretrained(tmp_path)
    b = create_backbone(model.config, weights=tmp_path / "model.safetensors").eval()
    x = inputs(b, name)
    assert gap(b(x), own_answer(model, x)) < 1e-5


def test_num_classes_gives_a_new_head_to_the_saved_body(tmp_path):
    for name, kind in (
        ("dinov2", "Dinov2ForImageClassification"),
        ("bert_words", "BertForSequenceClassification"),
        ("roberta_words", "RobertaForSequenceClassification"),
        ("distilbert_words", "DistilBertForSequenceClassification"),
        ("electra_replaced", "ElectraForSequenceClassification"),
        ("albert_words", "AlbertForSequenceClassification"),
    ):
        folder = tmp_path / name
        model = make_model(name).float()
        model.save_pretrained(folder)
        for arguments in ({}, {"weights": folder}) if name == "dinov2" else ({},):
            b = create_backbone(folder, num_classes=3, **arguments).eval()
            x = inputs(b, name)
            x = x if name in TEXTS else x.float()
            assert b.name == kind
            assert b(x).shape == (2, 3)
            assert gap(join(b.encode(b.embed(x), b.positions())), own_features(model, x)) < 1e-5
            bare = create_backbone(folder, num_classes=0, **arguments).eval()
            assert gap(bare(x), own_features(model, x)[:, 0]) < 1e-5
    assert create_backbone(transformers.GPT2Config(**GPT2), num_classes=3).name == "GPT2ForSequenceClassification"
    with pytest.raises(SitusError, match="num_classes=-1: must be at least 0"):
        create_backbone(transformers.ViTConfig(**VIT), num_classes=-1)


def test_model_args_change_the_config_and_not_the_one_given():
    config = transformers.ViTConfig(**VIT)
    b = create_backbone(config, model_args={"num_channels": 1, "patch_size": 8}, img_size=(8, 24), num_classes=4)
    assert b(torch.randn(2, 1, 8, 24)).shape == (2, 4)
    assert b.grid == (1, 3)
    assert (config.num_channels, config.patch_size, config.image_size, config.num_labels) == (3, 4, 16, 2)
    with pytest.raises(SitusError, match=r"unknown entry of ViTConfig \(model_args\) 'patchsize'; choose one of:"):
        create_backbone(config, model_args={"patchsize": 8})
    with pytest.raises(SitusError, match="ViTConfig does not accept these arguments"):
        create_backbone(config, model_args={"patch_size": "eight"})
    with pytest.raises(SitusError, match="applies only to a new model"):
        create_backbone(make_model("vit"), num_classes=4)
    with pytest.raises(SitusError, match="applies only to a new model"):
        create_backbone(make_model("vit"), weights="weights.pt")


def test_source_makes_the_model_again():
    import json

    for name in ("vit_resized", "registers", "bert_classes", "llama_yarn"):
        b = make(name)
        source = json.loads(json.dumps(b.source))
        assert source["library"] == "transformers"
        kind = getattr(transformers, source["architecture"])
        again = kind(kind.config_class.from_dict(source["model_args"]))
        assert {k: v.shape for k, v in again.state_dict().items()} == {
            k: v.shape for k, v in b.model.state_dict().items()
        }
    vit = make("vit_resized")
    assert vit.patch_values == 4 * 4 * 3


def test_a_given_model_keeps_its_mode_and_its_names():
    model = make_model("bert")
    b = create_backbone(model)
    assert b.model is model
    assert not b.training
    assert list(b.state_dict()) == [f"model.{key}" for key in model.state_dict()]


@pytest.mark.parametrize("kind", ["clip_vision_model", "swin", "deit", "beit", "deberta-v2"])
def test_what_users_try_and_situs_does_not_take_has_its_reason(kind: str, tmp_path) -> None:
    from situs.backbones.hf.create import ELSEWHERE

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(SitusError, match="is refused: ") as caught:
        create_backbone(tmp_path)
    assert ELSEWHERE[kind] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_models_named_instead_are_taken() -> None:
    import re

    from timm.models import model_entrypoint

    from situs.backbones.hf.create import ELSEWHERE
    from situs.backbones.timm.create import READ

    named = {name for said in ELSEWHERE.values() for name in re.findall(r"as (\w+_224)", said)}
    assert len(named) == 4
    assert all(model_entrypoint(name).__module__.rpartition(".")[2] in READ for name in named)
