"""Split training over a real socket with certificates: local training to the bit, whatever is cut or killed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from served import CONFIG, Proxy, Serving, serving, steps

from situs.errors import SitusError
from situs.locks import lock, new_key
from situs.locks.owner import unlocking
from situs.measure.accuracy import evaluate_accuracy
from situs.measure.hooks import validation_hooks
from situs.models import open_model
from situs.models.export import export_run
from situs.models.start import starting
from situs.progress import notes_to
from situs.split import run
from situs.split.hiding import Hide, read_hiding
from situs.split.message import Message, RefusedError
from situs.split.run import SplitFolder, train_split
from situs.split.serving import make_server
from situs.split.transport.certificates import make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.transport.serve import LOG
from situs.split.whole import merge, open_split, session_folder
from situs.train.assemble import Setup, make_method
from situs.train.checkpoint import RunFolder, folder
from situs.train.run import train_run


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    out = tmp_path_factory.mktemp("certs")
    make_certificates(out, clients=("client", "other"))
    return out


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The run that every other one is held against: trained here alone."""
    out = tmp_path_factory.mktemp("local") / "run"
    train_run(CONFIG, out=out, device="cpu", quiet=True)
    return out


def same(a, b, names=("model", "optimizer", "ema", "generators")) -> bool:
    one, two = RunFolder.open(a).newest(), RunFolder.open(b).newest()
    assert one.step == two.step
    for name in names:
        left, right = one.tensors(name), two.tensors(name)
        assert left.keys() == right.keys() and left
        if not all(torch.equal(left[each], right[each]) for each in left):
            return False
    return True


def test_split_over_tls_and_merged_is_the_local_run_to_the_bit(tmp_path, certs, local) -> None:
    pair = [read_credentials(certs, name) for name in ("server", "client")]
    with serving(tmp_path / "server", pair[0]) as server, Connection(server.address, pair[1]) as call:
        result = train_split(CONFIG, call, out=tmp_path / "split", device="cpu", quiet=True)
        assert (result.step, result.interrupted) == (10, False)
        assert result.metrics["loss"] == RunFolder.open(local).records()[-1]["loss"]
        assert server.server.sessions == {}  # it has said goodbye
        assert merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole") == 10
        images = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), open_split(tmp_path / "split", call) as model:
            seen = model.backbone(images)
            with pytest.raises(SitusError, match="is using this folder"):  # it would send a training back
                train_split(steps(12), call, resume=tmp_path / "split", device="cpu", quiet=True)
            assert len(server.server.sessions) == 1
        assert server.server.sessions == {}  # its place is free again
        meanwhile = pytest.raises(SitusError, match="the server restarted meanwhile")
        with meanwhile, torch.no_grad(), open_split(tmp_path / "split", call) as model:
            server.server.sessions.clear()
            model.backbone(images)
        assert 0 < call.served < call.waited
    assert same(tmp_path / "whole", local)
    assert RunFolder.open(tmp_path / "whole").records()[-1]["loss"] == result.metrics["loss"]
    with torch.no_grad():
        assert torch.equal(seen, open_model(tmp_path / "whole").backbone(images))
    assert export_run(tmp_path / "whole", tmp_path / "export").step == 10
    train_run(steps(11), resume=tmp_path / "whole", device="cpu", quiet=True)  # and it goes on here as it is


