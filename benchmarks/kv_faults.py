"""Flips bits of keys and values on their way between engines, in main memory and on a disk: each is found, no text is
wrong.

    python benchmarks/kv_faults.py --flips 500 --out FILE

`transfer`: prompts are computed by another engine or fetched from its prefix cache, and one bit is flipped in the pages
of the receiving engine after the last byte has come. `swap`: sequences are preempted in a small pool, and one bit of a
page is flipped in main memory before it comes back. `host` and `disk`: a prompt's blocks are in that tier alone, and a
bit of one of its pages is flipped there before it is asked for again; half of the loads from main memory go with a
pass. Texts are compared with those of an engine without any of these. Sources are trusted for ever and blocks are
always fetched, so that every flip is tried. Runs on a CPU.
"""

import argparse
import ctypes
import logging
import os
import random
import select
import socket
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq
from common.models import CONFIGS, model_folder
from common.report import make_parser, print_table, save, words

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Transfers
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers import tier
from mini_infer_engine.core.request import KVSource, Request, SamplingParams
from mini_infer_engine.core_process.build import BuiltEngine, build_engine
from mini_infer_engine.core_process.kv_transfer import start_transfer
from mini_infer_engine.kv_transfer import consumer, trust
from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.kv_transfer.transport import Digest
from mini_infer_engine.kv_transfer.worker import TransferWorker
from mini_infer_engine.runtime.memory.kv_pool import KVPool

_OUTPUT = 12
_FOR_EVER = 1 << 62


def main() -> None:
    """Flips, prints a table, and writes a JSON file. The exit status is 1 if a flip was missed or a text was wrong."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--parts", default="transfer,swap,host,disk")
    parser.add_argument("--flips", type=int, default=500, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.smoke:
        args.flips = 4
    trust.MOST_MISMATCHES = tier.MOST_MISMATCHES = _FOR_EVER
    consumer.fetching_pays = lambda *_: True
    logging.disable(logging.ERROR)  # one line a flip
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "transfer": transfers,
            "swap": swaps,
            "host": partial(tiers, medium="host"),
            "disk": partial(tiers, medium="disk"),
        }
        rows = []
        for name in words(args.parts):
            rows.append(parts[name](args, Path(folder)))
            save(args.out, {"model": args.model, "seed": args.seed, "rows": rows})
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    if any(row["flipped"] != row["found"] or row["wrong_texts"] for row in rows):
        raise SystemExit(1)


def open_engine(args: argparse.Namespace, folder: Path, *, moves_kv: bool = False, **options: Any) -> BuiltEngine:
    """Starts an engine in this process."""
    is_named = args.model in CONFIGS
    settings = EngineSettings(
        model=str(model_folder(args.model, folder)) if is_named else args.model,
        load_format="dummy" if is_named else "auto",
        skip_tokenizer_init=True,
        device="cpu",
        max_model_len=256,
        kv_transport="shm",
        **options,
    )
    built = build_engine(settings, record_events=False, moves_kv=moves_kv)
    assert isinstance(built, BuiltEngine)
    return built


def request(name: str, prompt: Sequence[int], length: int, source: KVSource | None = None) -> Request:
    """Returns a greedy request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, kv_source=source)


