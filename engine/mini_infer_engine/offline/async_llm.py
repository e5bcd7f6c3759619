"""`AsyncLLM`: the engine for asynchronous programs, with vLLM's names."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.async_engine import AsyncEngine, EngineDeadError
from mini_infer_engine.offline.engine_args import EngineArgs
from mini_infer_engine.offline.metrics import Counter, Gauge
from mini_infer_engine.offline.offline_model import OfflineModel
from mini_infer_engine.offline.outputs import RequestOutput
from mini_infer_engine.offline.pending import PendingRequest
from mini_infer_engine.offline.pooling import Pooled, PoolingOutput, PoolingParams, PoolingReader, PoolingRequestOutput
from mini_infer_engine.offline.prompts import Prompt
from mini_infer_engine.offline.requests import Params


class AsyncLLM(OfflineModel):
    """A model and its engine, which computes the prompts of all tasks of an event loop together."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Loads a model, which blocks. Raises ValueError if the model or a setting is at fault."""
        super().__init__(engine_args)
        self._engine = AsyncEngine(self._model)
        self._pending: dict[str, PendingRequest] = {}
        weakref.finalize(self, self._engine.stop)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a prompt as they become known, as `SamplingParams.output_kind` says: everything so far,
        what is new, or only the last.

        A slow caller gets several steps in one output. The prompt is aborted when its generator is closed before the
        last. Raises ValueError if the prompt, a parameter or the id is at fault, RuntimeError if a pass fails, and
        EngineDeadError if the engine has ended.
        """
        vllm_surface.refuse_others("generate", others, vllm_surface.ADD_REQUEST, type(self).__name__)
        vllm_surface.refuse_adapter(lora_request)
        # On a thread: a long text or a grammar takes time, in which other tasks go on.
        pending = await asyncio.to_thread(self._requests.one, request_id, prompt, sampling_params, priority)
        with self._running(pending) as wait:
            has_more = True
            while has_more:
                await wait()
                has_more = not pending.finished  # before the caller works on what it gets now
                if pending.has_output:
                    yield pending.output()

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None, **others: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yields the embedding or the scores of a prompt, once; nothing if it is aborted. Raises what `generate`
        raises.
        """
        vllm_surface.refuse_others("encode", others, vllm_surface.ADD_REQUEST, type(self).__name__)
        reader = PoolingReader(self._model.info, self._model.text.encoder, pooling_params)
        task = reader.task
        reader.check(task)
        (read,) = await asyncio.to_thread(reader.prompts, [prompt])
        pending = self._requests.pooled(request_id, read)
        with self._running(pending) as wait:
            while not pending.finished:
                await wait()
        if pending.replies[0].finish_reason != "abort":
            reply, name, ids, cached = Pooled.of(pending, read)
            yield PoolingRequestOutput(name, PoolingOutput(reader.data(task, reply)), ids, True, cached)

    async def abort(self, request_id: str | list[str]) -> None:
        """Aborts prompts: their last output has the finish reason "abort". Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if (pending := self._pending.get(one)) is not None:
                self._engine.abort(pending)

    async def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model's folder, as `LLM.get_tokenizer` does."""
        return await asyncio.to_thread(self._model.tokenizer)

    async def get_metrics(self) -> list[Counter | Gauge]:
        """Returns the engine's counters and gauges, as `LLM.get_metrics` does."""
        return await self._engine.between_steps(lambda: self._model.metrics("AsyncLLM.get_metrics"))

    async def reset_prefix_cache(self) -> bool:
        """Forgets the cached prefixes of earlier prompts. Returns False, and forgets nothing, while prompts run."""
        engine = self._model.engine_here("AsyncLLM.reset_prefix_cache")
        return await self._engine.between_steps(engine.reset_prefix_cache)

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has ended."""
        if self._engine.error is not None:
            raise self._engine.error

    @property
    def is_running(self) -> bool:
        """True until the engine ends."""
        return self._engine.error is None

    @property
    def errored(self) -> bool:
        """True if the engine has ended."""
        return self._engine.error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that callers get once the engine has ended."""
        return self._engine.error or EngineDeadError("the engine runs")

    def shutdown(self) -> None:
        """Ends the engine after the current step. Prompts in flight raise EngineDeadError."""
        self._engine.shut_down()

    @contextmanager
    def _running(self, pending: PendingRequest) -> Iterator[Callable[[], Awaitable[None]]]:
        """Runs a request as `AsyncEngine.running` does, known by its id."""
        name = pending.request_id
        if name in self._pending:
            raise ValueError(f"request id {name!r} is in use: choose another")
        self._pending[name] = pending
        try:
            with self._engine.running(pending) as wait:
                yield wait
        finally:
            del self._pending[name]


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
