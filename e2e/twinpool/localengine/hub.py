"""A hub of models on loopback: as much of the Hugging Face hub's API as its client needs to fetch a repository.

Tests steer it: it can break connections in the middle of a file, change what it sends, refuse, or fall silent.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Files of at least so many bytes are kept as the hub keeps large ones, named by their SHA-256.
LARGE = 1024
_MODEL = re.compile(r"^/api/models/(?P<repo>[^/]+/[^/]+?)(/revision/(?P<revision>[^/]+))?$")
_TREE = re.compile(r"^/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"^/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)$")


@dataclass
class Repository:
    """A model: its files' contents by name, at one commit that branch ``main`` is at."""

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The server; :attr:`url` is what ``HF_ENDPOINT`` is set to."""

    repositories: dict[str, Repository]
    #: What was asked for: the method and the path, and how often.
    asked: Counter[str] = field(default_factory=Counter)
    #: Files whose next transfers break off half way, or have a wrong byte, and how many of them.
    breaks: Counter[str] = field(default_factory=Counter)
    spoils: Counter[str] = field(default_factory=Counter)
    #: Status code of every answer, instead of what was asked for.
    refuses: int | None = None
    #: While it is not set, transfers stop half way and wait: those of these files, by default of all.
    flows: threading.Event = field(default_factory=threading.Event)
    stops: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Listen on a free port of loopback."""
        self.flows.set()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self.flows.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def described(name: str, content: bytes) -> dict[str, Any]:
    """Return what the hub says of one file."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    about: dict[str, Any] = {"size": len(content), "blobId": blob, "oid": blob, "rfilename": name, "path": name}
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        about["lfs"] = {"size": len(content), "sha256": digest, "oid": digest, "pointerSize": 134}
    return about


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are killed."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Answer what a file is."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer one question of the hub's client."""
        path = unquote(urlsplit(self.path).path)
        self.hub.asked[f"{self.command} {path}"] += 1
        found = _FILE.match(path) or _TREE.match(path) or _MODEL.match(path)
        repository = self.hub.repositories.get(found["repo"]) if found else None
        if self.hub.refuses is not None:
            self._json({"error": "refused"}, self.hub.refuses)
        elif found is None or repository is None:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif found.re is _FILE:
            self._file(repository, found["name"])
        elif found.re is _TREE:
            entries = [{**described(name, content), "type": "file"} for name, content in repository.files.items()]
            self._json(entries)
        else:
            siblings = [described(name, content) for name, content in repository.files.items()]
            self._json({"id": found["repo"], "modelId": found["repo"], "sha": repository.commit, "siblings": siblings})

    def _file(self, repository: Repository, name: str) -> None:
        content = repository.files.get(name)
        if content is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        about = described(name, content)
        etag = about["lfs"]["sha256"] if "lfs" in about else about["blobId"]
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._send(name, content, first)

    def _send(self, name: str, content: bytes, first: int) -> None:
        if self.hub.spoils[name]:
            self.hub.spoils[name] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        half = first + (len(content) - first) // 2
        self.wfile.write(content[first:half])
        self.wfile.flush()
        if self.hub.breaks[name]:
            self.hub.breaks[name] -= 1
            self.close_connection = True
            self.connection.close()
            return
        if not self.hub.stops or name in self.hub.stops:
            self.hub.flows.wait()
        self.wfile.write(content[half:])

    def _json(self, value: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""
