"""The server on a socket: receives messages chunk by chunk, answers one at a time, and logs every refusal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from situs.errors import SitusError, missing_extra
from situs.split.message import CHUNK, Message, RefusedError, encode
from situs.split.server import Server
from situs.split.transport.certificates import LOOPBACK, Credentials, DenyList

METHOD = "/situs.split/ask"
RECEIVE_LIMIT, ANSWER_LIMIT = 300.0, 3600.0
"""Seconds that a message may take to arrive, and then to be answered, including the turns of others."""

AT_ONCE = 4
"""Messages in memory at a time for each allowed client: those being answered, and repetitions after an interruption.
One name may have at most half of all, so no client blocks the others."""

WAITING = ("busy", "early")
"""Refusals after which the server tries again: another client's turn, or a message that arrived too early."""

POLL = 0.25
"""Seconds between two checks whether to stop."""

ANONYMOUS = "anyone"
"""The name of clients without a certificate (plaintext)."""

LOG, LOG_BYTES = "refused.log", 4 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", CHUNK),
    ("grpc.max_metadata_size", 1 << 14),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""gRPC's options on both sides. gRPC itself stores at most one chunk of a message."""


def grpc() -> Any:
    """The package grpc, or an error that names the extra. It reports failed handshakes on stderr."""
    try:
        import grpc
        import grpc.aio
    except ImportError as error:
        raise missing_extra("grpcio", "split", "a server or client of split learning") from error
    return grpc


