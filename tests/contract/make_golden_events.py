"""Makes golden_events.json: bytes and frames by vLLM's own classes, of the version that we send and of others we read.

    python tests/contract/make_golden_events.py 0.26.0=PATH 0.9.2=PATH ...

PATH is vllm/distributed/kv_events.py of that version's wheel; it is executed as it is, with stand-ins only for what it
imports from the rest of vLLM (types and a logger). Needs msgspec and pyzmq.
"""

import json
import logging
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import msgspec
import zmq

GOLDEN = Path(__file__).parent / "golden_events.json"
CHAIN: dict[str, Any] = {
    "block_hashes": [2**64 - 1, 5],
    "parent_block_hash": None,
    "token_ids": [*range(30), 151_643, 2**32 - 1],
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [("tenant-salt",), None],
    "group_idx": 0,
}
LORA = CHAIN | {"parent_block_hash": 5, "lora_id": 3, "lora_name": "sql", "extra_keys": [("sql",), ("sql",)]}
RAW_HASHES = CHAIN | {"block_hashes": [b"\x00" * 32, b"\xff" * 32], "parent_block_hash": b"p" * 32, "extra_keys": None}
SIGNED_HASHES = CHAIN | {"block_hashes": [-(2**63), -1], "parent_block_hash": -7, "extra_keys": [None, None]}
REMOVED = {"block_hashes": [5, 2**64 - 1], "medium": "GPU", "group_idx": 0}
NEWER_FIELDS = CHAIN | {"ownership": "tier-1", "session_id": "abc", "lookahead_token_ids": [[1], [2]]}
BATCHES: dict[str, tuple[float, list[tuple[str, dict[str, Any]]], int | None]] = {
    "empty": (0.0, [], None),
    "chain": (1764000000.25, [("BlockStored", CHAIN)], 0),
    "lora": (1.5, [("BlockStored", LORA)], 0),
    "raw_hashes": (1.5, [("BlockStored", RAW_HASHES)], 3),
    "signed_hashes": (1.5, [("BlockStored", SIGNED_HASHES)], None),
    "removed": (2.5, [("BlockRemoved", REMOVED)], 0),
    "cleared": (3.0, [("AllBlocksCleared", {})], 0),
    "step": (4.0, [("BlockRemoved", REMOVED), ("BlockStored", CHAIN), ("AllBlocksCleared", {})], 1),
    "newer_fields": (5.0, [("BlockStored", NEWER_FIELDS)], 0),
}


def load(version: str, path: Path) -> types.ModuleType:
    """The module of one version."""
    stand_ins = {
        "vllm.config": {"KVEventsConfig": object},
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"), lambda *_: None
        ),
    }
    for name, members in stand_ins.items():
        for depth in range(name.count("."), -1, -1):
            parent = name.rsplit(".", depth)[0]
            sys.modules.setdefault(parent, types.ModuleType(parent))
        vars(sys.modules[name]).update(members)
    module = types.ModuleType(f"kv_events_{version.replace('.', '_')}")
    sys.modules[module.__name__] = module
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


def batch(module: types.ModuleType, name: str) -> Any:
    """One of BATCHES, with the fields that the version has."""
    ts, events, rank = BATCHES[name]
    made = []
    for type_name, fields in events:
        event_type = getattr(module, type_name)
        made.append(event_type(**{key: fields[key] for key in event_type.__struct_fields__ if key in fields}))
    return module.KVEventBatch(ts=ts, events=made, data_parallel_rank=rank)


def replay(module: types.ModuleType) -> dict[str, list[list[str]]]:
    """What a subscriber gets from the version's publisher, and what a REQ socket gets that asks for batch 1 on."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        publisher = module.ZmqEventPublisher(0, *addresses, topic="kv-events")
        context = zmq.Context.instance()
        live, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket, address in zip((live, dealer), addresses, strict=True):
            socket.setsockopt(zmq.RCVTIMEO, 5000)
            socket.connect(address)
        live.subscribe(b"kv-events")
        probe = live.poll(500)  # lets the subscription arrive
        assert not probe
        for name in ("chain", "removed", "cleared"):
            publisher.publish(batch(module, name))
        published = [live.recv_multipart() for _ in range(3)]
        dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        replies = [dealer.recv_multipart() for _ in range(3)]
        publisher.shutdown()
        context.destroy(linger=0)
    return {
        name: [[frame.hex() for frame in frames] for frames in messages]
        for name, messages in (("published", published), ("replies", replies))
    }


def main() -> None:
    """Writes the file."""
    golden: dict[str, Any] = {}
    for argument in sys.argv[1:]:
        version, path = argument.split("=", 1)
        module = load(version, Path(path))
        golden[version] = {name: msgspec.msgpack.encode(batch(module, name)).hex() for name in BATCHES}
        if version in ("0.20.0", "0.26.0"):
            golden[version] |= replay(module)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
