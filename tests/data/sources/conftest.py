"""A web server in this process that can be told to misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from situs.data.sources import remote


class Server:
    """files: content by path. faults: what the next requests of a path get instead: "cut", "503", "404", "short",
    "ignore range", "other range" (and says so), "no word" of which range, "no length", "too much". asked: (method,
    path, range) of every request. sent: bytes of all answers, by path. rangeless: paths of which it always sends all.
    most: bytes after which it cuts every answer."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.silent: set[str] = set()  # paths whose ETag is not told
        self.sent: Counter[str] = Counter()
        self.rangeless: set[str] = set()
        self.most = 1 << 40
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                wanted = self.headers.get("Range", "")
                server.asked.append((self.command, self.path, wanted))
                path = self.path.partition("?")[0]
                waiting = server.faults.get(path, [])
                fault = waiting.pop(0) if waiting else ""
                data = server.files.get(path)
                if path in server.rangeless and not fault:
                    fault = "ignore range"
                if data is None or fault.isdigit():
                    self.send_response(int(fault or 404))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                start, end = 0, len(data)
                if wanted and fault != "ignore range":
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    if int(first) >= len(data):
                        self.send_response(416)
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                    start, end = int(first), min(end, int(last) + 1 if last else end)
                if fault == "other range":
                    start, end = start + 1, end + 1
                part = data[start:end]
                if fault == "too much":
                    part = (part + data * 9)[: 4 * len(part)]
                self.send_response(206 if wanted and fault != "ignore range" else 200)
                if path not in server.silent:
                    self.send_header("ETag", hashlib.md5(data).hexdigest())
                if wanted and fault not in {"ignore range", "no word"}:
                    whole = "*" if fault == "no length" else len(data)
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{whole}")
                self.send_header("Content-Length", str(len(part) // 2 if fault == "short" else len(part)))
                self.end_headers()
                cut = fault == "cut" or len(part) > server.most
                part = part[: len(part) // 2] if fault in {"cut", "short"} else part[: server.most]
                server.sent[path] += len(part)
                with contextlib.suppress(OSError):  # who asked has hung up
                    self.wfile.write(part)
                if cut:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def gets(self, path: str) -> int:
        """Bytes that were asked for with a range, or all of them without."""
        count = 0
        for method, asked, wanted in self.asked:
            if method == "GET" and asked.partition("?")[0] == path:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                count += int(last) - int(first) + 1 if wanted and last else len(self.files[path])
        return count


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """With a cache of its own, and no pauses between tries."""
    monkeypatch.setenv(remote.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(remote.LIMIT, raising=False)
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    monkeypatch.setattr(remote, "_RECENT", 0.0)
    made = Server()
    yield made
    made.stop()
