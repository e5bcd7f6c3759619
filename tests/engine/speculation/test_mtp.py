"""Multi-token prediction of DeepSeek-V3 checkpoints guesses what its definition says, and changes no text."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.architectures import MODELS, MTP
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.models.registry import model_class
from mini_infer_engine.runtime.model_runner import load_runner
from tests.engine.speculation.test_same_text import requests, run
from tests.support.fp8_checkpoints import quantize_folder
from tests.support.hidden_drafts import MtpReference, add_mtp, recorded_guesses, save_exact_mtp, save_mtp
from tests.support.tiny_models import DEEPSEEK_V3, GATED_DELTA, GATED_MOE, GLM_MOE, save_tiny_model

MTP_OPTIONS: dict[str, Any] = {"speculative_method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MtpReference]:
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, save_mtp(folder, "deepseek_v3", **DEEPSEEK_V3)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made however long a pass of a tiny model takes with them."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])


def greedy(*lengths: int, tokens: int = 12, shared: int = 0) -> list[Request]:
    """Requests with prompts of these lengths, whose first `shared` tokens are equal."""
    made = []
    for index, length in enumerate(lengths):
        prompt = [(place * 7 + (index * 5 if place >= shared else 0)) % 23 + 4 for place in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        made.append(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=index))
    return made


SETUPS: dict[str, tuple[list[Request], dict[str, Any]]] = {
    "batch": (greedy(9, 17, 30), {}),
    "chunks": (greedy(40, 23, 30), {"long_prefill_token_threshold": 16}),
    "prefix hits": (greedy(50, 50, 49, shared=40), {"max_num_seqs": 1}),
    "swap": (greedy(17, 18, 19, tokens=48), {"kv_cache_memory": 150_000, "kv_swap_memory": 4_000_000}),
    "recompute": (greedy(17, 18, 19, tokens=48), {"kv_cache_memory": 150_000}),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_mtp_guesses_equal_its_definition(saved: tuple[Path, MtpReference], setup: str) -> None:
    folder, reference = saved
    requested, options = SETUPS[setup]
    plain, _ = run(folder, requested)
    common = {"kv_cache_memory": 4_000_000} | options
    with recorded_guesses() as found:
        guessed, stats = run(folder, requested, **MTP_OPTIONS, **{"max_model_len": 80} | common)
    assert guessed == plain
    assert len(found) > 20
    for text, guesses in found[:: max(1, len(found) // 25)]:
        assert guesses == reference.guesses(text, len(guesses)), f"after {len(text)} tokens"
    assert stats.preemptions or setup not in ("swap", "recompute")
    assert stats.cached_prompt_tokens or setup != "prefix hits"


@pytest.mark.parametrize("step_depth", [0, 1])
def test_mtp_guesses_equal_its_definition_when_passes_without_guesses_come_between(
    saved: tuple[Path, MtpReference], monkeypatch: pytest.MonkeyPatch, step_depth: int
) -> None:
    folder, reference = saved
    turns = iter(range(1 << 20))
    levels = (3, 3, 0, 1, 0, 0, 3)
    monkeypatch.setattr(DraftController, "choose", lambda *_, **__: levels[next(turns) % 7])
    requested = greedy(9, 17, tokens=40)
    with recorded_guesses() as found:
        run(folder, requested, **MTP_OPTIONS, step_depth=step_depth)
    assert len(found) > 20
    for text, guesses in found[::3]:
        assert guesses == reference.guesses(text, len(guesses)), f"after {len(text)} tokens"


GLM: dict[str, dict[str, Any]] = {
    "glm4_moe": GLM_MOE | {"use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": DEEPSEEK_V3
    | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "v_head_dim": 24},
}


@pytest.mark.parametrize("architecture", GLM)
def test_mtp_guesses_equal_its_definition_when_the_model_is_glm(tmp_path: Path, architecture: str) -> None:
    """With rotation of a part of each head, norms of q and k, and biases; with latents."""
    reference = save_mtp(tmp_path, architecture, **GLM[architecture])
    with recorded_guesses() as found:
        guessed, _ = run(tmp_path, greedy(9, 17, 30), **MTP_OPTIONS)
    assert guessed == run(tmp_path, greedy(9, 17, 30))[0]
    assert len(found) > 20
    for text, guesses in found[::2]:
        assert guesses == reference.guesses(text, len(guesses)), f"after {len(text)} tokens"


def test_mtp_guesses_equal_its_definition_when_the_model_is_qwen(tmp_path: Path) -> None:
    """The recurrent state goes back behind the guesses that are wrong, which nearly all are."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    reference = save_mtp(tmp_path, "qwen3_next", **GATED_DELTA | GATED_MOE | {"layer_types": kinds})
    with recorded_guesses() as found:
        guessed, _ = run(tmp_path, greedy(9, 17, 30), **MTP_OPTIONS)
    assert guessed == run(tmp_path, greedy(9, 17, 30))[0]
    assert len(found) > 20
    for text, guesses in found[::2]:
        assert guesses == reference.guesses(text, len(guesses)), f"after {len(text)} tokens"


