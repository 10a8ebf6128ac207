"""Attacks on a lock, and the strength that is left."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_vit
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import quadratic_assignment
from torch import Tensor

from situs.backbones import create_backbone
from situs.backbones.layout import Group, Member
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.locks.attacks import match
from situs.locks.attacks.adapter import (
    Adapted,
    Labelled,
    accuracy_of,
    randomised,
    recover_with_labels,
    train_adapter,
)
from situs.locks.attacks.audit import ATTACKS, LockAudit, _joined
from situs.locks.attacks.match import assign, channels, fit_error, match_keys, normal_scores
from situs.locks.attacks.recovery import (
    STEPS,
    KeyRecovery,
    _reads,
    bits_left,
    check_finite,
    drift,
    exact_truth,
    graph_match,
    judged,
    opened,
    recover_blind,
    recover_with_base,
    scored,
)
from situs.locks.groups import permute_state, random_keys, residual_only, within


def audited(results: Sequence[KeyRecovery], missing: Collection[str] = ()) -> LockAudit:
    return LockAudit("m", (768,), 0, tuple(results), missing=frozenset(missing))


def strength_bits(results: Sequence[KeyRecovery], missing: Collection[str] = ()) -> float | None:
    return audited(results, missing).strength


def verdict(results: Sequence[KeyRecovery], missing: Collection[str] = ()) -> str:
    return audited(results, missing).verdict


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vit(**arguments: Any) -> Any:
    torch.manual_seed(0)
    dict(embed_dim=24, depth=2, num_heads=3)
    backbone = small_vit(8, width=24, heads=3, num_classes=3, **arguments)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return backbone.eval()


# --- matching --------------------------------------------------------------------------------------------------


@given(st.integers(2, 6), st.integers(0, 1000))
def test_assign_is_the_best_of_all_permutations(size: int, seed: int) -> None:
    similarity = torch.randn(size, size, generator=seeded(seed), dtype=torch.float64)
    best = max(itertools.permutations(range(size)), key=lambda q: sum(float(similarity[i, q[i]]) for i in range(size)))
    assert assign(similarity).tolist() == list(best)


@given(
    st.integers(2, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(0, 1), st.integers(0, 99)
)
def test_channels_move_as_the_group_does(size: int, outer: int, inner: int, start: int, axis: int, seed: int) -> None:
    stretch = outer * size * inner
    shape = [7, 7]
    shape[axis] = start + stretch + 2
    member = Member("w", axis, outer, inner, start, stretch)
    group = Group("g", "hidden", size, (member,))
    tensor = torch.randn(*shape, generator=seeded(seed))
    p = torch.randperm(size, generator=seeded(seed + 1))
    moved = permute_state({"w": tensor}, [group], {"g": p})["w"]
    assert torch.equal(channels(moved, member, size), channels(tensor, member, size)[p])


def test_channels_of_one_slice_of_a_table_that_layers_share() -> None:
    member = Member("w", 2, at=(1, 1))
    tensor = torch.randn(2, 3, 5, 4)
    p = torch.tensor([3, 1, 4, 0, 2])
    moved = permute_state({"w": tensor}, [Group("g", "heads", 5, (member,))], {"g": p})["w"]
    assert torch.equal(channels(tensor, member, 5), tensor[:, 1].movedim(1, 0).reshape(5, -1))
    assert torch.equal(channels(moved, member, 5), channels(tensor, member, 5)[p])


@pytest.mark.parametrize(
    ("shape", "axes"), [((4, 5), (1, 0)), ((5, 4), (0, 1)), ((3, 4, 5), (1, 2)), ((4, 3, 5), (0, 2))]
)
def test_channels_are_sorted_where_a_hidden_group_has_another_axis(
    shape: tuple[int, ...], axes: tuple[int, int]
) -> None:
    """Also where the hidden group has the channels' axis as well: then it is known up to its order alone."""
    axis, other = axes
    tensor = torch.randn(*shape, generator=seeded(5))
    member, size = Member("w", axis), shape[axis]
    for hidden in ((Member("w", other),), (Member("w", other), member)):
        groups = [Group(f"h{number}", "hidden", shape[each.axis], (each,)) for number, each in enumerate(hidden)]
        rows = channels(tensor, member, size, groups)
        values = tensor.movedim(axis, 0).reshape(size, -1)
        assert torch.equal(rows.sort(dim=1).values, values.sort(dim=1).values)
        shuffled = permute_state({"w": tensor}, groups[:1], random_keys(groups[:1], seeded(6)))["w"]
        assert not torch.equal(shuffled, tensor) and torch.equal(channels(shuffled, member, size, groups), rows)