def test_a_locked_backbone_is_trained_by_a_server_without_the_key(tmp_path, certs, local) -> None:
    """The server has the locked folder, the client its key; what is merged is what training the clear model gives."""
    key = new_key(tmp_path / "owner.key")
    export_run(local, tmp_path / "export")
    locked = tmp_path / "locked"
    lock(tmp_path / "export", key, locked)
    config = replace(steps(2), init=str(locked))
    hide = Hide(("rows", "columns"))
    pair = [read_credentials(certs, name) for name in ("server", "client")]
    with serving(tmp_path / "server", pair[0], config) as server, Connection(server.address, pair[1]) as call:
        start = starting(unlocking(key))
        with pytest.raises(SitusError, match="come from other weights"):
            train_split(config, call, out=tmp_path / "clear", key=key, start=start, device="cpu", quiet=True)
        train_split(config, call, hide, out=tmp_path / "split", key=key, start=start, device="cpu", quiet=True)
    merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole", key=key)
    train_run(
        replace(config, init=str(tmp_path / "export")),
        Setup(starting()),
        out=tmp_path / "alone",
        device="cpu",
        quiet=True,
    )
    one, two = (RunFolder.open(tmp_path / name).newest().tensors("model") for name in ("whole", "alone"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-5
    with pytest.raises(SitusError, match=r"does not contain the key .* of its training"):
        merge(tmp_path / "split", tmp_path / "server", tmp_path / "no")
    with pytest.raises(SitusError, match=r"the blocks of .* are not locked"):
        train_split(
            replace(CONFIG, init=str(tmp_path / "export")), None, hide, out=tmp_path / "no", device="cpu", quiet=True
        )


class Hurting:
    """A call through which questions come twice, and old ones again."""

    def __init__(self, call, rng: random.Random) -> None:
        self.call, self.rng, self.old, self.twice = call, rng, [], 0

    def __call__(self, message: Message, expected):
        if self.rng.random() < 0.3:
            self.twice += 1
            self.call(message, expected)
        if self.old and self.rng.random() < 0.2:
            self.twice += 1
            with_old, wanted = self.rng.choice(self.old)
            with contextlib.suppress(SitusError):  # refused: its step is over
                self.call(with_old, wanted)
        self.old = [*self.old[-3:], (message, expected)] if message.kind in ("forward", "backward") else self.old
        return self.call(message, expected)


def train_through_faults(tmp_path, certs, count: int, seed: int, config) -> dict[str, int]:
    """Trains while faults are injected until `count` of them were; gives how many of each kind."""
    kinds = ("cut", "slow", "server", "client")
    rng, done = random.Random(seed), dict.fromkeys((*kinds, "twice"), 0)
    server = Serving(tmp_path / "server", read_credentials(certs, "server"))
    proxy = Proxy(server, seed)
    credentials = read_credentials(certs, "client")

    class KilledError(Exception):
        """The client dies here."""

    def fault(kind: str) -> None:
        done[kind] += 1
        if kind == "cut":
            proxy.cut_after = rng.randrange(1, 20_000)
        elif kind == "slow":
            proxy.slow = 0.002
        elif kind == "server":  # what it held in memory is gone
            server.close()
            server.start()
        elif kind == "client":
            raise KilledError

    def hurt(call):
        hurting = Hurting(call, rng)

        def ask(message, expected):
            proxy.slow = 0.0
            if sum(done.values()) < count and message.kind in ("forward", "backward", "save") and rng.random() < 0.8:
                fault(("cut", "slow", "server", "cut", "client")[sum(done[k] for k in kinds) % 5])
            before = hurting.twice
            try:
                return hurting(message, expected)
            finally:
                done["twice"] += hurting.twice - before

        return ask

    out, attempt = tmp_path / "split", {}
    try:
        while True:
            with Connection(proxy.address, credentials, patience=60) as call:
                attempt = {"resume": out} if (out / "config.json").exists() else {"out": out}
                try:
                    train_split(config, hurt(call), **attempt, device="cpu", quiet=True)
                    return {**done, "really cut": proxy.cuts}
                except KilledError:
                    continue
    finally:
        proxy.close()
        server.close()


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_faults_lose_and_double_no_step(tmp_path, certs, local, count) -> None:
    seed = int(os.environ.get("SITUS_SEED", "1"))
    config = CONFIG if count == 20 else steps(40)
    done = train_through_faults(tmp_path, certs, count, seed, config)
    print(f"{sum(done.values()) - done['really cut']} faults, seed {seed}: {done}")
    assert sum(done.values()) - done["really cut"] >= count
    assert min(done.values()) > 0
    merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole")
    if count > 20:
        local = tmp_path / "local"
        train_run(config, out=local, device="cpu", quiet=True)
    assert same(tmp_path / "whole", local)
    logged, alone = (RunFolder.open(each).records() for each in (tmp_path / "whole", local))
    assert [(r["step"], r["loss"]) for r in logged] == [(r["step"], r["loss"]) for r in alone]


@pytest.mark.slow
def test_cuts_with_three_questions_under_way_lose_nothing(tmp_path, certs) -> None:
    """Micro-batches one behind the other, the connection cut every so many bytes: local training's bits."""
    config = replace(CONFIG, train=replace(CONFIG.train, max_steps=6, accumulate=4))
    train_run(config, out=tmp_path / "local", device="cpu", quiet=True)
    pair = [read_credentials(certs, name) for name in ("server", "client")]
    with serving(tmp_path / "server", pair[0]) as server:
        proxy = Proxy(server, 7)
        try:
            with Connection(proxy.address, pair[1], patience=60) as call:

                def submit(message, expected, really=call.submit):
                    if message.kind in ("forward", "backward") and proxy.cut_after is None and proxy.cuts < 10:
                        proxy.cut_after = proxy.random.randrange(1, 15_000)
                    return really(message, expected)

                call.submit = submit
                train_split(config, call, out=tmp_path / "split", device="cpu", quiet=True)
        finally:
            proxy.close()
    print(f"{proxy.cuts} cuts, {call.again} questions asked again")
    assert proxy.cuts >= 5 and call.again >= proxy.cuts
    merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "local")


@pytest.mark.slow
def test_the_val_split_is_looked_at_through_the_server_and_disturbs_nothing(tmp_path) -> None:
    """With the mean of both sides' weights, between two steps of which the server has not heard the end yet."""
    config = replace(steps(5), data=replace(CONFIG.data, count=8, batch=2), probe_every=1)
    with serving(tmp_path / "server", None, config) as server, Connection(server.address, None) as call:
        train_split(config, call, out=tmp_path / "split", device="cpu", quiet=True)
    train_run(config, Setup(hooks=validation_hooks(1)), out=tmp_path / "local", device="cpu", quiet=True)
    merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "local")
    records = [RunFolder.open(tmp_path / name).records() for name in ("whole", "local")]
    looks = [[record["val_top1"] for record in each if "val_top1" in record] for each in records]
    assert looks[0] == looks[1] and looks[0]


