"""Computes the number of pages of the pool, by the user's number or by what a GPU has left, within available memory."""

import logging
from pathlib import Path

from mini_infer_engine.config.errors import ModelError

log = logging.getLogger(__name__)

CPU_KV_BYTES = 2 * 1000**3
"""Default on a CPU: enough for a demo and small models, small enough for a laptop."""


def pages_for(kv_bytes: int, page_bytes: int, available_bytes: int, state_bytes: int = 0) -> int:
    """Returns the number of whole pages in `kv_bytes` less `state_bytes`, less a spare one.

    Raises:
        ModelError: the bytes are more than there are, or too few for two pages.
    """
    _check_available("kv_cache_memory", kv_bytes, available_bytes)
    pages = (kv_bytes - state_bytes) // page_bytes - 1
    if pages < 1:
        needed = 2 * page_bytes + state_bytes
        raise ModelError(f"the KV cache gets {kv_bytes:,} bytes; at least {needed:,} are needed for two pages.")
    return pages


def check_swap(swap_bytes: int, available_bytes: int) -> None:
    """Raises ModelError if main memory has too little for so many pages of preempted sequences."""
    _check_available("kv_swap_memory", swap_bytes, available_bytes)


def check_host_tier(host_bytes: int, available_bytes: int) -> None:
    """Raises ModelError if main memory has too little for so many evicted blocks."""
    _check_available("kv_host_memory", host_bytes, available_bytes)


def _check_available(option: str, requested_bytes: int, available_bytes: int) -> None:
    if requested_bytes > available_bytes:
        raise ModelError(
            f"{option} = {requested_bytes:,} bytes, but only {available_bytes:,} are available: set a smaller one."
        )


def fit_context(max_model_len: int | None, model_len: int, pool_tokens: int) -> int:
    """Returns the effective context: the configured one, or the model's own, limited by the pool.

    Raises:
        ModelError: the configured length exceeds the model's or the pool's.
    """
    if max_model_len is None:
        if pool_tokens < model_len:
            log.warning("context limited from %d to the %d tokens of the KV cache", model_len, pool_tokens)
        return min(model_len, pool_tokens)
    if max_model_len > model_len:
        raise ModelError(
            f"max_model_len = {max_model_len}, but the model's context is {model_len} tokens (max_position_embeddings "
            "of config.json, times the factor of its rope_scaling): set a smaller one."
        )
    if max_model_len > pool_tokens:
        raise ModelError(
            f"max_model_len = {max_model_len}, but the KV cache holds {pool_tokens} tokens: "
            "give kv_cache_memory more or max_model_len less."
        )
    return max_model_len


def available_memory() -> int:
    """Returns the bytes of main memory that can still be used, within this container's limit if it has one."""
    return min(_machine_available(), _container_available(Path("/sys/fs/cgroup")))


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62  # not Linux: nothing to check against


def _container_available(cgroup: Path) -> int:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    # File pages count as used but give way, except for those of file systems in memory.
    gives_way = int(statistics.get("file", 0)) - int(statistics.get("shmem", 0))
    return 1 << 62 if limit == "max" else int(limit) - used + gives_way
