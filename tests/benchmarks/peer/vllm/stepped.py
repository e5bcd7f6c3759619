"""Our stepped engine under vLLM's names, with the parts of vLLM's own engine that `tiered_engines` reaches into."""

from types import SimpleNamespace
from typing import Any, Self

from mini_infer_engine import EngineArgs as OurArgs
from mini_infer_engine import LLMEngine as OurEngine
from mini_infer_engine.core.page_allocator import PageAllocator

SMOKE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "kv_cache_memory": 4_000_000}


class EngineArgs(OurArgs):
    """On a CPU, whatever is asked for; main memory has no effect."""

    def __init__(self, model: str, *, kv_offloading_size: float = 0.0, **keywords: Any) -> None:
        assert kv_offloading_size >= 0
        assert keywords.pop("kv_cache_memory_bytes") > 0
        super().__init__(model, **keywords | SMOKE)


class BlockPool:
    """vLLM's names for the pages of our pool."""

    def __init__(self, pool: PageAllocator) -> None:
        self._pool = pool

    def get_num_free_blocks(self) -> int:
        return self._pool.num_free

    def get_new_blocks(self, count: int) -> list[int]:
        return [self._pool.allocate() for _ in range(count)]

    def free_blocks(self, blocks: list[int]) -> None:
        self._pool.release_all(blocks)


class LLMEngine(OurEngine):
    """Steps as vLLM's engine does."""

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, usage_context: Any) -> Self:
        assert usage_context.value == "LLM_CLASS"
        return cls(args)

    @property
    def vllm_config(self) -> Any:
        return SimpleNamespace(cache_config=SimpleNamespace(block_size=self._core.scheduler.kv_cache.page_size))

    @property
    def engine_core(self) -> Any:
        manager = SimpleNamespace(block_pool=BlockPool(self._core.scheduler.kv_cache.cache.pool))
        return SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager)))

    @property
    def _core(self) -> Any:
        return self._model.engine_here("a test")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return super().reset_prefix_cache(reset_running_requests)
