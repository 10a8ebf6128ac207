"""Groups of axes: the algebra on any layout, and on every architecture the law they are for."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import HF, ROTARY, TIMM, ZOO, inputs, make

from situs.backbones import create_backbone
from situs.core.permutation import compose, identity
from situs.errors import SitusError
from situs.locks.equivariance.experiment import Experiment, KeepDouble
from situs.locks.equivariance.sample import sample_of
from situs.locks.groups import (
    Group,
    Member,
    axis_index,
    changes_of,
    check_keys,
    entrance_and_exit,
    invert_keys,
    permute_state,
    random_keys,
    residual_only,
)
from situs.models.inference import evaluating

LOOSE = 1e-6
"""What a forgotten axis must be worse than; what holds is better than 1e-10."""


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the algebra ---------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Member, int, Tensor]:
    """A member of any layout, its group's size, and a tensor it fits."""
    outer, size, inner, start, rest, other = (draw(st.integers(low, 4)) for low in (1, 1, 1, 0, 0, 1))
    length, axis = outer * size * inner, draw(st.integers(0, 2))
    shape = [other, other, other]
    shape[axis] = start + length + rest
    at = draw(st.sampled_from([None, *((a, other - 1) for a in range(3) if a != axis)]))
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    return Member("t", axis, outer, inner, start, length, at), size, values


@given(layouts(), st.integers(0, 100))
def test_a_member_moves_as_its_layout_says(case: tuple[Member, int, Tensor], seed: int) -> None:
    member, size, x = case
    group = Group("g", "hidden", size, (member,))
    p = torch.randperm(size, generator=random(seed))
    y = permute_state({"t": x}, [group], {"g": p})["t"]
    for place in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)):
        source = place.clone()
        inside = int(place[member.axis]) - member.start
        here = member.at is None or int(place[member.at[0]]) == member.at[1]
        if here and 0 <= inside < (member.length or 0):
            o, i, n = inside // (size * member.inner), inside // member.inner % size, inside % member.inner
            source[member.axis] = member.start + (o * size + int(p[i])) * member.inner + n
        assert y[tuple(place)] == x[tuple(source)]


@given(layouts(), st.integers(0, 100))
def test_files_and_tensors_move_alike(case: tuple[Member, int, Tensor], seed: int) -> None:
    """Twice the same axis and a slice of it: what is written to files is what `permute_state` gives."""
    member, size, x = case
    groups = [Group("g", "hidden", size, (member,)), Group("h", "hidden", size, (replace(member, at=None),))]
    keys = {name: torch.randperm(size, generator=random(seed + n)) for n, name in enumerate("gh")}
    written = changes_of(groups, keys, {"t": x.shape, "other": (3,)})["t"](x.numpy())
    assert torch.equal(torch.from_numpy(written), permute_state({"t": x}, groups, keys)["t"])


@given(layouts(), st.integers(0, 100))
def test_keys_compose_and_invert(case: tuple[Member, int, Tensor], seed: int) -> None:
    member, size, x = case
    group, state = Group("g", "hidden", size, (member,)), {"t": x}
    first, then = (torch.randperm(size, generator=random(seed + k)) for k in range(2))
    twice = permute_state(permute_state(state, [group], {"g": first}), [group], {"g": then})
    once = permute_state(state, [group], {"g": compose(first, then)})
    assert torch.equal(twice["t"], once["t"])
    back = permute_state(once, [group], invert_keys({"g": compose(first, then)}))
    assert torch.equal(back["t"], x)
    assert torch.equal(permute_state(state, [group], {"g": identity(size)})["t"], x)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ZOO)
def test_all_groups_commute_and_come_back_bit_by_bit(name: str) -> None:
    backbone = make(name, torch.float32)
    groups, state = backbone.groups(), backbone.model.state_dict()
    keys = {key: p if (p != identity(len(p))).any() else p.flip(0) for key, p in random_keys(groups, random(0)).items()}
    locked = permute_state(state, groups, keys)
    one_by_one = dict(state)
    for group in reversed(groups):
        one_by_one = permute_state(one_by_one, [group], keys)
    moved = {member.tensor for group in groups for member in group.members}
    for tensor, clear in state.items():
        assert torch.equal(locked[tensor], one_by_one[tensor])
        assert (locked[tensor] is clear) == (tensor not in moved)
        assert torch.equal(locked[tensor], clear) == (tensor not in moved)
    back = permute_state(locked, groups, invert_keys(keys))
    assert all(torch.equal(back[tensor], clear) for tensor, clear in state.items())


def test_a_shard_moves_as_in_the_whole() -> None:
    backbone = make("vit")
    groups, state = backbone.groups(), backbone.model.state_dict()
    keys = random_keys(groups, random(0))
    whole = permute_state(state, groups, keys)
    for tensor, clear in state.items():
        assert torch.equal(permute_state({tensor: clear}, groups, keys)[tensor], whole[tensor])


