"""The laws themselves: measured by `verify` on every architecture, and by a training loop of its own."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import Tensor, nn
from zoo import CAUSAL, NO_ROWS, RELATIVE, ROTARY, ZOO, inputs, make

from situs.backbones import Backbone, create_backbone
from situs.backbones.layout import Group, Member
from situs.core.permutation import permute_columns
from situs.errors import SitusError
from situs.locks.equivariance import Finding, Verification, verify
from situs.locks.equivariance.experiment import Experiment, KeepDouble, relative_error, worst_relative_error
from situs.locks.equivariance.sample import moved_order, sample_of
from situs.locks.groups import (
    entrance_and_exit,
    invert_keys,
    non_identity,
    permute_state,
    random_keys,
    residual_only,
)
from situs.models.inference import evaluating
from situs.progress import listening

EXACT = 1e-10


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def verdict_of() -> Callable[[str], Verification]:
    """Each model is verified once, in float32, with one step; the loop below takes three."""
    made: dict[str, Verification] = {}

    def verdict(name: str) -> Verification:
        if name not in made:
            made[name] = verify(make(name, torch.float32), steps=1)
        return made[name]

    return verdict


# --- verify --------------------------------------------------------------------------------------------------------

VERIFIED = ("vit", "dinov2_swiglu", "res_post", "eva", "rope_mixed", "relpos_table", "swin", "hf_vit", "bert", "gpt2")
VERIFIED += ("llama", "albert")
"""One of each kind. The groups of all are certified in test_certify.py, their rows in test_sample.py; `verify` puts the
others to the same tests among the slow."""


def verified(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in VERIFIED else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", verified(ZOO))
def test_columns_hold_with_keyed_weights_in_every_architecture(
    name: str, verdict_of: Callable[[str], Verification]
) -> None:
    verdict = verdict_of(name)
    whole = verdict.whole("column")
    assert whole.status == "needs keyed weights"
    assert set(whole.errors) == set(whole.native) == {"forward", "backward", "steps"}
    assert max(whole.errors.values()) < EXACT
    assert 1e-9 < max(whole.native.values()) < verdict.own_tolerance == 1e-3  # float32, and not float64 unawares
    assert verdict.worst < EXACT
    assert verdict.control is not None and verdict.control > 1e-3


@pytest.mark.parametrize("name", verified(ZOO))
def test_rows_hold_or_are_refused_with_the_operation(name: str, verdict_of: Callable[[str], Verification]) -> None:
    whole = verdict_of(name).whole("row")
    if name not in NO_ROWS:
        assert whole.status == "holds"
        assert max(whole.errors.values()) < EXACT
        assert ("RoPE" in whole.reason and "order" in whole.reason) == (name in ROTARY)
        return
    assert whole.status == "refused"
    operation = "causal mask" if name in CAUSAL else "relative bias" if name in RELATIVE else "windows"
    assert operation in whole.reason
    if name in CAUSAL:
        assert whole.errors["forward"] > 1e-2


@pytest.mark.parametrize("name", verified(ZOO))
def test_every_leaf_moves_with_the_key_or_stays(name: str, verdict_of: Callable[[str], Verification]) -> None:
    verdict = verdict_of(name)
    inside = [each for each in verdict.findings if "*" in each.part]
    assert inside
    assert all(each.status != "refused" for each in inside)
    keyed = {each.part for each in inside if each.status == "needs keyed weights"}
    residual = {m.tensor for g in residual_only(make(name).groups()) for m in g.members}
    for tensor in residual:  # blocks.0.attn.qkv.weight -> blocks.*.attn.qkv
        module = ".".join("*" if word.isdigit() else word for word in tensor.split(".")[:-1])
        assert module in keyed or tensor.rpartition(".")[2].startswith("gamma_")
    rows = [each for each in inside if each.law == "row"]
    assert bool(rows) == (name not in NO_ROWS)


@pytest.mark.parametrize("name", verified(ROTARY))
def test_rotation_is_named_as_what_fixes_the_query_channels(
    name: str, verdict_of: Callable[[str], Verification]
) -> None:
    (found,) = (each for each in verdict_of(name).findings if each.part == "blocks, query and key channels")
    assert (found.status, "RoPE" in found.reason) == ("refused", True)


def test_what_stays_with_the_owner_is_said(verdict_of: Callable[[str], Verification]) -> None:
    reasons = {(each.part, each.law): each for each in verdict_of("vit").findings}
    assert reasons["embed", "column"].status == reasons["finish", "column"].status == "refused"
    assert "convolution" in reasons["embed", "column"].reason
    assert reasons["embed", "row"].status == "holds"


def test_progress_goes_through_four_parts() -> None:
    parts: list[tuple[float, str]] = []
    with listening(lambda tasks: parts.extend((each.done / each.total, each.now) for each in tasks[:1] if each.total)):
        verify(make("vit", torch.float32), steps=0)
    shares, names = zip(*dict.fromkeys(parts), strict=True)
    assert shares == (0, 0, 0.25, 0.5, 0.75) and len(set(names)) == 5  # it opens without a name


def test_a_network_without_tokens_is_refused_whole() -> None:
    verdict = verify(create_backbone("test_resnet"))
    assert [each.status for each in verdict.findings] == ["refused", "refused"]
    assert "convolution" in verdict.whole("row").reason
    assert "no law was found to hold" in verdict.summary().sentence and "largest" not in verdict.summary().sentence


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 24))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Along(nn.Conv1d):
    """A convolution over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("breaker", "operation", "row"),
    [(Along(24, 24, 3, padding=1), "convolution (Along)", "refused"), (Shifted(), "buffer (Shifted.shift)", "holds")],
)
def test_what_breaks_a_law_is_named(breaker: nn.Module, operation: str, row: str) -> None:
    backbone = make("vit", torch.float32)
    backbone.model.blocks[1].drop_path1 = breaker
    verdict = verify(backbone, steps=0)
    broken = [verdict.whole(law) for law in ("row", "column") if law == "column" or row == "refused"]
    for finding in broken:
        assert finding.reason.endswith(f"blocks.1.drop_path1: {operation}")
        assert finding.status == "refused"
    assert verdict.whole("row").status == row
    named = next(each for each in verdict.findings if each.part == "blocks.*.drop_path1" and each.law == "column")
    assert named.reason.startswith(operation)