def test_mtp_guesses_are_those_of_exact_weights_when_the_checkpoint_is_fp8(tmp_path: Path) -> None:
    """As DeepSeek-V3's is: blocks of FP8 in the layer, too, and its projection in the model's dtype."""
    wide = {"moe_intermediate_size": 96, "q_lora_rank": 64}
    save_tiny_model(tmp_path / "fp8", "deepseek_v3", num_hidden_layers=4, **DEEPSEEK_V3 | wide)
    shutil.copytree(tmp_path / "fp8", tmp_path / "exact")
    save_file(quantize_folder(tmp_path / "fp8", "fp8-block"), tmp_path / "exact" / "model.safetensors")
    torch.manual_seed(11)
    norms = {name: torch.rand(64) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    parts = norms | {"eh_proj": torch.randn(64, 128) * 0.2}
    texts = []
    for folder in (tmp_path / "fp8", tmp_path / "exact"):
        add_mtp(folder, parts)
        with recorded_guesses() as found:
            run(folder, greedy(9, 17), **MTP_OPTIONS)
        texts.append(found)
    assert len(texts[0]) > 15
    assert texts[0] == texts[1]


@pytest.mark.parametrize("step_depth", [0, 1])
def test_text_with_mtp_equals_the_plain_engines(saved: tuple[Path, MtpReference], step_depth: int) -> None:
    """Greedy and sampled, with stop tokens, penalties, biases and log probabilities."""
    folder, _ = saved
    plain, _ = run(folder, requests())
    guessed, stats = run(folder, requests(), **MTP_OPTIONS, step_depth=step_depth)
    assert guessed == plain
    assert stats.draft_tokens > 50


def test_every_draft_token_is_accepted_when_the_prediction_layer_is_exact(tmp_path: Path) -> None:
    folder = save_exact_mtp(tmp_path)
    requested = greedy(9, 14, tokens=1 + 4 * 12)
    guessed, stats = run(folder, requested, **MTP_OPTIONS, step_depth=0)
    for one, request in zip(guessed, requested, strict=True):
        first = request.prompt_token_ids[-1]
        assert one[0] == [(first + place) % 64 for place in range(1, 50)]
    assert stats.draft_tokens == sum(stats.accepted_tokens_by_position) == 3 * 2 * 12


def test_mtp_is_refused_when_the_checkpoint_has_no_such_layer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", **DEEPSEEK_V3)
    with pytest.raises(ModelError, match=r"speculative_method = 'mtp'.*model\.layers\.3\..*'ngram'"):
        run(tmp_path, [], **MTP_OPTIONS)


def test_mtp_is_refused_when_the_architecture_has_none(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    with pytest.raises(ModelError, match=r"'mtp'.*Qwen3ForCausalLM.*DeepseekV3ForCausalLM.*speculative_model"):
        run(tmp_path, [], **MTP_OPTIONS)


def test_the_error_names_the_tensor_when_the_layer_is_incomplete(tmp_path: Path) -> None:
    save_mtp(tmp_path, "deepseek_v3", **DEEPSEEK_V3)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.layers\.3\.hnorm\.weight"):
        run(tmp_path, [], **MTP_OPTIONS)


def test_mtp_is_refused_when_keys_and_values_go_to_other_engines(saved: tuple[Path, MtpReference]) -> None:
    settings = EngineSettings(model=str(saved[0]), device="cpu", kv_cache_memory=2_000_000, **MTP_OPTIONS)
    with pytest.raises(ModelError, match="--transfer-port"):
        load_runner(settings, reports_layers=True)


def test_hidden_states_count_when_pages_are_swapped(saved: tuple[Path, MtpReference]) -> None:
    sizes = {"kv_cache_memory": 2_000_000, "kv_swap_memory": 1_000_000}
    pool = load_runner(EngineSettings(model=str(saved[0]), device="cpu", **sizes, **MTP_OPTIONS)).pool
    assert pool.hidden is not None
    swapped = pool.host_pages.nbytes + pool.hidden.host_pages.nbytes
    assert 0.9 * 1_000_000 < swapped <= 1_000_000
    assert 0 < pool.hidden.host_pages.nbytes < pool.host_pages.nbytes


def test_architectures_with_mtp_are_those_whose_classes_name_its_tensors() -> None:
    assert {name for name in MODELS if model_class(name).mtp_names is not None} == MTP


def test_dummy_weights_have_a_prediction_layer(saved: tuple[Path, MtpReference], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved[0] / "config.json").read_text())
    plain, _ = run(tmp_path, greedy(9), load_format="dummy")
    guessed, stats = run(tmp_path, greedy(9), load_format="dummy", **MTP_OPTIONS)
    assert guessed == plain
    assert stats.draft_tokens > 5