def texts(engine: Engine, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Returns the tokens that follow these prompts, which are queued at once."""
    made: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt, length))
    while engine.has_work:
        for output in engine.step():
            assert not output.error, output.error
            made[output.request_id].extend(output.token_ids)
    return list(made.values())


class Side:
    """An engine with a transfer port."""

    def __init__(self, args: argparse.Namespace, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        built = open_engine(args, folder, moves_kv=True, kv_cache_memory=40_000_000)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        weights: Future[str] = Future()
        weights.set_result("the same")
        self.engine = built.engine
        self.worker: TransferWorker = start_transfer(
            context,
            EngineSettings(model=args.model, kv_transport="shm"),
            TransferPort(host="127.0.0.1", port=self.port),
            self.engine,
            "revision",
            built.memory,
            built.open_transport,
            weights,
        )


def transfers(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Flips bits of what arrives from another engine."""
    draw, context = random.Random(args.seed), zmq.Context[zmq.Socket[bytes]]()
    here, there = (Side(args, folder, context) for _ in range(2))
    plain = open_engine(args, folder, kv_cache_memory=40_000_000).engine
    transport, memory = here.worker._transport, here.worker.identity.memory
    check, flipped, wrong, begin_s = transport.digest, 0, 0, time.monotonic()

    def flip(span: Span, receiver: KVLayout | None = None) -> Digest:
        nonlocal flipped
        if receiver is None:
            page, offset = divmod(draw.randrange(span.begin, span.end), memory.layout.page_size)
            row = draw.randrange(memory.layout.num_layers * memory.layout.halves) * memory.layout.half_bytes
            place = row + offset * memory.layout.row_bytes + draw.randrange(memory.layout.row_bytes)
            address = memory.address + span.our_pages[page] * memory.layout.page_bytes + place
            ctypes.c_uint8.from_address(address).value ^= 1 << draw.randrange(8)
            flipped += 1
        return check(span, receiver)

    transport.digest = flip  # type: ignore[method-assign]  # a fault on the way
    number = 0
    while flipped < args.flips:
        number += 1
        prompt = [draw.randrange(3, 190) for _ in range(draw.randrange(40, 120))]
        source = KVSource(address=f"tcp://127.0.0.1:{there.port}", how=("prefill", "prefix")[number % 2])
        if source.how == "prefix":
            texts(there.engine, [prompt], 1)
        here.engine.add(request(str(number), prompt, _OUTPUT, source))
        made: list[int] = []
        while here.engine.has_work or there.engine.has_work:
            if here.engine.only_receives and not there.engine.has_work:
                select.select([here.worker.core_woken, there.worker.core_woken], [], [], 0.02)
            for output in here.engine.step():
                assert not output.error, output.error
                made.extend(output.token_ids)
            there.engine.step()
        wrong += made != texts(plain, [prompt], _OUTPUT)[0]
    time.sleep(0.2)  # the transfer thread reports its counters a little later
    found = sum(here.engine.stats().kv_transfer.mismatches.values())
    for side in (here, there):
        side.worker.stop()
    context.destroy(linger=0)
    return row("transfer", flipped, found, wrong, number, begin_s)


def swaps(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Flips bits of pages that wait in main memory."""
    draw = random.Random(args.seed)
    prompts = [[draw.randrange(3, 190) for _ in range(20)] for _ in range(12)]
    expected = texts(open_engine(args, folder, kv_cache_memory=200_000_000).engine, prompts, 90)
    small = {"kv_cache_memory": 6_000_000, "kv_swap_memory": 100_000_000, "max_num_seqs": 12}
    engine = open_engine(args, folder, **small).engine
    swap, flipped, wrong, compared, begin_s = KVPool.swap, 0, 0, 0, time.monotonic()

    def swap_flipped(pool: KVPool, moves: Transfers) -> None:
        nonlocal flipped
        if moves.swap_in and flipped < args.flips:
            bits = pool.host_pages.view(torch.uint8)
            bits[draw.choice(moves.swap_in).host_page, draw.randrange(bits.shape[1])] ^= 1 << draw.randrange(8)
            flipped += 1
        swap(pool, moves)

    KVPool.swap = swap_flipped  # type: ignore[method-assign]  # a fault on the way
    while flipped < args.flips:
        engine.reset_prefix_cache()
        made = texts(engine, prompts, 90)
        wrong += sum(one != other for one, other in zip(made, expected, strict=True))
        compared += len(made)
    KVPool.swap = swap  # type: ignore[method-assign]  # the fault is over
    found = engine.stats().kv_tiers.tiers["swap"].mismatches
    return row("swap", flipped, found, wrong, compared, begin_s)


def tiers(args: argparse.Namespace, folder: Path, medium: str) -> dict[str, Any]:
    """Flips bits of pages in main memory, or on the disk, while no other tier has them."""
    draw, below = random.Random(args.seed), {"kv_disk_path": f"{folder}/{medium}", "kv_disk_size": 40_000_000}
    memory = {"kv_cache_memory": 40_000_000, "kv_host_memory": 40_000_000}
    engine: Any = open_engine(args, folder, **memory, **(below if medium == "disk" else {})).engine
    plain = open_engine(args, folder, kv_cache_memory=40_000_000).engine
    own, flipped, wrong, begin_s = engine._tiers, 0, 0, time.monotonic()
    while flipped < args.flips:
        prompt = [draw.randrange(3, 190) for _ in range(16 * draw.randrange(4, 12) + draw.randrange(1, 16))]
        engine.reset_prefix_cache()
        texts(engine, [prompt], 1)  # only pages of the prompt are whole: all are loaded when it comes again
        while engine.write_behind():
            own.wait(1.0)
        engine.scheduler.kv_cache.reset_prefix_cache()
        bit = 1 << draw.randrange(8)
        if medium == "disk":
            own._host.clear()
            store, page = own._copies.disk, draw.choice(list(own._disk._pages.values()))
            segment, offset = store.layout.place(page.location)
            flip_in_file(store._folder.segment(segment), offset + store.layout.header_bytes, store, draw, bit)
        else:
            page = own._host.page(draw.choice(own._host.records).key)
            pages = engine._runner.host_memory.page_memory(page)
            pages[draw.randrange(len(pages))] ^= bit
        flipped += 1
        engine._runner.host_memory.least_load_s = draw.choice((0.0, 1000.0))
        own._search.compute_tokens_per_s = engine._rate.tokens_per_s = 1.0  # it is to load, whatever that costs
        wrong += texts(engine, [prompt], _OUTPUT) != texts(plain, [prompt], _OUTPUT)
    return row(medium, flipped, own.stats.tiers[medium].mismatches, wrong, flipped, begin_s)


def flip_in_file(path: Path, begin: int, store: Any, draw: random.Random, bit: int) -> None:
    """Flips a bit of a page that begins at this offset of a file."""
    with path.open("r+b", buffering=0) as file:
        place = begin + draw.randrange(store.layout.page_bytes)
        (byte,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte ^ bit]), place)


def row(what: str, flipped: int, found: int, wrong: int, compared: int, begin_s: float) -> dict[str, Any]:
    """Returns a line of the table."""
    counts = {"flipped": flipped, "found": found, "texts": compared, "wrong_texts": wrong}
    return {"what": what, **counts, "seconds": round(time.monotonic() - begin_s, 1)}


if __name__ == "__main__":
    main()
