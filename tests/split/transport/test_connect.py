"""The client's end: a server that is slow to come, one that is gone for good, answers that are not believed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from served import Proxy, serving

from situs.errors import SitusError
from situs.split.message import CHUNK, Expected, Message, RefusedError
from situs.split.transport.certificates import Credentials
from situs.split.transport.connect import Connection, PendingAnswer

HELLO = Message("hello", {})


def test_a_server_that_is_gone_for_good_is_said_in_one_sentence(tmp_path) -> None:
    said = pytest.raises(SitusError, match=r"127.0.0.1:1: no answer for \d+ s: nothing listens there")
    with Connection("127.0.0.1:1", None, patience=0.2) as call, said:
        call(HELLO, {})
    with pytest.raises(SitusError, match="only on this machine"):
        Connection("192.0.2.1:7443", None)


def test_a_server_that_comes_back_is_met_again(tmp_path) -> None:
    with serving(tmp_path / "server") as server, Connection(server.address, None) as call:
        with pytest.raises(RefusedError):
            call(HELLO, {})
        server.close()
        later = threading.Timer(0.6, server.start)
        later.start()
        with pytest.raises(RefusedError, match="32 hexadecimal"):
            call(HELLO, {})
        assert call.again > 0
        later.join()


def test_a_cut_after_a_long_wait_is_not_a_server_that_is_gone(tmp_path) -> None:
    """Patience begins with the first failure, however long the server computed before."""
    with serving(tmp_path / "server") as server:
        proxy, asked = Proxy(server, 1), []

        def slow(*_):
            asked.append(True)
            if len(asked) > 2:
                return Message("ok")
            time.sleep(0.7)
            return Message("ok")

        with Connection(proxy.address, None, patience=0.5) as call:
            with pytest.raises(RefusedError):  # it was met
                call(HELLO, {})
            server.server.answer = slow
            question = call.submit(HELLO, {})
            time.sleep(0.6)
            proxy.pairs[0][0].shutdown(socket.SHUT_RDWR)  # closed alone, it lives on in the thread that reads from it
            assert question.result().kind == "ok"
        proxy.close()
        assert call.again > 0 and len(asked) > 1


def test_whatever_a_server_says_of_its_time_is_no_fault_of_the_client() -> None:
    with Connection("127.0.0.1:1", None) as call:
        for seconds in ("soon", [], -1.0, 1e300, None, True):
            done: Future[Message] = Future()
            done.set_result(Message("ok", {"seconds": seconds}))
            assert PendingAnswer(call, done).result().kind == "ok"
        assert call.served == 0


def test_a_question_that_fails_late_leaves_the_channel_of_the_others_alone() -> None:
    """Else two that fail together would each close what the other has just opened."""
    closed = []

    class Channel:
        async def close(self) -> None:
            closed.append(self)

    with Connection("127.0.0.1:1", None) as call:
        old, call._channel = Channel(), (new := Channel())
        asyncio.run_coroutine_threadsafe(call._drop(old), call._loop).result(5)
        assert call._channel is new and closed == [old]


def test_an_answer_of_another_shape_is_not_taken_in(tmp_path) -> None:
    with serving(tmp_path / "server") as server, Connection(server.address, None) as call:
        answers = {"z": torch.zeros(2, 3)}
        server.server.answer = lambda *_: Message("ok", {}, answers)
        expected = {"z": Expected({"F32"}, ((2, 2), (3, 3)))}
        assert call(HELLO, expected).tensors["z"].shape == (2, 3)
        for wrong, reason in (
            ({"z": torch.zeros(2, 4)}, "has the shape"),
            ({"z": torch.zeros(2, 3, dtype=torch.float64)}, "F64"),
            ({"z": torch.zeros(2, 3), "more": torch.zeros(1)}, "not expected"),
            ({"z": torch.full((2, 3), torch.nan)}, "NaN or infinite"),
            ({}, "is missing"),
        ):
            answers.clear()
            answers.update(wrong)
            with pytest.raises(RefusedError, match=reason):
                call(HELLO, expected)


def test_a_server_that_is_busy_is_asked_again_and_one_that_stays_busy_is_left(tmp_path) -> None:
    with serving(tmp_path / "server") as server, Connection(server.address, None, patience=0.3) as call:
        asked, most, really = [], [2], server.server.admit

        def busy(*given):
            asked.append(True)
            if len(asked) <= most[0]:
                raise RefusedError("too many messages are waiting already", "busy")
            return really(*given)

        server.server.admit, server.server.answer = busy, lambda *_: Message("ok")
        assert call(HELLO, {}).kind == "ok"
        assert (len(asked), call.again) == (3, 2)
        most[0] = 10**6
        with pytest.raises(SitusError, match=r"no answer for \d+ s: the server refuses: too many messages") as told:
            call(HELLO, {})
        assert told.value.field == "server"


def test_a_question_that_is_dropped_is_not_asked_again(tmp_path) -> None:
    with serving(tmp_path / "server") as server, Connection(server.address, None) as call:
        asked, go_on = [], threading.Event()

        def slow(*_):
            asked.append(True)
            go_on.wait(5)
            return Message("ok")

        server.server.answer = slow
        question = call.submit(HELLO, {})
        while not asked:
            time.sleep(0.01)
        question.cancel()
        go_on.set()
        time.sleep(0.2)
        assert len(asked) == 1 and call.again == 0
        assert call(HELLO, {}).kind == "ok"


def test_what_does_not_fit_in_one_chunk_comes_back_as_it_went(tmp_path) -> None:
    z = torch.randn(2, CHUNK // 4 + 5)
    expected = {"z": Expected({"F32"}, ((2, 2), (z.shape[1], z.shape[1])))}
    with serving(tmp_path / "server") as server, Connection(server.address, None) as call:
        server.server.expected = lambda *_: expected
        server.server.answer = lambda _, message: Message("ok", {}, message.tensors)
        assert torch.equal(call(Message("infer", {}, {"z": z}), expected).tensors["z"], z)


@pytest.mark.parametrize(
    ("details", "met", "shown", "said"),
    [
        ("Connection refused", False, False, "nothing listens there"),
        ("failed to connect; last error: Connection refused (111)", True, False, "nothing listens there any more"),
        (
            "Handshake failed",
            True,
            True,
            "its certificate was issued by another authority, has expired, or is for another",
        ),
        (
            "Socket closed",
            False,
            False,
            "the server closed the connection at once, so it probably requires certificates (TLS)",
        ),
        (
            "reset by peer",
            False,
            True,
            "the server closed the connection at once, so it probably requires another certificate, or",
        ),
        ("Socket closed", True, False, "Socket closed"),
        ("all addresses failed; last error: Network is unreachable", False, False, "Network is unreachable"),
        ("x" * 300, False, False, "x" * 200),
        ("", False, False, "FailureError"),
    ],
)
def test_the_reason_is_the_end_of_a_sentence(details: str, met: bool, shown: bool, said: str) -> None:
    class FailureError(Exception):
        def details(self) -> str:
            return details

    with Connection("127.0.0.1:1", None) as call:
        call._met, call.credentials = met, Credentials(b"", b"", b"") if shown else None
        found = call._why(FailureError())
    assert found.startswith(said) and (len(found) == len(said) or said.endswith((" or", "another")))