def test_sorted_channels_do_not_see_the_hidden_groups() -> None:
    backbone = vit()
    state, groups = backbone.model.state_dict(), backbone.groups()
    inner = [group for group in groups if group.kind != "residual"]
    moved = permute_state(state, inner, random_keys(inner, seeded(3)))
    [residual] = residual_only(groups)
    for member in residual.members:
        before, after = (channels(each[member.tensor], member, residual.size, inner) for each in (state, moved))
        assert torch.equal(before, after), member
    assert any(not torch.equal(state[m.tensor], moved[m.tensor]) for m in residual.members)


# --- with a base -------------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["vit", "eva", "swin", "bert", "gpt2", "llama", "gpt_neox", "electra", "hf_vit"])
@pytest.mark.parametrize("cover", [False, True])
def test_a_public_base_gives_the_whole_key(name: str, cover: bool, model_folder: Callable[[str], Path]) -> None:
    backbone = create_backbone(model_folder(name))
    groups = backbone.groups() if cover else residual_only(backbone.groups())
    state = backbone.model.state_dict()
    truth = random_keys(groups, seeded(1))
    locked = permute_state(state, groups, truth)
    found = recover_with_base(locked, state, groups, truth=truth)
    assert found.share == 1.0
    assert found.right == found.size == sum(group.size for group in residual_only(groups))
    assert strength_bits([found]) == 0.0
    for group in groups:
        assert torch.equal(found.keys[group.name], truth[group.name]), group.name
    back = opened(locked, groups, found.keys)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_an_exact_base_proves_its_own_key_and_a_relative_does_not() -> None:
    backbone = vit()
    groups, state = residual_only(backbone.groups()), backbone.model.state_dict()
    truth = random_keys(groups, seeded(1))
    locked = permute_state(state, groups, truth)
    assert recover_with_base(locked, state, groups).share == 1.0
    known = exact_truth(locked, state, groups)
    assert known is not None and torch.equal(known["residual"], truth["residual"])
    relative = drift(state, 0.01)
    found = recover_with_base(locked, relative, groups)
    assert (found.right, found.bits) == (None, None)
    assert exact_truth(locked, relative, groups) is None
    assert strength_bits([found]) is None


@pytest.mark.parametrize("cover", [False, True])
def test_thirty_per_cent_drift_changes_nothing_and_much_noise_ends_it(cover: bool) -> None:
    backbone = vit()
    groups = backbone.groups() if cover else residual_only(backbone.groups())
    state = backbone.model.state_dict()
    truth = random_keys(groups, seeded(2))
    locked = permute_state(state, groups, truth)
    shares = [
        recover_with_base(locked, drift(state, amount, 5), groups, truth=truth).share for amount in (0.0, 0.3, 300.0)
    ]
    assert shares[:2] == [1.0, 1.0]
    assert shares[2] is not None and shares[2] < 0.3


def test_drift_is_noise_in_proportion_to_each_tensor() -> None:
    state = {"small": 1e-3 * torch.randn(200, 50), "large": 10 * torch.randn(200, 50), "count": torch.tensor(3)}
    state |= {"two": torch.tensor([1.0, 2.0]), "one": torch.tensor([1.0])}
    moved = drift(state, 0.3, 1)
    for name in ("small", "large"):
        ratio = float((moved[name] - state[name]).std() / state[name].std())
        assert ratio == pytest.approx(0.3, rel=0.03)
    assert moved["count"] is state["count"] and moved["one"] is state["one"]
    assert not torch.equal(moved["two"], state["two"])
    assert all(torch.equal(a, b) for a, b in zip(moved.values(), drift(state, 0.3, 1).values(), strict=True))
    for amount in (-1, float("inf"), float("nan")):
        with pytest.raises(SitusError, match=f"drift={amount}"):
            drift(state, amount)


def test_the_drift_that_was_put_in_is_the_drift_that_is_measured() -> None:
    backbone = vit()
    groups, state = residual_only(backbone.groups()), backbone.model.state_dict()
    truth = random_keys(groups, seeded(1))
    locked = permute_state(state, groups, truth)
    assert fit_error(locked, state, groups, truth) == 0
    assert fit_error(locked, drift(state, 0.3, 5), groups, truth) ** 0.5 == pytest.approx(0.3, rel=0.1)


def test_a_tensor_of_one_value_tells_nothing_and_disturbs_nothing() -> None:
    backbone = vit()
    with torch.no_grad():
        for block in backbone.model.blocks:  # as a norm is before it was trained
            block.norm1.weight.fill_(1.0)
            block.norm2.bias.zero_()
    groups, state = residual_only(backbone.groups()), backbone.model.state_dict()
    truth = random_keys(groups, seeded(1))
    assert torch.equal(
        match_keys(permute_state(state, groups, truth), state, groups).keys["residual"], truth["residual"]
    )


