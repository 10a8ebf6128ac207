"""The server without a network: every step once, its own client's alone, and nothing that is said is believed."""

from __future__ import annotations

import random
import resource

import pytest
import torch
from wired import SESSION, Loader, Pair, vit

from situs.backbones.base import Backbone
from situs.split.client import Client, Flight, RewoundError
from situs.split.message import CHUNK, Message, RefusedError, encode
from situs.split.parts import layout
from situs.split.server import Limits
from situs.split.session import MOST_STEPS


@pytest.fixture
def pair(tmp_path) -> Pair:
    made = Pair(vit, tmp_path)
    made.client.hello(*made.facts, [])
    return made


def features(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 17, 16, generator=torch.Generator().manual_seed(0))


def flown(client: Client) -> Flight:
    """Features of one micro-batch that went through the blocks."""
    flight = client.forward(features(), None, (2, 17, 16))
    client.output(flight)
    return flight


def facts(pair: Pair, step: int = 0, part: int = 0, **more):
    return {"session": SESSION, "incarnation": pair.client._incarnation, "step": step, "part": part, **more}


def commit(step: int = 0, rate: float = 0.1):
    return {"commit": {"step": step, "rate": rate, "fine": True}}


def test_a_step_is_done_once_and_a_repeated_question_gets_its_answer(pair) -> None:
    server = pair.server
    forward = Message("forward", facts(pair), {"z": features()})
    first = server.answer("me", forward)
    assert server.answer("me", forward) is first
    backward = Message("backward", facts(pair, last=True), {"gradient": features()})
    answer = server.answer("me", backward)
    assert server.answer("me", backward) is answer and (answer.tensors["norms"] > 0).all()
    follow = Message("forward", facts(pair, 1, **commit()), {"z": features(), "share": torch.tensor(0.5)})
    blocks = server.sessions[SESSION].blocks
    before = [p.clone() for p in blocks.parameters]
    server.answer("me", follow)
    moved = [p.clone() for p in blocks.parameters]
    assert any(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))
    server.answer("me", follow)
    assert all(torch.equal(a, p) for a, p in zip(moved, blocks.parameters, strict=True)) and blocks.updates == 1


def test_what_is_not_next_is_refused(pair) -> None:
    server = pair.server

    def refused(kind, reason, tensors, **given):
        with pytest.raises(RefusedError, match=reason):
            server.answer("me", Message(kind, facts(pair, **given), tensors))

    z, share = {"z": features()}, {"share": torch.tensor(1.0)}
    refused("forward", "at step 0", z, step=1)
    refused("forward", "at step 0", z, part=1)
    refused("backward", "0 of its 0 parts", {"gradient": features()})
    refused("commit", "0 of its 0 parts", share, **commit())
    refused("save", "at step 0", {}, step=1)
    server.answer("me", Message("forward", facts(pair), z))
    refused("forward", "was sent before with other content", {"z": features() + 1})
    refused("commit", "0 of its 1 parts", share, **commit())
    refused("save", "0 of its 1 parts", {})
    refused("infer", "arrived during step", z)
    refused("backward", "has the shape", {"gradient": features(3)})
    server.answer("me", Message("backward", facts(pair, last=True), {"gradient": features()}))
    for rate in (-1.0, 1e9, "1", None, True):
        expected = "the learning rate" if rate is not True else "at step"
        if rate is not True:
            refused("commit", expected, share, **commit(rate=rate))
    refused("commit", "outside \\[0, 1\\]", {"share": torch.tensor(2.0)}, **commit())
    refused("commit", "clipping factor", {}, **commit())
    refused("forward", "step=-1", z, step=-1)
    refused("forward", "step='0'", z, step="0")


def test_a_client_cannot_make_the_server_hold_more_and_more(pair) -> None:
    def ask(kind, part, name):
        return pair.server.answer("me", Message(kind, facts(pair, part=part), {name: features()}))

    for part in range(2):
        ask("forward", part, "z")
    with pytest.raises(RefusedError, match="2 parts of step 0 already wait"):
        ask("forward", 2, "z")
    for part in range(2, 12):
        ask("backward", part - 2, "gradient")
        ask("forward", part, "z")
    session = pair.server.sessions[SESSION]
    assert len(session.answers) == 4 and len(session.blocks._pending) == 2


