"""A hub on this machine: what huggingface_hub asks of huggingface.co when it downloads a commit of a model.

It serves one folder as one commit, counts the requests, and can refuse, cut a file short or be gone. Not covered:
branches, uploads, xet and redirects to another host.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPOSITORY, REVISION = "acme/tiny", "0123456789abcdef0123456789abcdef01234567"
REFERENCE = f"hf://{REPOSITORY}@{REVISION}"


class FakeHub:
    """A hub with one model. `refusal` is a status and the hub's own word for the reason; `refused` says who gets it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.refusal: tuple[int, str] | None = None
        self.refused = ""  # what a refused path contains
        self.cut: str | None = None  # a file whose connection breaks half way
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, has_body=False)

            def do_GET(self) -> None:
                hub.answer(self, has_body=True)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, *, has_body: bool) -> None:
        """Answer one request."""
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        if self.refusal is not None and self.refused in path:
            status, reason = self.refusal
            _send(request, status, b"{}", {"X-Error-Code": reason, "X-Error-Message": reason}, has_body=has_body)
        elif path == f"/api/models/{REPOSITORY}/tree/{REVISION}":
            _send(request, 200, json.dumps(self._list_files()).encode(), {}, has_body=has_body)
        elif (file := self.folder / path.removeprefix(f"/{REPOSITORY}/resolve/{REVISION}/")).is_file():
            content = file.read_bytes()
            headers = {"ETag": f'"{_name_blob(content)}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
            if start := int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")):
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            length = (len(content) - start) // 2 if file.name == self.cut else None
            status = 206 if start else 200
            _send(request, status, content[start:], headers, has_body=has_body, length=length)
        else:
            missing = "EntryNotFound" if REPOSITORY in path else "RepoNotFound"
            _send(request, 404, b"{}", {"X-Error-Code": missing}, has_body=has_body)

    def _list_files(self) -> list[dict[str, Any]]:
        files = [p for p in sorted(self.folder.rglob("*")) if p.is_file()]
        return [
            {
                "type": "file",
                "path": p.relative_to(self.folder).as_posix(),
                "size": p.stat().st_size,
                "oid": _name_blob(p.read_bytes()),
            }
            for p in files
        ]


@contextmanager
def serve_hub(folder: Path, cache: Path) -> Iterator[FakeHub]:
    """Serve a folder as `REFERENCE`; huggingface_hub asks there, and keeps its cache in another folder."""
    from huggingface_hub import close_session, constants

    hub = FakeHub(folder)
    close_session()
    changes: dict[str, Any] = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    try:
        with patch.multiple(constants, **changes):
            yield hub
    finally:
        hub.stop()


def _name_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str],
    *,
    has_body: bool,
    length: int | None = None,
) -> None:
    request.send_response(status)
    for name, value in (headers | {"Content-Length": str(len(content))}).items():
        request.send_header(name, value)
    request.end_headers()
    if has_body:
        request.wfile.write(content[:length])
