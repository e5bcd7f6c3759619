"""Models with recurrent layers: logits and texts are transformers', however their passes and checkpoints are cut."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mini_infer_engine import LLM, BeamSearchParams, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.architectures import HYBRIDS
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.request import SamplingParams as CoreSampling
from mini_infer_engine.models.recurrent_decoder import HybridModel
from mini_infer_engine.models.registry import MODELS, model_class, read_config
from mini_infer_engine.runtime import memory_plan
from mini_infer_engine.runtime.memory import state_slots
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from mini_infer_engine.runtime.recurrent.limits import check_recurrent
from tests.engine.models.test_models import TOLERANCE, VARIANTS
from tests.support.tiny_models import (
    GREEDY,
    PageDealer,
    chunk,
    reference_logits,
    run_chunks,
    save_tiny_model,
    save_tiny_model_with_text,
    tiny_runner,
)
from tests.support.transformers_models import expected_tokens

CHOSEN = ["qwen3-next", "granite-hybrid-moe", "lfm2"]
"""One variant of each kind of recurrence."""
TOKENS = [(place * 37 + 11) % 190 + 5 for place in range(150)]
PROMPTS = [[(place * 7 + index * 3) % 190 + 5 for place in range(9 + 31 * index)] for index in range(4)]
LENGTH = 24


@pytest.fixture(scope="module", params=CHOSEN)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and transformers' model of it."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    architecture, changes = VARIANTS[request.param]
    return directory, save_tiny_model(directory, architecture, **changes)


@pytest.fixture
def _half_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of running sequences may take half of the memory, whatever a sequence takes."""
    monkeypatch.setattr(state_slots, "running_share", lambda *_: 0.5)


def make_engine(directory: Path, **changes: Any) -> tuple[Engine, ModelRunner]:
    defaults = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 8, "max_num_batched_tokens": 48}
    runner = load_runner(EngineSettings(model=str(directory), **(defaults | changes)))
    return Engine(runner.settings, runner, (), runner.max_model_len, "revision"), runner


def generate(engine: Engine, prompts: Sequence[list[int]], *, apart: int = 0, length: int = LENGTH) -> list[list[int]]:
    """The greedy tokens of each prompt; `apart` steps lie between their arrivals."""
    made: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        made[str(index)] = []
        sampling = CoreSampling(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=0))
        take(engine, made, apart)
    while engine.has_work:
        take(engine, made, 1)
    return list(made.values())


def take(engine: Engine, made: dict[str, list[int]], num_steps: int) -> None:
    for _ in range(num_steps):
        for output in engine.step():
            assert not output.error
            made[output.request_id] += output.token_ids


def test_logits_equal_transformers_when_a_prompt_is_cut_anywhere(model: tuple[Path, Any]) -> None:
    directory, reference = model
    tokens = TOKENS[:70]
    expected = reference_logits(reference, tokens)
    runner = tiny_runner(directory)
    table = PageDealer(runner).table(70)
    for cut in range(1, 70):
        actual = run_chunks(runner, tokens, table, [cut, 70 - cut])
        assert (actual - expected).abs().max() <= TOLERANCE, cut


def test_logits_equal_transformers_when_a_row_writes_checkpoints_and_others_resume_from_them(
    model: tuple[Path, Any],
) -> None:
    directory, reference = model
    expected = reference_logits(reference, TOKENS)
    runner = tiny_runner(directory)
    table = PageDealer(runner).table(len(TOKENS))
    first = chunk(0, TOKENS, 0, 100, table, checkpoints=[(32, 4), (100, 1)])
    assert (runner.logits(Batch([first], 0)) - expected[:100]).abs().max() <= TOLERANCE
    step = chunk(0, TOKENS, 100, 1, table, checkpoints=[(1, 0)], sampling=GREEDY)
    assert (runner.logits(Batch([step], 1)) - expected[100:101]).abs().max() <= TOLERANCE
    for slot, source, start in ((1, 4, 32), (2, 1, 100), (0, 0, 101)):
        for count in (1, 40):
            row = chunk(slot, TOKENS, start, count, table, state_source=source)
            actual = runner.logits(Batch([row], 0))
            assert (actual - expected[start : start + count]).abs().max() <= TOLERANCE, (source, count)


