"""Runners on the GPU and requests through an engine around them, for tests that compare whole texts."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_infer_engine.communication.rank_group import ALONE_IN_GROUP, RankGroup
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime import model_runner
from mini_infer_engine.runtime.cpu.executor import TorchExecutor
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, WeightExchange

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "kv_cache_memory": 1 << 28,
    "max_model_len": 512,
    "disable_hybrid_kv_cache_manager": True,
}
"""Passes that tests write by hand have one page table; test_kv_groups.py has the others."""


def make_settings(directory: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(model=str(directory), **(DEFAULTS | changes))


def make_runner(
    settings: EngineSettings,
    group: RankGroup = ALONE_IN_GROUP,
    weights: WeightExchange = NO_EXCHANGE,
    *,
    defers: bool = False,
) -> ModelRunner:
    """With kernels, or with torch on the same device where `attention_backend` says so."""
    kind = TorchExecutor if settings.attention_backend == "torch" else CudaExecutor
    directory = Path(settings.model)
    config = read_config(directory, reads_images=True)
    return model_runner.make_runner(settings, config, directory, kind, group, weights=weights, defers=defers)


def make_engine(settings: EngineSettings, runner: ModelRunner, eos: tuple[int, ...] = ()) -> Engine:
    return Engine(settings, runner, eos, runner.max_model_len, "revision", record_events=False)


def texts(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of each request, run together."""
    made: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            made[output.request_id] += output.token_ids
    return list(made.values())


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=20),
    SamplingParams(temperature=0.9, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.05, min_tokens=3, stop_token_ids=[5, 6, 7, 8, 9, 10]),
    SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=list(range(20, 40))),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.8, frequency_penalty=-0.2),
]


def mixed_requests(
    count: int, vocabulary: int, longest: int, name: str = "", outputs: tuple[int, int] = (1, 60)
) -> list[Request]:
    """Prompts of 1 to `longest` tokens, a third of them with shared beginnings; all kinds of sampling, fixed seeds."""
    dice = random.Random(3)
    shared = [dice.randrange(vocabulary) for _ in range(longest)]
    requests = []
    for index in range(count):
        prompt = [dice.randrange(vocabulary) for _ in range(dice.randint(1, longest))]
        if index % 3 == 0:
            kept = dice.randrange(len(prompt))
            prompt[:kept] = shared[:kept]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        params = {field: getattr(sampling, field) for field in sampling.__struct_fields__}
        params |= {"max_tokens": dice.randint(*outputs), "ignore_eos": True}
        requests.append(
            Request(
                request_id=f"{name}{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(**params),
                noise_seed=dice.getrandbits(60),
            )
        )
    return requests
