"""Micro-batches one behind the other on the wire: the bits of one at a time, and the time of the link hidden."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn
from wired import TRAIN, Loader, Pair, farthest, method_of, train_locally, vit

from situs.errors import SitusError
from situs.split import remote
from situs.split.client import RewoundError
from situs.split.message import RefusedError

FOUR = replace(TRAIN, accumulate=4)


class Link:
    """A call with a link of so many seconds each way and a server that takes as many: questions overtake nobody."""

    def __init__(self, pair: Pair, way: float, work: float) -> None:
        self.pair, self.way, self.work = pair, way, work
        self.line, self.most, self.under_way = ThreadPoolExecutor(1), 0, 0
        self.later, self.lock = ThreadPoolExecutor(8), threading.Lock()

    def __call__(self, message, expected):
        return self.submit(message, expected).result()

    def submit(self, message, expected) -> Future:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        sent = time.monotonic()

        def serve():
            time.sleep(max(0.0, sent + self.way - time.monotonic()))
            time.sleep(self.work)
            return self.pair.call(message, expected), time.monotonic()

        served = self.line.submit(serve)

        def answer():
            found, then = served.result()
            time.sleep(max(0.0, then + self.way - time.monotonic()))
            with self.lock:
                self.under_way -= 1
            return found

        return self.later.submit(answer)


def trained(out, train, *, link=None, ahead=2, make=vit, monkeypatch=None, permute=()):
    pair = Pair(make, out, permute, train=train)
    if link is not None:
        pair.client._call = found = Link(pair, *link)
    monkeypatch.setattr(remote, "AHEAD", ahead)
    began = time.perf_counter()
    state = pair.run(Loader())
    return state, pair, time.perf_counter() - began, None if link is None else found.most


@pytest.mark.slow
def test_micro_batches_one_behind_the_other_give_the_bits_of_one_at_a_time(tmp_path, monkeypatch) -> None:
    """Drop path at the server, clipping, mean; rows and columns permuted: the same messages in another order."""
    local = train_locally(method_of(vit()), Loader(), tmp_path / "local", FOUR)
    one, alone, *_ = trained(tmp_path / "one", FOUR, ahead=0, monkeypatch=monkeypatch)
    two, ahead, *_ = trained(tmp_path / "two", FOUR, monkeypatch=monkeypatch)
    assert farthest(local, one) == farthest(local, two) == 0
    order = [(m.kind[0], m.facts["part"]) for m in ahead.seen[1:9]]
    assert order == [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("f", 3), ("b", 2), ("b", 3)]
    assert [m.kind for m in alone.seen[1:9]] == ["forward", "backward"] * 4
    shown = [
        trained(tmp_path / f"shown{ahead}", FOUR, ahead=ahead, monkeypatch=monkeypatch, permute=("rows", "columns"))[1]
        for ahead in (0, 2)
    ]
    sent = [{(m.kind, m.facts.get("step"), m.facts.get("part")): m.check() for m in pair.seen} for pair in shown]
    for key in sent[0].keys() - {("hello", None, None)}:
        tensors = [
            next(m for m in pair.seen if (m.kind, m.facts.get("step"), m.facts.get("part")) == key).tensors
            for pair in shown
        ]
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.slow
def test_a_slow_link_is_hidden_behind_the_server_and_no_bit_moves(tmp_path, monkeypatch) -> None:
    """25 ms each way and 25 ms of work: eight questions a step, of whose 400 ms on the link 300 are hidden."""
    train, link = replace(FOUR, max_steps=1), (0.025, 0.025)
    one, _, slow, most = trained(tmp_path / "one", train, link=link, ahead=0, monkeypatch=monkeypatch)
    two, _, fast, more = trained(tmp_path / "two", train, link=link, monkeypatch=monkeypatch)
    print(f"a step of 4 micro-batches: {slow:.2f} s one at a time, {fast:.2f} s one behind the other")
    assert farthest(one, two) == 0
    assert (most, more) == (1, 3)
    assert slow - fast > 0.1


def test_an_embedding_that_draws_keeps_the_order_of_its_draws(tmp_path, monkeypatch) -> None:
    def dropping():
        backbone = vit()
        backbone.model.pos_drop = nn.Dropout(0.3)
        backbone.model.head_drop = nn.Dropout(0.3)
        return backbone

    one, *_ = trained(tmp_path / "one", FOUR, ahead=0, make=dropping, monkeypatch=monkeypatch)
    two, pair, *_ = trained(tmp_path / "two", FOUR, make=dropping, monkeypatch=monkeypatch)
    assert [m.kind for m in pair.seen[1:5]] == ["forward", "backward"] * 2
    assert farthest(one, two) == 0


def test_draws_beside_a_later_embedding_are_a_servers_and_send_nothing_one_by_one(tmp_path, monkeypatch) -> None:
    """Once the first embedding drew nothing, what moves the generators is a server in the same process."""

    class Beside(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                torch.rand(1)
            return x

    def make():
        backbone = vit()
        backbone.model.pos_drop = Beside()
        return backbone

    _, pair, *_ = trained(tmp_path, replace(FOUR, max_steps=1), make=make, monkeypatch=monkeypatch)
    assert [m.kind for m in pair.seen[1:5]] == ["forward", "forward", "backward", "forward"]


def test_a_frozen_embedding_and_a_step_that_is_given_up(tmp_path, monkeypatch) -> None:
    """A question that fails ends the step, and those behind it are given up with it."""
    pair = Pair(vit, tmp_path / "frozen", train=FOUR)
    for name, parameter in pair.method.backbone.named_parameters():
        if "embed" in name or "cls_token" in name or "reg_token" in name:
            parameter.requires_grad_(False)
    pair.order = [name for name in pair.order if not any(word in name for word in ("embed", "_token"))]
    pair.run(Loader())
    lost = Pair(vit, tmp_path / "lost", train=FOUR)
    given_up, call = [], lost.call

    class Failing(Future):
        def cancel(self):
            given_up.append(True)
            return super().cancel()

    class Cut:
        def __call__(self, message, expected):
            return call(message, expected)

        def submit(self, message, expected):
            found: Future = Failing()
            if message.kind == "backward":
                found.set_exception(RefusedError("restarted", "anew"))
            elif message.facts.get("part", 0) < 2:  # the third waits for its turn
                found.set_result(call(message, expected))
            return found

    lost.client._call = Cut()
    with pytest.raises(RewoundError):
        lost.run(Loader())
    assert len(given_up) == 2


def test_only_the_output_of_all_blocks_is_there(tmp_path) -> None:
    pair = Pair(vit, tmp_path)
    pair.client.hello(*pair.facts, [])
    backbone, x = pair.method.backbone.eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        stream = backbone.assemble(backbone.embed(x), backbone.positions())
        assert backbone.blocks(stream).z.shape == (2, 17, 16)
        kinds = [message.kind for message in pair.seen]
        for keys, taps in ((None, (lambda number, z: None,)), (9, ())):
            with pytest.raises(SitusError, match="its blocks are on a server, so only the output of the last block"):
                backbone.run_layers(stream, keys, taps)
    assert kinds == ["hello", "infer"] == [message.kind for message in pair.seen]