def test_a_summary_says_how_the_negative_control_came_out_where_there_was_one() -> None:
    whole = [Finding("blocks", law, "holds", "", {"forward": 1e-15}) for law in ("row", "column")]
    made = Verification("m", "float32", 1e-10, 1e-3, 3, 0.25, tuple(whole))
    [note] = made.summary().notes
    assert "the error is 2.5e-01" in note and "above the tolerance" in note
    assert replace(made, control=None).summary().notes == ()


class OwnNorm(nn.LayerNorm):
    """A norm that nobody has read."""


def test_a_layer_that_nobody_has_read_refuses_columns_by_its_name_and_leaves_rows_alone() -> None:
    backbone = make("vit", torch.float32)
    backbone.model.blocks[1].norm2 = OwnNorm(24)
    verdict = verify(backbone, steps=0)
    with pytest.raises(SitusError) as caught:
        backbone.groups()
    column = verdict.whole("column")
    assert (column.status, column.reason) == ("refused", str(caught.value))
    assert "OwnNorm" in column.reason
    assert verdict.whole("row").status == "holds"
    unkeyed = verify(make("vit", torch.float32), groups=(), steps=0).whole("column")
    assert (unkeyed.status, unkeyed.reason) == ("refused", "no residual group is known")


def test_rounding_in_a_gradient_that_is_zero_breaks_no_law() -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    model = BertModel(BertConfig(vocab_size=99, max_position_embeddings=64, initializer_range=0.2, **sizes))
    verdict = verify(create_backbone(model), steps=0)  # its keys' biases are 0, and so are their gradients
    assert (verdict.whole("row").status, verdict.whole("column").status) == ("holds", "needs keyed weights")


