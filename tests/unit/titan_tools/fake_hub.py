"""A Hugging Face hub of one repository, served from memory: what the client asks of a real one, and how it fails."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep
from urllib.parse import unquote

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Set its fields between requests; `asked` is what came, in order: (method, path, range)."""

    repository: str
    files: dict[str, bytes]
    large: set[str] = field(default_factory=set)  # by SHA-256, as LFS files; the others by git's SHA-1
    gated: bool = False
    private: bool = False
    good_token: str = "hf_good"
    cut_after: dict[str, int] = field(default_factory=dict)  # file → bytes of an answer after which it is cut, once
    down_after_cut: bool = False
    slow_after: dict[str, int] = field(default_factory=dict)  # file → bytes after which the server takes its time
    down: bool = False
    ignores_ranges: bool = False
    cdn: bool = False  # large files are redirected to another host, as the real hub does
    cdn_was_told: list[str] = field(default_factory=list)  # Authorization headers that went there
    tampers: set[str] = field(default_factory=set)  # what is served is not what the checksum describes
    revisions: tuple[str, ...] = ("main", SHA)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def gets(self, name: str) -> list[str | None]:
        """The ranges asked for, one per request for the content of a file."""
        return [r for method, path, r in self.asked if method == "GET" and path.endswith(f"/resolve/{SHA}/{name}")]

    def etag(self, name: str) -> str:
        content = self.files[name]
        if name in self.large:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def __enter__(self) -> "Hub":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self._answer()

        def do_GET(self):
            self._answer()

        def log_message(self, *arguments):
            pass

        def _answer(self):
            path = unquote(self.path.split("?")[0])
            hub.asked.append((self.command, path, self.headers.get("Range")))
            api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
            has_token = self.headers.get("Authorization") == f"Bearer {hub.good_token}"
            if hub.down:
                self._refuse(503, "", "down for maintenance")
            elif self.headers.get("Authorization") == "Bearer hf_bad":
                self._refuse(401, "", "Invalid credentials in Authorization header")
            elif path.startswith("/cdn/"):
                hub.cdn_was_told += filter(None, [self.headers.get("Authorization")])
                self._file(path.removeprefix("/cdn/"))
            elif not path.startswith((api, files)) or (hub.private and not has_token):
                self._refuse(401, "RepoNotFound", "Repository not found")
            elif path == api or path.startswith(f"{api}/revision/"):
                self._tell_about(path.rpartition("/revision/")[2] if "/revision/" in path else "main")
            elif path.startswith(f"{api}/tree/"):
                self._send(json.dumps([self._entry(name) for name in hub.files]).encode())
            elif hub.gated and not has_token:
                self._refuse(401 if "Authorization" not in self.headers else 403, "GatedRepo", "Access is restricted")
            else:
                self._resolve(path.removeprefix(files).partition("/")[2])

        def _tell_about(self, revision: str):
            if revision not in hub.revisions:
                return self._refuse(404, "RevisionNotFound", "Invalid rev id")
            siblings = [{"rfilename": name} for name in hub.files]
            return self._send(json.dumps({"id": hub.repository, "sha": SHA, "siblings": siblings}).encode())

        def _entry(self, name: str) -> dict:
            entry = {"type": "file", "path": name, "size": len(hub.files[name]), "oid": "1" * 40}
            if name in hub.large:
                entry["lfs"] = {"oid": hub.etag(name), "size": entry["size"], "pointerSize": 130}
            return entry

        def _resolve(self, name: str):
            if not (hub.cdn and name in hub.large):
                return self._file(name)
            elsewhere = f"{hub.url.replace('127.0.0.1', 'localhost')}/cdn/{name}?signature=0"
            linked = {"X-Linked-Size": str(len(hub.files[name])), "X-Linked-ETag": f'"{hub.etag(name)}"'}
            return self._send(b"", 302, {"Location": elsewhere, "X-Repo-Commit": SHA, **linked})

        def _file(self, name: str):
            if name not in hub.files:
                return self._refuse(404, "EntryNotFound", "Entry not found")
            content = hub.files[name]
            if name in hub.tampers and self.command == "GET":
                content = bytes([content[0] ^ 1]) + content[1:]
            headers = {"ETag": f'"{hub.etag(name)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            status, asked = 200, self.headers.get("Range")
            if asked and not hub.ignores_ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                status, content = 206, content[start:]
            if name in hub.slow_after and self._gets:
                return self._send_slowly(content, headers, hub.slow_after[name])
            return self._send(content, status, headers, cut=hub.cut_after.pop(name, None) if self._gets else None)

        def _send_slowly(self, content: bytes, headers: dict, num_quick: int):
            self.send_response(200)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            with suppress(OSError):  # the reader is killed
                self.wfile.write(content[:num_quick])
                for start in range(num_quick, len(content), 1000):
                    sleep(0.05)
                    self.wfile.write(content[start : start + 1000])
            self.close_connection = True

        @property
        def _gets(self) -> bool:
            return self.command == "GET"

        def _refuse(self, status: int, code: str, message: str):
            self._send(b"{}", status, {"X-Error-Code": code, "X-Error-Message": message})

        def _send(self, body: bytes, status: int = 200, headers: dict | None = None, *, cut: int | None = None):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self._gets:
                self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                hub.down = hub.down or hub.down_after_cut
                self.close_connection = True

    return Handler
