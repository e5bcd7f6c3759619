"""Starts the core processes of a server or an LLM: a single one, or several with devices of their own."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from msgspec.structs import replace

from mini_infer_engine.config.options.settings import EngineSettings, num_ranks
from mini_infer_engine.core_process.child_process import CoreProcess
from mini_infer_engine.core_process.core_config import CoreConfig
from mini_infer_engine.data_parallel.devices import count_gpus, devices_of_engine


def environments(settings: EngineSettings, *, has_model: bool) -> list[dict[str, str]]:
    """Returns additional environment variables for each engine. Raises ValueError if there are too few GPUs."""
    engines = settings.data_parallel_size
    if settings.device == "cpu" or not has_model:
        return [{} for _ in range(engines)]
    ranks, gpus = settings.tensor_parallel_size * settings.pipeline_parallel_size, count_gpus()
    return [devices_of_engine(engine, engines, ranks, os.environ, gpus) for engine in range(engines)]


@contextmanager
def core_processes(config: CoreConfig) -> Iterator[list[CoreProcess]]:
    """Starts the core processes, and ends them after the block. Raises ValueError if there are too few GPUs."""
    if config.settings.data_parallel_size == 1:
        with CoreProcess(config) as core:
            yield [core]
        return
    variables = environments(config.settings, has_model=config.dry_run is None)
    with ExitStack() as stack:
        config = replace(config, settings=stack.enter_context(shared_tier(config.settings)))
        yield [
            stack.enter_context(CoreProcess(replace(config, engine=engine), more))
            for engine, more in enumerate(variables)
        ]


@contextmanager
def shared_tier(settings: EngineSettings) -> Iterator[EngineSettings]:
    """Gives settings by which all engines have one pool in main memory, which is freed when the last of them ends."""
    is_private = not settings.kv_host_memory or settings.kv_host_path or num_ranks(settings) > 1
    if is_private or not hasattr(os, "memfd_create"):
        yield settings
        return
    from mini_infer_engine.kv_host.open_pool import anonymous_pool  # with numpy, for which no core should wait

    file, path = anonymous_pool()
    try:
        yield replace(settings, kv_host_path=path)
    finally:
        os.close(file)
