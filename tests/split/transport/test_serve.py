"""The server on a socket: who is let in, what is logged, what it holds, and many clients at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from served import serving, steps
from wired import SESSION, Pair, vit

from situs.errors import SitusError
from situs.split.message import ANSWERS, CHUNK, Body, Message, RefusedError, encode, open_message
from situs.split.run import train_split
from situs.split.server import Limits, Server
from situs.split.serving import make_server
from situs.split.transport import serve
from situs.split.transport.certificates import Credentials, DenyList, make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.transport.serve import LOG, split_address
from situs.train.run import make_method


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    out = tmp_path_factory.mktemp("certs")
    make_certificates(out)
    make_certificates(out / "other")
    return out


HELLO = Message("hello", {})


def test_only_who_shows_a_certificate_of_the_authority_is_let_in(tmp_path, certs) -> None:
    own, other = read_credentials(certs, "client"), read_credentials(certs / "other", "client")
    deny = tmp_path / "deny"
    deny.write_text("")
    with serving(tmp_path / "server", read_credentials(certs, "server"), deny=deny) as server:
        mixed = Credentials(own.authority, other.certificate, other.key)
        for credentials, reason in (
            (None, "requires certificates"),
            (other, "its certificate was issued by another authority"),
            (mixed, "requires another certificate"),
        ):
            with Connection(server.address, credentials, patience=0.1) as call, pytest.raises(SitusError, match=reason):
                call(HELLO, {})
        with Connection(server.address, own) as call:
            with pytest.raises(RefusedError, match="32 hexadecimal"):
                call(HELLO, {})
            deny.write_text("client\n")  # no restart
            with pytest.raises(RefusedError, match="certificate is refused") as refused:
                call(HELLO, {})
            assert refused.value.code == "denied"
            deny.write_text("nobody else\n")
            with pytest.raises(RefusedError, match="32 hexadecimal"):
                call(HELLO, {})
        with pytest.raises(SitusError, match="the port is in use"), serving(tmp_path / "two", port=server.port):
            pass
    log = (tmp_path / "server" / LOG).read_text()
    assert log.count("'client' refused (message): session=None") == 2 and log.count("refused (denied)") == 1


def test_plaintext_is_for_this_machine_alone() -> None:
    for host in ("10.0.0.1", "example.org", "0.0.0.0"):
        with pytest.raises(SitusError, match="only on this machine"):
            split_address(f"{host}:7443", "listen", plaintext=True)
        assert split_address(f"{host}:7443", "listen") == (host, 7443)
    assert split_address("localhost:1", "server", plaintext=True) == ("localhost", 1)
    assert split_address("[::1]:7443", "listen") == ("::1", 7443)
    assert [split_address(f"host:{port}", "listen")[1] for port in (0, 65535)] == [0, 65535]
    for text in ("7443", "host:", "host:x", "host:65536", "host:-1", ":1"):
        with pytest.raises(SitusError, match="HOST:PORT"):
            split_address(text, "listen")


def test_a_server_that_fails_tells_its_log_and_not_its_client(tmp_path) -> None:
    with serving(tmp_path / "server") as server, Connection(server.address, None) as call:
        server.server.answer = lambda *_: 1 / 0
        with pytest.raises(RefusedError, match="the server failed; its log says why"):
            call(HELLO, {})
        server.server.answer = lambda *_: (_ for _ in ()).throw(SitusError("disk of /secret/place is full"))
        with pytest.raises(RefusedError, match="could not answer; its log") as refused:
            call(HELLO, {})
        assert "secret" not in str(refused.value)
    log = (tmp_path / "server" / LOG).read_text()
    assert "ZeroDivisionError" in log and "/secret/place" in log


def test_noise_on_the_socket_and_half_messages_leave_the_server_up(tmp_path) -> None:
    rng = random.Random(3)
    with serving(tmp_path / "server") as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(rng.randbytes(rng.randrange(1, 4000)))
        with Connection(server.address, None) as call, pytest.raises(RefusedError, match="32 hexadecimal"):
            call(HELLO, {})


# --- the service without a socket ----------------------------------------------------------------------------


class Shown:
    """What gRPC says of a client. name: in its certificate; None for a certificate without one."""

    def __init__(self, name: str | None) -> None:
        self.found = {"x509_pem_cert": [b"pem"]} | ({} if name is None else {"x509_common_name": [name.encode()]})

    def auth_context(self):
        return self.found


async def chunks(message: Message) -> AsyncIterator[bytes]:
    for chunk in encode(message):
        yield bytes(chunk)


async def said(service: serve.Service, message: Message, name: str | None = "me") -> Message:
    parts = [part async for part in service.handle(chunks(message), Shown(name))]
    body = Body(open_message(parts[0], ANSWERS))
    for part in parts[1:]:
        body.add(part)
    return body.message()


def service_of(server) -> serve.Service:
    return serve.Service(server, serve.refusal_log(server.out), DenyList(None))


def test_a_certificate_without_a_name_owns_no_session(tmp_path) -> None:
    async def main() -> None:
        service = service_of(make_server(steps(1), tmp_path))
        answer = await said(service, HELLO, None)
        assert answer.facts["code"] == "owner" and "no common name" in answer.facts["reason"]

    asyncio.run(main())


def test_who_asks_and_goes_away_leaves_no_message_behind(tmp_path) -> None:
    """A message that waits for the thread while another is computed goes with its client, not when its turn comes."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        assert go_on.wait(20)
        return Message("ok")

    async def main() -> None:
        service = service_of(server := make_server(steps(1), tmp_path))
        server.answer = slow
        first = asyncio.create_task(said(service, HELLO))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        first.cancel()  # even the one whose answer is being made
        for _ in range(20):
            gone = asyncio.create_task(said(service, HELLO))
            await asyncio.sleep(0.005)
            gone.cancel()
        await asyncio.sleep(0.01)
        waiting = service.pool._work_queue.qsize()
        go_on.set()
        assert (await said(service, HELLO)).kind == "ok"
        assert waiting == 0 and service.in_memory.total() == 0

    asyncio.run(main())


