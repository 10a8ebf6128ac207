"""`audit_lock` for Python users: what it says of a lock, and that nothing untried is ever counted as strength."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from builders import small_hf
from sentences import write_set
from tiny_texts import write_folder

from situs.backbones import create_backbone
from situs.backbones.timm.create import published_name
from situs.data.text import Columns
from situs.errors import SitusError
from situs.locks.attacks import LockAudit, LockAuditConfig, audit, audit_lock
from situs.locks.attacks.adapter import Labelled
from situs.locks.attacks.match import Schedule, long_schedule
from situs.locks.attacks.recovery import KeyRecovery
from situs.locks.folder import write_model
from situs.locks.key import Key
from situs.locks.locking import lock
from situs.train.distributed import Ranks

pytest.importorskip("cryptography")
KEY = Key(bytes(range(32)))


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("audit")
    clear = model_folder("vit")
    lock(clear, KEY, place / "locked", cover=True)
    lock(clear, KEY, place / "sealed", seal=True)
    lock(clear, KEY, place / "less", withhold=("embedding",))
    return clear, place


@pytest.mark.parametrize("opened", [False, True], ids=["folder", "module"])
def test_who_has_the_base_has_the_key(folders, opened):
    clear, place = folders
    audit = audit_lock(place / "locked", base=create_backbone(clear).model if opened else clear)
    (blind, base) = audit.attacks
    assert (blind.attacker, base.attacker) == ("no-base", "public-base")
    assert (base.right, base.size, base.bits) == (24, 24, 0.0)
    assert audit.strength == 0 and "These attackers open the lock" in audit.verdict
    assert (audit.sizes, audit.inner > 0, audit.judged) == ((24,), True, False)
    written = audit.to_json()
    assert written["strength_bits"] == 0 and "keys" not in written["attacks"][0]
    assert [each.answer for each in audit.judge().judgements] == ["above"] and audit.tone == "bad"


def test_no_strength_without_the_attack_that_anybody_can_make(folders):
    _, place = folders
    audit = audit_lock(place / "locked", key=KEY)
    assert audit.missing == {"images"}
    assert audit.strength is None and "bits." not in audit.verdict
    assert audit.attacks[0].bits is not None
    unjudged = audit_lock(place / "locked")
    assert unjudged.strength is None and unjudged.attacks[0].bits is None
    less = audit_lock(place / "less", key=KEY, attacker=["images"], images="samples")
    assert less.attacks == () and less.strength is None
    for inconclusive in (audit, unjudged, less):
        [judgement] = inconclusive.judge().judgements
        assert judgement.answer == "incomplete" and inconclusive.tone == "unsure"
    assert less.verdict.startswith("No attack was run, so no strength can be given.")


def test_a_server_without_the_embedding_has_nothing_to_compare_the_stream_with(folders):
    _, place = folders
    less = audit_lock(place / "less", key=KEY, attacker=["activations", "no-base"], images="samples")
    assert [each.attacker for each in less.attacks] == ["no-base"]
    assert "The attacker `activations` cannot start" in less.verdict
    assert "`activations`" not in audit_lock(place / "less", key=KEY).verdict


def test_where_images_tell_nothing_the_locked_file_alone_must_have_been_attacked(folders):
    clear, place = folders
    config = LockAuditConfig(drift=(1000.0,))
    given = {"key": KEY, "base": clear, "config": config}
    audit = audit_lock(place / "less", attacker=["drifted-base"], **given)
    assert audit.attacks[0].bits is audit.strength is None
    assert (
        "Attacks that were not run, although anybody could run them: no-base (the locked file alone)" in audit.verdict
    )
    both = audit_lock(place / "less", attacker=["drifted-base", "no-base"], **given)
    assert both.strength is None and "This base revealed nothing" in both.verdict and "256" not in both.verdict


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_base_that_is_another_model_proves_nothing_of_the_right_one(folders, seed):
    clear, place = folders
    other = create_backbone(clear).model
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    less = audit_lock(place / "less", base=other, key=KEY)
    assert less.attacks[1].right < 12 and less.attacks[1].bits is None and less.strength is None


@pytest.mark.thin(2)
@pytest.mark.parametrize("withhold", [("embedding",), ("embedding", "blocks=1")])
@pytest.mark.parametrize("cover", [False, True])
def test_with_the_embedding_withheld_who_has_a_base_decides(folders, tmp_path, withhold, cover):
    """The locked file alone says nothing then; its blocks still give the key to who has the model, drifted too."""
    clear, _ = folders
    lock(clear, KEY, tmp_path / "less", withhold=withhold, cover=cover)
    alone = audit_lock(tmp_path / "less", key=KEY)
    assert alone.strength is None and alone.missing == {"public-base"}
    assert alone.untried == ("images", "activations", "public-base", "drifted-base", "labels")
    assert "Attacks that were not run, although the strength depends on them: public-base" in alone.verdict
    [table] = alone.summary().tables
    assert table.rows[0][2] == "inconclusive" and "256" not in str(table.rows)
    assert alone.to_json()["not_tried"].keys() == set(alone.untried)
    config = LockAuditConfig(drift=(0.1,))
    names = ["no-base", "public-base", "drifted-base"]
    based = audit_lock(tmp_path / "less", key=KEY, base=clear, attacker=names, config=config)
    assert [each.right for each in based.attacks[1:]] == [24, 24] and based.strength == 0
    assert "public-base" not in based.untried


def test_the_command_that_holds_a_lock_against_public_weights_is_named() -> None:
    attacks = (KeyRecovery("no-base", 384, 2, residual_sizes=((384, 2),)),)
    said = LockAudit("m", (384,), 0, attacks, published="vit_small_patch14_dinov2").verdict
    assert "situs.audit_lock(LOCKED, key=FILE, base='vit_small_patch14_dinov2', weights=FILE)" in said
    assert "base='" not in LockAudit("m", (384,), 0, attacks).verdict
    both = (*attacks, KeyRecovery("public-base", 384, 2, residual_sizes=((384, 2),)))
    assert "base='" not in LockAudit("m", (384,), 0, both, published="vit_small_patch14_dinov2").verdict


@pytest.mark.parametrize(
    ("name", "fields", "published"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32}, "vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224", {"img_size": 32, "model_args": {"depth": 2}}, ""),  # an architecture of its own
        ("bert", None, ""),
    ],
)
def test_public_weights_are_known_by_the_name_of_a_whole_architecture(name, fields, published):
    if fields is None:
        pytest.importorskip("transformers")
        backbone = small_hf(
            "BertModel", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
        )
    else:
        backbone = create_backbone(name, **fields)
    assert published_name(backbone) == published


def test_of_several_stages_the_first_is_no_whole_lock(model_folder, tmp_path, monkeypatch):
    quick = {warmth: Schedule(1.0, long_schedule(warmth).steps[::10]) for warmth in (0.25, 0.5, 1.0)}
    monkeypatch.setattr("situs.locks.attacks.images.long_schedule", quick.__getitem__)
    lock(model_folder("swin"), KEY, tmp_path / "locked")
    found = audit_lock(tmp_path / "locked", key=KEY, images="samples")
    assert found.strength is None and "only the key of the first" in found.verdict


def test_drifts_are_attacked_one_by_one_and_the_same_every_time(folders):
    clear, place = folders
    config = LockAuditConfig(drift=(0.0, 30.0))
    one, two = (
        audit_lock(place / "locked", base=clear, key=KEY, attacker=["drifted-base"], config=config) for _ in range(2)
    )
    assert [each.attacker for each in one.attacks] == ["drifted-base, 0 ×", "drifted-base, 30 ×"]
    assert one.attacks[0].right == 24 > one.attacks[1].right
    assert all(
        torch.equal(a.keys["residual"], b.keys["residual"]) for a, b in zip(one.attacks, two.attacks, strict=True)
    )


def test_accuracies_stand_in_their_columns_and_the_control_beside_what_it_is_held_against() -> None:
    attacks = (
        KeyRecovery("public-base", 8, 8, 0.5, "a cost", before=0.1, after=0.7, owner=0.8, residual_sizes=((8, 8),)),
        KeyRecovery("labels", 8, None, 1.0, "labels", before=0.1, after=0.5, owner=0.8, control=0.3),
    )
    [table] = LockAudit("m", (8,), 2, attacks, judged=True).summary().tables
    first, second, *others = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert {row["attacker"] for row in others} == {"no-base", "images", "activations", "drifted-base"}
    assert {row["key recovered"] for row in others} == {"not tried"}
    assert (first["locked"], first["after attack"], first["with the key"]) == ("10.0 %", "70.0 %", "80.0 %")
    assert second["after attack"] == "50.0 % (random blocks 30.0 %)"
    assert (second["locked"], second["with the key"], second["key recovered"]) == ("10.0 %", "80.0 %", "not judged")
    assert first["key recovered"] == "100.0 % (8 of 8)"
    bare = LockAudit("m", (8,), 2, (KeyRecovery("no-base", 8, 1),)).summary().tables[0]
    assert not {"locked", "after attack", "with the key"} & set(bare.header)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"attacker": ["thief"]}, "attacker"),
        ({"attacker": ["public-base"]}, "base"),
        ({"attacker": ["labels"]}, "data"),
        ({"attacker": ["images"]}, "images"),
        ({"attacker": ["activations"]}, "images"),
        ({"images": "a", "texts": "b"}, "images"),
        ({"base": "no/such/folder"}, "base"),
    ],
)
def test_a_mistake_names_its_field(folders, arguments, field):
    with pytest.raises(SitusError) as caught:
        audit_lock(folders[1] / "locked", **arguments)
    assert caught.value.field == field


def test_a_seal_needs_the_key(folders):
    with pytest.raises(SitusError, match="is sealed") as caught:
        audit_lock(folders[1] / "sealed")
    assert caught.value.field == "key"
    assert audit_lock(folders[1] / "sealed", key=KEY).attacks[0].bits is not None


@pytest.mark.parametrize("wrong", [{"drift": (-1.0,)}, {"count": 0}, {"k": 0}, {"steps": 0}, {"test": 0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(SitusError) as caught:
        LockAuditConfig(**wrong)
    assert str(caught.value.field).removesuffix("[0]") == next(iter(wrong))


def test_a_device_that_is_not_here_is_refused(folders):
    with pytest.raises(SitusError, match="device='abacus': must be cpu, cuda") as caught:
        audit_lock(folders[1] / "locked", key=KEY, device="abacus")
    assert caught.value.field == "device"


def test_all_that_is_run_or_trained_is_on_the_device(folders, monkeypatch):
    """On `meta`, which holds no numbers: weights are matched on the CPU, and whoever runs the model has it there."""
    clear, place = folders
    where: dict[str, str] = {}

    def noting(name):
        def note(backbone, groups=(), *_, **__):
            [where[name]] = {each.device.type for each in backbone.model.state_dict().values()}
            return KeyRecovery(name, 24, keys={group.name: torch.arange(group.size) for group in groups})

        return note

    def labelled(folder, data, config, gone, device):
        where["labelled samples"] = device.type
        return (Labelled(torch.zeros(1), torch.zeros(1)),) * 2

    names = {"recover_with_labels": "labels", "recover_with_samples": "images"}
    names |= {"recover_with_activations": "activations", "recover_blind": "no-base"}
    monkeypatch.setattr("situs.locks.attacks.samples.Samples.doubt", lambda _, each, *__: noting("doubt")(each) and "")
    for function, name in names.items():
        monkeypatch.setattr(audit, function, noting(name))
    monkeypatch.setattr(audit, "_labelled", labelled)

    def score(trial, *_):
        noting("accuracy")(trial)
        return 0.5

    monkeypatch.setattr(audit, "_score", score)
    monkeypatch.setattr(audit.distributed, "start", lambda device: Ranks(0, 1, torch.device(device)))
    given = {"base": clear, "key": KEY, "images": "samples", "data": "samples", "device": "meta"}
    found = audit_lock(place / "locked", attacker=[*names.values(), "public-base"], **given)
    assert where == dict.fromkeys([*names.values(), "labelled samples", "accuracy", "doubt"], "meta")
    assert found.attacks[-1].right == 24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_finds_what_the_cpu_finds(folders):
    _, place = folders
    given = {"key": KEY, "images": "samples", "attacker": ["no-base", "images", "activations"]}
    ours, theirs = (audit_lock(place / "locked", device=device, **given) for device in ("cuda", "cpu"))
    for one, two in zip(ours.attacks, theirs.attacks, strict=True):
        assert abs(one.right - two.right) <= 4, one.attacker  # random weights: rounding may move what is a guess


@pytest.mark.slow
@pytest.mark.shared_data
def test_the_blocks_of_dinov2_alone_give_the_key_to_who_has_it(shared_data, tmp_path):
    """Its embedding withheld and its inner groups moved; the attacker has the public file, and one 30 % away."""
    weights = str(shared_data / "weights" / "vit_small_patch14_dinov2_fp16.safetensors")
    (tmp_path / "clear").mkdir()
    write_model(create_backbone("vit_small_patch14_dinov2", weights=weights, img_size=56), tmp_path / "clear")
    lock(tmp_path / "clear", KEY, tmp_path / "less", withhold=("embedding",), cover=True)
    alone = audit_lock(tmp_path / "less", key=KEY)
    assert alone.strength is None and alone.published == "vit_small_patch14_dinov2"
    given = {"key": KEY, "base": "vit_small_patch14_dinov2", "weights": weights}
    found = audit_lock(tmp_path / "less", attacker=["no-base", "public-base", "drifted-base"], **given)
    assert [each.right for each in found.attacks[1:]] == [384, 384] and found.strength == 0


def test_sentences_whose_columns_have_other_names(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    usual, model = write_set(tmp_path / "set"), write_folder(tmp_path / "bert", "bert", width=16, seed=5)
    (tmp_path / "other").mkdir()
    for file in usual.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        other = [{"id": "w9", "review": row["sentence"], "stars": row["label"]} for row in rows]
        (tmp_path / "other" / file.name).write_text("\n".join(map(json.dumps, other)))
    lock(model, KEY, tmp_path / "locked")
    found = [
        audit_lock(
            tmp_path / "locked", data=where, key=KEY, attacker="no-base", config=LockAuditConfig(test=12, text=columns)
        )
        for where, columns in ((usual, Columns()), (tmp_path / "other", Columns(column="review", label="stars")))
    ]
    assert found[0].attacks[0].owner == found[1].attacks[0].owner is not None
    assert "samples that have the same length, without labels" in found[0].attacks[0].cost