def test_a_key_that_opens_the_very_weights_is_right_whatever_the_order_of_equal_channels() -> None:
    backbone = vit()
    groups, state = residual_only(backbone.groups()), dict(backbone.model.state_dict())
    for member in groups[0].members:  # channels that were pruned: no weight tells one from the other
        state[member.tensor] = state[member.tensor].index_fill(member.axis, torch.arange(6), 0.0)
    truth = random_keys(groups, seeded(1))
    found = recover_with_base(permute_state(state, groups, truth), state, groups, truth=truth)
    assert not torch.equal(found.keys["residual"], truth["residual"])
    assert (found.share, found.bits) == (1.0, 0.0)


@pytest.mark.parametrize("amount", [0.3, 1.0])
def test_inner_keys_are_right_at_the_first_turn_and_a_second_confirms_them(amount: float) -> None:
    """Each group is compared along the axes that are known by then, and sorted along the others."""
    backbone = vit()
    groups, state = backbone.groups(), backbone.model.state_dict()
    truth = random_keys(groups, seeded(1))
    locked, base = permute_state(state, groups, truth), drift(state, amount, 5)
    found = match_keys(locked, base, groups)
    assert found.rounds == 2
    assert found.error == pytest.approx(fit_error(locked, base, groups, truth), rel=1e-3)


def test_a_match_that_does_not_settle_ends_after_its_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = vit()
    groups, state = backbone.groups(), backbone.model.state_dict()
    locked, base = permute_state(state, groups, random_keys(groups, seeded(1))), drift(state, 300.0, 5)
    settled = match_keys(locked, base, groups)
    assert settled.rounds == 3  # the third moved nothing
    monkeypatch.setattr(match, "MAX_ROUNDS", 2)
    ended = match_keys(locked, base, groups)
    assert ended.rounds == 2
    assert ended.error == settled.error == fit_error(locked, base, groups, ended.keys)


def test_another_architecture_is_refused() -> None:
    groups, state = residual_only(vit().groups()), vit().model.state_dict()
    other = dict(state)
    name = groups[0].members[0].tensor
    other[name] = state[name][:-1]
    with pytest.raises(SitusError, match=f"{name}.*different architectures"):
        match_keys(state, other, groups)
    del other[name]
    with pytest.raises(SitusError, match=f"{name}.*is missing from the base"):
        match_keys(state, other, groups)


# --- without one ---------------------------------------------------------------------------------------------------


def test_graph_match_finds_a_permutation_of_a_graph() -> None:
    truth = torch.randperm(20, generator=seeded(0))
    points = torch.randn(20, 20, generator=seeded(1), dtype=torch.float64)
    clear = points @ points.T
    locked = clear[truth][:, truth]
    hint = torch.zeros(20, 20, dtype=torch.float64)
    assert torch.equal(graph_match(hint, [(locked, clear)]), truth)


@pytest.mark.parametrize("concave", [False, True])
def test_graph_match_takes_the_steps_of_another_implementation(concave: bool) -> None:
    """FAQ of SciPy: the same start, and a line search that stops between corners where the objective is concave."""
    hint = torch.zeros(7, 7, dtype=torch.float64)
    for seed in range(12):
        a, b = torch.randn(2, 7, 7, generator=seeded(seed), dtype=torch.float64)
        if concave:
            a, b = -a @ a.T, b @ b.T
        options = {"maximize": True, "maxiter": STEPS, "tol": 1e-12, "rng": np.random.default_rng(0)}
        theirs = quadratic_assignment(a.numpy(), b.numpy(), method="faq", options=options)
        assert graph_match(hint, [(a, b)]).tolist() == theirs.col_ind.tolist()


def test_without_graphs_the_channels_that_look_alike_belong_together() -> None:
    """A straight objective has no curve: one full step, to the best assignment."""
    hint = torch.tensor([[3, 9, 1, 0], [8, 9, 2, 1], [0, 2, 1, 7], [1, 1, 6, 7]], dtype=torch.float64)
    assert graph_match(hint, []).tolist() == assign(hint).tolist() == [1, 0, 3, 2]


