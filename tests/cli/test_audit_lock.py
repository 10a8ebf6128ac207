"""`situs audit lock`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from builders import leaves
from PIL import Image
from torch import Tensor

from situs.cli.main import main
from situs.locks.attacks.match import Schedule, long_schedule
from situs.locks.attacks.recovery import BROKEN

pytest.importorskip("cryptography")


class Locked(NamedTuple):
    """The export of a trained run, its key, and the folder that was locked with it, plain and with cover."""

    export: Path
    key: Path
    plain: Path
    cover: Path


@pytest.fixture(scope="module")
def locked(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Locked:
    place = tmp_path_factory.mktemp("audit")
    made = Locked(place / "export", place / "k", place / "plain", place / "cover")
    assert main(["export", str(trained.one), "--out", str(made.export)]) == 0
    with pytest.MonkeyPatch.context() as patch:  # some keys of 16 channels hardly change what such a model answers
        patch.setattr("secrets.token_bytes", lambda count: bytes(range(count)))
        patch.setattr("secrets.token_hex", lambda count: "5a" * count)
        assert main(["keygen", "--out", str(made.key)]) == 0
        words = ["lock", str(made.export), "--key", str(made.key), "--out"]
        assert main([*words, str(made.plain)]) == 0
        assert main([*words, str(made.cover), "--cover"]) == 0
    return made


def audit(*words: Any) -> int:
    return main(["audit", "lock", *map(str, words)])


def test_a_public_base_opens_it(locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (locked.plain, locked.cover):
        out = tmp_path / folder.name
        assert audit(folder, "--attacks", "public-base", "--base", locked.export, "--out", out) == 0
        printed = capsys.readouterr().out
        assert "100.0 % (16 of 16)" in printed
        assert "at most 0 bits" in printed
        written = json.loads((out / "audit.json").read_text())
        assert written["strength_bits"] == 0
        assert [attack["share"] for attack in written["attacks"]] == [1.0]
        page = (out / "audit.html").read_text()
        assert "16 of 16" in page and "public-base" in page
        assert str(tmp_path) not in page + json.dumps(written)
    assert "permuted groups inside the blocks" in printed


def test_several_attackers_with_data_and_key(
    trained: Any, locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--attacks", "drifted-base,no-base,labels"]
    words = ["--base", trained.two, "--key", locked.key, "--data", trained.data, "--drift", "0,0.3", "--steps", 4]
    assert audit(locked.plain, *names, *words, "--k", 6, "--out", tmp_path) == 0
    written = json.loads((tmp_path / "audit.json").read_text())
    assert [attack["attacker"] for attack in written["attacks"]] == [
        "drifted-base, 0 ×",
        "drifted-base, 0.3 ×",
        "no-base",
        "labels",
    ]
    for attack in written["attacks"]:
        assert attack["size"] == 16 and 0 <= attack["right"] <= 16
        assert all(0 <= attack[name] <= 1 for name in ("before", "after", "owner"))
    *_, blind, last = written["attacks"]
    assert blind["cost"] == "the locked file and 6 samples, without labels"
    assert last["cost"] == "6 labelled samples, 4 steps of 6"
    assert 0 <= last["control"] <= 1
    printed = capsys.readouterr().out
    for attack in written["attacks"]:  # nothing is left to try where the model works again or the key is known
        lost, back = attack["owner"] - attack["before"], attack["after"] - attack["before"]
        spread = sum(share * (1 - share) for share in (attack["owner"], attack["before"])) / attack["tested"]
        works = lost > 2 * spread**0.5 and back >= BROKEN * lost
        assert (attack["bits"] == 0) == (works or attack["right"] >= 15)
    if any(attack["bits"] == 0 for attack in written["attacks"]):  # a toy of 16 channels: one may have opened it
        assert written["strength_bits"] == 0
    else:
        assert written["strength_bits"] is None  # nobody came with images
        assert (
            "Attacks that were not run, although anybody could run them: images (a few unlabelled images or texts)"
            in printed
        )
    assert "with the key" in printed and "random blocks" in printed
    assert "<img" in (tmp_path / "audit.html").read_text()  # share against drift


def test_what_nobody_knows_is_not_judged(trained: Any, locked: Locked, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(locked.plain, "--base", trained.two, "--attacks", "public-base") == 0
    printed = capsys.readouterr().out
    assert "The true key was not given, so this audit does not judge the results of: public-base." in printed
    assert "No strength can be given, " in printed
    assert "256" not in printed.replace(
        "vit_tiny_patch16_224", ""
    )  # nobody judged the attack, so it proves no strength


def test_without_a_key_no_strength_is_claimed(
    locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(locked.plain, "--out", tmp_path) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "")  # which may have any number in it
    assert "not judged" in printed and "the locked file alone" in printed
    assert json.loads((tmp_path / "audit.json").read_text())["strength_bits"] is None
    page = (tmp_path / "audit.html").read_text()
    assert "256" not in printed and "256 bits" not in page and "not judged" in page


def test_a_sealed_lock_is_attacked_below_its_seal(
    locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = tmp_path / "sealed"
    assert main(["lock", str(locked.export), "--key", str(locked.key), "--out", str(sealed), "--seal"]) == 0
    capsys.readouterr()
    before = sorted(path.name for path in sealed.iterdir())
    assert audit(sealed, "--key", locked.key, "--base", locked.export, "--out", tmp_path / "page") == 0
    printed = capsys.readouterr().out
    assert "16 of 16" in printed and "at most 0 bits" in printed
    assert sorted(path.name for path in sealed.iterdir()) == before
    written = json.loads((tmp_path / "page" / "audit.json").read_text())
    assert [attack["attacker"] for attack in written["attacks"]] == ["no-base", "public-base"]


def test_who_runs_the_blocks_reads_the_key_off_the_stream(
    locked: Locked, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--attacks", "activations", "--images", trained.data, "--out", tmp_path]
    assert audit(locked.cover, *words, "--key", locked.key) == 0
    [written] = json.loads((tmp_path / "audit.json").read_text())["attacks"]
    assert (written["attacker"], written["right"], written["size"], written["bits"]) == ("activations", 16, 16, 0)
    capsys.readouterr()
    assert audit(locked.cover, *words) == 2
    assert "needs the true key, to compute what the server sees (--key)" in capsys.readouterr().err


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the steps, for tests in which it does not matter how far the search comes."""
    quick = {warmth: Schedule(1.0, long_schedule(warmth).steps[::10]) for warmth in (0.25, 0.5, 1.0)}
    monkeypatch.setattr("situs.locks.attacks.images.long_schedule", quick.__getitem__)