def test_the_error_is_relative_to_the_largest_entry() -> None:
    a, b = torch.tensor([4.0, -8.0, 0.0]), torch.tensor([4.0, -6.0, 1.0])
    assert relative_error(a, b) == 2 / 8
    assert worst_relative_error({"a": a, "b": b}, {"a": b, "b": a}) == 2 / 6  # each by its own largest
    assert relative_error(torch.zeros(2), torch.zeros(2)) == worst_relative_error({}, {}) == 0.0
    tiny = torch.tensor([1e-9])  # beside a large gradient it is rounding, and so is its difference
    assert worst_relative_error({"a": a, "b": tiny}, {"a": a, "b": -tiny}) == pytest.approx(2e-9 / 8e-3)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("other", [0.0, 1.0, float("inf")])
def test_what_is_no_number_never_obeys_a_law(odd: float, other: float) -> None:
    a, b = torch.tensor([1.0, odd]), torch.tensor([1.0, other])
    for one, two in ((a, b), (b, a)):
        assert relative_error(one, two) == math.inf
        assert worst_relative_error({"a": one}, {"a": two}) == math.inf
    assert relative_error(torch.zeros(1), torch.zeros(2)) == math.inf
    assert worst_relative_error({"a": b}, {"a": b, "b": b}) == worst_relative_error({"a": b}, {}) == math.inf


def test_an_embedding_that_reads_other_patches_refuses_rows() -> None:
    backbone = make("vit", torch.float32)
    backbone.model.patch_embed.norm = Along(24, 24, 3, padding=1)
    (found,) = (f for f in verify(backbone, steps=0).findings if (f.part, f.law) == ("embed", "row"))
    assert found.status == "refused" and "it reads pixels outside its patch" in found.reason
    assert found.native["forward"] > 1e-2


def test_the_model_is_left_as_it_was() -> None:
    backbone = make("vit", torch.float32).train()
    before = copy.deepcopy(backbone.state_dict())
    verify(backbone, steps=1)
    assert backbone.training
    assert all(p.grad is None and p.requires_grad for p in backbone.parameters())
    assert all(torch.equal(before[name], t) for name, t in backbone.state_dict().items())
    assert not any(module._forward_hooks for module in backbone.modules())


def test_a_batch_of_ones_own_and_a_subset_of_tokens() -> None:
    backbone = make("registers")
    verdict = verify(backbone, inputs(backbone, 3), tokens=3, steps=1)
    assert verdict.worst < EXACT
    assert verify(backbone, tokens=2, steps=0).whole("row").status == "holds"


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_its_own_tolerance_and_float64_none_of_it(dtype: torch.dtype) -> None:
    verdict = verify(make("deit3", dtype), inputs(make("deit3")))
    column = verdict.whole("column")
    assert (column.status, verdict.whole("row").status) == ("needs keyed weights", "holds")
    assert max(column.errors.values()) < EXACT
    assert max(column.native.values()) < verdict.own_tolerance  # sums are kept in float32, so that it may even be 0
    assert "steps" not in column.native
    groups = make("deit3").groups()
    experiment = Experiment(make("deit3", dtype), sample_of(make("deit3", dtype), None, 32, random()), dtype, 0)
    control = experiment.control(groups, random_keys(groups, random()))
    assert control is not None
    assert control > verdict.own_tolerance


# --- a loop of its own ---------------------------------------------------------------------------------------------