def split_address(address: str, field: str, *, plaintext: bool = False) -> tuple[str, int]:
    """(host, port) of HOST:PORT. With plaintext, the host must be this machine."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise SitusError(field=field, value=address, allowed="HOST:PORT with a port from 0 to 65535")
    host = host.strip("[]")
    if plaintext and host not in LOOPBACK:
        raise SitusError(
            f"{host}: plaintext is allowed only on this machine ({', '.join(LOOPBACK)}), because without certificates "
            "anybody on the network can read and change messages",
            field="plaintext",
        )
    return host, int(port)


def refusal_log(folder: Path) -> logging.Logger:
    """A log of at most two files of 4 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger(f"situs.split.{folder.resolve()}")
    handler = RotatingFileHandler(folder / LOG, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.propagate = False
    for old in list(log.handlers):
        log.removeHandler(old)
        old.close()
    log.addHandler(handler)
    return log


class Service:
    """Answers messages of many clients with one `Server`, called by one thread."""

    def __init__(self, server: Server, log: logging.Logger, denied: DenyList) -> None:
        self.server, self.log, self.denied = server, log, denied
        self.pool, self.turn, self.moved = ThreadPoolExecutor(1, "situs-split"), asyncio.Lock(), asyncio.Event()
        self.in_memory: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    async def handle(self, chunks: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Receives a message and sends the answer; it counts as in memory until the answer is sent."""
        owner, pem = _peer(context)
        with contextlib.ExitStack() as stack:
            answer = await self._answer_or_refuse(owner, pem, chunks, stack)
            for chunk in encode(answer):
                yield chunk

    async def _answer_or_refuse(
        self, owner: str, pem: bytes, chunks: AsyncIterator[bytes], stack: contextlib.ExitStack
    ) -> Message:
        """The answer, or a refusal with the reason."""
        try:
            if not owner:
                raise RefusedError(
                    "this certificate has no common name, but the server identifies the client by this name", "owner"
                )
            if self.denied(owner, pem):
                raise RefusedError("this certificate is refused", "denied")
            self._count(owner, stack, alone=not pem)
            return await self._receive(owner, chunks)
        except RefusedError as error:
            return self._refuse(owner, error.code, str(error))
        except TimeoutError:
            reason = f"late: a message must arrive within {RECEIVE_LIMIT:g} s and be answered within {ANSWER_LIMIT:g} s"
            return self._refuse(owner, "late", reason)
        except SitusError as error:  # its sentence may name files of the server
            self.log.error("%s failed: %s", _name(owner), error)
            return self._refuse(owner, "failed", "the server could not answer; its log says why")
        except Exception:
            self.log.exception("%s failed", _name(owner))
            return self._refuse(owner, "failed", "the server failed; its log says why")

    def _count(self, owner: str, stack: contextlib.ExitStack, *, alone: bool) -> None:
        """Counts one more message until `stack` is closed. alone: all clients have one name (plaintext)."""
        total = AT_ONCE * self.server.limits.clients
        if self.in_memory[owner] >= (total if alone else max(AT_ONCE, total // 2)) or self.in_memory.total() >= total:
            raise RefusedError("too many messages are waiting already", "busy")
        self.in_memory[owner] += 1
        stack.callback(self._uncount, owner)

    def _uncount(self, owner: str) -> None:
        self.in_memory -= Counter([owner])  # without names that have none left

    def _refuse(self, owner: str, code: str, reason: str) -> Message:
        self.refused[code] += 1
        if code != "busy":
            self.log.warning("%s refused (%s): %s", _name(owner), code, reason.replace("\n", " ")[:400])
        return Message("refused", {"code": code, "reason": reason[:400]})

    async def _receive(self, owner: str, chunks: AsyncIterator[bytes]) -> Message:
        async with asyncio.timeout(RECEIVE_LIMIT):
            stream = aiter(chunks)
            body = self.server.admit(owner, await anext(stream, b""))
            async for chunk in stream:
                body.add(chunk)
        message = body.message()
        del body
        async with asyncio.timeout(ANSWER_LIMIT):
            return await self._answered(owner, message)

    async def _answered(self, owner: str, message: Message) -> Message:
        """The server's answer, when it is this message's turn.

        The turn ends when the thread is done, not when the client disconnects: otherwise clients that send and
        disconnect would fill the thread's queue.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self.turn.acquire()
            began = time.perf_counter()
            job = loop.run_in_executor(self.pool, self.server.answer, owner, message)
            job.add_done_callback(self._over)
            try:
                answer = await asyncio.shield(job)
            except RefusedError as error:
                if error.code not in WAITING:
                    raise
                with contextlib.suppress(TimeoutError):  # a lease may expire without a message
                    await asyncio.wait_for(self.moved.wait(), 1.0)
                continue
            return replace(answer, facts={**answer.facts, "seconds": time.perf_counter() - began})

    async def forget(self) -> None:
        """Drops what clients have left behind, also where no message comes; a message that is answered does it too."""
        if not self.turn.locked():
            async with self.turn:
                await asyncio.get_running_loop().run_in_executor(self.pool, self.server.forget)

    def _over(self, job: asyncio.Future[Message]) -> None:
        self.turn.release()
        if not job.cancelled() and job.exception() is None:
            self.moved.set()
            self.moved = asyncio.Event()


def _peer(context: Any) -> tuple[str, bytes]:
    """The common name ("" if it has none) and the certificate of a client; in plaintext `ANONYMOUS`."""
    shown = context.auth_context()
    pem = shown.get("x509_pem_cert", [b""])[0]
    name = shown.get("x509_common_name", [b"" if pem else ANONYMOUS.encode()])[0]
    return name.decode(errors="replace"), pem


def _name(owner: str) -> str:
    return repr(owner)[:80]


@asynccontextmanager
async def listening(service: Service, listen: str, credentials: Credentials | None) -> AsyncIterator[int]:
    """Listens until the context ends; yields the port."""
    rpc = grpc()
    split_address(listen, "listen", plaintext=credentials is None)
    clients = service.server.limits.clients
    options = (
        *OPTIONS,
        ("grpc.so_reuseport", 0),  # or a second server could share the port unnoticed
        ("grpc.max_concurrent_streams", AT_ONCE * clients),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    )

    class Handlers(rpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            return rpc.stream_stream_rpc_method_handler(service.handle) if call.method == METHOD else None

    grpc_server = rpc.aio.server(options=options, maximum_concurrent_rpcs=8 * clients)
    grpc_server.add_generic_rpc_handlers((Handlers(),))
    try:
        if credentials is None:
            port = grpc_server.add_insecure_port(listen)
        else:
            pair = [(credentials.key, credentials.certificate)]
            secure = rpc.ssl_server_credentials(pair, credentials.authority, require_client_auth=True)
            port = grpc_server.add_secure_port(listen, secure)
    except RuntimeError:
        port = 0
    if not port:
        raise SitusError(
            f"{listen}: cannot listen, because the port is in use or this machine has no such address", field="listen"
        )
    await grpc_server.start()
    try:
        yield port
    finally:
        await grpc_server.stop(2.0)
        service.pool.shutdown(wait=True)


def run_server(
    server: Server,
    listen: str,
    credentials: Credentials | None,
    *,
    deny: str | Path | None = None,
    say: Callable[[str], None] = print,
    stopped: Callable[[], bool] = lambda: False,
) -> Service:
    """Serves until `stopped`."""

    async def main() -> Service:
        service = Service(server, refusal_log(server.out), DenyList(deny))
        async with listening(service, listen, credentials) as port:
            host = split_address(listen, "listen")[0]
            say(f"listening on {host}:{port} {'in plaintext' if credentials is None else 'with certificates'}")
            while not stopped():
                await asyncio.sleep(POLL)
                await service.forget()
        return service

    return asyncio.run(main())