def test_every_axis_is_in_at_most_one_group_of_a_kind() -> None:
    for name in ZOO:
        groups = make(name).groups()
        assert len({group.name for group in groups}) == len(groups)
        for group in groups:
            assert len(set(group.members)) == len(group.members)


# --- what the keys are for -----------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ZOO)
def test_inner_groups_leave_the_function_as_it_was(name: str) -> None:
    backbone = make(name)
    x = inputs(backbone)
    state = {key: value.clone() for key, value in backbone.model.state_dict().items()}
    groups = backbone.groups()
    inner = [group for group in groups if group.kind != "residual"]
    keys = random_keys(groups, random(3))
    with torch.no_grad(), KeepDouble():
        before = backbone(x)
        for kind in dict.fromkeys(group.kind for group in inner):
            chosen = [group for group in inner if group.kind == kind]
            backbone.model.load_state_dict(permute_state(state, chosen, keys))
            assert (backbone(x) - before).abs().max() < 1e-10
        backbone.model.load_state_dict(permute_state(state, groups, keys))
        assert (backbone(x) - before).abs().max() > LOOSE  # the residual key alone locks


@pytest.mark.parametrize(
    "name",
    ["vit_qk_norm", "swin", "bert"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("vit_inner_norm", "eva_inner_norms", "gpt2", "qwen2")],
)
def test_no_axis_of_the_residual_key_can_be_left_out(name: str) -> None:
    backbone = make(name)
    groups = backbone.groups()
    keys = random_keys(groups, random(0))
    with evaluating(backbone):
        experiment = Experiment(backbone, sample_of(backbone, inputs(backbone), 32, random(0)), torch.float64, 0)
        residual = residual_only(groups)
        assert max(experiment.column(residual, keys).values()) < 1e-10
        for at, group in enumerate(residual):
            for member in group.members:
                less = replace(group, members=tuple(m for m in group.members if m != member))
                broken = [*residual[:at], less, *residual[at + 1 :]]
                assert max(experiment.column(broken, keys).values()) > LOOSE, member


OWNERS: dict[str, list[tuple[str, int]]] = {
    "vit": [
        ("patch_embed.proj.weight", 0),
        ("patch_embed.proj.bias", 0),
        ("cls_token", 2),
        ("pos_embed", 2),
        ("norm.weight", 0),
        ("norm.bias", 0),
        ("head.weight", 1),
    ],
    "bert": [
        *((f"bert.embeddings.{part}.weight", 1) for part in ("word_embeddings", "position_embeddings")),
        ("bert.embeddings.token_type_embeddings.weight", 1),
        ("bert.embeddings.LayerNorm.weight", 0),
        ("bert.embeddings.LayerNorm.bias", 0),
        ("bert.pooler.dense.weight", 1),
    ],
    "gpt2": [
        ("transformer.wte.weight", 1),
        ("transformer.wpe.weight", 1),
        ("transformer.ln_f.weight", 0),
        ("transformer.ln_f.bias", 0),
        ("lm_head.weight", 1),
    ],
    "llama": [("model.embed_tokens.weight", 1), ("model.norm.weight", 0), ("lm_head.weight", 1)],
    "qwen3": [("model.embed_tokens.weight", 1), ("model.norm.weight", 0), ("lm_head.weight", 1)],
    "gpt_neox": [
        ("gpt_neox.embed_in.weight", 1),
        ("gpt_neox.final_layer_norm.weight", 0),
        ("gpt_neox.final_layer_norm.bias", 0),
        ("lm_head.weight", 1),
    ],
    "distilbert": [
        *((f"distilbert.embeddings.{part}.weight", 1) for part in ("word_embeddings", "position_embeddings")),
        ("distilbert.embeddings.LayerNorm.weight", 0),
        ("distilbert.embeddings.LayerNorm.bias", 0),
        ("pre_classifier.weight", 1),
    ],
    "electra": [
        ("electra.embeddings_project.weight", 0),
        ("electra.embeddings_project.bias", 0),
        ("generator_predictions.dense.weight", 1),
    ],
    "albert": [
        ("albert.encoder.embedding_hidden_mapping_in.weight", 0),
        ("albert.encoder.embedding_hidden_mapping_in.bias", 0),
        ("predictions.dense.weight", 1),
    ],
}
"""The axes of the stream that stay clear."""