def test_a_session_is_its_owners_and_of_one_incarnation(pair) -> None:
    server, hello = pair.server, {"session": SESSION, "layout": pair.facts[0], "training": pair.facts[1], "steps": []}
    with pytest.raises(RefusedError, match="another client"):
        server.answer("eve", Message("forward", facts(pair), {"z": features()}))
    with pytest.raises(RefusedError, match="another client"):
        server.answer("eve", Message("hello", hello))
    with pytest.raises(RefusedError, match="has been restarted"):
        server.answer("me", Message("forward", {**facts(pair), "incarnation": "0"}, {"z": features()}))
    with pytest.raises(RefusedError, match="not open"):
        server.answer("me", Message("forward", {**facts(pair), "session": "0" * 32}, {"z": features()}))
    server.answer("me", Message("bye", facts(pair)))
    with pytest.raises(RefusedError, match="another client"):  # nor from what lies on the disk
        server.answer("eve", Message("hello", hello))
    for name in ("../../etc", "0" * 31, None, 5):
        with pytest.raises(RefusedError, match="32 hexadecimal"):
            server.answer("me", Message("hello", {**hello, "session": name}))


def test_a_hello_names_at_most_a_thousand_checkpoints_by_their_steps(pair) -> None:
    last = MOST_STEPS - 1
    for steps in ([0] * 1000, [last, 0], []):
        assert pair.client.hello(*pair.facts, steps).step == 0
    for steps in ([0] * 1001, [last + 1], [-1], [True], [0.0], "0", None, {}):
        facts = {"session": SESSION, "layout": pair.facts[0], "training": pair.facts[1], "steps": steps}
        with pytest.raises(RefusedError, match="must be the numbers of the client's checkpoints"):
            pair.server.answer("me", Message("hello", facts))


def test_another_model_or_training_is_refused(pair) -> None:
    layout, training = pair.facts
    with pytest.raises(RefusedError, match="this server has vit_tiny"):
        pair.client.hello("0" * 64, training, [])
    with pytest.raises(RefusedError, match=r"optim.clip is 0.5 on the server and 1.0 on the client"):
        pair.client.hello(layout, {**training, "optim.clip": 1.0}, [])
    with pytest.raises(RefusedError, match=r"train\.precision"):
        pair.client.hello(layout, {**training, "train.precision": "bf16"}, [])


def test_the_newest_common_checkpoint_is_gone_back_to(pair) -> None:
    server, client = pair.server, pair.client
    for step in range(5):
        client.begin(step, 0.1)
        flight = flown(client)
        client.backward(flight, features(), 52)
        client.input_gradient(flight)
        client.end_step(torch.tensor(1.0), fine=True)
        if step in (1, 3):
            client.save(step + 1)
    assert sorted(server.sessions[SESSION].folder.steps()) == [2, 4]
    weights = {step: server.sessions[SESSION].folder.whole(step).tensors("model") for step in (2, 4)}
    for steps, expected in (([2, 4], 4), ([2], 2), ([2, 3, 5], 2)):
        assert client.hello(*pair.facts, steps).step == expected
        own = server.sessions[SESSION].blocks.method.state_dict()
        assert all(torch.equal(own[name], value) for name, value in weights[expected].items())
    with pytest.raises(
        RefusedError, match="client and server have no checkpoint in common: the client has the steps 0, 3"
    ):
        client.hello(*pair.facts, [3])
    client.hello(*pair.facts, [4])
    client._incarnation = "of before"
    with pytest.raises(RewoundError):
        client.save(4)


def test_places_are_limited_and_an_idle_training_gives_way(tmp_path) -> None:
    pair = Pair(vit, tmp_path, limits=Limits(clients=1))
    pair.client.hello(*pair.facts, [])
    other = "f" * 32
    pair.client.session = other
    with pytest.raises(RefusedError, match="all 1 sessions are in use"):
        pair.client.hello(*pair.facts, [])
    pair.server.sessions[SESSION].last_message -= 1e6
    pair.client.hello(*pair.facts, [])
    assert list(pair.server.sessions) == [other]
    full = Pair(vit, tmp_path / "full", limits=Limits(kept=1))
    full.client.hello(*full.facts, [])
    full.client.bye()
    full.client.hello(*full.facts, [])  # its own is there
    full.client.session = other
    with pytest.raises(RefusedError, match="already stores 1 trainings"):
        full.client.hello(*full.facts, [])


