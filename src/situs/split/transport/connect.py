"""The client's connection: a `Call` that repeats a message after an interruption, until an answer or a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import Any, Self

from situs.split.message import (
    ANSWERS,
    Body,
    Expected,
    GoneError,
    Message,
    RefusedError,
    check_tensors,
    encode,
    open_message,
)
from situs.split.transport.certificates import Credentials
from situs.split.transport.serve import METHOD, OPTIONS, grpc, split_address

PATIENCE = 120.0
"""Seconds without an answer before a client gives up, from the first failure. While the server computes, gRPC's
keep-alive answers."""

FIRST = 20.0
"""The same limit before the first answer, because the server may still be starting."""

LATE = 3600.0
"""Seconds that one message may take, including the turns of other clients."""

_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))


class Connection:
    """A connection that reconnects after every interruption; calling it sends a message and waits for the answer.

    waited: seconds spent in calls; served: those of them in which the server computed. patience: see `PATIENCE`.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None,
        *,
        patience: float = PATIENCE,
    ) -> None:
        self.rpc = grpc()
        host, port = split_address(address, "server", plaintext=credentials is None)
        self.address, self.credentials, self.patience = address, credentials, patience
        self.target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.waited = self.served = 0.0
        self.again = 0
        self._channel: Any = None
        self._met = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="situs-split", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection for good."""
        if self._thread.is_alive():
            with contextlib.suppress(NotYetError):
                asyncio.run_coroutine_threadsafe(self._drop(self._channel), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def __call__(self, message: Message, expected: Mapping[str, Expected]) -> Message:
        """The answer; raises `RefusedError` if the server refuses, `GoneError` if it no longer answers."""
        return self.submit(message, expected).result()

    def submit(self, message: Message, expected: Mapping[str, Expected]) -> PendingAnswer:
        """Sends without waiting. The server answers in the order of its steps, whichever message arrives first."""
        return PendingAnswer(self, asyncio.run_coroutine_threadsafe(self._ask(message, expected), self._loop))

    async def _ask(self, message: Message, expected: Mapping[str, Expected]) -> Message:
        failed, pause = None, 0.05
        while True:
            channel = self._channel = self._channel or self._connect()
            try:
                answer = await _once(channel, message, expected)
                self._met = True
                return answer
            except RefusedError as error:
                if error.code != "busy":
                    raise
                why = str(error)
            except (self.rpc.aio.AioRpcError, TimeoutError, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                why = self._why(error)
                await self._drop(channel)
            failed = time.monotonic() if failed is None else failed
            silent = time.monotonic() - failed
            if silent > (self.patience if self._met else min(self.patience, FIRST)):
                raise GoneError(f"{self.address}: no answer for {silent:.0f} s: {why}", field="server")
            self.again += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _why(self, error: BaseException) -> str:
        """gRPC's reason, as the end of a sentence."""
        details: Any = getattr(error, "details", None)
        details_text = str(error if details is None else details()) or type(error).__name__
        last = details_text.rpartition("last error: ")[2][:200]
        if "onnection refused" in details_text:
            return f"nothing listens there{' any more' if self._met else ''}"
        if "andshake failed" in details_text:
            return "its certificate was issued by another authority, has expired, or is for another address"
        if self._met:
            return last
        if "Socket closed" in details_text or "reset by peer" in details_text:
            reason = "requires certificates (TLS)"
            if self.credentials is not None:
                reason = "requires another certificate, or does not use TLS"
            return f"the server closed the connection at once, so it probably {reason}"
        return last

    def _connect(self) -> Any:
        options = (*OPTIONS, *_RECONNECT)
        if self.credentials is None:
            return self.rpc.aio.insecure_channel(self.target, options=options)
        shown = self.credentials
        secure = self.rpc.ssl_channel_credentials(shown.authority, shown.key, shown.certificate)
        return self.rpc.aio.secure_channel(self.target, secure, options=options)

    async def _drop(self, channel: Any) -> None:
        """Closes a channel; the next message opens another, without waiting for gRPC's retries."""
        if channel is self._channel:  # another question may have a new one already
            self._channel = None
        if channel is not None:
            await channel.close()


class PendingAnswer:
    """The answer to a message that was sent."""

    def __init__(self, connection: Connection, future: Future[Message]) -> None:
        self.connection, self.future = connection, future

    def result(self) -> Message:
        """Waits for the answer."""
        began = time.perf_counter()
        try:
            while True:
                with contextlib.suppress(NotYetError):  # short waits, so Ctrl-C works
                    answer = self.future.result(0.5)
                    break
        except BaseException:
            self.cancel()
            raise
        finally:
            self.connection.waited += time.perf_counter() - began
        seconds = answer.facts.get("seconds")
        self.connection.served += seconds if isinstance(seconds, float) and 0 <= seconds <= LATE else 0.0
        return answer

    def cancel(self) -> None:
        """Drops the message."""
        self.future.cancel()


async def _once(channel: Any, message: Message, expected: Mapping[str, Expected]) -> Message:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in encode(message):
            yield chunk

    call = channel.stream_stream(METHOD)(chunks(), timeout=LATE)
    try:
        return await _read(call, expected)
    except BaseException:
        call.cancel()
        raise


async def _read(call: Any, expected: Mapping[str, Expected]) -> Message:
    """The answer; its header is checked before its tensors are received: the server is not trusted either."""
    stream = aiter(call)
    opening = open_message(await anext(stream, b""), ANSWERS)
    if opening.kind == "refused":
        code, reason = str(opening.facts.get("code"))[:20], str(opening.facts.get("reason"))[:400]
        raise RefusedError(f"the server refuses: {reason}", code)
    check_tensors(opening, expected)
    body = Body(opening)
    async for chunk in stream:
        body.add(chunk)
    return body.message()