def test_both_ends_of_the_blocks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read against what the embedding writes, and what is written against what the head reads."""
    from situs.locks.attacks import recovery

    backbone = vit()
    groups, state = residual_only(backbone.groups()), backbone.model.state_dict()
    given: list[Any] = []
    monkeypatch.setattr(recovery, "graph_match", lambda linear, pairs: given.append(pairs) or torch.arange(len(linear)))
    probes = torch.randn(8, 3, 8, 8, generator=seeded(0))
    recovery.match_blind(backbone, groups, probes)
    [[(reads, stream), (writes, head)]] = given
    with torch.no_grad():
        z = backbone.assemble(backbone.embed(probes), backbone.positions()).z.flatten(0, 1)
    blocks = [f"blocks.{depth}." for depth in (0, 1)]
    read = [state[b + n] for b in blocks for n in ("attn.qkv.weight", "mlp.fc1.weight")]
    written = [state[b + n].T for b in blocks for n in ("attn.proj.weight", "mlp.fc2.weight")]
    expected = (sum(w.T @ w for w in read), torch.cov(z.T), sum(w.T @ w for w in written))
    expected = (*expected, state["head.weight"].T @ state["head.weight"])
    for got, gram in zip((reads, stream, writes, head), expected, strict=True):
        gram = torch.as_tensor(gram).double()
        assert torch.allclose(got, gram * 24**0.5 / gram.norm(), atol=1e-5)


def test_channels_are_compared_by_the_ranks_of_each_kind_that_both_sides_have(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms with norms, biases with biases, what writes a channel with what writes it, and what reads it likewise."""
    from situs.locks.attacks import recovery

    backbone = create_backbone(model_folder("bert")).eval()
    state = {name.removeprefix("bert."): value for name, value in backbone.model.state_dict().items()}
    given: list[Any] = []
    monkeypatch.setattr(recovery, "graph_match", lambda linear, _: given.append(linear) or torch.arange(len(linear)))
    recovery.match_blind(backbone, residual_only(backbone.groups()))

    def kinds(parts: Sequence[tuple[str, str, int]]) -> dict[str, Tensor]:
        """(kind, tensor, axis of its channels) -> the common rank of each channel by kind."""
        by_kind: dict[str, list[Tensor]] = {}
        for kind, name, axis in parts:
            value = state[name] if state[name].dim() == 1 else torch.linalg.vector_norm(state[name], dim=1 - axis)
            by_kind.setdefault(kind, []).append(normal_scores(value))
        return {kind: normal_scores(torch.stack(every).mean(dim=0)) for kind, every in by_kind.items()}

    inside = []
    for layer in ("encoder.layer.0.", "encoder.layer.1."):
        readers = [f"attention.self.{name}" for name in ("query", "key", "value")] + ["intermediate.dense"]
        inside += [("read", f"{layer}{name}.weight", 1) for name in readers]
        for name in ("attention.output", "output"):
            inside += [("write", f"{layer}{name}.dense.weight", 0), ("bias", f"{layer}{name}.dense.bias", 0)]
            inside += [
                ("norm.weight", f"{layer}{name}.LayerNorm.weight", 0),
                ("bias", f"{layer}{name}.LayerNorm.bias", 0),
            ]
    around = [("write", f"embeddings.{name}_embeddings.weight", 1) for name in ("word", "position", "token_type")]
    around += [("norm.weight", "embeddings.LayerNorm.weight", 0), ("bias", "embeddings.LayerNorm.bias", 0)]
    around += [("read", "pooler.dense.weight", 1), ("bias", "pooler.dense.bias", 0), ("read", "classifier.weight", 1)]
    locked, clear = kinds(inside), kinds(around)
    assert len(locked) == 4
    expected = sum(torch.outer(locked[kind], clear[kind]) for kind in locked) / 4
    assert torch.allclose(given[0], expected, atol=1e-9)


def test_the_input_of_a_projection_is_known_by_its_bias() -> None:
    state = {
        "linear.weight": torch.zeros(5, 3), "linear.bias": torch.zeros(5),
        "conv1d.weight": torch.zeros(3, 5), "conv1d.bias": torch.zeros(5),  # as GPT-2 has it
        "square.weight": torch.zeros(4, 4), "square.bias": torch.zeros(4),
        "bare.weight": torch.zeros(5, 3),
    }  # fmt: skip
    inputs = {"linear": 1, "conv1d": 0, "square": 1, "bare": 1}
    for name, axis in inputs.items():
        assert [_reads(state, Member(f"{name}.weight", at)) for at in (0, 1)] == [axis == 0, axis == 1], name


def test_centring_is_found_without_a_base() -> None:
    backbone = vit()
    groups = residual_only(backbone.groups())
    probes = torch.randn(16, 3, 8, 8, generator=seeded(0))
    with torch.no_grad():
        z = backbone.assemble(backbone.embed(probes), backbone.positions()).z
        norm = backbone.model.blocks[0].norm1
        norm.bias.copy_(-norm.weight * torch.nn.functional.layer_norm(z, z.shape[-1:]).flatten(0, 1).mean(dim=0))
    truth = random_keys(groups, seeded(4))
    backbone.model.load_state_dict(permute_state(backbone.model.state_dict(), groups, truth))
    found = recover_blind(backbone, groups, truth=truth, inputs=probes)
    assert found.share is not None and found.share > 0.5
    assert found.cost == "the locked file and 16 samples, without labels"
    assert recover_blind(backbone, groups).cost == "the locked file alone"


@pytest.mark.parametrize("name", ["vit", "eva", "swin", "bert", "gpt2", "llama", "hf_vit"])
def test_random_weights_tell_nothing_without_a_base(name: str, model_folder: Callable[[str], Path]) -> None:
    backbone = create_backbone(model_folder(name)).eval()
    groups = residual_only(backbone.groups())
    truth = random_keys(groups, seeded(6))
    backbone.model.load_state_dict(permute_state(backbone.model.state_dict(), groups, truth))
    found = recover_blind(backbone, groups, truth=truth)
    assert found.share is not None and found.share < 0.3
    assert found.bits is not None and found.bits > 0


