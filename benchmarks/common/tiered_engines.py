"""Our engine and vLLM's in this process, whose caches can be made smaller: for loads in caches of several sizes."""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common import engines
from common.report import log_line

MAX_NUM_SEQS = 16


@dataclass(frozen=True, slots=True)
class Cache:
    """The tokens that fit into each tier; None is all that an engine has."""

    name: str
    device: int | None = None
    host: int = 0
    disk: int = 0


class Server(Protocol):
    """An engine in this process."""

    has_work: bool

    def use(self, cache: Cache) -> None:
        """Empties all tiers, and bounds them."""

    def add(self, name: str, prompt: list[int], output: int) -> None:
        """Adds a greedy request."""

    def step(self) -> Iterator[tuple[str, bool, int]]:
        """Yields the requests that made tokens: their names, whether they have ended, and their cached tokens."""

    def loaded(self) -> dict[str, int]:
        """Returns counts of tokens that only grow; they are reported as shares of all prompt tokens."""


class Ours:
    """Our engine, whose tiers have room for all."""

    def __init__(self, model: str, root: str, **options: Any) -> None:
        """Starts it."""
        from kv_tiers import open_engine  # a peer's process does not see our packages

        from mini_infer_engine.core.kv_tiers.write_behind import stores_all

        self._engine: Any = open_engine(model, Path(root), **options)
        self._stores = (self._engine.scheduler.kv_cache.cache.pool, self._engine._tiers._host.store)
        self._num_pages = [store.num_pages for store in self._stores]
        self._taken: tuple[list[int], ...] = ([], [])
        self._stores_all = stores_all

    @property
    def has_work(self) -> bool:
        """Implements `Server`."""
        return bool(self._engine.has_work)

    def use(self, cache: Cache) -> None:
        """Implements `Server`."""
        tiers, page_tokens = self._engine._tiers, self._engine._runner.page_size
        while tiers.are_copying:
            tiers.wait(1.0)
            tiers.take(0.0, time.monotonic())
        for store, taken, count in zip(self._stores, self._taken, self._num_pages, strict=True):
            store.release_all(taken)
            store.num_pages = count
        self._engine.reset_prefix_cache()
        tiers._host_tier.is_on, tiers._disk_tier.is_on = bool(cache.host), bool(cache.disk)
        counts = [
            -(-tokens // page_tokens) if tokens else store.num_free
            for store, tokens in zip(self._stores, (cache.device, cache.host), strict=True)
        ]
        self._taken = tuple(
            [store.allocate() for _ in range(store.num_free - count)]
            for store, count in zip(self._stores, counts, strict=True)
        )
        for store, count in zip(self._stores, counts, strict=True):
            store.num_pages = count  # what is to be copied, and when, depends on these numbers
        tiers._host.num_pages = counts[1]
        is_large = bool(cache.host) and self._stores_all(*counts)
        self._engine.scheduler.kv_cache.cache.whole_pages = deque(maxlen=counts[0]) if is_large else None

    def add(self, name: str, prompt: list[int], output: int) -> None:
        """Implements `Server`."""
        from kv_tiers import add

        add(self._engine, name, prompt, output)

    def step(self) -> Iterator[tuple[str, bool, int]]:
        """Implements `Server`."""
        for output in self._engine.step():
            assert output.finish_reason != "error", output.error
            if output.token_ids or output.finish_reason is not None:
                yield output.request_id, output.finish_reason is not None, output.num_cached_tokens

    def loaded(self) -> dict[str, int]:
        """Implements `Server`."""
        tiers = self._engine.stats().kv_tiers.tiers
        return {
            "from host": tiers["host"].hit_tokens,
            "from disk": tiers["disk"].hit_tokens,
            "declined": sum(tier.declined_tokens for tier in tiers.values()),
            "mismatches": sum(tier.mismatches for tier in tiers.values()),
        }


class VLLM:
    """vLLM's engine in this process."""

    def __init__(self, model: str, device_bytes: int, host_bytes: int) -> None:
        """Starts it; without `host_bytes` it does not offload."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.usage.usage_lib import UsageContext

        self._params = SamplingParams
        settings = engines.vllm_keywords(engines.share_of_gpu(device_bytes) | {"max_num_seqs": MAX_NUM_SEQS})
        offloading = {"kv_offloading_size": host_bytes / (1 << 30)} if host_bytes else {}
        arguments = EngineArgs(model=model, **settings, **offloading)
        # Tokens of a step as vLLM chooses them where throughput counts.
        self._engine: Any = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        try:
            self._engine.apply_model(spread_weights)
        except Exception as fault:  # it is measured all the same
            log_line(f"  vLLM keeps its dummy weights: {fault!r}")
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._taken: list[Any] = []

    @property
    def has_work(self) -> bool:
        """Implements `Server`."""
        return bool(self._engine.has_unfinished_requests())

    def use(self, cache: Cache) -> None:
        """Implements `Server`. What is left in main memory is of other tokens, and is evicted first."""
        for _ in range(20):  # takes in the copies of the last run
            self._engine.step()
            time.sleep(0.01)
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.free_blocks(self._taken)
        self._taken = []
        if not self._engine.reset_prefix_cache(reset_connector=True):
            log_line("  vLLM has not reset its cache")
        assert cache.device is not None, cache
        blocks = -(-cache.device // self._engine.vllm_config.cache_config.block_size)
        self._taken = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - blocks))

    def add(self, name: str, prompt: list[int], output: int) -> None:
        """Implements `Server`."""
        params = self._params(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> Iterator[tuple[str, bool, int]]:
        """Implements `Server`."""
        for output in self._engine.step():
            yield output.request_id, output.finished, output.num_cached_tokens or 0

    def loaded(self) -> dict[str, int]:
        """Implements `Server`: nothing is counted."""
        return {}


def spread_weights(model: Any) -> None:
    """Gives vLLM's model dummy weights like ours. Its own lie between -0.001 and 0.001, norms among them, with which
    routers choose few experts.
    """
    import torch

    torch.manual_seed(0)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    log_line("  vLLM's weights are normal with a deviation of 0.02, as ours")
