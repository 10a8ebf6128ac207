"""Parts that the owner keeps back: which tensors they are, and that two files make one model again, bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import ZOO, keyed_model, make, opened_model

from situs.backbones import Backbone, create_backbone
from situs.errors import SitusError
from situs.locks.contents import TABLE
from situs.locks.folder import INDEX, WHOLE, write_model
from situs.locks.key import Key
from situs.locks.locking import check, lock, readable, unlock
from situs.locks.manifest import NAME, read_manifest
from situs.locks.owner import open_without_key
from situs.locks.shards import make_header, plain_source, read_header
from situs.locks.withhold import block_tensors, described, parse_parts, tensors_of

pytest.importorskip("cryptography")

KEY, OTHER = Key(bytes(range(32))), Key(bytes(32))
MODELS = ("vit", "eva", "swin", "bert", "gpt2", "llama", "hf_vit")
BOTH = ("embedding", "blocks=1")
EMBEDDING = {
    "vit": {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"},
    "swin": {"patch_embed.proj.weight", "patch_embed.proj.bias", "patch_embed.norm.weight", "patch_embed.norm.bias"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"},
    "llama": {"model.embed_tokens.weight"},
    "qwen3": {"model.embed_tokens.weight"},
    "gpt_neox": {"gpt_neox.embed_in.weight"},
    "albert": {
        "predictions.decoder.weight",
        *(f"albert.encoder.embedding_hidden_mapping_in.{name}" for name in ("weight", "bias")),
        *(f"albert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")),
        *(f"albert.embeddings.LayerNorm.{name}" for name in ("weight", "bias")),
    },
    "electra": {
        "generator_lm_head.weight", "electra.embeddings_project.weight", "electra.embeddings_project.bias",
        *(f"electra.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")),
        *(f"electra.embeddings.LayerNorm.{name}" for name in ("weight", "bias")),
    },
    "bert": {
        f"bert.embeddings.{name}"
        for name in ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight",
                     "LayerNorm.weight", "LayerNorm.bias")
    },
}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max() / one.std())


# --- which tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EMBEDDING)
def test_the_embedding_is_all_that_stands_before_the_blocks(name):
    assert tensors_of(make(name), ["embedding"]) == EMBEDDING[name]


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_what_is_withheld_is_what_the_stream_is_made_of(name):
    """Of every architecture: noise in a withheld tensor changes what enters the blocks, in any other it does not."""
    backbone = make(name)
    held, blocks, state = tensors_of(backbone, ["embedding"]), block_tensors(backbone), backbone.model.state_dict()
    assert held and not held & blocks
    generator = torch.Generator().manual_seed(1)
    if backbone.input.shape is None:
        x = torch.randint(3, 31, (2, 9), generator=generator)
    else:
        x = torch.randn(2, 3, *backbone.input.shape, generator=generator, dtype=torch.float64)

    def entering() -> list[torch.Tensor]:
        stream = backbone.assemble(backbone.embed(x), backbone.positions())
        return [
            t for t in (stream.z, stream.rotary, None if stream.bias is None else stream.bias.values) if t is not None
        ]

    before = entering()
    for tensor, value in state.items():
        if tensor in blocks or not value.is_floating_point():
            continue
        old = value.clone()
        value.add_(torch.randn_like(value))
        same = all(torch.equal(a, b) for a, b in zip(before, entering(), strict=True))
        value.copy_(old)
        if "mask_token" not in tensor:  # DINOv2 keeps one that only its own training uses
            assert same == (tensor not in held), tensor


def test_blocks_are_the_first_ones_of_the_stream():
    backbone = make("vit")
    first = tensors_of(backbone, ["blocks=1"])
    assert first == {name for name in backbone.model.state_dict() if name.startswith("blocks.0.")}
    swin = make("swin")  # stages of 1 and 2 blocks, a merge between them
    names = set(swin.model.state_dict())
    one = {name for name in names if name.startswith("layers.0.blocks.0.")}
    two = one | {name for name in names if name.startswith(("layers.1.blocks.0.", "layers.1.downsample."))}
    assert tensors_of(swin, ["blocks=1"]) == one and tensors_of(swin, ["blocks=2"]) == two
    assert tensors_of(make("hf_vit"), ["blocks=1"]) == {
        name for name in make("hf_vit").model.state_dict() if ".layers.0." in name
    }


def test_a_tensor_at_an_unknown_place_keeps_the_embedding(tmp_path):
    backbone = make("vit")
    backbone.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(SitusError, match=r"withhold=embedding: it is not known whether .*extra of .* comes before or"):
        tensors_of(backbone, ["embedding"])
    assert tensors_of(backbone, ["blocks=1"]) == {name for name in block_tensors(backbone) if "blocks.0." in name}


def test_parts_are_said_as_they_are():
    assert parse_parts(["blocks=12", "embedding"]) == ("embedding", "blocks=12")
    assert parse_parts("blocks=1,embedding") == BOTH
    assert described(BOTH) == "the embedding and the first block" and described(["blocks=3"]) == "the first 3 blocks"
    for given in (["blocks"], ["blocks=0"], ["blocks=-1"], ["blocks=1.5"], ["blocks=01"], ["head"], [""]):
        with pytest.raises(SitusError) as raised:
            parse_parts(given)
        assert (raised.value.field, raised.value.value) == ("withhold", given[0])
    for twice in (["embedding", "embedding"], ["blocks=1", "blocks=2"]):
        with pytest.raises(SitusError, match="named twice"):
            parse_parts(twice)
    with pytest.raises(SitusError, match="has 2 blocks, but at least one block must remain"):
        tensors_of(make("vit"), ["blocks=2"])


# --- there and back -----------------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize(("name", "seal"), [(name, number % 2 == 0) for number, name in enumerate(MODELS)])
@torch.no_grad()
def test_two_files_give_back_the_very_folder(model_folder, tmp_path, name, seal):
    folder = model_folder(name)
    locked = lock(folder, KEY, tmp_path / "locked", cover=True, seal=seal, withhold=BOTH)
    second = locked.withheld
    assert second is not None
    assert second == tmp_path / "locked.withheld.safetensors" and second.stat().st_mode & 0o777 == 0o600
    assert locked.manifest.withheld is not None and locked.manifest.withheld.parts == BOTH
    if not seal:
        left, apart, clear = (load_file(path) for path in (locked.path / WHOLE, second, folder / WHOLE))
        assert not left.keys() & apart.keys() and left.keys() | apart.keys() == clear.keys()
        assert apart.keys() == locked.manifest.withheld_names() and apart and left
        gone = [clear[each].numpy().tobytes() for each in apart if clear[each].numel() > 16]
        assert not any(piece in content for content in contents(locked.path).values() for piece in gone)
    opened = unlock(locked.path, KEY, tmp_path / "open", withheld=second)
    assert contents(opened.path) == contents(folder) and not opened.notes
    assert check(locked.path, KEY, second) == locked.manifest
    clear = create_backbone(folder).eval()
    x = torch.randint(1, 31, (2, 9)) if clear.input.shape is None else torch.randn(2, 3, *clear.input.shape)
    assert torch.equal(opened_model(locked.path, KEY, second).eval()(x), clear(x))
    assert distance(clear(x), keyed_model(locked.path, KEY, second).eval()(x)) < 1e-4


def test_shards_of_which_one_is_withheld_whole(model_folder, tmp_path):
    source = Path(shutil.copytree(model_folder("llama"), tmp_path / "sharded"))
    state = load_file(source / WHOLE)
    (source / WHOLE).unlink()
    names = sorted(state)
    words_, rest = [each for each in names if "embed_tokens" in each], [each for each in names if "embed" not in each]
    parts = {"1.safetensors": words_, "2.safetensors": rest[::2], "3.safetensors": rest[1::2]}
    for shard, held in parts.items():
        save_file({each: state[each] for each in held}, source / shard, metadata={"format": "pt"})
    where = {each: shard for shard, held in parts.items() for each in held}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for seal in (False, True):
        locked = lock(
            source, KEY, tmp_path / f"locked{seal}", seal=seal, withhold=BOTH, withheld=tmp_path / f"{seal}.kept"
        )
        if not seal:
            assert load_file(locked.path / "1.safetensors") == {}
        opened = unlock(locked.path, KEY, tmp_path / f"open{seal}", withheld=tmp_path / f"{seal}.kept")
        assert contents(opened.path) == contents(source)


def test_a_head_that_is_tied_goes_with_the_words(model_folder, tmp_path):
    source = Path(shutil.copytree(model_folder("gpt2"), tmp_path / "tied"))
    state = load_file(source / WHOLE)
    save_file(state | {"lm_head.weight": state["transformer.wte.weight"].clone()}, source / WHOLE)
    locked = lock(source, KEY, tmp_path / "locked", withhold=["embedding"])
    assert "lm_head.weight" in locked.manifest.withheld_names() and "lm_head.weight" not in load_file(
        locked.path / WHOLE
    )
    assert contents(unlock(locked.path, KEY, tmp_path / "open", withheld=locked.withheld).path) == contents(source)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
def test_without_the_second_file_nothing_opens(model_folder, tmp_path, seal):
    locked = lock(model_folder("vit"), KEY, tmp_path / "locked", seal=seal, withhold=BOTH)
    other = lock(model_folder("vit"), KEY, tmp_path / "other", seal=seal, withhold=BOTH)
    second, out = locked.withheld, tmp_path / "open"
    assert second is not None
    calls = [lambda: unlock(locked.path, KEY, out), lambda: unlock(locked.path, KEY, out, retrained=not seal)]
    calls += [lambda way=way: way(locked.path, KEY) for way in (check, opened_model, keyed_model)]
    for call in calls:
        with pytest.raises(SitusError, match=r"the embedding and the first block"):
            call()
    with pytest.raises(SitusError, match="does not exist, but is needed"):
        unlock(locked.path, KEY, out, withheld=tmp_path / "nowhere")
    said = "altered" if seal else "does not contain the parts withheld"
    with pytest.raises(SitusError, match=said):
        unlock(locked.path, KEY, out, withheld=other.withheld)
    with pytest.raises(SitusError, match="was locked with the key"):
        unlock(locked.path, OTHER, out, withheld=second)
    whole = second.read_bytes()
    for at in (0, 9, len(whole) // 2, len(whole) - 1):
        second.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(SitusError):
            unlock(locked.path, KEY, out, withheld=second)
        second.write_bytes(whole[:at])
        with pytest.raises(SitusError):
            unlock(locked.path, KEY, out, withheld=second)
    assert not out.exists()
    plain = lock(model_folder("vit"), KEY, tmp_path / "plain", seal=seal).path
    with pytest.raises(SitusError, match="is not needed, because nothing was withheld"):
        unlock(plain, KEY, out, withheld=second)


def test_a_second_file_that_was_altered_is_refused_after_training_too(model_folder, tmp_path):
    locked = lock(model_folder("vit"), KEY, tmp_path / "locked", withhold=BOTH)
    second, out = locked.withheld, tmp_path / "open"
    whole = second.read_bytes()
    with plain_source(second) as reader:
        header = read_header(reader, "second")
    second.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for retrained, said in (
        (False, "is not the tensor that was locked"),
        (True, "is not the tensor that was withheld"),
    ):
        with pytest.raises(SitusError, match=rf"{second}: {header.tensors[-1].name} {said}"):
            unlock(locked.path, KEY, out, withheld=second, retrained=retrained)
    noted = make_header(header.tensors, {**header.notes, "more": "1"})
    second.write_bytes(noted.raw + whole[len(header.raw) :])
    for retrained in (False, True):
        with pytest.raises(SitusError, match=r"does not contain the parts withheld from .*, or was altered"):
            unlock(locked.path, KEY, out, withheld=second, retrained=retrained)
    assert not out.exists()
    second.write_bytes(whole)
    assert unlock(locked.path, KEY, out, withheld=second).path == out


def test_nothing_is_written_where_it_fails(model_folder, tmp_path):
    there = tmp_path / "there"
    there.write_text("mine")
    with pytest.raises(SitusError, match="never overwritten"):
        lock(model_folder("vit"), KEY, tmp_path / "locked", withhold=BOTH, withheld=there)
    assert there.read_text() == "mine"
    with pytest.raises(SitusError, match="at least one block must remain"):
        lock(model_folder("vit"), KEY, tmp_path / "locked", withhold=["blocks=7"])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_table_beside_the_model_is_refused_with_the_reason(model_folder, tmp_path):
    source = Path(shutil.copytree(model_folder("swin"), tmp_path / "swin"))
    save_file({"table": torch.zeros(64, 12)}, source / TABLE)
    with pytest.raises(SitusError, match="position table is a separate file"):
        lock(source, KEY, tmp_path / "locked", withhold=["embedding"])


# --- authorised use, and what others have -------------------------------------------------------------------


def trained(backbone: Backbone) -> Backbone:
    x = torch.randn(4, 3, *backbone.input.shape) if backbone.input.shape else torch.randint(1, 31, (4, 9))
    optimiser = torch.optim.AdamW(backbone.parameters(), lr=1e-2)
    backbone(x).square().mean().backward()
    optimiser.step()
    return backbone


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["vit", "hf_vit"])
@pytest.mark.parametrize("whole", [True, False], ids=["saved whole", "blocks alone"])
def test_retrained_with_parts_withheld(model_folder, tmp_path, name, whole):
    """Trained by the owner and saved whole; or only what is in the folder was trained, by somebody else."""
    locked = lock(model_folder(name), KEY, tmp_path / "locked", withhold=BOTH)
    owner = trained(keyed_model(locked.path, KEY, locked.withheld).eval())
    place = tmp_path / "trained"
    place.mkdir()
    write_model(owner, place)
    shutil.copy(locked.path / NAME, place)
    if not whole:
        names = load_file(place / WHOLE).keys() - locked.manifest.withheld_names()
        save_file({each: value for each, value in load_file(place / WHOLE).items() if each in names}, place / WHOLE)
        with pytest.raises(SitusError, match="withheld by the lock"):
            unlock(place, KEY, tmp_path / "open", retrained=True)
    opened = unlock(place, KEY, tmp_path / "open", retrained=True, withheld=None if whole else locked.withheld)
    got, clear = load_file(opened.path / WHOLE), load_file(model_folder(name) / WHOLE)
    now = unlocked_state(owner, locked.manifest)
    for each in clear:
        expected = clear[each] if not whole and each in locked.manifest.withheld_names() else now[each]
        assert torch.equal(got[each], expected), each
    assert "accepted as retrained" in opened.notes[0]
    if not whole:
        (place / "extra").mkdir()
        save_file({"new": torch.zeros(2), **load_file(place / WHOLE)}, place / WHOLE)
        with pytest.raises(SitusError, match="does not have the same tensor names"):
            unlock(place, KEY, tmp_path / "again", retrained=True, withheld=locked.withheld)


def unlocked_state(owner: Backbone, manifest) -> dict[str, torch.Tensor]:
    """The owner's weights under the names of the file, un-permuted, by `permute_state` alone."""
    from situs.locks.folder import names_in_file
    from situs.locks.groups import invert_keys, permute_state
    from situs.locks.manifest import permutations_of

    names = names_in_file(owner, {spec.name: spec for spec in manifest.specs()})
    state = {names[own]: value for own, value in owner.model.state_dict().items() if own in names}
    return permute_state(state, manifest.groups, invert_keys(permutations_of(manifest, KEY)))


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["vit", "swin", "bert", "gpt2", "hf_vit"])
def test_what_is_left_for_others(model_folder, tmp_path, name):
    """The folder alone as a model: what it holds, and noise where parts are withheld."""
    locked = lock(model_folder(name), KEY, tmp_path / "locked", withhold=BOTH)
    manifest = read_manifest(locked.path, None)
    backbone, gone = open_without_key(locked.path, manifest)
    whole = keyed_model(locked.path, KEY, locked.withheld).model.state_dict()
    state = backbone.model.state_dict()
    assert gone == tensors_of(backbone, BOTH) and gone
    assert all(torch.equal(state[each], whole[each]) for each in whole.keys() - gone)
    matrices = [each for each in gone if state[each].dim() > 1 and "relative" not in each]
    assert matrices and not any(torch.equal(state[each], whole[each]) for each in matrices)
    plain = lock(model_folder(name), KEY, tmp_path / "plain")
    backbone, gone = open_without_key(plain.path, plain.manifest)
    assert gone == frozenset()


def test_a_sealed_folder_without_its_seal_is_what_is_left(model_folder, tmp_path):
    """What an auditor with the key attacks: decrypted, still locked, and without what was withheld."""
    sealed = lock(model_folder("vit"), KEY, tmp_path / "sealed", seal=True, withhold=BOTH)
    with pytest.raises(SitusError, match="sealed"):
        open_without_key(sealed.path, sealed.manifest)
    with readable(sealed.path, sealed.manifest, KEY) as plain:
        backbone, gone = open_without_key(plain, replace(sealed.manifest, sealed=False))
        held = load_file(plain / WHOLE).keys()
    whole = keyed_model(sealed.path, KEY, sealed.withheld).model.state_dict()
    assert gone == tensors_of(backbone, BOTH) and not gone & held
    state = backbone.model.state_dict()
    assert all(torch.equal(state[each], whole[each]) for each in whole.keys() - gone)