def test_logits_equal_each_sequence_alone_when_a_batch_is_mixed(model: tuple[Path, Any]) -> None:
    directory, reference = model
    runner = tiny_runner(directory)
    dealer = PageDealer(runner)
    lengths = [70, 9, 41, 30, 1]
    sequences = [TOKENS[shift : shift + length] for shift, length in zip([0, 3, 7, 1, 5], lengths, strict=True)]
    tables = [dealer.table(length) for length in lengths]
    runner.logits(Batch([chunk(0, sequences[0], 0, 69, tables[0]), chunk(2, sequences[2], 0, 16, tables[2])], 0))
    runner.logits(Batch([chunk(1, sequences[1], 0, 8, tables[1])], 0))
    rows = [
        chunk(0, sequences[0], 69, 1, tables[0], sampling=GREEDY),
        chunk(1, sequences[1], 8, 1, tables[1], sampling=GREEDY),
        chunk(2, sequences[2], 16, 25, tables[2], sampling=GREEDY),
        chunk(3, sequences[3], 0, 30, tables[3]),
        chunk(4, sequences[4], 0, 1, tables[4], sampling=GREEDY),
    ]
    actual = runner.logits(Batch(rows, 2)).split([row.count for row in rows])
    for row, sequence, logits in zip(rows, sequences, actual, strict=True):
        expected = reference_logits(reference, sequence)[row.start : row.start + row.count]
        assert (logits - expected).abs().max() <= TOLERANCE, row.slot


@pytest.mark.parametrize("changes", [{}, {"step_depth": 0, "page_size": 32}], ids=str)
def test_text_is_that_of_transformers_when_sequences_come_and_go(
    model: tuple[Path, Any], changes: dict[str, Any]
) -> None:
    directory, reference = model
    expected = [expected_tokens(reference, prompt, LENGTH) for prompt in PROMPTS]
    engine, _ = make_engine(directory, max_num_seqs=3, **changes)
    for apart in (0, 5):
        assert generate(engine, PROMPTS, apart=apart) == expected
    assert engine.scheduler.kv_cache.usage == 0
    assert engine.stats().cached_prompt_tokens > 150, "the second time prompts resume from checkpoints"


@pytest.mark.usefixtures("_half_for_states")
def test_text_is_that_of_a_large_pool_when_sequences_are_preempted(model: tuple[Path, Any]) -> None:
    prompts = [[(place * 5 + index) % 190 + 5 for place in range(20)] for index in range(6)]
    _, runner = make_engine(model[0], enable_prefix_caching=False)
    state, page = runner.worker.state_bytes, runner.worker.page_bytes(16, runner.kv_cache)
    # Half of the memory are the states of six sequences. The other half has fewer pages than those get.
    num_pages = state // page + 4
    length, memory = num_pages * 16, 12 * state + 13 * page
    roomy, _ = make_engine(model[0], enable_prefix_caching=False, max_model_len=length)
    expected = generate(roomy, prompts, length=length - 20)
    assert not roomy.stats().preemptions
    for caching in (False, True):
        small, _ = make_engine(
            model[0], max_model_len=length, kv_cache_memory=memory, enable_prefix_caching=caching, max_num_seqs=6
        )
        assert generate(small, prompts, length=length - 20) == expected
        assert small.stats().preemptions


@pytest.mark.usefixtures("_half_for_states")
@pytest.mark.parametrize("caching", [False, True])
def test_text_is_that_of_a_large_pool_when_states_are_swapped(
    model: tuple[Path, Any], caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "_CPU_FLOPS_PER_S", 1.0)  # recomputing a token costs more than any copy
    prompts = [[(place * 5 + index) % 190 + 5 for place in range(20)] for index in range(6)]
    _, runner = make_engine(model[0], enable_prefix_caching=False)
    state, page = runner.worker.state_bytes, runner.worker.page_bytes(16, runner.kv_cache)
    num_pages = state // page + 4
    length = num_pages * 16
    roomy, _ = make_engine(model[0], enable_prefix_caching=False, max_model_len=length)
    expected = generate(roomy, prompts, length=length - 20)
    small, _ = make_engine(
        model[0],
        max_model_len=length,
        kv_cache_memory=12 * state + 13 * page,
        enable_prefix_caching=caching,
        max_num_seqs=6,
        kv_swap_memory=20 * state + 200 * page,
    )
    assert generate(small, prompts, length=length - 20) == expected
    assert small.scheduler.kv_cache.num_swaps
    with pytest.raises(ModelError, match="kv_swap_memory"):
        make_engine(model[0], kv_swap_memory=state)


