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
    MOST,
    Measure,
    Reading,
    WeightCheck,
    _measure_neurons,
    _reading,
    compare,
    compare_others,
    directions,
    layers_of,
    made_up_inputs,
    measure,
    order,
    others_of,
    parallel,
)
from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.gate import ABOVE, NOT_JUDGED, PASSED
from situs.models import open_model

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


@pytest.mark.parametrize(("numbers", "run"), [([1, 2, 3, 4, 5], 5), ([9, 1, 2, 3, 4, 0], 4), ([1, 7, 6, 5, 4, 8], 4)])
def test_a_run_of_numbers_is_as_rare_as_its_orders_are_many(numbers: list[int], run: int) -> None:
    expected = -math.log10(2 * len(numbers) / math.factorial(run))
    assert order(torch.tensor(numbers)) == pytest.approx(max(0.0, expected))


def test_scores_are_0_at_the_usual_value_and_1_at_the_limit_and_half_at_their_geometric_mean() -> None:
    times, decades = Measure("{}", 2, 32), Measure("{}", 1, 6, "decades")
    for measure_, values in ((times, (0.0, 1, 2, 8, 32, 512)), (decades, (-1, 0, 1, 3.5, 6, 11))):
        assert [measure_.score(value) for value in values] == pytest.approx([0, 0, 0, 0.5, 1, 2])


@pytest.mark.parametrize(
    ("public", "score"), [(None, 2.0), (1.0, 2.0), (2 * 16**0.8, 2.0), (32.0, 1.6), (512.0, 0.8), (2**13, 8 / 15)]
)
def test_what_the_public_model_shows_and_a_quarter_more_is_excused(
    public: float | None, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEASURES, "flat attention", Measure("{}", 2, 32))
    found = _reading("flat attention", (512.0, "here"), None if public is None else (public, "there"))
    assert found == ("flat attention", 512.0, "here", pytest.approx(score), public)


def test_neurons_are_as_steep_as_the_eighth_strongest_on_all_but_a_few_tokens() -> None:
    """Sums of known deviations; one token in fifty is a sink, far beyond all others."""
    sizes = torch.arange(1.0, 21)
    chance = torch.Generator().manual_seed(0)
    sums = sizes * torch.randn(3, 1000, 20, generator=chance) + 7
    sums[:, ::50] = 1e4
    sums[..., 3:6] = sums[..., 19:] * torch.tensor([0.01, -0.02, 0.03])
    values: dict[str, tuple[float, str]] = {}
    _measure_neurons("it", sums, values)
    steep, equal = values["steep neurons"], values["equal answers"]
    assert steep == (pytest.approx(13, rel=0.06), "it") and equal == (4, "it")