def test_shared_blocks_take_steps_in_turn(tmp_path) -> None:
    pair = Pair(vit, tmp_path, shared=True, limits=Limits(lease=1000))
    server, one = pair.server, pair.client
    two = Client(pair.call, "f" * 32)
    for client in (one, two):
        client.hello(*pair.facts, [])
    for number in range(2):
        for client in (one, two):
            client.begin(number, 0.1)
            flight = flown(client)
            other = two if client is one else one
            other.begin(number, 0.1)
            with pytest.raises(RefusedError, match="another client's step"):
                flown(other)
            client.backward(flight, features(), 52)
            client.input_gradient(flight)
            client.end_step(torch.tensor(1.0), fine=True)
    assert server.common.updates == 4
    one.begin(2, 0.1)
    flight = flown(one)
    server.sessions[one.session].last_message -= 2000  # it took too long: its step is given up
    two.begin(2, 0.1)
    flown(two)
    one.backward(flight, features(), 52)
    with pytest.raises(RewoundError, match="has been restarted"):
        one.input_gradient(flight)


def test_the_time_that_a_server_computes_is_not_the_clients(tmp_path, monkeypatch) -> None:
    """A step that takes longer than the lease is not taken from the client that waits for it."""
    pair = Pair(vit, tmp_path, shared=True, limits=Limits(lease=5.0))
    one, two = pair.client, Client(pair.call, "f" * 32)
    for client in (one, two):
        client.hello(*pair.facts, [])
        client.begin(0, 0.1)
    clock, really = [1000.0], pair.server.common.forward
    monkeypatch.setattr("situs.split.session.time.monotonic", lambda: clock[0])

    def slow(*args):
        clock[0] += 60.0
        return really(*args)

    monkeypatch.setattr(pair.server.common, "forward", slow)
    flight = flown(one)
    with pytest.raises(RefusedError, match="another client's step"):
        flown(two)
    one.backward(flight, features(), 52)
    assert one.input_gradient(flight).shape == (2, 17, 16)


def test_nobody_looks_at_the_mean_of_shared_blocks_in_the_middle_of_a_step(tmp_path) -> None:
    """For a moment it stands where the weights are, which the step's gradient still needs."""
    pair = Pair(vit, tmp_path, shared=True)
    one, two = pair.client, Client(pair.call, "f" * 32)
    for client in (one, two):
        client.hello(*pair.facts, [])
    one.begin(0, 0.1)
    flight = flown(one)
    two.mean = True
    with pytest.raises(RefusedError, match="another client's step") as refused:
        two.infer(features(), None, (2, 17, 16))
    assert refused.value.code == "busy"  # which a transport waits out
    one.backward(flight, features(), 52)
    one.input_gradient(flight)
    one.end_step(torch.tensor(1.0), fine=True)
    assert two.infer(features(), None, (2, 17, 16)).shape == (2, 17, 16)
    one.begin(1, 0.1)
    flown(one)


def test_a_client_with_many_trainings_gives_way_to_one_with_none(tmp_path) -> None:
    pair = Pair(vit, tmp_path, limits=Limits(clients=3, kept=3))
    layout, training = pair.facts

    def hello(owner: str, number: int) -> None:
        given = {"session": f"{number:032x}", "layout": layout, "training": training, "steps": []}
        pair.server.answer(owner, Message("hello", given))

    lines: list[str] = []
    pair.server.say = lines.append
    for number in range(3):
        hello("eve", number)
    hello("ann", 10)
    most = "its owner has the most sessions (3)"
    assert lines == [f"the session {0:032x} is unloaded for another client, because {most}"]
    assert [each.owner for each in pair.server.sessions.values()] == ["eve", "eve", "ann"]
    for owner, number in (("eve", 0), ("eve", 3), ("ann", 11)):
        with pytest.raises(RefusedError, match=r"sessions are in use|already stores"):
            hello(owner, number)
    pair.server.sessions.clear()
    with pytest.raises(RefusedError, match="already stores 3 trainings"):  # of her own; others' do not count
        hello("eve", 3)
    hello("bob", 20)


def test_shared_blocks_begin_where_their_server_ended(tmp_path) -> None:
    pair = Pair(vit, tmp_path, shared=True)
    pair.client.hello(*pair.facts, [])
    for step in range(2):
        pair.client.begin(step, 0.1)
        flight = flown(pair.client)
        pair.client.backward(flight, features(), 52)
        pair.client.input_gradient(flight)
        pair.client.end_step(torch.tensor(1.0), fine=True)
    pair.client.save(2)
    again, fresh = (Pair(vit, out, shared=True).server.common for out in (tmp_path, tmp_path / "other"))
    assert (again.updates, fresh.updates) == (pair.server.common.updates, 0) == (2, 0)
    ended, started, first = (each.method.state_dict() for each in (pair.server.common, again, fresh))
    assert all(torch.equal(started[name], value) for name, value in ended.items())
    assert not all(torch.equal(first[name], value) for name, value in ended.items())