def train(backbone: Backbone, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], steps: int) -> Any:
    """An ordinary loop: the owner's part, blocks, the owner's head, a loss on labels, AdamW over everything."""
    x = inputs(backbone, 4)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-3, weight_decay=0.05, eps=1e-6)
    first: dict[str, Tensor] = {}
    for step in range(steps):
        stream = backbone.assemble(backbone.embed(x), backbone.positions())
        out = backbone.blocks(replace(stream, z=move(stream.z)))
        logits = backbone.head(backbone.finish(replace(out, z=back(out.z)))).flatten(1)
        loss = nn.functional.cross_entropy(logits, torch.arange(4) % logits.shape[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = {n: p.grad.clone() for n, p in backbone.model.named_parameters() if p.grad is not None}
    return first, dict(backbone.model.named_parameters()), logits.detach()


TRAINED = ("vit", "res_post", "eva", "relpos", "swin", "hf_vit", "bert", "gpt2", "llama")
"""One of each kind; the steps of all others are among what `verify` finds above, and stand here among the slow."""


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in TRAINED else pytest.mark.slow) for n in ZOO])
def test_authorised_training_of_a_locked_model_is_normal_training(name: str) -> None:
    clear, locked = make(name), make(name)
    groups = clear.groups()  # with the inner groups too
    keys = random_keys(groups, random(7))
    undo = invert_keys(keys)
    enter, leave = entrance_and_exit(groups)
    locked.model.load_state_dict(permute_state(locked.model.state_dict(), groups, keys))
    with KeepDouble():
        gradients, weights, logits = train(clear, lambda z: z, lambda z: z, 3)
        theirs = train(locked, lambda z: permute_columns(z, keys[enter]), lambda z: permute_columns(z, undo[leave]), 3)
    assert worst_relative_error(gradients, permute_state(theirs[0], groups, undo)) < EXACT
    assert worst_relative_error(weights, permute_state(theirs[1], groups, undo)) < EXACT
    assert relative_error(logits, theirs[2]) < EXACT
    assert all((weights[n] != p).any() for n, p in make(name).model.named_parameters() if n in gradients)  # it trained
    assert (
        relative_error(weights["blocks.0.norm1.weight"], make(name).model.blocks[0].norm1.weight) > 1e-4
        if name == "vit"
        else True
    )


# --- float64 all the way -------------------------------------------------------------------------------------------


def test_keep_double_undoes_casts_to_float32() -> None:
    x = torch.randn(3, dtype=torch.float64)
    with KeepDouble():
        assert {x.float().dtype, x.to(torch.float32).dtype, x.to(dtype=torch.float32).dtype} == {torch.float64}
        assert x.softmax(-1, dtype=torch.float32).dtype == torch.float64
        assert nn.functional.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert x.half().dtype == torch.float16
        assert torch.arange(3).float().dtype == torch.float64  # positions of rotary embeddings
        assert torch.ones(1).to(torch.float32).dtype == torch.float32
    assert x.float().dtype == torch.float32


# --- real weights --------------------------------------------------------------------------------------------------


@pytest.mark.shared_data
@pytest.mark.slow
def test_a_pretrained_vit_obeys_both_laws(shared_data: Path) -> None:
    weights = shared_data / "weights" / "vit_small_patch14_dinov2_fp16.safetensors"
    backbone = create_backbone("vit_small_patch14_dinov2", img_size=56, weights=str(weights))
    groups = backbone.groups()
    with evaluating(backbone):
        experiment = Experiment(backbone, sample_of(backbone, None, 6, random()), torch.float64, 0)
        assert max(experiment.row().values()) < EXACT
        assert max(experiment.column(residual_only(groups), random_keys(groups, random())).values()) < EXACT


# --- what is under test is never nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_key_under_test_is_never_the_identity(seed: int) -> None:
    """Groups of two are the identity half the time: 20 seeds of 4 groups would pass by luck once in 10^24."""
    groups = [Group(f"g{i}", "heads", 2, (Member("t", 0),)) for i in range(4)] + [Group("h", "heads", 3, ())]
    keys = random_keys(groups, random(seed))
    assert all(p.tolist() != list(range(len(p))) for p in keys.values())
    assert random_keys([Group("one", "heads", 1, ())], random(seed))["one"].tolist() == [0]
    assert not (moved_order(6, 2, random(seed)) == torch.arange(2)).all(dim=1).any()
    assert moved_order(2, 1, random(seed)).tolist() == [[0], [0]]


def test_keys_under_test_are_drawn_evenly() -> None:
    """All 5 permutations of 3 places that move something, each about 400 times of 2,000."""
    generator = random(0)
    drawn = Counter(tuple(non_identity(3, generator).tolist()) for _ in range(2000))
    assert len(drawn) == 5 and all(300 < count < 500 for count in drawn.values())


