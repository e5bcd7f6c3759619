"""The offline API, with vLLM's names: prompts in, finished texts out, the engine in this process. No HTTP.

With `data_parallel_size` above 1 the engines are processes (data_parallel.offline).
"""

import threading
from collections.abc import Sequence
from os import PathLike
from typing import Any, Self

from tqdm import tqdm

from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from mini_infer_engine.offline.engine_args import EngineArgs
from mini_infer_engine.offline.metrics import Counter, Gauge
from mini_infer_engine.offline.offline_model import OfflineModel
from mini_infer_engine.offline.outputs import RequestOutput
from mini_infer_engine.offline.pending import PendingRequest
from mini_infer_engine.offline.pooling_calls import PoolingCalls
from mini_infer_engine.offline.prompts import OfflinePrompt, Prompt
from mini_infer_engine.offline.reply import Reply
from mini_infer_engine.offline.requests import Message, Params
from mini_infer_engine.offline.sampling_params import SamplingParams
from mini_infer_engine.offline.stepped_engine import SteppedEngine


class LLM(OfflineModel, PoolingCalls):
    """A model and its engine. Calls of several threads wait for each other."""

    def __init__(self, model: str | PathLike[str], **settings: Any) -> None:
        """Loads `model`; keywords are EngineSettings' fields, and vLLM's others at values that request nothing.

        Raises a ValueError that says why model or settings are at fault, and TypeError for an unknown keyword.
        """
        super().__init__(EngineArgs(model, **settings))
        self._engine, self.model_info = self._model.engine, self._model.info
        self._encoder = self._model.text.encoder
        self._stepped = SteppedEngine(self._model)
        self._engine_lock = threading.Lock()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        """Loads the model of `engine_args`, as `LLM(...)` does with their keywords."""
        vllm_surface.refuse_others("from_engine_args", others, vllm_surface.FROM_ENGINE_ARGS)
        return cls(**engine_args.keywords)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets the cached prefixes of earlier prompts; returns True. Nothing runs between calls, so the flags do
        nothing.

        Raises ValueError if the engines are processes of their own (`data_parallel_size` above 1).
        """
        with self._engine_lock:
            return self._model.engine_here("LLM.reset_prefix_cache").reset_prefix_cache()

    def get_metrics(self) -> list[Counter | Gauge]:
        """Returns the engine's counters and gauges. Raises ValueError as `reset_prefix_cache` does."""
        with self._engine_lock:
            return self._model.metrics("LLM.get_metrics")

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the default sampling parameters, with the model's own values from its generation_config.json."""
        return self._requests.default_params()

    def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model's folder.

        Raises ImportError if transformers is not installed, ValueError if the model has no folder.
        """
        return self._model.tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Returns one output for each prompt, in order. Parameters are one for all, or one for each; priorities one for
        each.

        Everything is checked before anything runs: a ValueError names the fault and leaves the engine as it was.
        Keywords of vLLM's that are not here are accepted at values that request nothing.
        """
        vllm_surface.refuse_adapter(lora_request)
        vllm_surface.refuse_others("generate", others, vllm_surface.GENERATE)
        read = self._requests.prompts(prompts)
        if priority is not None and len(priority) != len(read):
            raise ValueError(f"there are {len(read)} prompts and {len(priority)} priorities: give one for each")
        if priority is not None and not all(isinstance(number, int) for number in priority):
            raise ValueError(f"priority = {list(priority)!r}: they are integers, and the lower goes first")
        return self._run(read, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Returns one output for each conversation: a list of messages, or a list of such lists.

        Keywords of vLLM's that are not here are accepted at values that request nothing.
        """
        vllm_surface.refuse_adapter(lora_request)
        vllm_surface.refuse_others("chat", others, vllm_surface.CHAT)
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._run(self._requests.conversations(messages, options), sampling_params, use_tqdm)

    def _run(
        self,
        prompts: Sequence[OfflinePrompt],
        sampling_params: Params | Sequence[Params] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        params = self._requests.params_of(len(prompts), sampling_params)
        priorities = [0] * len(prompts) if priority is None else priority
        requests = [
            self._requests.generation(index, prompt, *chosen, number)
            for index, (prompt, chosen, number) in enumerate(zip(prompts, params, priorities, strict=True))
        ]
        self._finish(requests, use_tqdm)
        return [request.output() for request in requests]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False, **others: Any
    ) -> list[BeamSearchOutput]:
        """Returns the `beam_width` most likely continuations of each prompt, the best first.

        Raises ValueError if a prompt or a parameter is at fault, or the KV cache is too small for so many beams.
        """
        vllm_surface.refuse_others("beam_search", others, vllm_surface.BEAM_SEARCH)
        read = self._requests.prompts(prompts)
        requests = [self._requests.beams(index, prompt, params) for index, prompt in enumerate(read)]
        self._finish(requests, use_tqdm)
        return [BeamSearchOutput([self._beam(reply) for reply in request.replies]) for request in requests]

    def _beam(self, reply: Reply) -> BeamSearchSequence:
        assert reply.cumulative_logprob is not None
        assert reply.beam_score is not None
        tokens = [*reply.request.prompt_token_ids, *reply.token_ids]
        encoder = self._encoder
        text = None if encoder is None else encoder.decode(tokens, skip_special_tokens=True)
        cumulative, score = reply.cumulative_logprob, reply.beam_score
        return BeamSearchSequence(
            tokens, reply.logprobs_by_token, cumulative, score, text, reply.finish_reason, reply.stop_reason
        )

    def _finish(self, requests: Sequence[PendingRequest], use_tqdm: bool) -> None:
        """Runs requests to their ends. Raises RuntimeError if a pass failed, ValueError if the engine refuses one of
        them.
        """
        with self._engine_lock:
            try:
                for request in requests:
                    self._stepped.submit(request)
                with tqdm(total=len(requests), desc="prompts", unit="prompt", disable=not use_tqdm) as progress:
                    while len(self._stepped):
                        for request in self._stepped.advance():
                            if (error := request.error) is not None:
                                raise error
                            progress.update(request.finished)
            finally:
                self._stepped.abort(requests)  # after Ctrl-C or an error: the next call finds an idle engine