def test_limits_of_time_at_their_bounds_and_what_the_server_says(tmp_path, monkeypatch) -> None:
    clock, lines = [1000.0], list[str]()
    monkeypatch.setattr("situs.split.server.time.monotonic", lambda: clock[0])

    def paired(out: str, **given) -> Pair:
        pair = Pair(vit, tmp_path / out, shared=out == "lease", limits=Limits(**given))
        pair.server.say = lines.append
        return pair

    pair, other = paired("idle", clients=1, idle=50), "f" * 32
    pair.client.hello(*pair.facts, [])
    pair.client.session = other
    clock[0] += 49.5
    with pytest.raises(RefusedError, match="all 1 sessions are in use"):
        pair.client.hello(*pair.facts, [])
    clock[0] += 0.5
    pair.client.hello(*pair.facts, [])
    assert lines.pop() == f"the session {SESSION} was idle, so it is unloaded for another client"
    pair = paired("lease", lease=50)
    one, two = pair.client, Client(pair.call, other)
    for client in (one, two):
        client.hello(*pair.facts, [])
        client.begin(0, 0.1)
    flown(one)
    clock[0] += 49.5
    with pytest.raises(RefusedError, match="another client's step"):
        flown(two)
    clock[0] += 0.5
    two.begin(0, 0.1)
    flown(two)
    assert lines.pop() == f"the session {SESSION}: its step took longer than 50 s and was abandoned"
    pair = paired("cached", cached=50)
    pair.client.hello_reading(layout(pair.method.backbone, any_length=True))
    for seconds, stays in ((50, True), (0.5, False)):
        clock[0] += seconds
        pair.server.forget()
        assert (SESSION in pair.server.sessions) == stays
    assert not lines


@pytest.mark.parametrize("how", ["bye", "hello", "idle"])
def test_who_leaves_in_the_middle_of_a_shared_step_holds_nobody_up(tmp_path, how: str) -> None:
    pair = Pair(vit, tmp_path, shared=True, limits=Limits(clients=2, lease=1e6, idle=100))
    one, two = pair.client, Client(pair.call, "f" * 32)
    for client in (one, two):
        client.hello(*pair.facts, [])
        client.begin(0, 0.1)
    flown(one)
    with pytest.raises(RefusedError, match="another client's step"):
        flown(two)
    if how == "bye":
        one.bye()
    elif how == "hello":
        one.hello(*pair.facts, [])
    else:
        pair.server.sessions[SESSION].last_message -= 101
        Client(pair.call, "e" * 32).hello(*pair.facts, [])
    assert pair.server.holder is None
    two.begin(0, 0.1)
    assert flown(two).pending is not None
    assert len(pair.server.common._pending) == 1  # nothing of the other's is left


def test_a_session_trains_or_reads_and_is_not_both(tmp_path) -> None:
    pair = Pair(vit, tmp_path)
    layouts = pair.facts[0], layout(pair.method.backbone, any_length=True)
    pair.client.hello(*pair.facts, [])
    with pytest.raises(RefusedError, match=f"the session {SESSION} is open for training"):
        pair.client.hello_reading(layouts[1])
    pair.client.bye()
    with pytest.raises(RefusedError, match=f"the session {SESSION} belongs to a training, so it cannot generate"):
        pair.client.hello_reading(layouts[1])
    reader = Client(pair.call, "f" * 32)
    assert reader.hello_reading(layouts[1]).step == 0
    assert reader.infer(features(), None, (2, 17, 16)).shape == (2, 17, 16)
    with pytest.raises(RefusedError, match=f"the session {'f' * 32} is open for use without training"):
        reader.hello(*pair.facts, [])
    with pytest.raises(RefusedError, match="cannot continue a sequence"):
        reader.text().extend(features(1)[:, :3])
    with pytest.raises(RefusedError, match="a session without training accepts only"):
        reader.save(1)