@pytest.mark.thin(4)
@pytest.mark.parametrize("seed", range(4))
def test_heads_in_groups_are_really_exchanged(seed: int) -> None:
    """Grouped queries, two key heads: every kind of key changes the weights, so that 0 as an error means something."""
    backbone = make("llama", torch.float32)
    verdict = verify(backbone, steps=0, seed=seed)
    found = {each.part: each for each in verdict.findings if each.part.startswith("blocks, ")}
    for part in ("blocks, heads", "blocks, MLP units", "blocks, value channels"):
        assert found[part].status == "needs keyed weights" and 0 < found[part].errors["backward"] < EXACT


def test_one_head_leaves_nothing_to_permute() -> None:
    backbone = small_vit(32, depth=1, width=12, heads=1, patch_size=None)
    assert not any(group.kind == "heads" for group in backbone.groups())
    lone = Group("blocks.0.heads", "heads", 1, (Member("blocks.0.attn.proj.weight", 1, inner=12),))
    found = verify(backbone, steps=0, groups=[*backbone.groups(), lone]).findings
    heads = next(each for each in found if each.part == "blocks, heads")
    assert heads.status == "holds" and heads.reason.startswith("nothing to permute") and not heads.errors
    single = small_vit(depth=1, width=12, heads=1, patch_size=None)
    row = verify(single, steps=0).whole("row")
    assert row.status == "holds" and row.reason.startswith("nothing to permute") and not row.errors


# --- models and inputs as users have them --------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float16) for name in ("vit", "llama")] + [(name, torch.bfloat16) for name in ("bert", "swin")],
)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    verdict = verify(make(name, dtype), steps=1)
    assert verdict.dtype == str(dtype).removeprefix("torch.")
    whole = verdict.whole("column")
    assert max(whole.errors.values()) < EXACT  # the law, in float64, on the very weights
    assert set(whole.native) == {"forward", "backward"}  # nobody trains weights of half precision
    if whole.status == "refused":
        assert whole.reason.startswith("the law holds in float64, but in the model's dtype rounding errors grow to")
        assert max(whole.native.values()) > verdict.own_tolerance
    else:
        assert whole.status == "needs keyed weights" and max(whole.native.values()) <= verdict.own_tolerance


def test_models_of_both_libraries_as_they_are() -> None:
    for name in ("vit", "bert"):
        backbone = make(name, torch.float32)
        assert verify(backbone.model, steps=0).findings == verify(backbone, steps=0).findings


@pytest.mark.parametrize(
    ("model", "field"),
    [(nn.TransformerEncoderLayer(12, 2), "img_size"), (nn.Linear(2, 2).half(), "img_size"), (None, "source")],
)
def test_what_is_no_model_is_refused(model: Any, field: str | None) -> None:
    with pytest.raises(SitusError) as raised:
        verify(model)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("name", "x", "said"),
    [
        ("vit", [1, 2], r"x=\[1, 2\]: must be a Tensor or none"),
        ("vit", torch.zeros(2, 3, 32, 48).numpy(), "x=a ndarray: must be a Tensor or none"),
        ("vit", torch.zeros(2, 3, 32, 48, dtype=torch.long), "int64, but .* takes floating-point images"),
        ("vit", torch.zeros(0, 3, 32, 48), r"x has the shape \[0, 3, 32, 48\]"),
        ("vit", torch.zeros(2, 3, 5, 5), "must have"),
        ("bert", torch.zeros(2, 9), "takes integer ids"),
        ("bert", torch.full((2, 9), 31), "allowed: 0 to 30"),
        ("bert", torch.full((2, 9), -1), "allowed: 0 to 30"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_sentence(name: str, x: Any, said: str) -> None:
    with pytest.raises(SitusError, match=said):
        verify(make(name), x, steps=0)


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(SitusError, match=r"steps=-1: must be at least 0"):
        verify(make("vit"), steps=-1)
    with pytest.raises(SitusError, match=r"tokens=1: must be at least 2"):
        verify(make("vit"), tokens=1)
