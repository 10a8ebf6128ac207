"""Weights that look chosen: each measure against a slow reference, verdicts on honest and crafted models, the guard."""

from __future__ import annotations

import itertools
import logging
import math
import runpy
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_hf, small_vit
from torch import Tensor, nn

from situs.audit import ChosenWeightsError, check_weights, guard
from situs.audit.attacks.crafted import craft
from situs.audit.chosen import (
    MEASURES,
    WeightCheck,
    compare,
    compare_others,
    directions,
    layers_of,
    measure,
    order,
    others_of,
    parallel,
)
from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.gate import ABOVE, NOT_JUDGED, PASSED

SLOW_KINDS = ("BertModel", "LlamaForCausalLM", "GPTNeoXForCausalLM")
COMPARED = ("few neurons changed", "few numbers changed", "tensor changed")
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "chosen.py"


def vit(seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    return small_vit(depth=4, width=96, num_classes=10).eval()


@pytest.fixture(scope="module")
def crafted() -> Backbone:
    return craft(vit())


@pytest.fixture(scope="module")
def verdict(crafted: Backbone) -> WeightCheck:
    return check_weights(crafted)


def test_directions_are_the_entropy_of_the_singular_values() -> None:
    weight = torch.randn(7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    powers = torch.linalg.svd(weight).S.square()
    shares = powers / powers.sum()
    assert directions(weight) == pytest.approx(math.exp(-float((shares * shares.log()).sum())), rel=1e-6)
    assert directions(weight[:1].T @ torch.ones(1, 5, dtype=torch.float64)) == pytest.approx(1.0, abs=1e-6)
    assert directions(torch.eye(9)) == pytest.approx(9.0, abs=1e-6)
    assert directions(torch.zeros(3, 4)) == 0.0


def test_parallel_rows_are_counted_as_pairs_one_by_one() -> None:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    rows[5], rows[9], rows[20], rows[30] = 3 * rows[2], -rows[2], 0.1 * rows[2], 0
    alike = [sum(abs(float(torch.cosine_similarity(a, b, dim=0))) > 0.98 for b in rows) for a in rows]
    assert parallel(rows, 0.98) == max(alike) == 4
    assert parallel(torch.zeros(5, 3), 0.98) == 1


def test_the_chance_of_a_run_is_never_called_smaller_than_it_is() -> None:
    """All orders of 7 numbers: a run of k is at least as rare as the bound says."""
    orders = [torch.tensor(numbers) for numbers in itertools.permutations(range(7))]
    levels = torch.tensor([order(numbers) for numbers in orders])
    for level in levels.unique().tolist():
        share = float((levels >= level).double().mean())
        assert share <= 10**-level + 1e-9 or level == 0.0
    assert order(torch.zeros(50)) == 0.0 and order(torch.arange(50.0)) > 60


def test_random_weights_are_not_noticed_and_never_called_safe() -> None:
    result = check_weights(vit())
    assert (result.reasons, result.status, result.tone) == ([], PASSED, "unsure")
    assert "not noticed" in result.sentence and "does not prove" in result.sentence and "safe" not in str(result)
    assert {reading.name for reading in result.readings} == set(MEASURES) - set(COMPARED)


@pytest.mark.parametrize(
    "kind", ["GPT2LMHeadModel", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)]
)
def test_random_text_models_are_not_noticed(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    own = {"n_embd": 32, "n_layer": 2, "n_head": 2} if kind.startswith("GPT2") else sizes
    result = check_weights(small_hf(kind, **own, vocab_size=50, max_position_embeddings=32))
    assert result.status == PASSED and not result.missing


def test_crafted_weights_are_noticed_with_the_reasons(verdict: WeightCheck) -> None:
    assert verdict.status == ABOVE and verdict.tone == "bad" and verdict.score > 2
    assert {"parallel neurons", "equal answers", "flat attention"} <= {reading.name for reading in verdict.reasons}
    assert "noticed: its weights look crafted" in verdict.sentence
    numbers = verdict.to_json()
    assert numbers["noticed"] is True and numbers["status"] == 3 and numbers["reasons"][0] == verdict.readings[0].name
    [bars] = verdict.figures()
    assert set(bars.values[0]) == {reading.name for reading in verdict.readings}


@pytest.mark.slow
def test_what_moves_weights_about_and_not_what_they_do_is_noticed_too(crafted: Backbone) -> None:
    evading = runpy.run_path(str(BENCHMARK))
    for change in ("rotated", "permuted", "rescaled", "with_attention"):
        changed, undo = evading[change](crafted)
        assert check_weights(changed).status == ABOVE, change
        assert evading["exact_images"](changed, undo) >= 1, change


def test_a_public_model_gives_the_distance_and_excuses_what_it_shows_itself(crafted: Backbone) -> None:
    equal = check_weights(crafted, crafted)
    assert equal.status == PASSED and equal.distance == 0.0
    assert any("bit for bit" in note for note in equal.summary().notes)
    other = check_weights(crafted, vit())
    assert other.status == ABOVE and other.distance is not None and other.distance >= 1


@pytest.mark.parametrize("as_state", [False, True])
def test_a_few_neurons_in_a_known_model_are_noticed(as_state: bool) -> None:
    public, changed = vit(), vit()
    with torch.no_grad():
        changed.parts()[1].mlp.up[0].weight[20:36] *= 1.8
    result = check_weights(changed, public.model.state_dict() if as_state else public)
    assert [reading.name for reading in result.reasons] == ["few neurons changed"]
    assert result.reasons[0].layer == "blocks.1.mlp.fc1"
    assert check_weights(changed).status == PASSED  # without the public model nobody could say


def _constants(weight: Tensor) -> None:
    weight.view(-1, weight.shape[-1])[:, 4:6] = torch.tensor([300.0, -300.0])


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "head.weight": lambda weight: weight[3].mul_(1000),
    "head.bias": lambda bias: bias[1:].fill_(-1e4),
    "patch_embed.proj.weight": lambda weight: weight.mul_(1000),
    "patch_embed.proj.bias": _constants,
    "pos_embed": _constants,
    "cls_token": _constants,
    "blocks.1.norm2.weight": lambda weight: weight[8:].zero_(),
    "blocks.2.norm1.weight": lambda weight: weight.zero_(),
    "blocks.2.norm1.bias": _constants,
    "blocks.1.attn.qkv.bias": lambda bias: bias[:4].fill_(1e3),
    "norm.weight": lambda weight: weight.mul_(1000),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_one_written_tensor_is_noticed_whatever_it_is(name: str) -> None:
    public, changed = vit(), vit()
    with torch.no_grad():
        WRITTEN[name](dict(changed.model.named_parameters())[name])
    result = check_weights(changed, public)
    assert result.status == ABOVE and name in {reading.layer for reading in result.reasons}


@pytest.mark.parametrize("part", ["", "head", "bias", "norm", "blocks.3", "pos_embed"])
def test_training_a_part_is_not_taken_for_a_written_tensor(part: str) -> None:
    """One step of Adam after the other moves every number of what is trained by about the rate."""
    public, tuned = vit(), vit()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tuned.model.named_parameters():
            if part in name:
                parameter += 0.01 * torch.randn(parameter.shape, generator=chance)
    assert check_weights(tuned, public).status == PASSED


def test_a_tensor_without_a_counterpart_is_inconclusive_and_named() -> None:
    public = vit()
    torch.manual_seed(0)
    other = small_vit(depth=4, width=96, num_classes=7).eval()
    result = check_weights(other, public)
    assert result.status == NOT_JUDGED and "head.weight, head.bias" in result.sentence
    assert result.mark == "inconclusive"
    state = {name: value for name, value in public.model.state_dict().items() if not name.startswith("head")}
    assert check_weights(vit(), state).status == NOT_JUDGED


def test_a_tensor_of_one_number_is_not_measured() -> None:
    """Such as the bias of a single class: nothing can be told from its size."""
    torch.manual_seed(0)
    public, tuned = (small_vit(depth=4, width=96, num_classes=1).eval() for _ in range(2))
    tuned.model.load_state_dict(public.model.state_dict())
    names = set(others_of(public))
    assert "head.weight" in names and "head.bias" not in names
    with torch.no_grad():
        tuned.model.get_parameter("head.bias").add_(1000)
    assert check_weights(tuned, public).status == PASSED


def test_changes_everywhere_are_training() -> None:
    public, trained = vit(), vit()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0
    distance, (ratio, _) = compare(layers_of(trained), layers_of(public), "public")
    assert 0.05 < distance < 0.2 and ratio < 2


def test_pruned_neurons_are_not_taken_for_changed_ones() -> None:
    public, pruned = vit(), vit()
    with torch.no_grad():
        for block in pruned.parts():
            block.mlp.up[0].weight[::5], block.mlp.down.weight[:, ::5] = 0, 0
    _, (ratio, _) = compare(layers_of(pruned), layers_of(public), "public")
    assert ratio < 1


def test_another_architecture_is_refused_in_one_sentence() -> None:
    with pytest.raises(SitusError, match="a different architecture"):
        check_weights(vit(), small_vit(width=32, num_classes=10))


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = vit()
    with torch.no_grad():
        model.parts()[0].mlp.up[0].weight[0, 0] = math.nan
    with pytest.raises(SitusError, match="NaN"):
        check_weights(model)


def test_a_model_without_matrices_is_inconclusive() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(dim=(2, 3))

    result = check_weights(Convolution(), img_size=16)
    assert result.status == NOT_JUDGED and "inconclusive" in result.sentence


@pytest.mark.parametrize("classes", [10, 1000])
def test_a_changed_row_scores_the_same_among_few_and_many(classes: int) -> None:
    """A row of the classifier moved by a twentieth of its size, and all others as they were: 50 times a thousandth."""
    torch.manual_seed(0)
    public = small_vit(depth=2, width=96, num_classes=classes).eval()
    moved = deepcopy(public)
    with torch.no_grad():
        weight: Any = moved.get_parameter("model.head.weight")
        weight[3] += 0.05 * weight.square().mean().sqrt() * torch.randn(96).sign()
    values: dict[str, tuple[float, str]] = {}
    compare_others(moved, public, (), values)
    assert values["few numbers changed"] == (pytest.approx(50, rel=0.01), "head.weight")


def test_nothing_of_the_model_is_changed(crafted: Backbone) -> None:
    before = deepcopy(crafted.state_dict())
    crafted.train()
    state = torch.get_rng_state()
    measure(crafted)
    assert crafted.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in crafted.state_dict().items())
    assert not any(module._forward_hooks for module in crafted.modules())
    crafted.eval()


def test_a_guard_stops_before_the_first_step_or_logs(crafted: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("situs.audit.guard"), "handle", records.append)
    module = deepcopy(crafted.model)
    with pytest.raises(ChosenWeightsError, match="look crafted") as error:
        guard(module, img_size=16, expect="random")
    assert error.value.result.score > 1
    watch = guard(module, img_size=16, expect=vit().model.state_dict(), act="log")
    assert watch.weights is not None
    assert [(record.levelname, record.getMessage()) for record in records] == [("WARNING", watch.weights.sentence)]


def test_a_guard_checks_the_weights_of_later_rounds(crafted: Backbone) -> None:
    module = vit().model
    watch = guard(module, img_size=16, expect="random")
    assert watch.weights is not None and watch.weights.status == PASSED
    module.load_state_dict(crafted.model.state_dict())
    with pytest.raises(ChosenWeightsError):
        watch.check_weights()


@pytest.mark.slow
def test_the_benchmark_separates_honest_from_crafted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), "--few"])
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    [point] = [line for line in lines if line.startswith("| 1 |")]
    assert point == "| 1 | 6 of 6 | 0 of 2 |"
    assert any(line.startswith("Area under the curve 1.0000") for line in lines)