def test_any_number_of_classes_stays_with_the_client_and_equals_local_training(tmp_path) -> None:
    """The loss and the labels are the client's: the server, which knows of neither, trains the same blocks."""
    generator = torch.Generator().manual_seed(0)
    rows = ["file,labels"]
    for split in ("train", "val"):
        (tmp_path / "set" / split).mkdir(parents=True)
        for number, values in enumerate(torch.randint(256, (8, 28, 28), generator=generator, dtype=torch.uint8)):
            Image.fromarray(values.numpy()).save(tmp_path / "set" / split / f"{number}.png")
            rows.append(f"{split}/{number}.png,{('nan', '', 'a;c', 'b')[number % 4]}")
    (tmp_path / "set" / "labels.csv").write_text("\n".join(rows))
    data = replace(CONFIG.data, path=str(tmp_path / "set"), multi_label=True, count=None)
    config = replace(steps(3), data=data, backbone=replace(CONFIG.backbone, num_classes=3), probe_every=1)
    with serving(tmp_path / "server", None, config) as server, Connection(server.address, None) as call:
        train_split(config, call, out=tmp_path / "split", device="cpu", quiet=True)
        with open_split(tmp_path / "split", call) as model:
            seen = evaluate_accuracy(model)
    train_run(config, Setup(hooks=validation_hooks(1)), out=tmp_path / "local", device="cpu", quiet=True)
    merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "local")
    looks = [
        [r["val_map"] for r in RunFolder.open(tmp_path / n).records() if "val_map" in r] for n in ("whole", "local")
    ]
    assert looks[0] == looks[1] and looks[0]
    assert seen.scores == evaluate_accuracy(tmp_path / "local").scores
    assert open_model(tmp_path / "whole").multi_label
    unknown = "\n".join(f"{row.partition(',')[0]},nan" if at and row.startswith("train") else row
                        for at, row in enumerate(rows))  # fmt: skip
    (tmp_path / "set" / "labels.csv").write_text(unknown)
    for train in (
        lambda: train_run(config, out=tmp_path / "no"),
        lambda: train_split(config, call, out=tmp_path / "no"),
    ):
        with pytest.raises(SitusError, match=r"none of the 8 images of set \(train\) has a known label") as caught:
            train()
        assert caught.value.field == "data"
    assert not (tmp_path / "no").exists()


def test_a_disk_that_is_full_at_either_side_loses_nothing(tmp_path, local, monkeypatch) -> None:
    out, really = tmp_path / "split", folder.write_checkpoint

    def side_of(path) -> str:
        return "server" if tmp_path / "server" in path.parents else "client"

    with serving(tmp_path / "server") as server, Connection(server.address, None) as call:
        for side in ("server", "client"):

            def full(final, *_, side=side, **__):
                if side_of(final) == side and final.name == "step-00000004":
                    raise OSError(28, "No space left on device")
                return really(final, *_, **__)

            where = {"resume": out} if out.exists() else {"out": out}
            with monkeypatch.context() as patch:
                patch.setattr(folder, "write_checkpoint", full)
                with pytest.raises(SitusError, match="log says why" if side == "server" else "no space left") as told:
                    train_split(CONFIG, call, **where, device="cpu", quiet=True)
            assert str(tmp_path / "server") not in str(told.value)
        train_split(CONFIG, call, resume=out, device="cpu", quiet=True)
    merge(out, tmp_path / "server", tmp_path / "whole")
    assert same(tmp_path / "whole", local)
    assert "no space left" in (tmp_path / "server" / LOG).read_text()


