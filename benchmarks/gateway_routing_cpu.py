"""What one routing decision costs: CPU microseconds of `Router.route` among many endpoints that hold parts of a prompt.

`python benchmarks/gateway_routing_cpu.py [--endpoints N] [--tokens N] [--rounds N]` needs no sockets. "Held" parts come
from KV events, "guessed" ones from requests that were just sent there. The best of all rounds counts: other work on the
machine only ever adds to it.
"""

import argparse
import gc
import time
from collections.abc import Callable
from random import Random

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys
from mini_infer_contract.events import BlockStored
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.index.key_chain import KeyChain
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root
from mini_infer_gateway.routing.base import Candidate, PromptKeys, RoutingRequest
from mini_infer_gateway.routing.policies import build_router

ALIKE_BLOCKS = 200
Depths = Callable[[int, int], int]
"""(number of the endpoint, blocks of the prompt) -> blocks that it holds."""
SITUATIONS: dict[str, Depths] = {
    "none": lambda number, blocks: 0,
    "all the same 200 blocks": lambda number, blocks: min(ALIKE_BLOCKS, blocks),
    "all of it": lambda number, blocks: blocks,
    "each another depth": lambda number, blocks: (number * 7919 + 13) % (blocks - 1) + 1,
}


def holding(endpoints: int, ids: list[int], depths: Depths, guessed: bool) -> PrefixIndex:
    """An index in which each endpoint holds something of another prompt, and its part of this one."""
    index, keys = PrefixIndex(1 << 22), block_keys(ids, prompt_root())
    blocks, dice = len(keys), Random(1)
    for number in range(endpoints):
        other = [dice.randrange(150_000) for _ in range(BLOCK_SIZE_TOKENS * 20)]
        index.apply(f"e{number}", [_stored(other, number)])
        depth = depths(number, blocks)
        if depth and guessed:
            index.guess(f"e{number}", keys[:depth], 1e9)
        elif depth:
            index.apply(f"e{number}", [_stored(ids[: depth * BLOCK_SIZE_TOKENS], number)])
    return index


def _stored(ids: list[int], number: int) -> BlockStored:
    hashes = [hash((number, position, ids[0])) & 0xFFFFFFFF for position in range(len(ids) // BLOCK_SIZE_TOKENS)]
    return BlockStored(
        block_hashes=hashes, parent_block_hash=None, token_ids=ids, block_size=BLOCK_SIZE_TOKENS, lora_id=None
    )


def least_us(work: Callable[[], object], rounds: int) -> float:
    """Of the calling thread, one call."""
    best = float("inf")
    for _ in range(rounds):
        began = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - began)
    return best / 1e3


def main() -> None:
    """A line a situation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    dice = Random(0)
    ids = [dice.randrange(150_000) for _ in range(options.tokens)]
    names = [f"e{number}" for number in range(options.endpoints)]
    candidates = [
        Candidate(Endpoint(name=name, url="", model="m"), index="exact", assets_revision="r") for name in names
    ]
    prompt = PromptKeys(options.tokens, (KeyChain(block_keys(ids, prompt_root())),))
    request = RoutingRequest("m", options.tokens, {"r": prompt})
    gc.disable()
    for guessed in (False, True):
        for situation, depths in SITUATIONS.items():
            index = holding(options.endpoints, ids, depths, guessed)
            router = build_router("prefix", index, LoadLedger(), Random(0))
            whole = least_us(lambda: router.route(request, candidates, 1.0), options.rounds)
            hits = least_us(lambda: index.hits(names, prompt.chains[0], 1.0), options.rounds)
            kind = "guessed" if guessed else "held"
            print(f"{kind:8} {situation:24} {whole:6.0f} us, hits alone {hits:5.0f}", flush=True)


if __name__ == "__main__":
    main()
