"""A server on loopback for the parts of S3 and of Google's XML API that reading needs: ListObjectsV2 and GetObject with
ranges and If-Match, from a folder. It checks that requests are signed by a known key, and can fail on purpose.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "test-key"
PAGE = 2
"""Objects in one answer to a list: every model takes several."""


class ObjectServer(ThreadingHTTPServer):
    """Serves the folders below `root` as buckets."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.signed = True
        """Requests need the signature of KEY."""
        self.requests: Counter[str] = Counter()
        self.answers: list[int] = []
        """Statuses for the next requests, in place of answers."""
        self.changes = False
        """Objects have another tag than in the list, as if they were written anew."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a client with good credentials."""
        secrets = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "secret"}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1", **secrets}


@contextmanager
def object_server(root: Path) -> Iterator[ObjectServer]:
    with ObjectServer(root) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: ObjectServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        self.server.requests["list" if "list-type" in query else "get"] += 1
        signature = self.headers.get("Authorization", "")
        if self.server.answers:
            self._fail(self.server.answers.pop(0), "Injected")
        elif self.server.signed and not signature:
            self._fail(401, "Unauthorized")
        elif self.server.signed and f"Credential={KEY}/" not in signature:
            self._fail(403, "AccessDenied")
        elif not (self.server.root / bucket).is_dir():
            self._fail(404, "NoSuchBucket")
        elif "list-type" in query:
            self._list(bucket, query.get("prefix", [""])[0], query.get("continuation-token", [""])[0])
        else:
            self._get(self.server.root / bucket / key)

    def _list(self, bucket: str, prefix: str, after: str) -> None:
        folder = self.server.root / bucket
        keys = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
        keys = [key for key in keys if key.startswith(prefix) and key > after]
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{_tag(folder / key)}&quot;</ETag><Size>{(folder / key).stat().st_size}</Size></Contents>"
            for key in keys[:PAGE]
        )
        more = f"<NextContinuationToken>{escape(keys[PAGE - 1])}</NextContinuationToken>" if len(keys) > PAGE else ""
        whole = "true" if more else "false"
        self._answer(
            200, f"<ListBucketResult><IsTruncated>{whole}</IsTruncated>{more}{items}</ListBucketResult>".encode()
        )

    def _get(self, file: Path) -> None:
        expected = self.headers.get("If-Match")
        if not file.is_file():
            self._fail(404, "NoSuchKey")
        elif expected is not None and (self.server.changes or expected.strip('"') != _tag(file)):
            self._fail(412, "PreconditionFailed")
        else:
            self._send(file)

    def _send(self, file: Path) -> None:
        found, size = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")), file.stat().st_size
        if found is None:
            self._answer(200, file.read_bytes())
            return
        start, end = int(found[1]), min(int(found[2]) + 1, size)
        with file.open("rb") as opened:
            opened.seek(start)
            self._answer(206, opened.read(end - start), {"Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        more = {"ETag": '"tag"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **(headers or {})}
        for name, value in {"Content-Length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


def _tag(file: Path) -> str:
    """Changes with size and time, as multipart uploads' tags are no hashes of contents either."""
    stat = file.stat()
    return f"{stat.st_mtime_ns:x}-{stat.st_size:x}"
