from __future__ import annotations

import filecmp
import hashlib
import hmac
import json
import os
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.locks import locking
from situs.locks.certify import certify_folder
from situs.locks.folder import INDEX, WHOLE
from situs.locks.groups import permute_state
from situs.locks.key import Key
from situs.locks.locking import check, lock, unlock
from situs.locks.manifest import NAME, permutations_of, read_manifest, write_manifest
from situs.models import open_model
from situs.results import percent

pytest.importorskip("cryptography")

KEY, OTHER = Key(bytes(range(32))), Key(bytes(32))
MODELS = ("vit", "eva", "swin", "bert", "gpt2", "llama", "hf_vit")


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def same_folders(one: Path, two: Path) -> bool:
    names = listing(one)
    return names == listing(two) and filecmp.cmpfiles(one, two, names, shallow=False)[0] == names


@pytest.fixture(scope="module")
def locked_vit(model_folder, tmp_path_factory) -> Path:
    return lock(model_folder("vit"), KEY, tmp_path_factory.mktemp("locked") / "vit").path


def copy_of(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place))


# --- there and back -----------------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("name", "cover", "seal"),
    [  # what a seal does to a file does not ask which axes of it are keyed
        pytest.param(name, cover, seal, marks=() if (cover and not seal) or name == "vit" else pytest.mark.slow)
        for name in MODELS
        for cover in (False, True)
        for seal in (False, True)
    ],
)
def test_lock_then_unlock_gives_the_very_files(model_folder, tmp_path, name, cover, seal):
    folder = model_folder(name)
    locked = lock(folder, KEY, tmp_path / "locked", cover=cover, seal=seal)
    names = listing(folder)
    assert listing(locked.path) == sorted([NAME] + [each + ".sealed" if seal else each for each in names])
    opened = unlock(locked.path, KEY, tmp_path / "open")
    assert same_folders(folder, opened.path) and not opened.notes
    assert check(locked.path, KEY) == locked.manifest


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_keyed_moved_and_nothing_else_did(model_folder, tmp_path, name):
    """The locked file against one tensor at a time through the permutations, in the dtype of the file."""
    folder = model_folder(name)
    locked = lock(folder, KEY, tmp_path / "locked", cover=True)
    clear, keyed = load_file(folder / WHOLE), load_file(locked.path / WHOLE)
    expected = permute_state(clear, locked.manifest.groups, permutations_of(locked.manifest, KEY))
    assert keyed.keys() == clear.keys()
    assert all(torch.equal(keyed[each], expected[each]) for each in clear)
    moved = {each for each in clear if not torch.equal(keyed[each], clear[each])}
    assert moved <= locked.manifest.keyed()
    outside = ("embed", "head", "classifier", "wte", "wpe", "lm_head", "cls_token")
    assert moved and not any(word in each for each in moved for word in outside)
    blocks = {each for each in clear if any(part.isdigit() for part in each.split(".")) and clear[each].dim() == 2}
    assert {each for each in blocks if "relative_position" not in each} <= moved


def test_shards_with_an_index(model_folder, tmp_path):
    """The same model in three shards: locked shard by shard, opened to the same files."""
    source = copy_of(model_folder("llama"), tmp_path / "sharded")
    state = load_file(source / WHOLE)
    (source / WHOLE).unlink()
    names = sorted(state)
    parts = {f"model-0000{i}-of-00003.safetensors": names[i - 1 :: 3] for i in (1, 2, 3)}
    for shard, held in parts.items():
        save_file({each: state[each] for each in held}, source / shard, metadata={"format": "pt"})
    where = {each: shard for shard, held in parts.items() for each in held}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    locked = lock(source, KEY, tmp_path / "locked", cover=True)
    assert set(locked.manifest.shards) == set(parts)
    assert same_folders(source, unlock(locked.path, KEY, tmp_path / "open").path)
    (locked.path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SitusError, match=r"00002.* is missing"):
        unlock(locked.path, KEY, tmp_path / "open2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_bits_of_any_dtype_come_back(model_folder, tmp_path, dtype):
    source = copy_of(model_folder("vit"), tmp_path / "clear")
    state = {name: tensor.to(dtype) for name, tensor in load_file(source / WHOLE).items()}
    if dtype == torch.bfloat16:
        state["blocks.0.mlp.fc1.weight"].view(torch.int16)[0, :4] = torch.tensor([32704, 32705, -64, -63])  # NaNs
    save_file(state, source / WHOLE)
    locked = lock(source, KEY, tmp_path / "locked", cover=True)
    assert same_folders(source, unlock(locked.path, KEY, tmp_path / "open").path)


def test_a_backbone_in_memory_is_locked_as_its_library_saves_it(model_folder, tmp_path):
    backbone = create_backbone(model_folder("vit"))
    locked = lock(backbone, KEY, tmp_path / "locked")
    opened = unlock(locked.path, KEY, tmp_path / "open")
    state = create_backbone(opened.path).model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in backbone.model.state_dict().items())