# --- strength ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 12))
def test_bits_left_count_the_orders_that_remain(size: int, right: int) -> None:
    right = min(size, right)
    wrong = size - right
    orders = math.log2(math.factorial(wrong))
    exchanges = math.log2(max(1, (wrong - 1) * (wrong * (wrong - 1) // 2)))
    expected = min(orders, exchanges) if 2 * right > size else orders
    assert bits_left(size, right) == pytest.approx(expected)


def test_who_is_mostly_right_goes_on_by_exchanges() -> None:
    assert bits_left(384, 375) == pytest.approx(math.log2(8 * 36))  # 9! would be 18 bits
    assert bits_left(384, 193) < 24 < 256 < bits_left(384, 192)
    assert [bits_left(384, right) for right in (384, 383, 382)] == [0, 0, 0]


def result(size: int, right: int | None, **fields: Any) -> KeyRecovery:
    pairs = () if right is None else ((size, right),)
    return KeyRecovery("x", size, right, residual_sizes=pairs, **fields)


def test_strength_is_the_best_attack_and_never_more_than_the_seed() -> None:
    assert bits_left(768, 0) == pytest.approx(6259, abs=1)
    assert strength_bits([result(768, 0)]) == 256
    assert strength_bits([result(768, 768)]) == 0
    assert strength_bits([result(768, 0), result(768, 738)]) == pytest.approx(bits_left(768, 738))
    assert strength_bits([result(768, 0)], {"images"}) is None
    assert strength_bits([result(768, 768)], {"images"}) == 0  # open is open
    assert strength_bits([result(768, None), result(768, 768)]) == 0
    assert strength_bits([]) is strength_bits([result(768, None)]) is None
    with pytest.raises(SitusError, match="right=9"):
        bits_left(8, 9)


def test_chance_in_a_small_test_is_no_open_lock_and_the_verdict_says_so() -> None:
    """4 of 48 channels right, and accuracy that 100 samples cannot tell from the locked model's, is not 0 bits."""
    scores = {"before": 0.47, "after": 0.55, "owner": 0.53}
    chance = result(48, 4, **scores, tested=100)
    assert not chance.broken and chance.bits == bits_left(48, 4)
    assert "53.0 % with the key and 47.0 % without the key. 100 samples are too few" in verdict([chance])
    sure = result(48, 4, **scores, tested=10_000)  # the same with enough samples: it works without the key
    assert sure.broken and sure.bits == 0 and "too few to separate" not in verdict([sure])
    doubtful = result(48, 4, doubt="there are too few")
    assert doubtful.bits is None and UNJUDGED not in verdict([doubtful])
    keyless = result(48, None, **scores | {"after": 0.53}, tested=10_000)
    assert keyless.bits == 0 and UNJUDGED not in verdict([keyless])
    assert UNJUDGED in verdict([result(48, None, **scores, tested=100)])
    few = result(48, 4, before=0.0, after=1.0, owner=1.0, tested=3)
    assert few.broken and few.bits == 0  # a difference beyond doubt is one in a small test too


OPEN, BOUND = "These attackers open the lock", "A better attack may exist, so the strength may be lower"
UNJUDGED = "The true key was not given, so this audit does not judge the results of: x"
NO_PASS = "No strength can be given, so the audit is inconclusive (not a pass)."


@pytest.mark.parametrize(
    ("rights", "said", "never"),
    [
        ((), ["No attack was run, so no strength can be given."], ["bits", "not judged", OPEN, BOUND]),
        ((None,), [f"{NO_PASS} {UNJUDGED}."], ["bits", "Not attacked", OPEN, BOUND]),
        ((None, None), [f"{NO_PASS} {UNJUDGED}, x."], ["bits", "Not attacked", OPEN, BOUND]),
        ((0,), ["at most 256 bits", BOUND], ["Not", OPEN]),
        ((765,), ["at most 3 bits", BOUND], ["Not", OPEN]),
        ((768,), ["at most 0 bits", OPEN], ["Not", BOUND]),
        ((0, 768), ["at most 0 bits", OPEN], ["Not", BOUND]),
        ((None, 768), ["at most 0 bits", OPEN, f"{UNJUDGED}."], ["No strength", BOUND]),
        ((None, 0), ["at most 256 bits", BOUND, f"{UNJUDGED}."], ["No strength", OPEN]),
    ],
)
def test_the_verdict_in_each_case(rights: tuple[int | None, ...], said: list[str], never: list[str]) -> None:
    sentence = verdict([result(768, right) for right in rights])
    assert all(words in sentence for words in said), sentence
    assert not any(words in sentence for words in never), sentence


@pytest.mark.parametrize(
    ("rights", "said", "never"),
    [
        (
            (0,),
            [
                "Attacks that were not run, although anybody could run them",
                "images (a few unlabelled images or texts)",
                "No strength",
            ],
            ["bits", OPEN, BOUND],
        ),
        (
            (None,),
            [UNJUDGED, "Attacks that were not run, although anybody could run them", "No strength"],
            ["bits", OPEN, BOUND],
        ),
        ((768,), ["at most 0 bits", OPEN], ["Not", "not run", "No strength", BOUND]),
        ((), ["No attack was run, so no strength can be given."], ["bits", "not run"]),
    ],
)
def test_the_verdict_where_an_attacker_who_applies_did_not_try(
    rights: tuple[int | None, ...], said: list[str], never: list[str]
) -> None:
    sentence = verdict([result(768, right) for right in rights], {"images"})
    assert all(words in sentence for words in said), sentence
    assert not any(words in sentence for words in never), sentence


@pytest.mark.parametrize(("size", "right"), [(768, 0), (384, 190), (24, 3), (16, 8)])
def test_an_attack_that_had_too_little_proves_no_strength_when_it_fails(size: int, right: int) -> None:
    weak, blind = result(size, right, doubt="2 varied images"), result(size, 0)
    assert weak.bits is None and strength_bits([weak]) is strength_bits([blind, weak]) is None
    sentence = verdict([blind, weak])
    assert (
        sentence.startswith(NO_PASS)
        and "Inconclusive for the attacker `x`: 2 varied images." in sentence
        and "bits" not in sentence
    )


@pytest.mark.parametrize(("size", "right"), [(768, 768), (384, 375), (24, 13)])
def test_an_attack_that_got_far_speaks_for_itself_whatever_it_had(size: int, right: int) -> None:
    weak = result(size, right, doubt="2 varied images")
    assert weak.bits == strength_bits([weak, result(size, 0)], {"images"}) == bits_left(size, right)
    assert "Inconclusive" not in verdict([weak])
    works = result(size, 0, doubt="2 varied images", before=0.1, after=0.9, owner=0.9)
    assert works.bits == strength_bits([works]) == 0


@pytest.mark.parametrize(
    "ran", [["no-base"], ["no-base", "images"], ["images", "public-base"], ["drifted-base, 0.3 ×"]]
)
def test_a_strength_names_who_tried_and_who_did_not(ran: list[str]) -> None:
    results = [KeyRecovery(name, 384, 1, residual_sizes=((384, 1),)) for name in ran]
    sentence = verdict(results)
    assert "at most 256 bits" in sentence and f": {'; '.join(ran)}." in sentence
    _, rest = sentence.split("Attackers not tried: ")
    names = {name.partition(",")[0] for name in ran}
    for name in ATTACKS:
        assert (f"{name} (" in rest) == (name not in names)
    assert ("Another base model may" in sentence) == bool({"public-base", "drifted-base"} & names)


def test_what_is_withheld_is_no_part_of_any_group() -> None:
    groups = vit().groups()
    gone = {name for name in vit().model.state_dict() if name.startswith("blocks.0.")}
    names = vit().model.state_dict().keys()
    left = within(groups, names - gone)
    assert {group.name for group in groups} - {group.name for group in left} == {
        group.name for group in groups if group.name.startswith("blocks.0.")
    }
    assert not gone & {member.tensor for group in left for member in group.members}
    assert any("blocks.1." in member.tensor for member in residual_only(left)[0].members)
    assert within(groups, names) == tuple(groups)


def test_weights_that_are_no_numbers_are_refused() -> None:
    good = {"a": torch.ones(3), "count": torch.tensor(2)}
    check_finite(good, "locked")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(SitusError, match=r"locked: b contains NaN or infinite numbers, so no attack can be run"):
            check_finite({**good, "b": torch.tensor([1.0, bad])}, "locked")


def test_a_model_that_works_again_is_broken_whatever_the_key() -> None:
    assert result(768, 0, before=0.1, after=0.9, owner=0.9).bits == 0
    assert result(768, 0, before=0.1, after=0.85, owner=0.9).bits == pytest.approx(bits_left(768, 0))
    assert not result(768, 0, before=0.1, after=0.1, owner=0.05).broken
    assert not result(768, 0, before=0.1, after=0.9).broken


def test_inner_groups_never_count() -> None:
    groups = vit().groups()
    truth = random_keys(groups, seeded(0))
    wrong = random_keys(groups, seeded(1))
    found = judged("x", groups, {**wrong, "residual": truth["residual"]}, truth)
    assert (found.right, found.bits) == (24, 0)
    lost = judged("x", groups, {**truth, "residual": wrong["residual"]}, truth)
    assert lost.right == int((wrong["residual"] == truth["residual"]).sum())


# --- labels --------------------------------------------------------------------------------------------------------


def test_a_model_without_residual_keys_has_no_lock() -> None:
    inner = [group for group in vit().groups() if group.kind != "residual"]
    with pytest.raises(SitusError, match="no residual channels of this model are permuted, so there is no lock"):
        judged("base", inner, {group.name: torch.arange(group.size) for group in inner}, None)


@pytest.fixture(scope="module")
def toy() -> tuple[Any, Labelled, Labelled]:
    """A ViT trained to tell which of three channels is bright, and images to learn from and to test on."""
    backbone = vit()

    def draw(count: int, seed: int) -> Labelled:
        labels = torch.arange(count) % 3
        images = 0.5 * torch.randn(count, 3, 8, 8, generator=seeded(seed))
        images[torch.arange(count), labels] += 1.0
        return Labelled(images, labels)

    train, test = draw(120, 0), draw(150, 1)
    optimiser = torch.optim.AdamW(backbone.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(backbone(train[0]), train[1]).backward()
        optimiser.step()
    assert accuracy_of(backbone, test) > 0.95
    return backbone, train, test


def test_labels_train_around_the_lock(toy: Any) -> None:
    backbone, train, test = toy
    groups, state = residual_only(backbone.groups()), {k: v.clone() for k, v in backbone.model.state_dict().items()}
    owner, truth = accuracy_of(backbone, test), random_keys(residual_only(backbone.groups()), seeded(8))
    locked = permute_state(state, groups, truth)
    backbone.model.load_state_dict(locked)
    try:
        few = Labelled(train.inputs[:30], train.labels[:30])
        found = recover_with_labels(backbone, groups, few, test, steps=60, lr=1e-2, truth=truth, owner=owner)
        kept = backbone.model.state_dict()
        assert all(torch.equal(kept[name], locked[name]) for name in kept)  # a copy was attacked
        assert all(parameter.requires_grad for parameter in backbone.parameters())
    finally:
        backbone.model.load_state_dict(state)
    assert found.before is not None and found.after is not None and found.control is not None
    assert found.before < 0.8 < found.after
    assert found.right is not None and found.seconds > 0
    assert "30 labelled samples, 60 steps of 30" in found.cost


def test_the_adapter_with_the_right_permutations_is_the_open_model(toy: Any) -> None:
    backbone, _, test = toy
    groups, state = residual_only(backbone.groups()), {k: v.clone() for k, v in backbone.model.state_dict().items()}
    truth = random_keys(groups, seeded(9))
    clear = backbone(test[0])
    backbone.model.load_state_dict(permute_state(state, groups, truth))
    try:
        adapter = train_adapter(randomised(backbone, [], 0), test, 1, 1e-12)
        with torch.no_grad():
            place = torch.eye(24)[truth["residual"]]
            adapter.before.copy_(place.T)
            adapter.behind.copy_(place)
            assert torch.allclose(adapter(test[0]), clear, atol=1e-5)
        assert torch.equal(assign(adapter.before.detach().T), truth["residual"])  # how the key is read off it
        frozen = [name for name, value in adapter.named_parameters() if not value.requires_grad]
        assert frozen and all(name.startswith("backbone.model.") and ".head." not in name for name in frozen)
    finally:
        backbone.model.load_state_dict(state)


def test_scores_before_after_and_of_the_owner(toy: Any) -> None:
    backbone, _, test = toy
    groups, state = residual_only(backbone.groups()), {k: v.clone() for k, v in backbone.model.state_dict().items()}
    truth = random_keys(groups, seeded(10))
    locked = permute_state(state, groups, truth)

    def score(given: Any) -> float:
        backbone.model.load_state_dict(given)
        return accuracy_of(backbone, test)

    try:
        owner = score(state)
        found = scored(recover_with_base(locked, state, groups), locked, groups, score, owner, 500)
    finally:
        backbone.model.load_state_dict(state)
    assert found.before is not None and found.before < 0.8
    assert found.after == found.owner == owner
    assert found.broken


def test_a_stream_of_several_widths_is_refused(model_folder: Callable[[str], Path]) -> None:
    backbone = create_backbone(model_folder("swin"))
    empty = Labelled(torch.zeros(0), torch.zeros(0))
    with pytest.raises(SitusError, match="needs a lock with one key for the residual channels, but this lock has 2"):
        recover_with_labels(backbone, backbone.groups(), empty, empty)


# --- real weights ----------------------------------------------------------------------------------------------


@pytest.mark.shared_data
@pytest.mark.slow
def test_a_real_pretrained_vit(shared_data: Path) -> None:
    weights = shared_data / "weights" / "vit_small_patch14_dinov2_fp16.safetensors"
    backbone = create_backbone("vit_small_patch14_dinov2", weights=weights, img_size=28, num_classes=0).eval()
    groups, state = residual_only(backbone.groups()), backbone.model.state_dict()
    truth = random_keys(groups, seeded(1))
    locked = permute_state(state, groups, truth)
    found = recover_with_base(locked, drift(state, 3.0, 2), groups, truth=truth)
    assert found.share == 1.0
    images = torch.randn(2, 3, 28, 28, generator=seeded(0))
    with torch.no_grad():
        clear = backbone(images)
        backbone.model.load_state_dict(locked)
        stolen = backbone(images)
        guess = recover_blind(backbone, groups, truth=truth)
        backbone.model.load_state_dict(opened(locked, groups, found.keys))
        assert torch.equal(backbone(images), clear)
    assert torch.nn.functional.cosine_similarity(clear, stolen).abs().max() < 0.5
    # What the first norm's bias says of the stream's mean is worth a few channels, not the key.
    assert guess.right is not None and 1 < guess.right < 40


def test_labelled_sentences_are_judged_as_an_evaluation_judges_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from sentences import write_set
    from tiny_texts import write_folder

    from situs.locks import audit_lock, lock, new_key
    from situs.locks.attacks.audit import LockAuditConfig
    from situs.measure import evaluate_accuracy
    from situs.models import open_model

    folder, data = write_folder(tmp_path / "open", "bert", width=16, seed=4), write_set(tmp_path / "set")
    key = new_key(tmp_path / "owner.key")
    lock(folder, key, tmp_path / "locked")
    found = audit_lock(
        tmp_path / "locked", key=key, base=folder, data=data, attacker=("public-base", "labels"),
        config=LockAuditConfig(k=20, steps=2, test=20),
    ).attacks  # fmt: skip
    owner, thief = (evaluate_accuracy(tmp_path / name, data).numbers()["top1"] for name in ("open", "locked"))
    assert [(each.before, each.owner) for each in found] == [(thief, owner)] * 2
    assert found[0].after == owner and found[0].share == 1
    import transformers

    transformers.BertModel.from_pretrained(folder).save_pretrained(tmp_path / "bare")  # the base without its head
    bare = audit_lock(tmp_path / "locked", key=key, base=tmp_path / "bare", attacker="public-base").attacks[0]
    assert bare.share == 1
    backbone = open_model(folder).backbone
    ids = torch.randint(5, 40, (3, 9), generator=seeded(0))
    mask = torch.arange(9) < torch.tensor([[4], [9], [2]])
    adapted = Adapted(backbone).eval()
    assert torch.allclose(adapted(ids, mask), backbone(ids, mask), atol=1e-6)
    assert torch.allclose(adapted(ids[:1, :4]), adapted(ids, mask)[:1], atol=1e-6)  # padding changes nothing
    rows = Labelled(ids, torch.zeros(3), mask).unpadded()
    assert rows.shape[0] == 1 and bool((rows[0] == ids[mask.sum(1) == rows.shape[1]][0, : rows.shape[1]]).all())
    pairs = torch.stack([ids, (torch.arange(9) > 2).long().expand(3, 9)], dim=1)
    assert torch.allclose(adapted(pairs, mask), backbone(pairs, mask), atol=1e-6)
    assert not torch.allclose(adapted(pairs, mask), adapted(ids, mask), atol=1e-3)
    short = Batch(pairs[:1, :, :4], torch.zeros(1), {"label": torch.zeros(1)}, mask[:1, :4])
    joined = _joined([short, Batch(pairs[1:], torch.zeros(2), {"label": torch.ones(2)}, mask[1:])])
    assert torch.equal(adapted(*joined.part(torch.arange(3))), adapted(pairs, mask)) and joined.inputs.shape == (
        3,
        2,
        9,
    )
    two = joined.part(torch.tensor([0, 2]))
    assert two[0].shape == (2, 2, 4)  # as wide as the longer of them
    assert torch.allclose(adapted(*two), adapted(pairs, mask)[[0, 2]], atol=1e-6)
    both = Labelled(pairs, torch.zeros(3), mask).unpadded()
    assert torch.equal(both[:, 0], rows) and torch.equal(both[:, 1], pairs[:1, 1, : rows.shape[1]])


def test_random_blocks_have_the_spread_of_the_locked_ones_and_the_rest_stays() -> None:
    backbone = vit()
    groups = backbone.groups()
    keyed = {member.tensor for group in groups for member in group.members}
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    blank, other = (randomised(backbone, groups, seed) for seed in (0, 1))
    state = blank.model.state_dict()
    for name, value in before.items():
        assert torch.equal(value, backbone.model.state_dict()[name])  # the model itself stays
        if name not in keyed or value.numel() == 1:
            assert torch.equal(state[name], value)
            continue
        assert not torch.equal(state[name], value) and not torch.equal(state[name], other.model.state_dict()[name])
        if value.numel() > 500:
            assert float(state[name].std() / value.std()) == pytest.approx(1.0, abs=0.15)
            assert float((state[name].mean() - value.mean()).abs() / value.std()) < 0.15
    again = randomised(backbone, groups, 0).model.state_dict()
    assert all(torch.equal(again[name], state[name]) for name in state)
