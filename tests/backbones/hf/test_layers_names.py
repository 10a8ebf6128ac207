"""Names in transformers' files, against what its own from_pretrained does with each tensor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from situs.backbones.hf.layers import one_block, own_names, own_state, quietly
from situs.errors import SitusError

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT = {**SIZES, "intermediate_size": 12, "image_size": 8, "patch_size": 4}
DINO = {**SIZES, "mlp_ratio": 2, "image_size": 8, "patch_size": 4}
BERT = {**SIZES, "intermediate_size": 12, "vocab_size": 9, "max_position_embeddings": 6}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "vit": (VIT, ("ViTModel", "ViTForImageClassification")),
    "dinov2": (DINO, ("Dinov2Model", "Dinov2ForImageClassification")),
    "swiglu": ({**DINO, "use_swiglu_ffn": True}, ("Dinov2Model", "Dinov2ForImageClassification")),
    "bert": (BERT, ("BertModel", "BertForSequenceClassification")),
}
PAIRS = [(name, *pair) for name, (_, (a, b)) in FAMILIES.items() for pair in ((a, a), (a, b), (b, a), (b, b))]


def make(name: str, kind: str, seed: int) -> Any:
    """A model in which no two tensors are alike."""
    torch.manual_seed(seed)
    made = getattr(transformers, kind)
    model = made(made.config_class(**FAMILIES[name][0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def spoken(model: Any, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """What from_pretrained makes of a state dict: the tensors of `model`, and the names that it did not find."""
    with quietly():
        loaded, found = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(state), output_loading_info=True
        )
    return loaded.state_dict(), set(found["missing_keys"])


@pytest.mark.thin(2)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_every_tensor_goes_where_transformers_puts_it(
    name: str, source: str, target: str, old: bool, tmp_path: Path
) -> None:
    """old: under the names that save_pretrained writes; else under those of today's modules."""
    given, model = make(name, source, 0), make(name, target, 1)
    with quietly():
        given.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors") if old else dict(given.state_dict())
    expected, missing = spoken(model, state)
    found = own_state(model, state)
    assert {key for key in found if key in expected} == set(expected) - missing
    assert all(torch.equal(found[key], expected[key]) for key in found if key in expected)
    assert all(torch.equal(found[key], state[key]) for key in found if key not in expected)
    pairs = own_names(model, state)
    assert all(torch.equal(state[key], expected[new]) for key, new in pairs.items())
    made = name == "swiglu" and old  # gate and up stand in one tensor of the file
    assert (len(pairs) < len([key for key in found if key in expected])) is made


def test_a_name_that_a_renaming_would_spoil_stays() -> None:
    """transformers renames weight_g for its parametrisations; a model whose own tensor is called so keeps it."""

    class Gain(transformers.ViTModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layernorm.weight_g = nn.Parameter(torch.randn(8))

    model = Gain(transformers.ViTConfig(**VIT))
    state = {**model.state_dict(), "layernorm.weight_g": torch.randn(8), "elsewhere.weight_g": torch.randn(8)}
    expected, missing = spoken(model, state)
    assert not missing and torch.equal(expected["layernorm.weight_g"], state["layernorm.weight_g"])
    pairs = own_names(model, state)
    assert pairs == {name: name for name in model.state_dict()}
    assert own_state(model, state).keys() == state.keys()


def test_what_the_model_does_not_know_has_no_entry_and_keeps_its_name() -> None:
    model = make("vit", "ViTModel", 0)
    state = {
        "classifier.weight": torch.zeros(1),
        "vit.layernorm.weight": torch.ones(8),
        "blocks.0.weight": torch.zeros(1),
    }
    assert own_names(model, state) == {"vit.layernorm.weight": "layernorm.weight"}
    assert own_state(model, state).keys() == {"classifier.weight", "layernorm.weight", "blocks.0.weight"}


def test_a_tensor_that_transformers_makes_of_two_is_made(tmp_path: Path) -> None:
    """SwiGLU's gate and up, which DINOv2's files hold in one tensor; what a file lacks, or has in another size, is
    not made up."""
    given, model = (make("swiglu", "Dinov2Model", seed) for seed in (0, 1))
    with quietly():
        given.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert not state.keys() >= given.state_dict().keys()
    found = own_state(model, state)
    assert found.keys() == given.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in given.state_dict().items())
    lost = "layernorm.weight"
    odd = {**state, "layernorm.bias": torch.zeros(3)}
    del odd[lost]
    found = own_state(model, odd)
    assert found.keys() == given.state_dict().keys() - {lost} and found["layernorm.bias"].shape == (3,)


def test_a_transformers_without_the_table_of_names_is_to_be_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    with pytest.raises(SitusError, match=r"^upgrade transformers: this version lacks transformers.conversion_mapping"):
        own_names(make("bert", "BertModel", 0), ["pooler.dense.bias"])


def test_quietly_gives_back_how_loud_it_was() -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def loudness(level: int, bar: bool) -> None:
        logging.set_verbosity(level)
        (logging.enable_progress_bar if bar else logging.disable_progress_bar)()

    def fail() -> None:
        with quietly():
            assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
            raise ZeroDivisionError

    try:
        for bar in (True, False):
            loudness(logging.INFO, bar)
            with pytest.raises(ZeroDivisionError):
                fail()
            assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, bar)
    finally:
        loudness(*before)


def test_one_block_keeps_the_ids_that_few_words_have() -> None:
    """And the names under which each config holds its layers, with the kind of the first one."""
    bert = transformers.BertConfig(**BERT, pad_token_id=63, bos_token_id=64, eos_token_id=None)
    assert one_block(bert) == {
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    assert one_block(transformers.GPT2Config(bos_token_id=3, eos_token_id=50256)) == {
        "n_layer": 1,
        "vocab_size": 64,
        "pad_token_id": None,
        "eos_token_id": None,
    }
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    qwen = one_block(transformers.Qwen2Config(num_hidden_layers=3, **windows))
    assert (qwen["num_hidden_layers"], qwen["layer_types"]) == (1, ["full_attention"])
    vit = transformers.ViTConfig(**VIT)
    assert one_block(vit) == {"num_hidden_layers": 1} | {
        name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name in vit.to_dict()
    }