@pytest.mark.parametrize("name", ["vit", "hf_vit"])
def test_a_model_that_is_open_keeps_how_its_images_are_prepared(model_folder, tmp_path, name):
    model = open_model(model_folder(name))
    own = replace(model.data, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_share=0.5)
    locked = lock(replace(model, input=own, classes=("a", "b", "c", "d", "e")), KEY, tmp_path / "locked")
    found = open_model(unlock(locked.path, KEY, tmp_path / "open").path)
    assert found.data.normalisation == own.normalisation and found.data.crop_share == 0.5
    assert name != "vit" or found.classes == ("a", "b", "c", "d", "e")
    with pytest.raises(SitusError, match="locked already"):
        lock(open_model(locked.path), KEY, tmp_path / "twice")


def test_a_name_keeps_how_its_images_are_prepared(tmp_path):
    """timm prepares this one's images with a mean of .5, not with ImageNet's."""
    asked = {"weights": "random", "model_args": {"depth": 1, "embed_dim": 24, "num_heads": 3}}
    clear = open_model("vit_tiny_patch16_224", **asked)
    locked = lock("vit_tiny_patch16_224", KEY, tmp_path / "locked", **asked)
    found = open_model(locked.path)
    assert found.data.normalisation == clear.data.normalisation == ((0.5,) * 3, (0.5,) * 3)
    assert found.data.crop_share == clear.data.crop_share < 1


def test_two_locks_share_nothing(model_folder, tmp_path):
    first, second = (lock(model_folder("vit"), KEY, tmp_path / name).manifest for name in "ab")
    assert first.fingerprint != second.fingerprint and first.lock_id != second.lock_id
    assert not {entry.code for entry in first.tensors.values()} & {entry.code for entry in second.tensors.values()}
    p, q = (permutations_of(manifest, KEY)["residual"] for manifest in (first, second))
    assert (p == q).sum() < 12  # of 24; unrelated ones agree in one place on average
    third = lock(model_folder("eva"), KEY, tmp_path / "c").manifest
    assert (p == permutations_of(third, KEY)["residual"]).sum() < 12


@pytest.mark.thin(2)
@pytest.mark.parametrize("withhold", [(), ("embedding", "blocks=1")], ids=["whole", "withheld"])
@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
def test_the_manifest_confirms_no_guess(model_folder, tmp_path, seal, withhold):
    """Somebody with the very files and tensors finds no hash of them: not of the clear, not of the locked bytes."""
    source = copy_of(model_folder("vit"), tmp_path / "source")
    (source / "vocab.txt").write_text("4711")  # four digits can all be tried
    locked = lock(source, KEY, tmp_path / "locked", seal=seal, withhold=withhold)
    plain = lock(source, KEY, tmp_path / "plain").path
    said = (locked.path / NAME).read_text()
    guesses = [(source / each).read_bytes() for each in listing(source)]
    for file in (source / WHOLE, plain / WHOLE):
        raw = file.read_bytes()
        guesses += [raw[: 8 + int.from_bytes(raw[:8], "little")]]
        guesses += [tensor.numpy().tobytes() for tensor in load_file(file).values()]
    clear = {
        each: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for each, tensor in load_file(source / WHOLE).items()
    }
    layout = json.loads(said)["layout"]
    guesses.append(json.dumps([layout, sorted(clear.items())], separators=(",", ":")).encode())  # the old fingerprint
    assert len(guesses) > 60
    for guess in guesses:
        for kind in ("sha256", "sha1", "md5", "blake2b"):
            assert hashlib.new(kind, guess).hexdigest() not in said
        assert hmac.new(bytes(32), guess, "sha256").hexdigest() not in said
    again = lock(source, KEY, tmp_path / "again", seal=seal, withhold=withhold)
    codes = [re.findall("[0-9a-f]{64}", (place / NAME).read_text()) for place in (locked.path, again.path)]
    assert set(codes[0]) & set(codes[1]) == {layout}  # nor do two locks show that they hold the same
    assert len(set(codes[0])) == len(codes[0])  # nor one that two of its tensors are alike


