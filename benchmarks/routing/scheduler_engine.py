"""The engine's real scheduler and prefix cache behind the interface of `EngineModel`: exact, a hundred times slower.

The only file of the simulation that imports the engine. Each token of a block is the block's identifier, pages have the
size of a block, and passes take the time that the rates say.
"""

from array import array
from collections.abc import Callable

from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.workload import SimulatedRequest
from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, root_key
from mini_infer_engine.core.kv_cache_manager import KVCacheManager
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.step import Step

ANSWER_TOKEN = 1 << 30
"""What every output token is: block identifiers are smaller."""


class SchedulerEngine:
    """One engine of real parts, one pass at a time."""

    def __init__(
        self,
        shape: EngineShape,
        on_first_token: Callable[[SimulatedRequest, float], None],
        on_finish: Callable[[SimulatedRequest, float, int], None],
    ) -> None:
        if shape.block_tokens != BLOCK_SIZE_TOKENS:
            raise ValueError(f"block_tokens is {shape.block_tokens}: the real engine's blocks have {BLOCK_SIZE_TOKENS}")
        self._shape, self._on_first_token, self._on_finish = shape, on_first_token, on_finish
        self.scheduler = Scheduler(
            KVCacheManager(shape.kv_blocks, BLOCK_SIZE_TOKENS, record_events=False),
            max_num_seqs=shape.max_num_seqs,
            token_budget=shape.token_budget,
            chunk_limit=shape.token_budget,
        )
        self.next_s: float | None = None
        self.computed_tokens = 0
        self._step: Step | None = None
        self._requests: dict[str, SimulatedRequest] = {}
        self._arrivals = 0

    @property
    def preemptions(self) -> int:
        """So far."""
        return self.scheduler.num_preemptions

    def add(self, request: SimulatedRequest, now_s: float, priority: int = 0) -> None:
        """See EngineModel."""
        tokens = array("I")
        for position in range(request.prompt_tokens):
            block = position // BLOCK_SIZE_TOKENS
            is_prompt = block < len(request.blocks)
            tokens.append(request.blocks[block] if is_prompt else ANSWER_TOKEN + 1 + request.number)
        engine_request = Request(
            request_id=str(request.number),
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
            priority=priority,
        )
        self._requests[engine_request.request_id] = request
        last = request.prompt_tokens + request.output_tokens - 2
        sequence = Sequence(
            engine_request, (priority, self._arrivals), now_s, root_key("simulated"), last, frozenset(), ()
        )
        self._arrivals += 1
        self.scheduler.add(sequence)
        if self.next_s is None:
            self._plan(now_s)

    def wake(self, now_s: float) -> None:
        """See EngineModel."""
        assert self._step is not None
        self.scheduler.ended(self._step)
        for row, sequence in zip(self._step.batch.rows, self._step.sequences, strict=True):
            sequence.in_flight -= 1
            if row.sampling is not None and sequence.state is not State.FINISHED:
                self._accept(sequence, now_s)
            if sequence.is_leaving and not sequence.in_flight:
                self.scheduler.release(sequence)
        self._plan(now_s)

    def _accept(self, sequence: Sequence, now_s: float) -> None:
        request = self._requests[sequence.request.request_id]
        # An answer's token is the identifier of the block that it lies in, so that a next prompt finds it.
        block = len(sequence.token_ids) // BLOCK_SIZE_TOKENS
        is_prompt = block < len(request.blocks)
        token = request.blocks[block] if is_prompt else ANSWER_TOKEN + 1 + request.number
        self.scheduler.append(sequence, token)
        if len(sequence.token_ids) == request.prompt_tokens + 1:
            self._on_first_token(request, now_s)
        if sequence.finish_reason(token):
            self.scheduler.leave(sequence, State.FINISHED)
            self._on_finish(request, now_s, sequence.num_cached or 0)

    def _plan(self, now_s: float) -> None:
        step = self.scheduler.plan()
        rows, decodes = step.batch.rows, step.batch.num_decodes
        if not rows:
            self._step, self.next_s = None, None
            return
        self.scheduler.launched(step)
        prefill = sum(row.count for row in rows[decodes:])
        pairs = sum(row.count * (row.start + row.count / 2) for row in rows[decodes:])
        kv_tokens = sum(row.start + 1 for row in rows[:decodes])
        self.computed_tokens += prefill
        self._step = step
        self.next_s = now_s + self._shape.rates.pass_s(decodes, kv_tokens, prefill, pairs)