def test_a_server_that_is_gone_for_good_ends_the_run_in_one_sentence_and_loses_nothing(tmp_path, certs, local) -> None:
    out = tmp_path / "split"
    pair = [read_credentials(certs, name) for name in ("server", "client")]
    with serving(tmp_path / "server", pair[0]) as server:
        with Connection(server.address, pair[1], patience=0.3) as call:

            def ask(message, expected):
                if message.kind == "backward" and message.facts["step"] == 5:
                    server.close()
                return call(message, expected)

            said = r"no answer for \d+ s: nothing listens there any more; .* to continue, resume this run"
            with pytest.raises(SitusError, match=said) as told:
                train_split(CONFIG, ask, out=out, device="cpu", quiet=True)
            assert told.value.field == "server" and str(out) in str(told.value)
        server.start()
        with Connection(server.address, pair[1]) as call:
            train_split(CONFIG, call, resume=out, device="cpu", quiet=True)
    merge(out, tmp_path / "server", tmp_path / "whole")
    assert same(tmp_path / "whole", local)


def test_what_a_split_training_refuses(tmp_path) -> None:
    from situs.methods.mae import MAEConfig
    from situs.train.private import DpConfig
    from situs.train.tuning import TuningConfig

    for config, reason in (
        (replace(CONFIG, method=MAEConfig()), "must be one of supervised, language"),
        (steps(2, precision="fp16"), "fp16"),
        (replace(CONFIG, dp=DpConfig(noise=1.0)), "dp: leave this field out"),
        (replace(CONFIG, tuning=TuningConfig("head")), "tuning.parts: leave this field out"),
    ):
        with pytest.raises(SitusError, match=reason):
            train_split(config, None, out=tmp_path / "no", device="cpu")
    with pytest.raises(SitusError, match="give either a new folder or a run to resume"):
        train_split(CONFIG, None)
    assert not (tmp_path / "no").exists()


