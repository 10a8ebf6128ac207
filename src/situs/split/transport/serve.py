"""The server on a socket: takes in messages chunk by chunk, has them answered one at a time, and logs every refusal."""

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
from situs.split.transport.certificates import LOOPBACK, Credentials, Denied

METHOD = "/situs.split/ask"
LONGEST, PATIENT = 300.0, 3600.0
"""Seconds that a message may take to come in, and then to be answered: others' turns come first."""

AT_ONCE = 4
"""Messages held at a time for each client that may be served: those under way, and one of them again after a cut. Of
all together one name has at most half, so that no client keeps the others out."""

WAITING = ("busy", "early")
"""Refusals that time mends: another client's turn, or a message that overtook the one before it."""

LOOKS = 0.25
"""Seconds between two looks whether to stop."""

NOBODY = "anyone"
"""Who asks where nobody shows a certificate."""

LOG, LOG_BYTES = "refused.log", 4 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", CHUNK + (1 << 16)),
    ("grpc.max_send_message_length", CHUNK + (1 << 16)),
    ("grpc.max_metadata_size", 1 << 14),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""What both sides ask of gRPC. A chunk is all that it ever holds of a message."""


def grpc() -> Any:
    """The package, or one sentence. What it says of a handshake that failed goes to stderr."""
    try:
        import grpc
        import grpc.aio
    except ImportError as error:
        raise missing_extra("grpcio", "split", "a server or client of split learning") from error
    return grpc


def split_address(address: str, field: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise SitusError(field=field, value=address, allowed="HOST:PORT with a port from 0 to 65535")
    return host.strip("[]"), int(port)


def check_plaintext(host: str, field: str) -> None:
    """Without certificates, this machine alone may be talked to."""
    if host not in LOOPBACK:
        raise SitusError(
            f"{host}: without certificates anybody on the way reads and writes along, so plaintext is for this machine "
            f"alone ({', '.join(LOOPBACK)})",
            field=field,
        )


def refusal_log(folder: Path) -> logging.Logger:
    """A log that cannot fill the disk: two files of 4 MiB at most."""
    folder.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger(f"situs.split.{folder.resolve()}")
    handler = RotatingFileHandler(folder / LOG, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.propagate = False
    for old in list(log.handlers):
        log.removeHandler(old)
        old.close()
    log.addHandler(handler)
    return log


class Service:
    """Answers messages of many clients over one `Server`, which one thread calls."""

    def __init__(self, server: Server, log: logging.Logger, denied: Denied) -> None:
        self.server, self.log, self.denied = server, log, denied
        self.pool, self.turn, self.moved = ThreadPoolExecutor(1, "situs-split"), asyncio.Lock(), asyncio.Event()
        self.held: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    async def handle(self, chunks: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """One message in, one out. It is held until the client has taken the answer."""
        owner, pem = _peer(context)
        with contextlib.ExitStack() as held:
            answer = await self._judged(owner, pem, chunks, held)
            for chunk in encode(answer):
                yield chunk

    async def _judged(
        self, owner: str, pem: bytes, chunks: AsyncIterator[bytes], held: contextlib.ExitStack
    ) -> Message:
        """The answer, or the reason why there is none."""
        try:
            if not owner:
                raise RefusedError("this certificate has no common name, which identifies the client", "owner")
            if self.denied(owner, pem):
                raise RefusedError("this certificate is refused", "denied")
            self._hold(owner, held, alone=not pem)
            return await self._take_in(owner, chunks)
        except RefusedError as error:
            return self._refuse(owner, error.code, str(error))
        except TimeoutError:
            said = f"no whole message within {LONGEST:g} s or no turn for {PATIENT:g} s"
            return self._refuse(owner, "late", said)
        except SitusError as error:  # its sentence may name files of this machine
            self.log.error("%s failed: %s", _name(owner), error)
            return self._refuse(owner, "failed", "the server could not do it; its own log says why")
        except Exception:
            self.log.exception("%s failed", _name(owner))
            return self._refuse(owner, "failed", "the server failed; its own log says why")

    def _hold(self, owner: str, held: contextlib.ExitStack, *, alone: bool) -> None:
        """Counts one more message. alone: there is but one owner, since nobody shows a certificate."""
        total = AT_ONCE * self.server.limits.clients
        if self.held[owner] >= (total if alone else max(AT_ONCE, total // 2)) or self.held.total() >= total:
            raise RefusedError("too many messages are waiting already", "busy")
        self.held[owner] += 1
        held.callback(self._let_go, owner)

    def _let_go(self, owner: str) -> None:
        self.held[owner] -= 1
        if not self.held[owner]:
            del self.held[owner]

    def _refuse(self, owner: str, code: str, reason: str) -> Message:
        self.refused[code] += 1
        if code != "busy":
            self.log.warning("%s refused (%s): %s", _name(owner), code, reason.replace("\n", " ")[:400])
        return Message("refused", {"code": code, "reason": reason[:400]})

    async def _take_in(self, owner: str, chunks: AsyncIterator[bytes]) -> Message:
        async with asyncio.timeout(LONGEST):
            stream = aiter(chunks)
            body = self.server.admit(owner, await anext(stream, b""))
            async for chunk in stream:
                body.add(chunk)
        message = body.message()
        del body
        async with asyncio.timeout(PATIENT):
            return await self._answered(owner, message)

    async def _answered(self, owner: str, message: Message) -> Message:
        """Has the server answer when it is this message's turn.

        The turn ends when the thread is done, not when a client is gone: else those who ask and go away would leave
        message upon message in the thread's queue.
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
                with contextlib.suppress(TimeoutError):  # a lease may end in silence
                    await asyncio.wait_for(self.moved.wait(), 1.0)
                continue
            return replace(answer, facts={**answer.facts, "seconds": time.perf_counter() - began})

    def _over(self, job: asyncio.Future[Message]) -> None:
        self.turn.release()
        if not job.cancelled() and job.exception() is None:
            self.moved.set()
            self.moved = asyncio.Event()