def test_neurons_that_are_mostly_off_are_measured_about_their_mean() -> None:
    """On for three tokens of ten: their mean distance from the mean is 2 · 0.3 · 0.7."""
    sizes = torch.arange(1.0, 21)
    on = (torch.rand(1000, 20, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    values: dict[str, tuple[float, str]] = {}
    _measure_neurons("it", sizes * on - 5, values)
    assert values["steep neurons"][0] == pytest.approx(1.25 * 0.42 * 13, rel=0.1)
    assert values["equal answers"][0] == 1


@pytest.mark.parametrize(("count", "noticed"), [(7, False), (8, True)])
@pytest.mark.parametrize("part", ["up", "down"])
def test_an_outlier_is_one_neuron_and_an_attack_needs_many(count: int, noticed: bool, part: str) -> None:
    public, changed = vit(), vit()
    mlp = changed.parts()[2].mlp
    with torch.no_grad():
        if part == "up":
            mlp.up[0].weight[:count] *= 1.5
        else:
            mlp.down.weight[:, :count] *= 1.5
    distance, (ratio, name) = compare(layers_of(changed), layers_of(public), "public")
    assert distance == 0 and (ratio > 400) is noticed
    assert name == ("blocks.2.mlp.fc1" if part == "up" else "blocks.2.mlp.fc2") if noticed else ratio < 1


def test_a_neuron_that_changed_is_held_against_the_median_of_its_layer() -> None:
    """Rows of equal length, all moved by a tenth, ten of them by seven tenths."""
    public, changed = vit(), vit()
    with torch.no_grad():
        for one in (public, changed):
            weight = one.parts()[1].mlp.up[0].weight
            weight /= weight.norm(dim=1, keepdim=True)
        weight *= 1.1
        weight[:10] *= 1.7 / 1.1
    distance, (ratio, name) = compare(layers_of(changed), layers_of(public), "public")
    assert (ratio, name, distance) == (pytest.approx(7, rel=1e-4), "blocks.1.mlp.fc1", 0.0)


@pytest.mark.parametrize("kind", ["vit", "GPT2LMHeadModel", "BertModel"])
def test_layers_are_the_matrices_that_the_models_own_layers_multiply_with(kind: str) -> None:
    torch.manual_seed(0)
    own = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    if kind == "BertModel":
        own = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        own |= {"vocab_size": 50, "max_position_embeddings": 32}
    backbone: Any = vit() if kind == "vit" else small_hf(kind, **own)
    depth, layers, calls = len(backbone.parts()), layers_of(backbone), dict[int, Any]()
    assert [layer.part for layer in layers] == ["query", "key", "value", "out", "up", "down"] * depth
    for layer in layers:
        if layer.module is not None:
            layer.module.register_forward_hook(lambda module, given, out: calls.update({id(module): (given[0], out)}))
    inputs = made_up_inputs(backbone)
    backbone(inputs)
    ups = [layer for layer in layers if layer.part == "up"]
    assert len(calls) == len(ups) == depth
    for layer in ups:
        given, out = calls[id(layer.module)]
        torch.testing.assert_close(given @ layer.weight.T + layer.bias, out)
    fused = torch.cat([layer.weight for layer in backbone.parts()[0].attention.qkv])
    fused = fused.T if kind.startswith("GPT2") else fused
    torch.testing.assert_close(torch.cat([layer.weight for layer in layers[:3]]), fused.detach())


@pytest.mark.parametrize(("side", "count"), [(16, 8), (48, 3), (96, 2)])
def test_made_up_images_are_half_smooth_and_few_where_they_have_many_tokens(side: int, count: int) -> None:
    images = made_up_inputs(small_vit(side, depth=1))
    assert images.shape == (2 * count, 3, side, side)
    rough = images.diff(dim=-1).square().flatten(1).mean(dim=1) / images.var(dim=(1, 2, 3))
    assert bool((rough[:count] < rough[count:].min()).all()) and 1.8 < float(rough[count:].mean()) < 2.2


def said(*scores: float, **more: Any) -> WeightCheck:
    readings = [Reading(name, 50.0, f"layer {n}", scores[n]) for n, name in enumerate([*MEASURES][: len(scores)])]
    return WeightCheck("it", more.pop("like", ""), tuple(readings), **more)


@pytest.mark.parametrize(
    ("result", "status", "mark", "end"),
    [
        (said(1.0, 0.2), PASSED, "not noticed", "stay below all limits."),
        (said(1.0, missing=("a", "b")), NOT_JUDGED, "inconclusive", "it: inconclusive: a; b."),
        (said(missing=("a",)), NOT_JUDGED, "inconclusive", "it: inconclusive: a."),
        (said(1.2, 1.0), ABOVE, "noticed", "(layer 0: 50 neurons have parallel weights; limit 8)."),
        (said(1.3, 1.2, missing=("a",)), ABOVE, "noticed", "50 neurons have proportional outputs; limit 58)."),
        (said(1.4, 1.3, 1.2), ABOVE, "noticed", "limit 58), and 1 more."),
        (said(1.4, 1.3, 1.2, 1.1), ABOVE, "noticed", "limit 58), and 2 more."),
    ],
)
def test_the_sentence_names_two_reasons_and_counts_the_others(
    result: WeightCheck, status: int, mark: str, end: str
) -> None:
    assert (result.status, result.mark) == (status, mark)
    assert result.sentence.startswith(f"it: {mark}") and result.sentence.endswith(end)
    assert result.tone == ("bad" if status == ABOVE else "unsure")
    assert result.numbers()["status"] == status and result.numbers()["noticed"] is (status == ABOVE)
    assert result.summary().notes == (("a",) if status == ABOVE and result.missing else ())


def test_the_table_has_the_public_models_values_and_a_note_on_the_distance() -> None:
    one = said(12.346, 0.5, like="theirs", distance=0.69)
    [table] = one.summary().tables
    assert table.header[-2:] == ("layer", "public") and list(table.rows[0]) == [
        "parallel neurons", 50.0, 8, 12.35, "layer 0", None,
    ]  # fmt: skip
    assert one.summary().numbers[0][0] == "12.3" and said().score == 0.0
    assert one.figures()[0].values[0] == {"parallel neurons": (10.0, "bad"), "equal answers": (0.5, "")}
    notes = [said(like="theirs", distance=far).summary().notes[-1] for far in (0.0, 0.69, 0.7)]
    assert "equal to the matrices of theirs, bit for bit" in notes[0]
    assert "is 0.69 (median over the matrices)" in notes[1] and "Fine-tuning can also cause" in notes[1]
    assert "is 0.7 (median over the matrices)" in notes[2] and "The models are therefore unrelated" in notes[2]
    [plain] = said(0.5).summary().tables
    assert plain.header[-1] == "layer" and len(plain.rows[0]) == 5


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
    values = {reading.name: reading.value for reading in equal.readings}
    assert [values[name] for name in COMPARED] == [1 / MOST] * 3  # nothing changed: the least there is
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


class Unknown(nn.Module):
    """Linear layers without blocks, for two images at most."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(48, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise ValueError("two images at most\nand no more")
        return self.two(torch.relu(self.one(x.flatten(1)[:, :48])))


def test_a_model_that_does_not_run_on_made_up_images_is_inconclusive_and_its_matrices_are_measured() -> None:
    torch.manual_seed(0)
    result = check_weights(Unknown(), img_size=16)
    said = "the outputs on random inputs could not be measured (two images at most)"
    assert result.status == NOT_JUDGED and result.missing == (said,) and said in result.sentence
    [one, two] = layers_of(open_model(Unknown(), img_size=16).backbone)
    assert [one.name, two.name] == ["one", "two"] and one.part == two.part == "up"


def test_a_public_model_by_its_name_is_opened_for_the_same_images() -> None:
    result = check_weights("test_vit", "test_vit=random", img_size=32)
    assert result.status == PASSED and result.distance == 0.0
    with pytest.raises(SitusError, match="a different architecture"):
        check_weights(vit(), "test_vit=random")


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
