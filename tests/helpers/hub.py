"""A local server that imitates the hub for one data set repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

DATASET = "somebody/colours"


class _Hub(ThreadingHTTPServer):
    """The server, with a record of its requests."""

    daemon_threads = True

    def __init__(self, commits: Mapping[str, Mapping[str, bytes]], branches: Mapping[str, str]):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.commits, self.branches = dict(commits), dict(branches)
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: _Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def _answer(self, body: Any = None) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        api, files = f"/api/datasets/{DATASET}", f"/datasets/{DATASET}/resolve/"
        if path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            return self._file(revision, name)
        if path == api or path.startswith(f"{api}/revision/"):
            return self._told(self._commit(path.partition("/revision/")[2] or "main"), None, self._info)
        for kind in ("tree", "paths-info"):
            if path.startswith(f"{api}/{kind}/"):
                revision, _, folder = path.removeprefix(f"{api}/{kind}/").partition("/")
                wanted = body and body.get("paths")
                return self._told(self._commit(revision), wanted, lambda c, w, f=folder: self._entries(c, w, f))
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _commit(self, revision: str) -> str | None:
        found = self.server.branches.get(revision, revision)
        return found if found in self.server.commits else None

    def _told(self, commit: str | None, wanted: Any, say: Any) -> None:
        if commit is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        self._send(200, json.dumps(say(commit, wanted)).encode(), {"Content-Type": "application/json"})

    def _info(self, commit: str, wanted: Any) -> Any:
        siblings = [{"rfilename": name} for name in self.server.commits[commit]]
        return {"id": DATASET, "sha": commit, "private": False, "gated": False, "disabled": False} | {
            "siblings": siblings,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }

    def _entries(self, commit: str, wanted: Any, folder: str) -> Any:
        files = self.server.commits[commit]
        found = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
            if name.startswith(f"{folder}/" if folder else "") and (wanted is None or name in wanted)
        ]
        folders = {name.rpartition("/")[0] for name in files} - {""}
        listed = [f for f in folders if (f in wanted if wanted is not None else not folder)]
        return found + [{"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in sorted(listed)]

    def _file(self, revision: str, name: str) -> None:
        commit = self._commit(revision)
        content = None if commit is None else self.server.commits[commit].get(name)
        if commit is None or content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit or ""})
        etag = hashlib.sha1(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(commits: Mapping[str, Mapping[str, bytes]], branches: Mapping[str, str]) -> Iterator[_Hub]:
    """Serve the files of each commit by name under these branches."""
    hub = _Hub(commits, branches)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