def test_a_training_goes_on_only_with_the_weights_it_began_with(tmp_path) -> None:
    first = Pair(vit, tmp_path)
    first.client.hello(*first.facts, [])

    def other() -> Backbone:
        backbone = vit()
        with torch.no_grad():
            backbone.model.blocks[0].norm1.weight.add_(1)
        return backbone

    second = Pair(other, tmp_path)
    with pytest.raises(RefusedError, match=f"the session {SESSION} began with other weights than this server") as told:
        second.client.hello(*second.facts, [])
    assert told.value.code == "model"
    third = Pair(vit, tmp_path)
    assert third.client.hello(*third.facts, []).digest == first.server.digest != second.server.digest


# --- bytes that nobody should believe -----------------------------------------------------------------------


def spoiled(rng: random.Random, good: list[bytes], kind: int) -> list[bytes]:
    """A message with something wrong in it: cut, stretched, bits turned, another dtype, shape, version or number."""
    whole = b"".join(good)
    if kind == 0:
        return [whole[: rng.randrange(len(whole))]]
    if kind == 1:
        return [*good, rng.randbytes(rng.randrange(1, 2000))]
    if kind == 2:
        turned = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            turned[rng.randrange(400)] ^= 1 << rng.randrange(8)
        return [bytes(turned)]
    if kind == 3:
        return [rng.randbytes(rng.randrange(3000))]
    if kind == 4:  # any number of the body may be NaN
        return [whole[:-4] + b"\xff\xff\xff\x7f"]
    swaps = [
        (b'"F32"', b'"F64"'), (b'"F32"', b'"I8" '), (b"[2,17,16]", b"[9,17,16]"), (b"[2,17,16]", b"[2,17,-1]"),
        (b'"situs":"1"', b'"situs":"9"'), (b'\\"step\\": 0', b'\\"step\\": 7'), (SESSION.encode(), b"f" * 32),
        (b'\\"part\\": 0', b'\\"part\\": 3'), (b"__metadata__", b"__metadata_x"), (b'"forward"', b'"destroy"'),
    ]  # fmt: skip
    old, new = rng.choice(swaps)
    return [whole.replace(old, new)]


def strange(rng: random.Random, pair: Pair) -> list[bytes]:
    """A message in good order that asks for what is not served."""
    shape = [rng.randrange(1, 4), rng.choice([16, 17, 18]), rng.choice([8, 16])]
    name, dtype = rng.choice(["z", "gradient", "x"]), rng.choice([torch.float64, torch.int64, torch.float16])
    kind = rng.choice(["forward", "backward", "commit", "save", "infer"])
    return [b"".join(bytes(c) for c in encode(Message(kind, facts(pair), {name: torch.ones(shape, dtype=dtype)})))]


def fuzz(pair: Pair, count: int, seed: int) -> dict[str, int]:
    """Sends spoiled messages; gives how many were refused for which reason."""
    rng, server, reasons = random.Random(seed), pair.server, {}
    good = [bytes(c) for c in encode(Message("forward", facts(pair), {"z": features()}))]
    for number in range(count):
        chunks = strange(rng, pair) if number % 7 == 6 else spoiled(rng, good, number % 7)
        owner = "eve" if number % 11 == 0 else "me"
        try:
            body = server.admit(owner, chunks[0])
            for chunk in chunks[1:]:
                body.add(chunk)
            server.answer(owner, body.message())
        except RefusedError as error:
            reasons[error.code] = reasons.get(error.code, 0) + 1
        else:
            reasons["taken"] = reasons.get("taken", 0) + 1
            server.sessions[SESSION].restart(0)
            pair.client._incarnation = server.sessions[SESSION].incarnation
            good = [bytes(c) for c in encode(Message("forward", facts(pair), {"z": features()}))]
    return reasons


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_spoiled_messages_are_refused_with_a_reason_and_hold_no_memory(pair, count) -> None:
    fuzz(pair, 50, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reasons = fuzz(pair, count, 2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{count} spoiled messages, seed 2: {reasons}; memory grew by {grown / 1024:.1f} MiB")
    # A turned bit in a name or in the JSON's spaces leaves a message whole: those are few, and are ordinary ones.
    assert reasons.pop("taken", 0) < count / 20
    assert {"message", "version", "tensors", "finite", "step", "anew", "owner"} <= reasons.keys()
    assert grown < 32 * 1024
    assert pair.run(Loader())["model"]  # and the server trains as ever


def test_a_header_that_asks_for_much_memory_gets_none(pair) -> None:
    head = Message("forward", facts(pair), {"z": features()})
    whole = b"".join(bytes(c) for c in encode(head)).replace(b"[2,17,16]", b"[1000000,17,16]", 1)
    with pytest.raises(RefusedError):
        pair.server.admit("me", whole[:CHUNK])
