"""A web server on this machine whose every answer comes late; it ends with its standard input.

python benchmarks/feed_store.py FOLDER SECONDS       prints its address
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Late(BaseHTTPRequestHandler):
    """Files of a folder, whole or a range of bytes, each request after a pause."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a small answer waits 40 ms for the one before it to be acknowledged
    folder: Path
    pause_seconds: float

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        time.sleep(self.pause_seconds)
        path = self.folder / Path(self.path).name
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        first, last = 0, size - 1
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first = int(asked[1]) if asked[1] else size - int(asked[2])
            last = min(int(asked[2]), size - 1) if asked[1] and asked[2] else size - 1
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if with_body:
            with path.open("rb") as file, contextlib.suppress(ConnectionError):
                self.connection.sendfile(file, first, last - first + 1)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@contextlib.contextmanager
def late_store(folder: Path, pause_seconds: float) -> Iterator[str]:
    """Its address, while it runs in a process of its own."""
    command = [sys.executable, __file__, str(folder), str(pause_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def main() -> None:
    folder, pause_seconds = Path(sys.argv[1]), float(sys.argv[2])
    server = _Server(("127.0.0.1", 0), type("Late", (_Late,), {"folder": folder, "pause_seconds": pause_seconds}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