def test_names_of_older_files_are_found(model_folder, tmp_path):
    """A BERT saved under its bare names with LayerNorm.gamma, as in 2018, is locked under these very names."""
    source = copy_of(model_folder("bert"), tmp_path / "old")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(source / WHOLE).items()
    }
    save_file(old, source / WHOLE, metadata={"format": "pt"})
    locked = lock(source, KEY, tmp_path / "locked")
    assert "bert.encoder.layer.0.output.LayerNorm.gamma" in locked.manifest.keyed()
    assert same_folders(source, unlock(locked.path, KEY, tmp_path / "open").path)


def test_the_sentences_count_what_is_permuted_what_is_withheld_and_what_is_clear(model_folder, tmp_path):
    clear = load_file(model_folder("vit") / WHOLE)

    def share(names) -> str:
        return percent(sum(clear[name].numel() for name in names) / sum(tensor.numel() for tensor in clear.values()))

    both = ("embedding", "blocks=1")
    for cover, seal, withhold in ((False, False, ()), (True, True, both), (True, False, "blocks=1")):
        out = tmp_path / f"{cover}{seal}"
        locked = lock(model_folder("vit"), KEY, out, cover=cover, seal=seal, withhold=withhold)
        manifest, (first, counted, *more) = locked.manifest, locked.sentences
        assert first == f"{out}: {manifest.model} locked with the key {KEY.id}."
        absent = set() if manifest.withheld is None else set(manifest.withheld.tensors)
        keyed = {member.tensor for group in manifest.groups for member in group.members} - absent
        inner = len(manifest.groups) - 1
        assert (inner > 0) == cover
        assert counted.startswith(
            f"{len(keyed)} of {len(clear)} tensors are permuted ({share(keyed)} of the parameters). "
            "The key permutes 24 residual channels"
            + (f", and {inner} groups inside the blocks (these groups add no strength)." if cover else ".")
        )
        what = "the embedding and the first block" if withhold == both else "the first block"
        second = f" A second file (mode 0600) holds the withheld parts: {what} ({share(absent)} of the parameters)."
        assert (second in counted) == bool(withhold) == ("second file" in counted)
        final = "Final" if "embedding" in withhold else "Embedding, positions, final"
        assert counted.endswith(f". {final} norm and head are not locked.")
        assert any(line.startswith("Every file except manifest.json is encrypted") for line in more) == seal
        assert more[-1].startswith("A lock is obfuscation, not encryption") and f"audit lock {out}`" in more[-1]
        assert str(locked) == "\n".join(locked.sentences) and locked.notes == []


# --- retrained ----------------------------------------------------------------------------------------------


def test_retrained_tensors_are_opened_and_said(model_folder, locked_vit, tmp_path):
    trained = copy_of(locked_vit, tmp_path / "trained")
    manifest = check(locked_vit, KEY)
    clear = load_file(model_folder("vit") / WHOLE)
    wanted = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in clear.items()}
    wanted["head.weight"], wanted["head.bias"] = torch.randn(7, 24), torch.zeros(7)  # a new classifier
    save_file(permute_state(wanted, manifest.groups, permutations_of(manifest, KEY)), trained / WHOLE)
    (trained / "optimizer.pt").write_bytes(b"moments")
    with pytest.raises(SitusError, match="so the file was altered or belongs to another model"):
        unlock(trained, KEY, tmp_path / "open")
    opened = unlock(trained, KEY, tmp_path / "open", retrained=True)
    got = load_file(opened.path / WHOLE)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    assert f"{len(clear)} of {len(clear)} tensors" in opened.notes[0] and "head.bias, head.weight" in opened.notes[1]
    assert "optimizer.pt" in opened.notes[2] and NAME not in listing(opened.path)


