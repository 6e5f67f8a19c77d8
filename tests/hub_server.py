"""A hub on loopback: what datasets and huggingface_hub ask for a repository of files, with failures on demand."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """One dataset repository, served from a folder."""

    folder: Path
    repository: str
    failures: dict[str, int]
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.posted = self.rfile.read(length)
        self.answer()

    def answer(self, body: bool = True) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.asked.append(f"{self.command} {path}")
        for pattern, left in self.failures.items():
            if left > 0 and re.search(pattern, path):
                self.failures[pattern] -= 1
                self.reply(503, b"busy", body=body)
                return
        api, files = f"/api/datasets/{self.repository}", f"/datasets/{self.repository}/resolve/"
        if path.startswith(files):
            self.send_file(path[len(files) :].partition("/")[2], body)
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{REVISION}"):
            siblings = [{"rfilename": name} for name in self.names()]
            self.json(
                {
                    "id": self.repository,
                    "sha": REVISION,
                    "siblings": siblings,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                },
                body,
            )
        elif path.startswith(f"{api}/tree/"):
            below = path[len(f"{api}/tree/") :].partition("/")[2]
            deep = parse_qs(url.query).get("recursive", ["False"])[0].lower() in ("true", "1")
            self.tree(below, deep, body)
        elif path.startswith(f"{api}/paths-info/"):
            posted = self.posted.decode()
            wanted = json.loads(posted)["paths"] if posted.startswith("{") else parse_qs(posted)["paths"]
            found = [self.entry(name) for name in wanted if (self.folder / name).exists()]
            self.json(found, body)
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"} if "datasets" in path else {}, body)

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())

    def entry(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        return {"type": "file", "path": name, "oid": sha1(path.read_bytes()).hexdigest(), "size": path.stat().st_size}

    def tree(self, below: str, deep: bool, body: bool) -> None:
        top = self.folder / below
        if not top.exists():
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
            return
        paths = top.rglob("*") if deep else top.iterdir()
        self.json([self.entry(str(p.relative_to(self.folder))) for p in sorted(paths)], body)

    def send_file(self, name: str, body: bool) -> None:
        file = self.folder / name
        if not file.is_file():
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        content = file.read_bytes()
        headers = {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span:
            start, stop = int(span[1]), int(span[2] or len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(content)) - 1}/{len(content)}"
            self.reply(206, content[start:stop], headers, body)
        else:
            self.reply(200, content, headers, body)

    def json(self, value: Any, body: bool) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def reply(self, status: int, content: bytes, headers: dict[str, str] | None = None, body: bool = True) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextlib.contextmanager
def serve(folder: Path, repository: str, failures: dict[str, int] | None = None) -> Iterator[tuple[str, type[Hub]]]:
    """Serves a folder as a dataset repository; gives the endpoint and the handler, which keeps what was asked.

    Args:
        folder: the repository's files.
        repository: "owner/name".
        failures: pattern of a path -> how often it is answered with 503.
    """
    settings = {"folder": folder, "repository": repository, "failures": dict(failures or {}), "asked": []}
    handler = type("ThisHub", (Hub,), settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
    finally:
        server.shutdown()
        server.server_close()
