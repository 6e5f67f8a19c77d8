"""A hub on loopback that takes uploads, with failures on demand.

It answers what huggingface_hub asks when it makes a repository and commits to it.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "ThisTokenIsForTests1234567890"


@dataclass
class Branch:
    """A branch: its files, and a commit for each change."""

    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])
    messages: list[str] = field(default_factory=list)


@dataclass
class Repository:
    private: bool
    branches: dict[str, Branch] = field(default_factory=lambda: {"main": Branch()})
    card: dict[str, Any] | None = None


@dataclass
class State:
    """What the hub holds and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256, which no commit need name."""
    asked: list[str] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    """Pattern of "METHOD path" -> status of the answer."""
    tokens_on_storage: int = 0
    """Uploads of large files that showed the token to the storage, which is another host in the real world."""
    endpoint: str = ""


class UploadHub(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.take()

    def do_POST(self) -> None:
        self.take()

    def do_PUT(self) -> None:
        self.take()

    def take(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        chunked = self.headers.get("Transfer-Encoding", "") == "chunked"
        body = self._chunks() if chunked else self.rfile.read(length)
        path = urlsplit(self.path).path
        asked = f"{self.command} {unquote(path)}"
        self.state.asked.append(asked)
        for pattern, status in self.state.failures.items():
            if re.search(pattern, asked):
                self.json({"error": f"refused with {status}"}, status)
                return
        if path.startswith("/storage/"):
            self.store(path.rpartition("/")[2], body)
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.json({"error": "Invalid credentials in Authorization header"}, 401)
        else:
            self.answer(path, body)

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline().strip(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def store(self, oid: str, body: bytes) -> None:
        if "Authorization" in self.headers:
            self.state.tokens_on_storage += 1
        if hashlib.sha256(body).hexdigest() != oid:
            self.json({"error": "wrong checksum"}, 400)
            return
        self.state.stored[oid] = body
        self.json({})

    def answer(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            status = 409 if name in self.state.repositories else 200
            self.state.repositories.setdefault(name, Repository(private=wanted["visibility"] == "private"))
            self.json({"url": f"{self.state.endpoint}/{name}"}, status)
            return
        if path == "/api/validate-yaml":
            self.validate(json.loads(body)["content"])
            return
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/(.+))?", path)
        batch = re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        name = (found or batch)[1] if found or batch else None
        repository = self.state.repositories.get(name)
        if repository is None:
            self.json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif batch:
            self.batch(json.loads(body))
        else:
            self.repository(name, repository, found[2], unquote(found[3] or "main"), body)

    def repository(self, name: str, repository: Repository, what: str | None, branch: str, body: bytes) -> None:
        if what == "branch":
            made = branch not in repository.branches
            repository.branches.setdefault(branch, Branch(dict(repository.branches["main"].files)))
            self.json({}, 201 if made else 409)
            return
        if branch not in repository.branches:
            self.json({"error": "no such branch"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        at = repository.branches[branch]
        if what in (None, "revision"):
            siblings = [{"rfilename": file} for file in at.files]
            info = {"id": name, "sha": at.commits[-1], "private": repository.private, "siblings": siblings}
            self.json(info if repository.card is None else {**info, "cardData": repository.card})
        elif what == "preupload":
            modes = []
            for file in json.loads(body)["files"]:
                large = file["size"] > 1_000_000 or file["path"].endswith((".nemo", ".safetensors"))
                modes.append(
                    {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                )
            self.json({"files": modes})
        elif what == "commit":
            self.commit(name, at, [json.loads(line) for line in body.splitlines()])

    def validate(self, content: str) -> None:
        from huggingface_hub import ModelCard

        try:
            ModelCard(content)
        except ValueError as error:
            self.json({"errors": [{"message": str(error)}], "warnings": []}, 400)
            return
        self.json({"errors": [], "warnings": []})

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for entry in wanted["objects"]:
            found = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.state.stored:
                found["actions"] = {"upload": {"href": f"{self.state.endpoint}/storage/{entry['oid']}"}}
            objects.append(found)
        self.json({"transfer": "basic", "objects": objects})

    def commit(self, name: str, branch: Branch, lines: list[dict[str, Any]]) -> None:
        """All operations, or none."""
        files = dict(branch.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.state.stored:
                    self.json({"error": "a large file was not uploaded"}, 400)
                    return
                files[value["path"]] = self.state.stored[value["oid"]]
        branch.files = files
        branch.commits.append(hashlib.sha1(repr(sorted(files)).encode() + bytes(len(branch.commits))).hexdigest())
        branch.messages.append(lines[0]["value"]["summary"])
        url = f"{self.state.endpoint}/{name}/commit/{branch.commits[-1]}"
        self.json({"success": True, "commitOid": branch.commits[-1], "commitUrl": url})

    def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def serve_uploads() -> Iterator[State]:
    """An empty hub on loopback; gives its state, which the test reads and changes."""
    state = State()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ThisHub", (UploadHub,), {"state": state}))
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