def test_retrained_still_wants_the_key_and_the_layout(locked_vit, tmp_path):
    trained = copy_of(locked_vit, tmp_path / "trained")
    with pytest.raises(SitusError, match="was locked with the key"):
        unlock(trained, OTHER, tmp_path / "open", retrained=True)
    state = load_file(trained / WHOLE)
    save_file({name: tensor.half() for name, tensor in state.items()}, trained / WHOLE)
    with pytest.raises(SitusError, match=r"F16 and shape \[24\], but was locked with dtype F32 and shape \[24\]"):
        unlock(trained, KEY, tmp_path / "open", retrained=True)
    (trained / NAME).unlink()
    with pytest.raises(SitusError, match="not a locked model"):
        unlock(trained, KEY, tmp_path / "open", retrained=True)


def test_a_sealed_folder_was_not_retrained(model_folder, tmp_path):
    locked = lock(model_folder("vit"), KEY, tmp_path / "locked", seal=True)
    with pytest.raises(SitusError, match="sealed"):
        unlock(locked.path, KEY, tmp_path / "open", retrained=True)


# --- refusals -----------------------------------------------------------------------------------------------


def test_wrong_key(locked_vit, tmp_path):
    with pytest.raises(SitusError, match=rf"locked with the key {KEY.id}.* {OTHER.id}"):
        unlock(locked_vit, OTHER, tmp_path / "open")
    assert list(tmp_path.iterdir()) == []


def test_wrong_model_of_the_same_layout_and_of_another(model_folder, locked_vit, tmp_path):
    swapped = copy_of(locked_vit, tmp_path / "swapped")
    shutil.copy(lock(model_folder("vit"), KEY, tmp_path / "again").path / WHOLE, swapped / WHOLE)
    with pytest.raises(SitusError, match="not the tensor that was locked"):
        unlock(swapped, KEY, tmp_path / "open")
    shutil.copy(lock(model_folder("eva"), KEY, tmp_path / "eva").path / WHOLE, swapped / WHOLE)
    with pytest.raises(SitusError, match="another model"):
        unlock(swapped, KEY, tmp_path / "open")
    assert not (tmp_path / "open").exists()