def test_a_message_must_come_in_soon_and_may_then_be_computed_for_long(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(serve, "RECEIVE_LIMIT", 0.1)

    async def half() -> AsyncIterator[bytes]:
        yield next(iter(encode(HELLO)))
        await asyncio.sleep(60)

    async def main() -> None:
        service = service_of(server := make_server(steps(1), tmp_path))
        parts = [part async for part in service.handle(half(), Shown("me"))]
        assert open_message(parts[0], ANSWERS).facts["code"] == "late"
        server.answer = lambda *_: time.sleep(0.25) or Message("ok")
        assert [(await said(service, HELLO)).kind for _ in range(2)] == ["ok", "ok"]

    asyncio.run(main())


def test_one_client_cannot_hold_all_messages(tmp_path) -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def main() -> None:
        service = service_of(make_server(steps(1), tmp_path))

        async def hang() -> None:
            async for _ in service.handle(never(), Shown("eve")):
                pass

        slow = [asyncio.create_task(hang()) for _ in range(50)]
        await asyncio.sleep(0.1)
        assert service.in_memory["eve"] == 16
        assert (await said(service, HELLO, "eve")).facts["code"] == "busy"
        assert (await said(service, HELLO, "ann")).facts["code"] == "message"
        for task in slow:
            task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(("clients", "named", "all_of"), [(1, 4, 4), (2, 4, 8), (8, 16, 32)])
def test_one_name_has_half_of_all_places_unless_all_have_one_name(
    clients: int, named: int, all_of: int, tmp_path
) -> None:
    def places(*owners: str, alone: bool = False) -> list[int]:
        server = SimpleNamespace(limits=Limits(clients=clients))
        service = serve.Service(cast(Server, server), logging.getLogger("none"), DenyList(None))
        with contextlib.ExitStack() as stack:
            for owner in owners:
                with contextlib.suppress(RefusedError):
                    while True:
                        service._count(owner, stack, alone=alone)
            counts = [service.in_memory[owner] for owner in owners]
        assert not service.in_memory  # the names are forgotten too
        return counts

    assert places("eve") == [named]
    assert places("eve", "ann", "bob") == [named, min(named, all_of - named), 0]
    assert places("anyone", alone=True) == [all_of]


def test_a_refusal_is_one_line_of_the_log_and_a_busy_server_writes_none(tmp_path) -> None:
    lines: list[str] = []
    log = cast(logging.Logger, SimpleNamespace(warning=lambda text, *of: lines.append(text % of)))
    service = serve.Service(cast(Server, None), log, DenyList(None))
    answer = service._refuse("me", "message", "one\ntwo" + "x" * 400)
    assert answer.kind == "refused" and answer.facts == {"code": "message", "reason": "one\ntwo" + "x" * 393}
    assert lines == ["'me' refused (message): one two" + "x" * 393]
    assert service._refuse("me", "busy", "later").facts == {"code": "busy", "reason": "later"}
    assert len(lines) == 1 and service.refused == {"message": 1, "busy": 1}


def test_an_answer_that_is_not_taken_counts_as_held(tmp_path) -> None:
    """Else a client that reads nothing would have the server keep one answer after another."""

    async def main() -> None:
        service = service_of(server := make_server(steps(1), tmp_path))
        server.answer = lambda *_: Message("ok", {}, {"z": torch.zeros(2_000_000)})
        slow = service.handle(chunks(HELLO), Shown("eve"))
        assert len(await anext(slow)) == CHUNK
        assert service.in_memory["eve"] == 1
        await slow.aclose()
        assert service.in_memory.total() == 0

    asyncio.run(main())


def test_a_message_that_overtook_another_waits_for_its_turn(tmp_path) -> None:
    """All of a step's messages put backwards, each before the one that it follows; a repeated step stays refused."""

    async def main() -> None:
        pair = Pair(vit, tmp_path)
        pair.client.hello(*pair.facts, [])
        service = service_of(pair.server)
        z, own = torch.ones(2, 17, 16), {"session": SESSION, "incarnation": pair.client._incarnation}

        def of(kind: str, step: int, part: int, **more) -> Message:
            tensors = {"z" if kind == "forward" else "gradient": z} | more.pop("tensors", {})
            return Message(kind, {**own, "step": step, "part": part, **more}, tensors)

        commit = {"commit": {"step": 0, "rate": 0.1, "fine": True}, "tensors": {"share": torch.tensor(1.0)}}
        order = [of("forward", 0, 1), of("forward", 0, 0), of("backward", 0, 1), of("backward", 0, 0)]
        order += [of("forward", 1, 1), of("forward", 1, 0, **commit)]
        late = []
        for message in order:
            if message.facts["step"]:  # which a client begins with the answers to the one before
                await asyncio.wait(late[:4])
            late.append(asyncio.create_task(said(service, message)))
            await asyncio.sleep(0.05)
        assert [(await task).kind for task in late] == ["ok"] * 6
        session = pair.server.sessions[SESSION]
        assert (session.step, session.forwards, session.blocks.updates) == (1, 2, 1)
        assert (await said(service, of("forward", 5, 0))).facts["code"] == "step"
        assert (await said(service, of("forward", 1, 9))).facts["code"] == "step"

    asyncio.run(main())


def test_several_clients_train_at_once_each_with_blocks_of_its_own(tmp_path) -> None:
    """Eight in the slow form; in both every one ends where it would alone."""
    many(tmp_path, 2)


@pytest.mark.slow
def test_eight_clients_at_once(tmp_path) -> None:
    many(tmp_path, 8)


def many(tmp_path, count: int) -> None:
    # The weights are in a file and nothing is dropped: threads of one process share torch's generators.
    config = replace(
        steps(3), backbone=replace(steps(3).backbone, drop_path=0.0), init=str(tmp_path / "first.safetensors")
    )
    save_file(make_method(replace(config, init=None), list("0123456789")).backbone.model.state_dict(), config.init)
    found, failed = {}, []

    def train(number: int, address: str, out: str) -> None:
        try:
            with Connection(address, None) as call:
                seeded = replace(config, data=replace(config.data, seed=number))
                result = train_split(seeded, call, out=tmp_path / out, device="cpu", quiet=True)
                found[out] = result.metrics["loss"]
        except Exception as error:  # noqa: BLE001  (told to the test)
            failed.append(error)

    with serving(tmp_path / "server", None, config) as server:
        began = time.perf_counter()
        threads = [threading.Thread(target=train, args=(n, server.address, f"{n}")) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        print(f"{count} clients, 3 steps each: {time.perf_counter() - began:.1f} s")
        assert not failed
        assert len(set(found.values())) == count
        train(0, server.address, "alone")
    assert found["alone"] == found["0"]
