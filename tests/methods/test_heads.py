"""What methods add to a backbone: losses and shares of few tokens, initial weights, norms of a pyramid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import small_swin, small_vit
from torch import Tensor, nn

from situs.methods import MAE, DropPos
from situs.methods.heads import Decoder, init_classifier, own_norms, position_accuracy, position_loss


@pytest.mark.parametrize("real", [[[True, False, False], [False] * 3], [[True] * 3, [True, True, False]]])
def test_only_real_tokens_count_however_few(real: list[list[bool]]) -> None:
    torch.manual_seed(0)
    logits, places = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[4, 0, 1], [2, 2, 3]])
    logits[0, 0, 4] = 3.0  # the first is right
    asked = [(b, k) for b in range(2) for k in range(3) if real[b][k]]
    losses = [float(logits[b, k].exp().sum().log() - logits[b, k, places[b, k]]) for b, k in asked]
    right = [int(logits[b, k].argmax()) == int(places[b, k]) for b, k in asked]
    mask = torch.tensor(real)
    assert float(position_loss(logits, places, mask)) == pytest.approx(sum(losses) / len(asked), rel=1e-5)
    assert float(position_accuracy(logits, places, mask)) == pytest.approx(sum(right) / len(asked))


def test_of_no_real_token_loss_and_share_are_0() -> None:
    logits, places, none = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3).bool()
    assert float(position_loss(logits, places, none)) == float(position_accuracy(logits, places, none)) == 0.0


def test_a_classifier_starts_nearly_undecided() -> None:
    torch.manual_seed(0)
    head = init_classifier(nn.Linear(256, 100))
    assert float(head.weight.detach().std()) == pytest.approx(0.02, rel=0.05) and not head.bias.any()


def test_a_decoder_starts_as_maes_do() -> None:
    """Xavier's uniform weights, no biases, and norms with an epsilon of 1e-6."""
    torch.manual_seed(0)
    decoder = Decoder(64, 48, 2, 4, 100)
    linears = [part for part in decoder.modules() if isinstance(part, nn.Linear)]
    assert len(linears) == 2 + 2 * 4 and not any(bool(layer.bias.any()) for layer in linears)
    for layer in linears:
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.98 * bound < float(layer.weight.detach().abs().max()) <= bound
    norms = [part for part in decoder.modules() if isinstance(part, nn.LayerNorm)]
    assert len(norms) == 5 and {norm.eps for norm in norms} == {1e-6}


@pytest.mark.parametrize("kind", [MAE, DropPos])
def test_the_vector_of_hidden_patches_starts_small(kind: Any) -> None:
    torch.manual_seed(0)
    method = kind(small_vit(width=128), kind.Config(decoder_width=128, decoder_heads=2, decoder_depth=1))
    token: Tensor = method.mask_token.detach()
    assert token.numel() == 128 and float(token.std()) == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize(
    ("depths", "widths"), [((1,), []), ((1, 1), [12]), ((1, 2, 1), [12, 24])], ids=["one", "two", "three"]
)
def test_every_stage_but_the_last_has_a_norm_of_its_own(depths: tuple[int, ...], widths: list[int]) -> None:
    backbone = small_swin(64, depths=depths, heads=(1, 2, 3)[: len(depths)])
    assert [norm.normalized_shape[0] for norm in own_norms(backbone.levels())] == widths  # type: ignore[union-attr]
    assert not own_norms(small_vit().levels())