@pytest.mark.thin(2)
@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
def test_every_altered_byte_is_found(model_folder, tmp_path_factory, seal):
    """One bit of one file, anywhere, or its end cut off, or bytes added."""
    place = tmp_path_factory.mktemp("altered")
    locked = lock(model_folder("vit"), KEY, place / "locked", seal=seal).path

    @given(st.data())
    def run(data):
        name = data.draw(st.sampled_from(listing(locked)))
        path = locked / name
        whole = path.read_bytes()
        end = min(len(whole), 4096) if data.draw(st.booleans()) else len(whole)
        at = data.draw(st.integers(0, end - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "add"]))
        if kind == "flip":
            broken = bytearray(whole)
            broken[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            broken = whole[:at] if kind == "cut" else whole + bytes(1 + at % 64)
        try:
            path.write_bytes(broken)
            if name == NAME and _same_json(whole, bytes(broken)):
                return  # white space, or another spelling of the same values: nothing that is signed changed
            with pytest.raises(SitusError):
                unlock(locked, KEY, place / "open")
            assert not (place / "open").exists()
        finally:
            path.write_bytes(whole)

    run()
    assert unlock(locked, KEY, place / "open")


def _same_json(one: bytes, two: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(two)
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
def test_files_may_not_change_places(model_folder, tmp_path, seal):
    locked = lock(model_folder("vit"), KEY, tmp_path / "locked", seal=seal).path
    one, two = (locked / f"{name}{'.sealed' if seal else ''}" for name in ("README.md", "tokens/merges.txt"))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(SitusError, match="altered"):
        unlock(locked, KEY, tmp_path / "open")


def test_targets_that_exist_are_refused(model_folder, locked_vit, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(SitusError, match="exists already"):
        lock(model_folder("vit"), KEY, tmp_path / "there")
    with pytest.raises(SitusError, match="exists already"):
        unlock(locked_vit, KEY, tmp_path / "there")


def test_sources_that_cannot_be_locked(model_folder, locked_vit, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SitusError) as raised:
        lock("vit_tiny_patch16_224", KEY, out)
    assert raised.value.field == "weights"
    with pytest.raises(SitusError, match="is not a model with weights"):
        lock(model_folder("vit") / WHOLE, KEY, out)
    with pytest.raises(SitusError, match="locked already"):
        lock(locked_vit, KEY, out)
    source = copy_of(model_folder("vit"), tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(bytes(2 << 20))
    with pytest.raises(SitusError, match=r"pytorch_model\.bin has 2\.0 MiB.* may contain the unlocked weights"):
        lock(source, KEY, out)
    (source / "pytorch_model.bin").unlink()
    state = load_file(source / WHOLE)
    save_file({name: tensor for name, tensor in state.items() if name != "blocks.1.norm2.weight"}, source / WHOLE)
    with pytest.raises(SitusError, match=r"blocks\.1\.norm2\.weight: the model and its files"):
        lock(source, KEY, out)
    (source / WHOLE).unlink()
    with pytest.raises(SitusError, match="holds neither"):
        lock(source, KEY, out)
    (source / "config.json").unlink()
    with pytest.raises(SitusError, match="is not a model with weights"):
        lock(source, KEY, out)
    assert not out.exists() and [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_locked_file_is_one_that_safetensors_reads(locked_vit):
    with safe_open(locked_vit / WHOLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert len(list(file.keys())) > 20


def test_weights_that_change_meanwhile_are_not_locked(model_folder, tmp_path, monkeypatch):
    source = copy_of(model_folder("vit"), tmp_path / "source")

    def written_to(*args):
        os.utime(source / WHOLE, (1, 1))
        return certify_folder(*args)

    monkeypatch.setattr(locking, "certify_folder", written_to)
    with pytest.raises(SitusError, match=f"{source}: its weights changed during locking"):
        lock(source, KEY, tmp_path / "locked")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_opens_is_the_model_that_the_manifest_fingerprints(locked_vit, tmp_path):
    """The owner's own signature under another fingerprint: every file is as it was, and opens to other weights."""
    other = copy_of(locked_vit, tmp_path / "other")
    manifest = read_manifest(other, KEY)
    (other / NAME).unlink()
    write_manifest(other, replace(manifest, fingerprint="0" * 64), KEY)
    for call in (lambda: unlock(other, KEY, tmp_path / "open"), lambda: check(other, KEY)):
        with pytest.raises(SitusError, match="the unlocked model is not the model that was locked"):
            call()
    assert not (tmp_path / "open").exists()


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_locked_folder_is_for_everybody_and_an_opened_one_for_its_owner(locked_vit, tmp_path):
    opened = unlock(locked_vit, KEY, tmp_path / "open").path
    retrained = unlock(locked_vit, KEY, tmp_path / "again", retrained=True).path
    plain = tmp_path / "plain"
    plain.touch()
    modes = {stat.S_IMODE((locked_vit / name).stat().st_mode) for name in listing(locked_vit)}
    assert modes == {stat.S_IMODE(plain.stat().st_mode)}
    for folder in (opened, retrained):
        assert {stat.S_IMODE((folder / name).stat().st_mode) for name in listing(folder)} == {0o600}


@pytest.mark.shared_data
def test_a_real_pretrained_vit(shared_data, tmp_path):
    """DINOv2's ViT-S/14 in float16, its file named in a folder as timm would: every bit back."""
    source = tmp_path / "dinov2"
    source.mkdir()
    shutil.copyfile(shared_data / "weights" / "vit_small_patch14_dinov2_fp16.safetensors", source / WHOLE)
    (source / "config.json").write_text(json.dumps({"architecture": "vit_small_patch14_dinov2", "num_classes": 0}))
    locked = lock(source, KEY, tmp_path / "locked", cover=True)
    assert [group.size for group in locked.manifest.groups if group.kind == "residual"] == [384]
    assert same_folders(source, unlock(locked.path, KEY, tmp_path / "open").path)