def pictures(folder: Path, pixels: Tensor) -> Path:
    folder.mkdir()
    for number, each in enumerate((255 * pixels).byte()):
        Image.fromarray(each.permute(1, 2, 0).numpy()).save(folder / f"{number:02}.png")
    return folder


@pytest.mark.usefixtures("hasty")
def test_images_without_labels(locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs = pictures(tmp_path / "photographs", leaves(24))
    for folder in (locked.plain, locked.cover):
        out = tmp_path / folder.name
        assert audit(folder, "--key", locked.key, "--images", photographs, "--count", 20, "--out", out) == 0
        printed = capsys.readouterr().out
        written = json.loads((out / "audit.json").read_text())
        blind, images = written["attacks"]
        assert (blind["attacker"], images["attacker"]) == ("no-base", "images")
        assert images["cost"].startswith("the locked file and 20 unlabelled images; ") and images["doubt"] == ""
        assert images["size"] == 16 and 0 <= images["right"] <= 16
        assert -1 <= images["failed"] <= 1 and -1 <= images["agreement"] <= 1
        assert blind["agreement"] is None
        assert written["strength_bits"] == min(256, blind["bits"], images["bits"])
        assert f"at most {written['strength_bits']:.0f} bits" in printed and written["verdict"] in printed
        assert "unlabelled samples" in (out / "audit.html").read_text()
        for name, words in (("public-base", "the model that was locked"), ("labels", "labelled samples")):
            assert written["not_tried"][name] == words and f"{name} ({words})" in written["verdict"]
            assert f"<td>{name}</td><td>not tried</td>" in (out / "audit.html").read_text().replace("\n", "")
    assert audit(locked.plain, "--images", photographs) == 0
    said = "inconclusive (not a pass). The true key was not given, so this audit does not judge the results of: "
    assert said + "no-base, images." in capsys.readouterr().out


FLAT = torch.linspace(0.1, 0.9, 24)[:, None, None, None].expand(-1, 3, 32, 32)
POOR = {
    "one picture": (leaves(1), "1 varied image, but 16 are needed; give 16 photographs or more"),
    "two flat pictures": (FLAT[:2], "0 varied images, but 16 are needed (too flat: 00.png, 01.png)"),
    "flat pictures": (FLAT, "too flat: 00.png, 01.png, 02.png, 03.png, 04.png and 19 more"),
    "four of many": (torch.cat([leaves(4, 32), FLAT[:20]]), "4 varied images, but 16 are needed (too flat: 04.png"),
    "copies": (leaves(1).expand(24, -1, -1, -1), "1 varied image, but 16 are needed (copies of others: 01.png"),
    "black pictures": (torch.zeros(20, 3, 32, 32), "0 varied images"),
    "seven pictures": (leaves(7), "7 varied images, but 16 are needed"),
}


@pytest.mark.thin(3)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", POOR)
def test_pictures_that_tell_nothing_prove_no_strength(
    kind: str, locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels, said = POOR[kind]
    folder = pictures(tmp_path / "pictures", pixels)
    assert audit(locked.plain, "--key", locked.key, "--images", folder, "--out", tmp_path / "out") == 0
    printed = " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    images = written["attacks"][1]
    assert images["right"] <= 8  # it got nowhere
    assert written["strength_bits"] is None and images["bits"] is None and said in images["doubt"]
    assert "No strength can be given, so the audit is inconclusive (not a pass)." in printed and said in printed
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "no strength" in page and "of 256<" not in page and "bits." not in printed and "inconclusive" in printed


@pytest.mark.thin(3)
@pytest.mark.parametrize("attack", ["recover_with_samples", "recover_blind", "recover_with_base"])
def test_an_attack_that_was_stopped_says_nothing(
    attack: str, locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"situs.locks.attacks.audit.{attack}", stopped)
    words = ["--images", pictures(tmp_path / "pictures", leaves(3)), "--base", locked.export, "--out", tmp_path / "out"]
    assert audit(locked.plain, "--key", locked.key, *words, "--attacks", "images,no-base,public-base") != 0
    assert "bits" not in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_what_is_attacked_does_not_drop_out(locked: Locked) -> None:
    import torch

    from situs.locks.attacks.audit import LockAuditConfig, _target

    backbone = _target(locked.plain, None, None, None, {}, None, LockAuditConfig(), torch.device("cpu")).backbone
    assert not any(module.training for module in backbone.modules())


def lock_less(locked: Locked, out: Path, part: str, *more: str) -> Path:
    words = ["lock", str(locked.export), "--key", str(locked.key), "--out", str(out), "--withhold", part, *more]
    assert main(words) == 0
    return out


def test_what_is_left_is_attacked(
    trained: Any, locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = lock_less(locked, tmp_path / "few", "blocks=1")
    words = ["--key", locked.key, "--images", trained.data, "--base", locked.export]
    assert audit(few, *words, "--out", tmp_path / "1") == 0
    printed = capsys.readouterr().out
    assert "16 residual channels; the first block withheld" in printed
    written = json.loads((tmp_path / "1" / "audit.json").read_text())
    assert [(a["attacker"], a["size"]) for a in written["attacks"]] == [
        ("no-base", 16),
        ("images", 16),
        ("public-base", 16),
    ]
    assert written["attacks"][2]["right"] == 16  # the second block alone gives the key to who has the base
    assert "first block withheld" in (tmp_path / "1" / "audit.html").read_text()
    assert audit(few, "--base", locked.export, "--attacks", "public-base") == 0  # which also proves it
    assert "at most 0 bits" in capsys.readouterr().out

    blind = lock_less(locked, tmp_path / "blind", "embedding", "--seal")
    capsys.readouterr()
    assert audit(blind, "--key", locked.key, "--images", trained.data, "--out", tmp_path / "2") == 0
    printed = capsys.readouterr().out
    assert "the embedding withheld" in printed
    assert "The attacker `images` cannot start, because the embedding is withheld." in printed
    written = json.loads((tmp_path / "2" / "audit.json").read_text())
    assert [a["attacker"] for a in written["attacks"]] == ["no-base"]
    assert written["strength_bits"] is None  # whoever has the base was not tried, and opens it
    assert "public-base (the model that was locked)" in printed and "bits." not in printed
    assert audit(blind, "--key", locked.key, "--base", locked.export) == 0
    assert "16 of 16" in (printed := capsys.readouterr().out) and "at most 0 bits" in printed
    assert audit(blind, "--key", locked.key, "--images", trained.data, "--attacks", "images") == 0
    printed = capsys.readouterr().out
    assert "No attack was run, so no strength can be given." in printed and "bits." not in printed
    assert audit(few, "--key", locked.key, "--data", trained.data) == 2
    assert "parts of the model are withheld" in capsys.readouterr().err
    assert audit(few, "--base", locked.export, "--drift", "1") == 2
    assert (
        "applies only to the attacker drifted-base, which is not chosen (--drift, --attacks)" in capsys.readouterr().err
    )


def spoil(folder: Path, out: Path) -> Path:
    """A copy of a model whose last tensor holds a NaN."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    state = load_file(out / "model.safetensors")
    name = max(state)
    state[name].view(-1)[0] = torch.nan
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_weights_that_are_no_numbers_are_one_sentence(
    locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, base = spoil(locked.plain, tmp_path / "lock"), spoil(locked.export, tmp_path / "base")
    for words, said in (([lock], f"{lock}: "), ([locked.plain, "--base", base], f"base={base}: ")):
        assert audit(*words) == 2
        printed = capsys.readouterr()
        assert said in printed.err and "contains NaN or infinite numbers" in printed.err
        assert printed.err.count("\n") == 1 and printed.out == ""


def test_mistakes_are_one_sentence(
    trained: Any, locked: Locked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = tmp_path / "sealed"
    assert main(["lock", str(locked.export), "--key", str(locked.key), "--out", str(sealed), "--seal"]) == 0
    capsys.readouterr()
    for words, said in (
        ([locked.plain, "--attacks", "guess"], "guess"),
        ([locked.plain, "--attacks", "public-base"], "(--base)"),
        ([locked.plain, "--attacks", "labels"], "(--data)"),
        ([locked.plain, "--base", "vit_tiny_patch16_224"], "(--base)"),
        ([locked.plain, "--base", locked.export, "--drift", -1], "drift[0]=-1: must be >= 0 (--drift)"),
        ([locked.plain, "--k", 0], "(--k)"),
        ([locked.plain, "--attacks", "images"], "needs unlabelled images or texts (--images, --texts)"),
        ([locked.plain, "--images", "x", "--texts", "y"], "give images or texts"),
        ([locked.plain, "--images", trained.data, "--count", 0], "(--count)"),
        ([locked.export], "holds no manifest.json"),
        ([sealed], "is sealed"),
    ):
        assert audit(*words) == 2, words
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
