"""Fine-tuning locked models of words: with the key it is the training of the open model, in float64, step by step."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import write_plain, write_set
from tiny_texts import write_folder

from situs.data.loader import make_loader
from situs.data.text import Columns
from situs.errors import SitusError
from situs.locks.groups import invert_keys, permute_state, random_keys, residual_only
from situs.locks.tuning.finetune import audit_tuning, make_way, run_ways
from situs.locks.tuning.result import WAYS, TuningConfig
from situs.locks.tuning.start import Pretrained, from_model
from situs.train.run import make_method

pytest.importorskip("transformers")

THEFT = 5
"""Steps that show that training without the key is another one."""

SHORT = TuningConfig(count=24, test=12, epochs=50, batch=6, lr=1e-3, looks=2)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("locked-texts")
    made = {kind: write_folder(base / kind, kind, width=16, seed=5) for kind in ("bert", "gpt2")}
    return {**made, "sentences": write_set(base / "set"), "words": write_plain(base / "plain", 200)}


def start(places: dict[str, Path], kind: str, config: TuningConfig) -> Pretrained:
    words = config.method == "language"
    return from_model(places[kind], str(places["words" if words else "sentences"]), None, config)


def two_trainings(begun: Pretrained, steps: int, batch: int = 6) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """Losses of each step and last weights (in the clear order), by way, in float64 and with the method's own loss."""
    config, classes = replace(begun.config, data=replace(begun.config.data, batch=batch)), begun.train.classes
    groups = residual_only(make_method(config, classes).backbone.groups())
    keys = random_keys(groups, torch.Generator().manual_seed(3))
    batches = list(make_loader(config.data, config.augment, source=begun.train))
    assert any(batch.mask is not None and not batch.mask.all() for batch in batches)
    found = {}
    for way in WAYS[:3]:
        method = make_way(way, config, classes, begun.state, groups, keys).double().train()
        optimiser, losses = torch.optim.AdamW(method.parameters(), lr=1e-3, weight_decay=0.05), []
        for each in islice(cycle(batches), steps if way != "unauthorised" else THEFT):
            loss = method(each, {}).loss
            assert loss.dtype == torch.float64
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss))
        state = method.backbone.model.state_dict()
        found[way] = losses, state if way == "normal" else permute_state(state, groups, invert_keys(keys))
    return found


def check_equal(found: dict[str, tuple[list[float], dict[str, Any]]]) -> None:
    (losses, open_state), (same, back), (stolen, _) = found.values()
    assert max(abs(a - b) for a, b in zip(losses, same, strict=True)) <= 1e-9
    assert min(losses) < losses[0] - 0.05  # it learned
    assert max(abs(a - b) for a, b in zip(losses[:THEFT], stolen, strict=True)) > 1e-2
    for name in back:
        assert torch.allclose(open_state[name], back[name], atol=1e-8, rtol=0), name


@pytest.mark.parametrize(("kind", "method"), [("bert", "supervised"), ("gpt2", "language")])
def test_with_the_key_every_step_is_that_of_the_open_model(places: dict[str, Path], kind: str, method: Any) -> None:
    # A Llama's norms are taken in float32 whatever its weights are (transformers), so that it is equal to 1e-6 alone.
    config = replace(SHORT, method=method, **({"longest": 12, "count": 16} if method == "language" else {}))
    check_equal(two_trainings(start(places, kind, config), 50 if kind == "bert" else 12))


@pytest.mark.slow
@pytest.mark.shared_data
def test_with_the_key_every_step_of_minilm_is_that_of_the_open_model(shared_data: Path) -> None:
    folder = os.environ.get("SITUS_MINILM")
    if folder is None:
        pytest.skip("SITUS_MINILM names no folder of all-MiniLM-L6-v2")
    config = replace(SHORT, count=12, longest=16)
    check_equal(two_trainings(from_model(folder, str(shared_data / "text"), None, config), 50, batch=3))


def test_only_what_the_folder_lacks_is_new(places: dict[str, Path]) -> None:
    from safetensors.torch import load_file

    held = load_file(places["bert"] / "model.safetensors")
    begun = start(places, "bert", SHORT)
    assert {name for name in held if name not in begun.state} <= {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(begun.state[name], held[name]) for name in begun.state)
    words = start(places, "gpt2", replace(SHORT, method="language", longest=12))
    assert torch.equal(words.state["lm_head.weight"], words.state["transformer.wte.weight"])
    scratch = make_way("from scratch", words.config, None, words.state, (), {}).backbone.model.state_dict()
    assert not torch.allclose(
        scratch["transformer.h.0.mlp.c_fc.weight"], words.state["transformer.h.0.mlp.c_fc.weight"]
    )