def test_prompts_resume_from_the_longest_checkpoint_when_they_share_a_beginning(model: tuple[Path, Any]) -> None:
    """A prompt that leaves a cached one has a checkpoint there; the next that leaves it at the same place resumes."""
    directory, reference = model
    shared = TOKENS[:70]
    prompts = [shared + [10 + index] * 20 for index in range(3)]
    expected = [expected_tokens(reference, prompt, LENGTH) for prompt in prompts]
    engine, _ = make_engine(directory)
    cached = []
    for prompt, text in zip([*prompts, prompts[0]], [*expected, expected[0]], strict=True):
        before = engine.stats().cached_prompt_tokens
        assert generate(engine, [prompt]) == [text]
        cached.append(engine.stats().cached_prompt_tokens - before)
    assert cached[0] == 0
    assert cached[1] == 48, "the end of the first chunk"
    assert cached[2] == 64, "where the second prompt left the first"
    assert cached[3] == 80, "the last whole page before the last token"


def test_a_conversation_resumes_behind_its_last_answer_when_it_goes_on(model: tuple[Path, Any]) -> None:
    directory, reference = model
    engine, _ = make_engine(directory)
    (answer,) = generate(engine, [PROMPTS[2]])
    longer = PROMPTS[2] + answer + [9, 8, 7]
    before = engine.stats().cached_prompt_tokens
    assert generate(engine, [longer]) == [expected_tokens(reference, longer, LENGTH)]
    known = len(PROMPTS[2]) + LENGTH - 1
    assert engine.stats().cached_prompt_tokens - before == known - known % 16


@pytest.mark.usefixtures("_half_for_states")
def test_prefix_caching_is_off_with_a_line_in_the_log_when_no_checkpoint_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    architecture, changes = VARIANTS["qwen3-next"]
    reference = save_tiny_model(tmp_path, architecture, **changes)
    _, runner = make_engine(tmp_path)
    # Half of it are less than two sequences' states, and a quarter less than a checkpoint.
    memory = 4 * runner.worker.state_bytes - 1
    small, runner = make_engine(tmp_path, kv_cache_memory=memory, max_model_len=64)
    assert runner.settings.max_num_seqs == 1
    assert not small.scheduler.kv_cache.is_caching
    assert sum("prefix caching is off" in record.getMessage() for record in caplog.records) == 1
    assert sum("max_num_seqs limited" in record.getMessage() for record in caplog.records) == 1
    expected = [expected_tokens(reference, PROMPTS[0], LENGTH)]
    assert generate(small, PROMPTS[:1]) == generate(small, PROMPTS[:1]) == expected


def test_text_is_that_of_transformers_when_drafts_are_rejected(model: tuple[Path, Any]) -> None:
    """The state goes back behind rejected tokens, in chunks, beside others and from the cache."""
    directory, reference = model
    prompts = [*PROMPTS, [7, 8, 9] * 12, [11, 12] * 15]
    expected = [expected_tokens(reference, prompt, LENGTH) for prompt in prompts]
    engine, _ = make_engine(directory, max_num_seqs=3, speculative_method="ngram", num_speculative_tokens=3)
    for apart in (0, 5):
        assert generate(engine, prompts, apart=apart) == expected
    stats = engine.stats()
    assert stats.cached_prompt_tokens > 100
    assert stats.draft_tokens > sum(stats.accepted_tokens_by_position)


