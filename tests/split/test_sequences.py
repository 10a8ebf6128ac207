"""The server's side of generation: every message once, and no half sequence is kept."""

from __future__ import annotations

import pytest
import torch
from builders import small_hf

from situs.methods import create_method
from situs.split.blocks import Blocks
from situs.split.message import Message, RefusedError
from situs.split.sequences import Sequences
from situs.train.optim import OptimConfig

SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "vocab_size": 20}


@pytest.fixture
def blocks() -> Blocks:
    torch.manual_seed(0)
    backbone = small_hf("GPT2LMHeadModel", **SIZES, bos_token_id=None, eos_token_id=None).double()
    return Blocks(create_method("language", backbone), OptimConfig(ema=0.5), seed=0, precision="fp32")


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def message(z: torch.Tensor, start: int = 0, sequence: int = 1, **facts) -> Message:
    return Message("extend", {"sequence": sequence, "start": start, **facts}, {"z": z})


def test_rows_one_by_one_give_what_all_at_once_give(blocks) -> None:
    sequences, z = Sequences(2, 1 << 20), rows(7)
    whole = blocks.infer(z)
    for start, end in ((0, 3), (3, 4), (4, 7)):
        out = sequences.extend(message(z[:, start:end], start), blocks).tensors["z"]
        assert out.shape == (1, 1, 16)
        assert float((out[0, 0] - whole[0, end - 1]).abs().max()) < 1e-12
    assert blocks.token_bytes * 7 == sequences._kept[1].past.nbytes


def test_a_text_is_generated_in_the_precision_of_the_weights(blocks) -> None:
    """A training in bf16 rounds its steps, and not the tokens of a text."""
    blocks.method.float()
    z, past = rows(4).float(), blocks.backbone.new_past
    before, whole = blocks.extend(z, past()), blocks.infer(z)
    blocks.precision = "bf16"
    assert torch.equal(blocks.extend(z, past()), before)
    assert not torch.equal(blocks.infer(z), whole)


def test_a_repeated_message_gets_its_answer_and_is_computed_once(blocks, monkeypatch) -> None:
    sequences, z, runs = Sequences(2, 1 << 20), rows(5), []
    really = blocks.extend
    assert blocks.token_bytes
    monkeypatch.setattr(blocks, "extend", lambda *args, **options: runs.append(1) or really(*args, **options))
    first = sequences.extend(message(z[:, :4]), blocks)
    assert sequences.extend(message(z[:, :4].clone()), blocks) is first and len(runs) == 1
    second = sequences.extend(message(z[:, 4:], 4), blocks)
    assert sequences.extend(message(z[:, 4:], 4), blocks) is second and len(runs) == 2
    with pytest.raises(
        RefusedError, match="sequence 1 has 5 tokens on the server, but this message starts at token 4"
    ) as told:
        sequences.extend(message(z[:, 4:] + 1, 4), blocks)
    assert told.value.code == "length"
    anew = sequences.extend(message(z), blocks)  # from 0 on it starts again
    assert torch.allclose(anew.tensors["z"], second.tensors["z"]) and len(runs) == 3


def test_other_weights_make_a_sequence_unknown(blocks) -> None:
    sequences, z = Sequences(2, 1 << 20), rows(3)
    sequences.extend(message(z), blocks)
    with pytest.raises(RefusedError, match="has 0 tokens on the server"):
        sequences.extend(message(rows(1), 3, mean=True), blocks)
    blocks.updates += 1
    with pytest.raises(RefusedError, match="has 0 tokens on the server"):
        sequences.extend(message(rows(1), 3), blocks)


def test_an_error_while_it_is_computed_leaves_no_half_sequence(blocks, monkeypatch) -> None:
    sequences = Sequences(2, 1 << 20)
    sequences.extend(message(rows(3)), blocks)
    sequences.extend(message(rows(3), sequence=2), blocks)
    last = blocks.backbone.layers()[1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            sequences.extend(message(rows(1), 3), blocks)
    assert list(sequences._kept) == [2] and sequences._kept[2].past.length == 3
    with pytest.raises(RefusedError, match="has 0 tokens on the server"):
        sequences.extend(message(rows(1), 3), blocks)


def test_number_and_bytes_are_limited_and_the_oldest_is_forgotten(blocks) -> None:
    sequences = Sequences(3, 18 * blocks.token_bytes)
    for number in range(5):
        sequences.extend(message(rows(3), sequence=number), blocks)
    assert list(sequences._kept) == [2, 3, 4]
    sequences.extend(message(rows(1), 3, sequence=2), blocks)
    sequences.extend(message(rows(12), sequence=9), blocks)
    assert list(sequences._kept) == [2, 9]  # 4 and 12 tokens
    small = Sequences(3, 5 * blocks.token_bytes)
    with pytest.raises(
        RefusedError, match="sequence 1 would need 3,072 bytes on the server, but at most 2,560 are allowed"
    ):
        small.extend(message(rows(6)), blocks)
    with pytest.raises(RefusedError, match="would have 13 tokens, but this server takes at most 12"):
        sequences.extend(message(rows(13)), blocks)


def test_a_sequence_is_forgotten_after_its_time_and_not_before(blocks, monkeypatch) -> None:
    sequences, clock = Sequences(3, 1 << 20), [1000.0]
    monkeypatch.setattr("situs.split.sequences.time.monotonic", lambda: clock[0])
    for number in (1, 2):
        sequences.extend(message(rows(2), sequence=number), blocks)
        clock[0] += 5
    for seconds, remain in ((10, [1, 2]), (9.5, [2]), (5, [2]), (4.5, [])):
        sequences.forget(seconds)
        assert list(sequences._kept) == remain and len(sequences) == len(remain)


def test_what_is_counted_is_what_is_held() -> None:
    """A window of a long prompt is no view of all of it, and neither is the answer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "max_position_embeddings": 64}
    backbone = small_hf("Qwen3ForCausalLM", **sizes, **windows, vocab_size=20, head_dim=8).double()
    blocks = Blocks(create_method("language", backbone), OptimConfig(), seed=0, precision="fp32")
    sequences, z = Sequences(2, 1 << 20), rows(40)
    assert torch.allclose(
        sequences.extend(message(z[:, :39]), blocks).tensors["z"], blocks.infer(z[:, :39])[:, -1:], atol=1e-12
    )
    last = sequences.extend(message(z[:, 39:], 39), blocks).tensors["z"]
    assert torch.allclose(last, blocks.infer(z)[:, -1:], atol=1e-12)
    sequences.extend(message(rows(39, 1), sequence=2), blocks)
    for each in sequences._kept.values():
        parts = [part for layer in each.past.cache.layers for part in (layer.keys, layer.values)]
        held = sum(part.untyped_storage().nbytes() for part in parts)
        assert held == each.past.nbytes < 1.2 * (40 + 4) * blocks.token_bytes / 2
        assert each.answer.tensors["z"].untyped_storage().nbytes() == last.nbytes
