"""Models whose code is transformers', on a GPU: greedy text equals that of `generate` in fp32 on a CPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.config.model.transformers_architectures import THROUGH_TRANSFORMERS
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.runtime.model_runner import load_runner
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_settings, texts
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_models import expected_tokens, save_model

pytestmark = GPU_ONLY
LENGTH = 32
PROMPTS = [[(place * 7 + index * 3) % 150 + 5 for place in range(20 + 23 * index)] for index in range(3)]
EXPERTS = [
    "afmoe", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "laguna", "mellum", "minimax_m2", "olmoe",
    "phimoe", "qwen2_moe", "solar_open",
]  # fmt: skip
"""Models whose passes in fp32 are not recorded, for their experts are a loop on the host."""
CASES = {each.model_type: each.gpu != "graphs" or each.model_type in EXPERTS for each in THROUGH_TRANSFORMERS.values()}
"""Whether a model runs with `--enforce-eager`."""


@pytest.mark.parametrize("model_type", sorted(CASES))
def test_text_is_that_of_generate_when_a_gpu_runs_transformers_code(model_type: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, model_type)
    expected = [expected_tokens(model, prompt, LENGTH) for prompt in PROMPTS]
    settings = make_settings(
        tmp_path,
        model_impl="transformers",
        enforce_eager=CASES[model_type],
        max_num_seqs=4,
        disable_hybrid_kv_cache_manager=False,
    )
    runner = load_runner(settings)
    assert runner.config.model_impl == "transformers"
    engine = make_engine(settings, runner)
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    requests = [
        Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    assert texts(engine, requests) == expected


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_text_is_that_of_generate_when_our_operations_compute_recognised_layers(
    architecture: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, architecture, head_dim=32, hidden_size=128)
    expected = [expected_tokens(model, prompt, LENGTH) for prompt in PROMPTS]
    settings = make_settings(tmp_path, model_impl="transformers", max_num_seqs=4, disable_hybrid_kv_cache_manager=False)
    runner = load_runner(settings)
    assert "forward" in vars(runner.worker.model.causal.model.layers[0])
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    requests = [
        Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    assert texts(make_engine(settings, runner), requests) == expected


@pytest.mark.parametrize("model_type", [each for each in EXPERTS if each != "phimoe"])
def test_passes_with_experts_are_recorded_when_the_model_is_bf16(model_type: str, tmp_path: Path) -> None:
    """Products of experts in fp32 are a loop on the host, grouped ones in bf16 are not."""
    save_model(tmp_path, model_type)
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    requests = [
        Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    made = []
    for eager in (False, True):
        settings = make_settings(
            tmp_path, model_impl="transformers", dtype="bfloat16", enforce_eager=eager, max_num_seqs=4,
            disable_hybrid_kv_cache_manager=False,
        )  # fmt: skip
        made.append(texts(make_engine(settings, load_runner(settings)), requests))
    first = [[text[0] for text in one] for one in made]
    assert first[0] == first[1], "rows of other passes round differently: later tokens may differ"
