"""A stand-in for the gateway in tests of `mini-infer up`: the first endpoint of the file answers everything.

Its reports are files beside that of the endpoints.
"""

import argparse
import json
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--endpoints", type=Path)
    parser.add_argument("--routing-headers", action="store_true")
    parser.add_argument("--peer-key-file", type=Path)
    options = parser.parse_args()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reports = {"/scaling": "load.json", "/rollouts": "rollouts.json"}
            if self.path in reports:
                report = options.endpoints.with_name(reports[self.path])
                self.answer(report.read_bytes() if report.exists() else b'{"started_s": 1.0}')
                return
            self.answer(b"ok" if self.path == "/healthz" else self.forward(None))

        def do_POST(self) -> None:
            self.answer(self.forward(self.rfile.read(int(self.headers["content-length"]))))

        def forward(self, body: bytes | None) -> bytes:
            endpoint = json.loads(options.endpoints.read_text())["endpoints"][0]["url"]
            request = urllib.request.Request(endpoint + self.path, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.read()

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
    return 0