@pytest.mark.parametrize("name", OWNERS)
def test_with_the_owners_part_keyed_too_the_librarys_own_forward_is_unchanged(name: str) -> None:
    """Nothing of ours runs here: timm and transformers are the oracle that all axes of the stream were named."""
    backbone = make(name)
    model, x = backbone.model, inputs(backbone)
    (residual,) = residual_only(backbone.groups())
    assert not {m.tensor for m in residual.members} & {tensor for tensor, _ in OWNERS[name]}
    everything = replace(residual, members=(*residual.members, *(Member(t, a) for t, a in OWNERS[name])))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    keys = random_keys([residual], random(5))

    def logits() -> Tensor:
        out: Any = model(x)
        return out if isinstance(out, Tensor) else out.logits

    with torch.no_grad(), KeepDouble():
        before = logits()
        model.load_state_dict(permute_state(state, [residual], keys))
        assert (logits() - before).abs().max() > 0.1
        model.load_state_dict(permute_state(state, [everything], keys))
        assert (logits() - before).abs().max() < 1e-10


# --- what is in a group and what is not ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_query_channels_stay_under_rotation(name: str) -> None:
    kinds = {group.kind for group in make(name).groups()}
    assert kinds == {"residual", "hidden", "heads", "value"} | (set() if name in ROTARY else {"query"})


def test_swin_has_a_key_for_each_stage_and_repeats_it_over_the_merge() -> None:
    groups = make("swin").groups()
    assert [(g.name, g.size) for g in residual_only(groups)] == [("residual.0", 12), ("residual.1", 24)]
    assert entrance_and_exit(groups) == ("residual.0", "residual.1")
    repeated = [m for g in groups for m in g.members if m.outer == 4 and "downsample" in m.tensor]
    assert {m.tensor.rpartition("downsample.")[2] for m in repeated} == {
        "norm.weight",
        "norm.bias",
        "reduction.weight",
    }


def test_grouped_queries_move_by_kv_head_and_within() -> None:
    sizes = {group.name: group.size for group in make("llama").groups()}
    assert (sizes["blocks.0.heads"], sizes["blocks.0.queries"], sizes["blocks.0.value"]) == (2, 2, 6)


def test_layers_that_share_a_bias_share_the_order_of_heads() -> None:
    heads = [group for group in make("relpos_shared").groups() if group.kind == "heads"]
    assert [group.name for group in heads] == ["heads"]
    assert {"shared_rel_pos.mlp.fc2.weight", "blocks.1.attn.qkv.weight"} <= {m.tensor for m in heads[0].members}


def test_a_gate_on_the_heads_moves_with_them() -> None:
    """timm's gated attention is in no architecture that Situs makes by name, so it is put there by hand."""
    backbone = make("vit")
    old = backbone.model.blocks[0].attn
    try:
        gated = type(old)(24, num_heads=3, qkv_bias=True, gated=True)
    except TypeError:
        pytest.skip("this timm has no gated attention")
    backbone.model.blocks[0].attn = gated.double()
    members = {(g.kind, m.tensor, m.axis) for g in backbone.groups() for m in g.members}
    for kind, axis in (("residual", 1), ("heads", 0), ("value", 0)):
        assert (kind, "blocks.0.attn.gate.weight", axis) in members
    with evaluating(backbone):
        groups = backbone.groups()
        keys = random_keys(groups, random(0))
        experiment = Experiment(backbone, sample_of(backbone, None, 32, random(0)), torch.float64, 0)
        assert max(experiment.column(residual_only(groups), keys).values()) < 1e-10
        assert max(experiment.column([g for g in groups if g.kind != "residual"], keys).values()) < 1e-10


# --- refusals ------------------------------------------------------------------------------------------------------


def test_what_we_have_not_read_is_refused_by_name() -> None:
    with pytest.raises(SitusError, match="convolutional network"):
        create_backbone("test_resnet").groups()
    backbone = make("vit")
    backbone.model.blocks[0].norm1 = nn.BatchNorm1d(24)
    with pytest.raises(SitusError, match=r"blocks\.0\.norm1 is a BatchNorm1d"):
        backbone.groups()
    backbone = make("vit")
    backbone.model.blocks[1].mlp = nn.Sequential(OrderedDict(fc2=nn.Linear(4, 24)))
    with pytest.raises(SitusError, match="locks do not support an MLP of the class Sequential"):
        backbone.groups()


def test_wrong_keys_are_refused() -> None:
    group = Group("g", "hidden", 3, (Member("t", 0),))
    for entry in (check_keys, lambda groups, keys: permute_state({"t": torch.arange(3)}, groups, keys)):
        with pytest.raises(SitusError, match="no key is given for the group 'g'"):
            entry([group], {})
        for bad in (torch.arange(4), torch.tensor([0, 0, 1]), torch.tensor([0.0, 1.0, 2.0])):
            with pytest.raises(SitusError, match="not a permutation of 3 channels"):
                entry([group], {"g": bad})
    with pytest.raises(SitusError, match="axis 0 has 5 entries"):
        axis_index(Member("t", 0), 3, 5, torch.arange(3))
    with pytest.raises(SitusError, match="cannot be permuted by a key"):
        entrance_and_exit([group])


def test_the_zoo_has_at_least_twelve_architectures() -> None:
    assert len({TIMM[n][0] for n in TIMM}) + len({HF[n][0] for n in HF}) >= 12
