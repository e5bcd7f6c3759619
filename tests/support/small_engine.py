"""A stand-in for an engine in tests of `mini-infer up`: starts at once, with a child process as the real one has."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    options, others = parser.parse_known_args()
    if options.max_num_seqs == 13:
        print("ERROR 13 brings bad luck", flush=True)
        return 3
    subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            model = {"id": options.served_model_name, "model_impl": "native"}
            self.answer({"data": [model]} if "models" in self.path else {"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/crash":
                os._exit(9)
            if self.path == "/role":
                others.append(f"switched to {body['role']} by {len(self.headers['x-mini-infer-peer'])} digits")
                self.answer(body)
                return
            text = f"{len(body['messages'])} messages, the last: {body['messages'][-1]['content']}"
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for word in text.split(" "):
                event = {"choices": [{"delta": {"content": word + " "}}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def answer(self, body: dict[str, Any]) -> None:
            data = json.dumps({**body, "flags": others, "threads": os.environ.get("OMP_NUM_THREADS")}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"serving on {options.port}", flush=True)
    server.serve_forever(poll_interval=0.05)
    time.sleep(0.05)
    return 0  # leaves its child behind, as a crash would
