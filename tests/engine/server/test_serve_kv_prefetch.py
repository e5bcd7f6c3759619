"""A server without work loads a session's blocks from main memory when a gateway says that it returns."""

import re

from tests.engine.server.dry_server import EngineServer, wait_until

PEER = {"x-mini-infer-peer": "gateway"}
TIERED = ("--kv-cache-memory", "3MB", "--kv-host-memory", "100MB", "--max-model-len", "256", "--max-num-seqs", "2")


def count(server: EngineServer, name: str) -> float:
    found = re.search(rf'kv_tier_{name}{{.*tier="host".*}} (\S+)', server.client.get("/metrics").text)
    return float(found[1]) if found else 0.0


def complete(server: EngineServer, topic: str, name: str, lease_s: float = 0.0) -> None:
    body = {"prompt": f"{topic} is sorted, and then its names are joined with a comma, so that " * 6, "max_tokens": 2}
    headers = {"x-request-id": name, "x-mini-infer-kv-lease": str(lease_s)}
    answer = server.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def test_blocks_are_on_the_device_when_the_session_was_announced() -> None:
    with EngineServer("demo", "--device", "cpu", "--dtype", "float32", *TIERED) as server:
        complete(server, "The first list", "session", lease_s=0.01)
        for number in range(12):
            complete(server, f"List {number}", f"other-{number}")

        def is_prefetched() -> bool:
            answer = server.client.post("/kv_prefetch", json={"request_ids": ["session"]}, headers=PEER)
            assert answer.status_code == 204
            return count(server, "prefetched_tokens_total") > 0

        wait_until(is_prefetched)
        complete(server, "The first list", "returned")
        wait_until(lambda: count(server, "prefetch_used_tokens_total") > 0)