@pytest.mark.parametrize("variant", ["qwen3.5-moe", "nemotron-3"])
def test_texts_equal_transformers_through_the_python_api(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model_with_text(tmp_path, architecture, **changes)
    llm = LLM(str(tmp_path), device="cpu", kv_cache_memory=40_000_000, max_model_len=256)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = [expected_tokens(reference, prompt, LENGTH) for prompt in PROMPTS]
    for _ in ("computed", "cached"):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    with pytest.raises(ValueError, match="use_beam_search"):
        llm.beam_search(prompts[:1], BeamSearchParams(beam_width=2, max_tokens=4))


def test_the_text_part_runs_when_a_checkpoint_also_reads_images(tmp_path: Path) -> None:
    """Tensors of the vision tower and of multi-token prediction are left out."""
    architecture, changes = VARIANTS["qwen3.5"]
    model = save_tiny_model(tmp_path, architecture, **changes)
    expected = reference_logits(model, TOKENS[:40])
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed |= {"model.visual.patch.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file(renamed, str(tmp_path / "model.safetensors"))
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "vision_config": {},
        "text_config": text,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS[:40], PageDealer(runner).table(40), [30, 10])
    assert (actual - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("variant", ["qwen3.5-moe", "qwen3-next"])
def test_logits_equal_transformers_when_experts_are_stored_as_stacks(variant: str, tmp_path: Path) -> None:
    """Qwen3.5's files have them so, and transformers writes each expert's own tensors."""
    architecture, changes = VARIANTS[variant]
    model = save_tiny_model(tmp_path, architecture, **changes)
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacked |= {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
    assert len(stacked) < len(tensors)
    save_file(stacked, str(tmp_path / "model.safetensors"))
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS[:20], PageDealer(runner).table(20), [20])
    assert (actual - reference_logits(model, TOKENS[:20])).abs().max() <= TOLERANCE


@pytest.mark.parametrize("pattern", ["ME*E", "ME*-E"])
def test_layers_are_those_of_the_pattern_when_the_file_has_letters(pattern: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS["nemotron-3"]
    save_tiny_model(tmp_path, architecture, **changes)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    kinds = values.pop("layers_block_type")
    path.write_text(json.dumps(values | {"hybrid_override_pattern": pattern, "num_hidden_layers": 99}))
    config = read_config(tmp_path)
    assert config.num_layers == len(pattern)
    assert config.mixers == tuple({"M": "recurrent", "*": "attention"}.get(letter, "none") for letter in pattern)
    path.write_text(json.dumps(values | {"layers_block_type": kinds}))
    assert (read_config(tmp_path) == config) == (len(pattern) == len(kinds))


BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-next", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
    ("qwen3-next", {"layer_types": ["full_attention", 5, "linear_attention", "mamba"]}, "layer_types"),
    ("qwen3-next", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3-next", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    ("qwen3-next", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("qwen3.5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
    ("granite-hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("granite-hybrid", {"mamba_d_head": 5}, "mamba_n_heads"),
    ("granite-hybrid", {"mamba_n_groups": 3}, "mamba_n_groups"),
    ("granite-hybrid", {"time_step_limit": [2, 1]}, "time_step_limit"),
    ("granite-hybrid", {"time_step_limit": "none"}, "time_step_limit"),
    ("granite-hybrid-moe", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
    ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M?*"}, "hybrid_override_pattern"),
    ("nemotron-h", {"layers_block_type": "M-*"}, "layers_block_type"),
    ("nemotron-h", {"layers_block_type": ["full_attention", "conv"]}, "layer_types"),
    ("nemotron-h", {"n_groups": 3}, "n_groups"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
    ("nemotron-3", {"mlp_bias": True}, "mlp_bias"),
    ("lfm2", {"conv_L_cache": "3"}, "conv_L_cache"),
    ("lfm2", {"layer_types": {}}, "layer_types"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 1}, "full_attn_idxs"),
    ("lfm2-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("lfm2-moe", {"num_dense_layers": -1}, "num_dense_layers"),
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The config.json of each variant in `BAD_CONFIGS`."""
    directory = tmp_path_factory.mktemp("configs")
    found = {}
    for variant in {variant for variant, _, _ in BAD_CONFIGS}:
        architecture, changes = VARIANTS[variant]
        save_tiny_model(directory, architecture, **changes)
        found[variant] = json.loads((directory / "config.json").read_text())
    return found


@pytest.mark.parametrize(("variant", "changes", "named"), BAD_CONFIGS, ids=lambda value: str(value)[:40])
def test_a_config_is_refused_by_name_when_a_hybrids_field_is_unsupported(
    variant: str, changes: dict[str, Any], named: str, configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configs[variant]))
    read_config(tmp_path)
    path.write_text(json.dumps(configs[variant] | changes))
    with pytest.raises(ModelError, match=rf"config\.json: {named} = "):
        read_config(tmp_path)


def test_the_list_of_hybrids_is_that_of_the_models_with_recurrent_layers() -> None:
    assert {name for name in MODELS if issubclass(model_class(name), HybridModel)} == HYBRIDS


def test_a_start_on_a_gpu_is_refused_when_experts_without_gates_are_to_be_quantised(tmp_path: Path) -> None:
    architecture, changes = VARIANTS["nemotron-3"]
    save_tiny_model(tmp_path, architecture, **changes)
    config, settings = read_config(tmp_path), EngineSettings(model="any", quantization="int8")
    with pytest.raises(ModelError, match=rf"{config.architecture}.*quantization = 'int8'"):
        check_recurrent(settings, config, "cuda", moves_kv=False)
    check_recurrent(settings, config, "cpu", moves_kv=False)
    check_recurrent(EngineSettings(model="any"), config, "cuda", moves_kv=False)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_start_on_a_gpu_is_allowed_with_and_without_graphs(model: tuple[Path, Any], *, enforce_eager: bool) -> None:
    settings = EngineSettings(model="any", enforce_eager=enforce_eager)
    check_recurrent(settings, read_config(model[0]), "cuda", moves_kv=False)


def test_a_draft_with_recurrent_state_is_refused(model: tuple[Path, Any], tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    with pytest.raises(ModelError, match=r"speculative_model .*recurrent"):
        make_engine(tmp_path, speculative_model=str(model[0]))
