"""A Hugging Face Hub on loopback: the part of its HTTP API that ``huggingface_hub`` and ``datasets`` use to read."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info|refs|parquet)(?:/(.*))?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Revision -> commit -> files.

    Attributes:
        token: who reads it must show this token; None: anyone may.
        gated: whether a reader without the token hears that access must be asked for, or that there is no such name.
    """

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = True

    def commit(self, files: Mapping[str, bytes], *revisions: str) -> str:
        """Add a commit, to which ``main`` or the named revisions then point."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.revisions |= dict.fromkeys(revisions or ("main",), sha)
        return sha


class Hub(ThreadingHTTPServer):
    """The server. Use :func:`serving`.

    Attributes:
        repositories: ``models/owner/name`` or ``datasets/owner/name`` -> repository.
        served: how often each file was sent, by name; and how many bytes, under ``"bytes"``.
        cut: the number of bytes after which a download breaks off, once.
        status: an HTTP status with which every request is answered; None: what is asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.served: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.cut: int | None = None
        self.status: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: Mapping[str, bytes] | Path, *revisions: str, kind: str = "models") -> Repository:
        """Add a commit with these files, or those of a folder, to a repository."""
        if isinstance(files, Path):
            root = files
            files = {str(each.relative_to(root)): each.read_bytes() for each in root.rglob("*") if each.is_file()}
        repository = self.repositories.setdefault(f"{kind}/{name}", Repository())
        repository.commit(files, *revisions)
        return repository


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body: bytes = b"") -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        if self.server.status is not None:
            return self._send(self.server.status, b"")
        if found := API.fullmatch(path):
            kind, name, what, rest = found.groups()
        elif found := FILE.fullmatch(path):
            kind, name, what, rest = found[1], found[2], "resolve", f"{found[3]}/{found[4]}"
            kind = "datasets" if kind else "models"
        else:
            return self._refuse(404, "RepoNotFound")
        repository = self.server.repositories.get(f"{kind}/{name}")
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        if repository.token is not None and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._refuse(401, "GatedRepo" if repository.gated else "RepoNotFound")
        if what == "refs":
            branches = [
                {"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in repository.revisions.items()
            ]
            return self._json({"branches": branches, "tags": [], "converts": []})
        revision, _, rest = (rest or "main").partition("/")
        sha = repository.revisions.get(revision, revision)
        if sha not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[sha]
        if what in (None, "revision"):
            siblings = [{"rfilename": each} for each in files]
            return self._json({"id": name, "_id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []})
        if what == "tree":
            deep = parse_qs(address.query).get("recursive", ["false"])[0].lower() == "true"
            return self._json(_tree(files, rest.strip("/"), deep))
        if what == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", []) if b"=" in body[:20] else json.loads(body)["paths"]
            entries = {each["path"]: each for each in _tree(files, "", True)}
            return self._json([entries[path] for path in wanted if path in entries])
        if what == "resolve":
            return self._file(rest, files, sha)
        return self._refuse(404, "EntryNotFound")

    def _file(self, name: str, files: Mapping[str, bytes], sha: str) -> None:
        if name not in files:
            self._refuse(404, "EntryNotFound")
            return
        data, headers, status, start = files[name], {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}, 200, 0
        headers["ETag"] = f'"{_etag(data)}"'
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(asked[1]), min(int(asked[2] or len(data) - 1) + 1, len(data))
            self.server.ranges.append(f"{name}:{start}")
            headers["Content-Range"], status = f"bytes {start}-{stop - 1}/{len(data)}", 206
            data = data[start:stop]
        if self.command == "GET":
            self.server.served[name] += 1
            if self.server.cut is not None and len(data) > self.server.cut:
                part, self.server.cut = data[: self.server.cut], None
                self._head(status, len(data), headers)
                self.wfile.write(part)
                self.close_connection = True
                return
        self._send(status, data, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": code})

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._head(status, len(data), headers or {})
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _tree(files: Mapping[str, bytes], under: str, deep: bool) -> list[dict[str, Any]]:
    inside = {name: data for name, data in files.items() if not under or name.startswith(f"{under}/")}
    found: dict[str, dict[str, Any]] = {}
    for name, data in inside.items():
        parts = name.split("/")
        depth = len(under.split("/")) if under else 0
        for length in range(depth + 1, len(parts)):
            if deep or length == depth + 1:
                folder = "/".join(parts[:length])
                found[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
        if deep or len(parts) == depth + 1:
            found[name] = {"type": "file", "path": name, "oid": _etag(data), "size": len(data)}
    return list(found.values())


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve on a free port of loopback."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def read_from(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process read from the server, into a cache below ``home``, where the packages were imported before."""
    for name, value in environment(hub, home).items():
        monkeypatch.setenv(name, value)
    # Read from the environment once, when the package is imported.
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Return the variables with which another process reads from the server, into a cache of its own."""
    off = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "0")
    on = dict.fromkeys(("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"), "1")
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **off, **on}