def test_one_process_is_the_client(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("situs.split.run.distributed.world", lambda: 2)
    with pytest.raises(SitusError, match="split training runs in one process, but torchrun has started several"):
        train_split(CONFIG, None, out=tmp_path / "no", device="cpu")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("done", [0, 1])
def test_a_server_that_starts_anew_again_and_again_is_left(tmp_path, monkeypatch, done: int) -> None:
    monkeypatch.setattr(run, "MAX_REWINDS", 2)
    server, kinds = make_server(steps(3), tmp_path / "server", device="cpu"), []

    def call(message, _):
        kinds.append(message.kind)
        if message.kind == "forward" and message.facts["step"] == done:
            raise RefusedError("the session has been restarted", "anew")
        return server.answer("me", message)

    said = "went back to a checkpoint 2 times without completing a step; the last error: the session has"
    with pytest.raises(SitusError, match=said):
        train_split(steps(3, save_every=1), call, out=tmp_path / "split", device="cpu", quiet=True)
    assert kinds.count("hello") == 3


def test_a_server_that_starts_anew_once_a_step_costs_no_patience(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "MAX_REWINDS", 1)
    config, lost = steps(3, save_every=1), set()
    server = make_server(config, tmp_path / "server", device="cpu")

    def call(message, _):
        if message.kind == "forward" and (step := message.facts["step"]) not in lost:
            lost.add(step)
            raise RefusedError("the session has been restarted", "anew")
        return server.answer("me", message)

    lines: list[str] = []
    with notes_to(lines.append):
        train_split(config, call, out=tmp_path / "split", device="cpu", quiet=True)
    assert len(lost) == RunFolder.open(tmp_path / "split").newest().step == 3
    again = "both continue from their newest common checkpoint"
    assert lines[-3:] == [f"the server restarted at step {step}: {again}" for step in range(3)]


def test_a_training_goes_on_from_the_servers_step(tmp_path) -> None:
    config = steps(3, save_every=1)
    server = make_server(config, tmp_path / "server", device="cpu")
    train_split(config, lambda m, _: server.answer("me", m), out=tmp_path / "split", device="cpu", quiet=True)
    have = sorted(RunFolder.open(tmp_path / "split").steps())
    assert have == [2, 3]
    for limit in (0, 2, 3):
        folder = SplitFolder.open(tmp_path / "split")
        folder.limit = limit
        assert (folder.start.step if folder.start else None) == (limit or None)


def test_a_checkpoint_that_disappears_is_missed(tmp_path) -> None:
    folder = SplitFolder.create(tmp_path / "run", {})
    folder.limit = 3
    with pytest.raises(SitusError, match="the checkpoint of step 3 has disappeared"):
        _ = folder.start
    folder.limit = 0
    assert folder.start is None


# --- both parts together --------------------------------------------------------------------------------------------


def parts(out, *, shared: bool = False, count: int = 4):
    """A client's run and its server's folder, after so many steps with a checkpoint every second."""
    config = steps(count)
    server = make_server(config, out / "server", shared=shared, device="cpu")
    call = lambda message, _: server.answer("me", message)  # noqa: E731
    train_split(config, call, out=out / "split", device="cpu", quiet=True)
    return out / "split", out / "server", call


def test_blocks_that_clients_share_are_joined_as_they_are_now(tmp_path) -> None:
    one, server, _ = parts(tmp_path, shared=True)
    assert merge(one, server, tmp_path / "whole") == 4
    whole, blocks = RunFolder.open(tmp_path / "whole").newest(), RunFolder.open(server / "shared").newest()
    for file in ("model", "optimizer"):
        joined, mine = whole.tensors(file), RunFolder.open(one).newest().tensors(file)
        theirs = blocks.tensors(file)
        assert joined.keys() == mine.keys() | theirs.keys() and not mine.keys() & theirs.keys()
        assert all(torch.equal(joined[name], value) for part in (mine, theirs) for name, value in part.items())
    assert RunFolder.open(tmp_path / "whole").records() == RunFolder.open(one).records() != []
    RunFolder.open(one).metrics.unlink()  # a run without its log is joined all the same
    assert merge(one, server, tmp_path / "unlogged") == 4
    assert not RunFolder.open(tmp_path / "unlogged").metrics.exists()


def test_parts_without_a_common_checkpoint_are_not_joined(tmp_path) -> None:
    one, server, _ = parts(tmp_path)
    theirs = session_folder(server, read_hiding(one).session).path / "checkpoints"
    assert sorted(path.name[-1] for path in theirs.iterdir()) == ["2", "4"]
    shutil.rmtree(theirs / "step-00000004")
    assert merge(one, server, tmp_path / "older") == 2  # the newest that both have
    shutil.rmtree(theirs / "step-00000002")
    said = "no checkpoint in common: the client has the steps 2, 4, and the server has none"
    with pytest.raises(SitusError, match=said):
        merge(one, server, tmp_path / "whole")
    with pytest.raises(SitusError, match=f"{tmp_path}: contains no blocks of the session {read_hiding(one).session}"):
        merge(one, tmp_path, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_server_of_another_folder_has_no_checkpoint_of_a_run(tmp_path) -> None:
    one, *_ = parts(tmp_path)
    fresh = make_server(steps(4), tmp_path / "fresh", device="cpu")
    with (
        pytest.raises(SitusError, match=f"{one}: the server and this run have no checkpoint in common"),
        open_split(one, lambda message, _: fresh.answer("me", message)),
    ):
        pass


def test_blocks_are_not_served_in_half_precision_or_from_what_does_not_fit(tmp_path) -> None:
    lines: list[str] = []

    def served(**fields):
        return make_server(replace(CONFIG, **fields), tmp_path / "server", device="cpu", say=lines.append)

    with pytest.raises(SitusError, match="precision='fp16'") as told:
        served(train=replace(CONFIG.train, precision="fp16"))
    assert told.value.field == "train.precision"
    key = new_key(tmp_path / "key")
    train_run(steps(1), out=tmp_path / "run", device="cpu", quiet=True)
    export_run(tmp_path / "run", tmp_path / "export")
    kept = lock(tmp_path / "export", key, tmp_path / "kept", withhold=["blocks=1"]).path
    with pytest.raises(
        SitusError, match=rf"{kept}: the lock withholds the tensor model\.blocks\.0\..*incomplete"
    ) as told:
        served(init=str(kept))
    assert told.value.field == "init"
    whole = lock(tmp_path / "export", key, tmp_path / "whole", withhold=["embedding"]).path
    lines.clear()
    assert served(init=str(whole)).digest != served().digest
    name = f"the blocks of {make_method(CONFIG, ['a']).backbone.name} are new (random weights from seed 0)"
    assert lines == [f"the blocks are those of {whole}, locked", name]
    lines.clear()
    served(init=str(tmp_path / "export"))
    assert lines and str(tmp_path / "export") in lines[0]
    for shape in ({"depth": 3}, {"embed_dim": 32}):
        wide = replace(CONFIG.backbone, model_args={"depth": 2, "embed_dim": 16, "num_heads": 2} | shape)
        with pytest.raises(
            SitusError, match=rf"{whole}: does not fit vit_.*: model\.blocks\..* is missing or has"
        ) as told:
            served(init=str(whole), backbone=wide)
        assert told.value.field == "init"
