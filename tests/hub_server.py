"""A server that speaks the hub's protocol on this machine, and can be told to cut, lie, redirect and refuse."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".parquet")


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """One repository, someone/small. files: its content. fault: what goes wrong; a name that the handler knows.

    change: edits the list of files before it is sent. seen: method, path and authorization of each request.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fault = ""
        self.where = ""  # the file or the part ("api") that the fault is about
        self.status = 500
        self.change: Callable[[dict[str, Any]], Any] = lambda listed: None
        self.redirect = self.message = ""
        self.seen: list[tuple[str, str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def listed(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
            if name.endswith(LARGE):
                large = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                entry["lfs"] = large
            siblings.append(entry)
        answer = {"id": "someone/small", "modelId": "someone/small", "sha": COMMIT, "siblings": siblings}
        self.change(answer)
        return answer

    def tree(self, folder: str) -> list[dict[str, Any]]:
        """The entries of a folder, as the hub lists a tree."""
        inside = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for entry in self.listed()["siblings"]:
            name, data = entry["rfilename"], self.files[entry["rfilename"]]
            if not name.startswith(inside):
                continue
            first, deeper, _ = name.removeprefix(inside).partition("/")
            described = {"type": "file", "oid": git_hash(data), "size": len(data), "path": name}
            if "lfs" in entry:
                described["lfs"] = {"oid": entry["lfs"]["sha256"], "size": len(data), "pointerSize": 130}
            folder_entry = {"type": "directory", "oid": "0" * 40, "size": 0, "path": f"{inside}{first}"}
            entries[first] = folder_entry if deeper else described
        return list(entries.values())

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        self.seen.append((request.command, path, request.headers.get("Authorization") or ""))
        name = "api" if path.startswith("/api/") else path.partition("/resolve/")[2].partition("/")[2] or path[5:]
        hit = self.fault if self.where in ("", name) else ""
        if hit == "status":
            headers = {"X-Error-Code": self.redirect, "X-Error-Message": self.message}
            headers = {header: value for header, value in headers.items() if value}
            return self.send(request, self.status, b'{"error": "no"}', body, headers)
        if hit == "loop":
            return self.send(request, 302, b"", body, {"Location": request.path})
        if name == "api":
            if "/someone/small" not in path:
                return self.send(request, 404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            if "/revision/" in path and path.rpartition("/")[2] not in (COMMIT, "main"):
                return self.send(request, 404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            data = b"<html>maintenance</html>" if hit == "garbage" else json.dumps(self.listed()).encode()
            if "/tree/" in path:
                data = json.dumps(self.tree(path.partition("/tree/")[2].partition("/")[2])).encode()
            return self.send(request, 200, data, body, {"Content-Type": "application/json"})
        data = self.files.get(name)
        if data is None:
            return self.send(request, 404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        tag = hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_hash(data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if path.startswith("/cdn/") or not name.endswith(LARGE):
            return self.send_file(request, data, body, headers, hit)
        headers |= {"X-Linked-Etag": f'"{tag}"', "X-Linked-Size": str(len(data))}
        home = self.redirect if hit == "elsewhere" else self.url
        return self.send(request, 302, b"", body, headers | {"Location": f"{home}/cdn/{name}"})

    def send_file(self, request: Any, data: bytes, body: bool, headers: dict[str, str], fault: str) -> None:
        if fault == "flip":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault == "short":
            data = data[: len(data) // 2]
        if fault == "long":
            data = data + b"more"
        if fault == "etag":
            headers = headers | {"ETag": '"00000000000000000000000000000000"'}
        status, start = 200, request.headers.get("Range", "")
        if start and fault != "cut":
            offset = int(start.removeprefix("bytes=").partition("-")[0])
            status, headers = 206, headers | {"Content-Range": f"bytes {offset}-{len(data) - 1}/{len(data)}"}
            data = data[offset:]
        if not (body and fault in ("cut", "cut once")):
            return self.send(request, status, data, body, headers)
        self.fault = "" if fault == "cut once" else fault
        self.send(request, status, data, False, headers)
        request.wfile.write(data[: len(data) // 2])
        request.wfile.flush()
        request.close_connection = True
        return None

    @staticmethod
    def send(request: Any, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data)
