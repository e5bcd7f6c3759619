"""Clients ask for the same prompts while blocks move between the device, main memory and a disk: no text may change.

    python benchmarks/kv_tier_soak.py --minutes 60 --out FILE

A server of the demo model has a KV cache of a few prompts, main memory of a third of all, and a disk for all. Clients
send prompts of one list, in an order of their own, with 16 greedy tokens each. Every text is compared with that of an
engine that has computed each prompt by itself, without any tier. Hits by tier are the server's own counters. Runs on a
CPU. The exit status is 1 if a text was another one, a request failed, or a tier has not been hit.
"""

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common.report import log_line, make_parser, print_table, save
from common.servers import Server, started
from kv_tiers import add, open_engine

_OUTPUT = 16
_CACHE = "mini_infer_engine_cached_tokens_total"
_HITS, _MISMATCHES = "mini_infer_engine_kv_tier_hit_tokens_total", "mini_infer_engine_kv_tier_mismatches_total"
_REPORT_S = 60.0


def main() -> int:
    """Serves until the time is over, prints a table, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=120)
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(minutes=0.1, clients=4, prompts=12)
    prompts = prompts_of(args.prompts)
    engine: Any = open_engine("demo", Path(), kv_cache_memory=100_000_000, device="cpu")
    expected = [text_of(engine, prompt) for prompt in prompts]
    page_bytes, page_tokens = engine._runner.pool.spec.page_bytes, engine._runner.page_size
    all_bytes = sum(map(len, prompts)) // page_tokens * page_bytes
    del engine
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "load_format": "auto",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory": max(all_bytes // 8, 40 * 512 // page_tokens * page_bytes // 4),
        "kv_host_memory": all_bytes // 3,
        "kv_disk_size": 3 * all_bytes,
    }
    counts, lock = Counter[str](), threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"kv_disk_path": f"{folder}/kv"}
        with started("ours", "demo", settings, Path(folder)) as server:
            server.first_token(120.0)
            end_s = time.monotonic() + 60 * args.minutes
            clients = [
                threading.Thread(target=serve, args=(server, number, prompts, expected, end_s, counts, lock))
                for number in range(args.clients)
            ]
            for client in clients:
                client.start()
            while any(client.is_alive() for client in clients):
                clients[-1].join(min(_REPORT_S, max(1.0, end_s - time.monotonic() + 5)))
                found = figures(args, server, counts)
                log_line(f"{found}")
                save(args.out, {"rows": [found]})
    print_table(list(found), [list(found.values())])
    is_good = not found["different texts"] and not found["failed"] and not found["mismatches"]
    return int(not is_good or (not args.smoke and not (found["host tokens"] and found["disk tokens"])))


def prompts_of(count: int) -> list[list[int]]:
    """Returns prompts of 60 to 400 tokens, each fourth of which goes on where another one ends."""
    draw = random.Random(5)
    found: list[list[int]] = []
    for number in range(count):
        begin = found[-1] if number % 4 else []
        found.append((begin + [draw.randrange(3, 1000) for _ in range(draw.randrange(60, 130))])[:400])
    return found


def text_of(engine: Any, prompt: list[int]) -> list[int]:
    """Returns the tokens that follow a prompt, which is computed as a whole."""
    engine.reset_prefix_cache()
    add(engine, "one", prompt, _OUTPUT)
    made: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert not output.error, output.error
            made += output.token_ids
    return made


def serve(
    server: Server,
    number: int,
    prompts: list[list[int]],
    expected: list[list[int]],
    end_s: float,
    counts: "Counter[str]",
    lock: threading.Lock,
) -> None:
    """Is one client, until the time is over."""
    draw, address = random.Random(number), server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=120)
    while time.monotonic() < end_s:
        place = draw.randrange(len(prompts))
        body = {"model": "measured", "prompt": prompts[place], "max_tokens": _OUTPUT, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        outcome = "failed"
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == 200:
                made = json.loads(content)["choices"][0]["token_ids"]
                outcome = "equal texts" if made == expected[place] else "different texts"
        except (OSError, http.client.HTTPException):
            connection.close()
        with lock:
            counts[outcome] += 1


def figures(args: argparse.Namespace, server: Server, counts: "Counter[str]") -> dict[str, float]:
    """Returns what clients have seen so far, and what the server has counted."""
    row: dict[str, float] = {name: counts[name] for name in ("equal texts", "different texts", "failed")}
    lines = [line for part in (_CACHE, _HITS, _MISMATCHES) for line in server.metrics(part)]

    def total(name: str, tier: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and tier in line)

    for tier in ("host", "disk"):
        row[f"{tier} tokens"] = total(_HITS, f'"{tier}"')
    row["cached tokens"] = total(_CACHE, "")
    row["mismatches"] = total(_MISMATCHES, "")
    return row | {"clients": args.clients, "prompts": args.prompts, "minutes": args.minutes}


if __name__ == "__main__":
    raise SystemExit(main())
