"""A backbone cut around its blocks gives what it gives whole, also when each half lacks the other's weights."""

from __future__ import annotations

import copy

import pytest
import torch
from builders import small_hf, small_vit

from situs.backbones.base import Backbone
from situs.backbones.halves import enter, leave, through
from situs.methods import create_method
from situs.methods.supervised import SupervisedConfig
from situs.split.parts import Side, cut

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 40, "max_position_embeddings": 12}
KINDS = {
    "BertForSequenceClassification": {**SIZES, **TEXT, "num_labels": 3},
    "LlamaForCausalLM": {**SIZES, **TEXT, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "vocab_size": 40},
}


def half(whole: Backbone, side: Side) -> Backbone:
    return cut(create_method("supervised", copy.deepcopy(whole), SupervisedConfig()), side).backbone.eval()


@pytest.mark.parametrize("kind", [*KINDS, "vit"])
@torch.no_grad()
def test_the_halves_are_the_whole(kind: str) -> None:
    torch.manual_seed(3)
    backbone = (small_vit(16, num_classes=3) if kind == "vit" else small_hf(kind, **KINDS[kind])).double().eval()
    x, mask = torch.randn(2, 3, 16, 16).double(), None
    if kind != "vit":
        x, mask = torch.randint(40, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
        mask[1, 5:] = False
    client, server, depths = half(backbone, "client"), half(backbone, "server"), []
    z, seen = enter(client, x, mask)
    out = through(server, z, seen, [lambda depth, _: depths.append(depth)])
    assert torch.equal(out, through(server, z, seen))
    logits, whole = leave(client, out, mask), backbone(x, mask)
    assert logits.shape == whole.shape and float((logits - whole).abs().max()) < 1e-12
    assert depths == list(range(1, backbone.depth + 1))
    for name, value in client.state_dict().items():
        assert value.is_meta != server.state_dict()[name].is_meta, name