def test_the_study_of_a_language_model(places: dict[str, Path], tmp_path: Path) -> None:
    config = replace(SHORT, method="language", count=12, steps=4, thief_lr=(1e-2,), longest=12)
    found = run_ways(start(places, "gpt2", config), config, tmp_path)
    assert found.curves["normal"].steps == [0, 2, 4] and found.curves["normal"].lr is None
    assert found.curves["unauthorised"].lr in (1e-3, 1e-2)
    opened, owner, thief = list(found.served.values())[1:]
    assert opened == found.served["open"]  # the very bits
    assert owner.loss == pytest.approx(opened.loss, rel=1e-5) and abs(thief.loss - opened.loss) > 1e-3
    assert found.served["open"].loss == pytest.approx(found.curves["normal"].loss[-1], rel=1e-6)
    assert opened.perplexity == pytest.approx(math.exp(opened.loss))
    written = found.numbers()
    assert written["last"]["normal"]["perplexity"] == pytest.approx(opened.perplexity, rel=1e-5)
    assert "blocks" in found.about and "4 updates" in found.about and "perplexity" in found.summary().tables[0].header


def test_a_rate_twice_or_far_too_high_does_not_end_the_study(places: dict[str, Path], tmp_path: Path) -> None:
    config, said = replace(SHORT, count=12, test=4, epochs=1, looks=1, thief_lr=(1e-3, 1e30)), list[str]()
    found = run_ways(start(places, "bert", config), config, tmp_path, said.append)
    assert [curve.lr for curve in found.tries["unauthorised"]] == [1e-3, 1e30]
    assert found.curves["unauthorised"].lr == 1e-3 and found.curves["unauthorised"].steps == [0, 2]
    assert any(line.startswith("unauthorised: broke off at a rate of 1e+30") for line in said)
    config = replace(config, lr=1e30, thief_lr=())
    with pytest.raises(SitusError, match="not finite"):
        run_ways(start(places, "bert", config), config, tmp_path / "all")


def test_a_test_set_that_is_tuned_on_is_told(places: dict[str, Path]) -> None:
    train = str(places["sentences"] / "train.jsonl")
    assert start(places, "bert", SHORT).notes == ()
    [note] = from_model(places["bert"], train, train, SHORT).notes
    assert note.startswith("12 of the 12 sentences of the test set are among those tuned on")


def test_columns_of_other_names(places: dict[str, Path], tmp_path: Path) -> None:
    """In the study and in the audit of the lock; what is read is the set under its usual names."""
    from situs.locks import audit_lock, lock, new_key
    from situs.locks.attacks import LockAuditConfig

    for file in places["sentences"].glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        other = [{"id": "w9", "review": row["sentence"], "stars": row["label"]} for row in rows]
        (tmp_path / file.name).write_text("\n".join(map(json.dumps, other)))
    columns = Columns(column="review", label="stars")
    usual, named = (
        from_model(places["bert"], str(where), None, replace(SHORT, text=own))
        for where, own in ((places["sentences"], Columns()), (tmp_path, columns))
    )
    for a, b in ((usual.train, named.train), (usual.test, named.test)):
        assert [a.key(n) for n in range(len(a))] == [b.key(n) for n in range(len(b))]
        assert [a.label(n) for n in range(len(a))] == [b.label(n) for n in range(len(b))]
    with pytest.raises(SitusError, match="several columns hold words, id, review") as stop:
        from_model(places["bert"], str(tmp_path), None, SHORT)
    assert stop.value.field == "text.column"
    lock(places["bert"], key := new_key(tmp_path / "owner.key"), tmp_path / "locked")
    asked = {"key": key, "attacker": "no-base"}
    found = [
        audit_lock(tmp_path / "locked", data=where, config=LockAuditConfig(test=12, text=own), **asked)
        for where, own in ((places["sentences"], Columns()), (tmp_path, columns))
    ]
    assert found[0].attacks[0].owner == found[1].attacks[0].owner is not None
    assert re.fullmatch(
        r"the locked file and the \d+ of \d+ samples that have one length, labels unread", found[0].attacks[0].cost
    )


def test_mistakes(places: dict[str, Path]) -> None:
    with pytest.raises(SitusError, match="brings no data"):
        audit_tuning(places["bert"])
    with pytest.raises(SitusError, match="has no head for the next word"):
        from_model(places["bert"], str(places["words"]), None, replace(SHORT, method="language", longest=12))
    whole = next(places["sentences"].glob("train*"))
    with pytest.raises(SitusError, match="has no split of its own to measure the curves on") as stop:
        from_model(places["bert"], str(whole), None, SHORT)
    assert stop.value.field == "test_data"