def _peer(context: Any) -> tuple[str, bytes]:
    """The common name and the certificate that a client showed, "" where it has none; in plaintext nobody's."""
    shown = context.auth_context()
    pem = shown.get("x509_pem_cert", [b""])[0]
    name = shown.get("x509_common_name", [b"" if pem else NOBODY.encode()])[0]
    return name.decode(errors="replace"), pem


def _name(owner: str) -> str:
    return repr(owner)[:80]


@asynccontextmanager
async def listening(service: Service, listen: str, credentials: Credentials | None) -> AsyncIterator[int]:
    """Listens until the block ends; gives the port."""
    rpc = grpc()
    host, _ = split_address(listen, "listen")
    clients = service.server.limits.clients
    options = (
        *OPTIONS,
        ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
        ("grpc.max_concurrent_streams", 4 * clients),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    )

    class Handlers(rpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            return rpc.stream_stream_rpc_method_handler(service.handle) if call.method == METHOD else None

    made = rpc.aio.server(options=options, maximum_concurrent_rpcs=8 * clients)
    made.add_generic_rpc_handlers((Handlers(),))
    try:
        if credentials is None:
            check_plaintext(host, "plaintext")
            port = made.add_insecure_port(listen)
        else:
            pair = [(credentials.key, credentials.certificate)]
            secure = rpc.ssl_server_credentials(pair, credentials.authority, require_client_auth=True)
            port = made.add_secure_port(listen, secure)
    except RuntimeError:
        port = 0
    if not port:
        raise SitusError(
            f"{listen}: cannot listen: the port is in use, or this machine has no such address", field="listen"
        )
    await made.start()
    try:
        yield port
    finally:
        await made.stop(2.0)
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
        service = Service(server, refusal_log(server.out), Denied(deny))
        async with listening(service, listen, credentials) as port:
            host = split_address(listen, "listen")[0]
            say(f"listening on {host}:{port} {'in plaintext' if credentials is None else 'with certificates'}")
            while not stopped():
                await asyncio.sleep(LOOKS)
        return service

    return asyncio.run(main())
