"""The server on a socket: who is let in, what is logged, what it holds, and many clients at once."""

from __future__ import annotations

import random
import socket
import threading
import time
from dataclasses import replace

import pytest
from safetensors.torch import save_file
from served import serving, steps

from situs.errors import SitusError
from situs.split.message import Message, RefusedError
from situs.split.run import train_split
from situs.split.transport.certificates import Credentials, make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.transport.serve import LOG, check_plaintext, split_address
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
            (None, "wants certificates"),
            (other, "its certificate is not of this authority"),
            (mixed, "wants another certificate"),
        ):
            with Connection(server.address, credentials, patience=0.1) as call, pytest.raises(SitusError, match=reason):
                call(HELLO, {})
        with Connection(server.address, own) as call:
            with pytest.raises(RefusedError, match="32 hexadecimal"):
                call(HELLO, {})
            deny.write_text("client\n")  # no restart
            with pytest.raises(RefusedError, match="turned away") as refused:
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
        with pytest.raises(SitusError, match="for this machine alone"):
            check_plaintext(host, "plaintext")
    assert split_address("[::1]:7443", "listen") == ("::1", 7443)
    for text in ("7443", "host:", "host:x", "host:99999", ":1"):
        with pytest.raises(SitusError, match="HOST:PORT"):
            split_address(text, "listen")


def test_a_server_that_fails_tells_its_log_and_not_its_client(tmp_path) -> None:
    with serving(tmp_path / "server") as server, Connection(server.address, None) as call:
        server.server.answer = lambda *_: 1 / 0
        with pytest.raises(RefusedError, match="the server failed; its own log says why"):
            call(HELLO, {})
        server.server.answer = lambda *_: (_ for _ in ()).throw(SitusError("disk of /secret/place is full"))
        with pytest.raises(RefusedError, match="could not do it; its own log") as refused:
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
