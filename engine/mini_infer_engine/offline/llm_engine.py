"""`LLMEngine`: an engine that its caller steps, with vLLM's names."""

from collections.abc import Sequence
from typing import Any

from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.engine_args import EngineArgs
from mini_infer_engine.offline.metrics import Counter, Gauge
from mini_infer_engine.offline.offline_model import OfflineModel
from mini_infer_engine.offline.outputs import RequestOutput
from mini_infer_engine.offline.pending import PendingGeneration
from mini_infer_engine.offline.prompts import Prompt
from mini_infer_engine.offline.requests import Params
from mini_infer_engine.offline.stepped_engine import SteppedEngine


class LLMEngine(OfflineModel):
    """A model and its engine; texts advance by one step with each call of `step`. Not thread-safe."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Loads a model. Raises ValueError if the model or a setting is at fault."""
        super().__init__(engine_args)
        self._engine = SteppedEngine(self._model)
        self._pending: dict[str, PendingGeneration] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Adds a prompt, and returns its id. Raises ValueError if the prompt, a parameter or the id is at fault."""
        vllm_surface.refuse_others("add_request", others, vllm_surface.ADD_REQUEST, type(self).__name__)
        vllm_surface.refuse_adapter(lora_request)
        if request_id in self._pending:
            raise ValueError(f"request id {request_id!r} is in use: choose another")
        pending = self._requests.one(request_id, prompt, params, priority)
        self._engine.submit(pending)
        self._pending[request_id] = pending
        return request_id

    def step(self) -> list[RequestOutput]:
        """Computes one step. Returns an output for each prompt that it adds to, as `SamplingParams.output_kind` says:
        everything so far, what is new, or nothing until the last. Prompts whose pass failed end with the finish reason
        "error".

        Raises RunnerLostError if the engine has ended.
        """
        outputs = []
        for pending in self._engine.advance():
            assert isinstance(pending, PendingGeneration)
            if pending.has_output:
                outputs.append(pending.output())
            if pending.finished:
                self._pending.pop(pending.request_id, None)
        return outputs

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Aborts prompts; unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self._engine.abort([self._pending.pop(one) for one in ids if one in self._pending])

    def has_unfinished_requests(self) -> bool:
        """Returns True if there is a prompt with an output to come."""
        return bool(self._pending)

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of prompts with an output to come."""
        return len(self._pending)

    def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model's folder, as `LLM.get_tokenizer` does."""
        return self._model.tokenizer()

    def get_metrics(self) -> list[Counter | Gauge]:
        """Returns the engine's counters and gauges, as `LLM.get_metrics` does."""
        return self._model.metrics("LLMEngine.get_metrics")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets the cached prefixes of earlier prompts. Returns False, and forgets nothing, while requests run."""
        if reset_running_requests or reset_connector:
            raise ValueError("reset_running_requests and reset_connector are not supported: leave them out")
        return self._model.engine_here("LLMEngine.reset_prefix_cache").reset_prefix_cache()
