"""Every architecture, shared out among ranks: logits equal those of the whole model, and are the same on all ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.distributed.group_layers import GroupLayers
from mini_infer_engine.kv_transfer.layout import layout_refusal
from mini_infer_engine.layers.latent_attention import LatentAttention
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.registry import model_class, read_config
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.engine.models.test_models import VARIANTS
from tests.support import fp4_checkpoints, fp8_checkpoints
from tests.support.mixed_checkpoints import Group
from tests.support.mixed_checkpoints import quantize_folder as quantize_mixed
from tests.support.thread_group import ThreadGroup, ThreadRank
from tests.support.tiny_models import DEEPSEEK, GREEDY, PageDealer, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SIZES = [30, 1, 9]
CHOSEN = [
    "qwen2", "qwen2-tied", "qwen3-tied", "llama-biased", "mistral-window", "gemma3", "gemma2-tight-caps", "qwen3-moe",
    "qwen3-moe-mixed", "mixtral", "phi3", "phi4-mini", "olmo2", "olmo2-biased", "granite-biased", "smollm3",
    "deepseek-v2-lite", "deepseek-v2", "deepseek-v2-dense", "deepseek-v3", "deepseek-v3-halves", "gpt-oss",
    "glm", "glm4", "glm4-moe", "glm4-moe-air", "minimax-m2", "minimax-m2-one-kv-head",
    "glm4-moe-lite", "solar-open", "dots1", "seed-oss", "exaone4", "olmo3", "olmoe", "qwen2-moe",
    "ernie4.5", "ernie4.5-moe",
    "deepseek-v3.2", "glm-5", "gemma4", "gemma4-unified", "gemma4-inputs", "gemma4-moe",
]  # fmt: skip
HYBRIDS = [
    "qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-hybrid", "granite-hybrid-moe", "nemotron-h", "nemotron-3",
    "nemotron-3-latent", "lfm2", "lfm2-biased", "lfm2-moe",
]  # fmt: skip


@contextmanager
def torch_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _check(directory: Path, size: int, **settings: Any) -> None:
    runner = tiny_runner(directory)
    expected = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES)
    group = ThreadGroup(directory, size, tensor_parallel_size=size, **settings)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES))
    assert all(torch.equal(logits, found[0]) for logits in found[1:])
    assert (found[0] - expected).abs().max() < 2e-4
    shares = [rank.worker.weight_bytes for rank in group.runners]
    assert max(shares) < (0.75 if size == 2 else 0.6) * runner.worker.weight_bytes


@pytest.mark.parametrize("size", [2, 4])  # of two KV heads four ranks hold each twice
@pytest.mark.parametrize("variant", CHOSEN)
def test_tensor_parallel_logits_equal_one_process(variant: str, size: int, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    _check(tmp_path, size)


@pytest.mark.parametrize("variant", HYBRIDS)
def test_tensor_parallel_logits_equal_one_process_when_layers_have_a_recurrent_state(
    variant: str, tmp_path: Path
) -> None:
    """Ranks have heads, groups and channels of the recurrences."""
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    _check(tmp_path, 2)


def test_ranks_have_the_group_of_their_heads_when_there_are_fewer_groups_than_ranks(tmp_path: Path) -> None:
    architecture, changes = VARIANTS["granite-hybrid"]
    save_tiny_model(tmp_path, architecture, **changes | {"mamba_n_groups": 1})
    _check(tmp_path, 2)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen3-next", {"num_experts": 8}),
        ("granite-hybrid-moe", {"num_local_experts": 8, "mamba_n_groups": 1}),
        ("nemotron-3", {"n_routed_experts": 8}),
    ],
)
def test_expert_parallel_logits_equal_one_process_when_layers_have_a_recurrent_state(
    variant: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    architecture, common = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **common | changes)
    _check(tmp_path, 2, enable_expert_parallel=True)


@pytest.mark.parametrize("whole", [False, True])
def test_experts_that_a_checkpoint_stores_as_stacks_are_sharded(whole: bool, tmp_path: Path) -> None:
    architecture, changes = VARIANTS["qwen3.5-moe"]
    model = save_tiny_model(tmp_path, architecture, **changes)
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacked |= {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
    save_file(stacked, tmp_path / "model.safetensors")
    _check(tmp_path, 2, enable_expert_parallel=whole)


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("qwen3-next", "linear_num_key_heads = 2"),
        ("granite-hybrid", "number of Mamba heads = 8"),
        ("nemotron-h", "number of Mamba heads = 8"),
        ("lfm2", "channels of the convolution = 64"),
    ],
)
def test_a_start_is_refused_by_name_when_ranks_cannot_share_a_recurrence(
    variant: str, named: str, tmp_path: Path
) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    config = replace(read_config(tmp_path), tensor_parallel=TensorParallel(0, 3))
    with pytest.raises(ModelError, match=f"{named} cannot be split"):
        model_class(config.architecture).check_split(config)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", ["qwen2", "gemma3", "deepseek-v2-lite"])
def test_bfloat16_error_of_tensor_parallel_logits_equals_that_of_one_process(
    variant: str, size: int, tmp_path: Path
) -> None:
    """They add in another order, and no further from what fp32 gives."""
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)

    def logits(runner: ModelRunner) -> torch.Tensor:
        return run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES).float()

    exact = logits(tiny_runner(tmp_path))
    alone = logits(tiny_runner(tmp_path, dtype="bfloat16"))
    with torch_default_dtype(torch.bfloat16):  # threads share it, and each sets it while its model is made
        group = ThreadGroup(tmp_path, size, tensor_parallel_size=size, dtype="bfloat16")
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    first, *others = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES).float())
    assert all(torch.equal(logits, first) for logits in others)
    errors = [(found - exact).square().mean().sqrt() for found in (alone, first)]
    assert errors[0] > 1e-4
    assert errors[1] < 1.25 * errors[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "variant",
    ["qwen3-moe", "qwen3-moe-mixed", "mixtral", "deepseek-v2-lite", "deepseek-v3", "gpt-oss", "glm4-moe", "minimax-m2"],
)
def test_expert_parallel_logits_equal_one_process(variant: str, size: int, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    names = dict.fromkeys(("mixtral", "gpt_oss", "minimax_m2"), "num_local_experts") | {"qwen3_moe": "num_experts"}
    experts = names.get(architecture, "n_routed_experts")
    width = {0: 33, 1: 36, 2: 34}[changes.get("n_shared_experts", 0)]  # the shared experts' alone is shared out
    save_tiny_model(tmp_path, architecture, **(changes | {experts: 8, "moe_intermediate_size": width}))
    _check(tmp_path, size, enable_expert_parallel=True)


@pytest.mark.parametrize("whole", [False, True])
def test_each_layer_needs_two_all_reduces(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After attention, and after routed and shared experts together; embeddings are summed once."""
    save_tiny_model(tmp_path, "deepseek_v3", **VARIANTS["deepseek-v3"][1])
    group = ThreadGroup(tmp_path, 2, tensor_parallel_size=2, enable_expert_parallel=whole)
    sums: list[int] = []
    all_reduce = ThreadRank.all_reduce

    def counted(rank: ThreadRank, x: torch.Tensor) -> torch.Tensor:
        sums.append(rank.parallel.rank)
        return all_reduce(rank, x)

    monkeypatch.setattr(ThreadRank, "all_reduce", counted)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    group.run(lambda rank: run_chunks(rank, TOKENS, table, [40]))
    assert sorted(sums) == [0] * (1 + 2 * 3) + [1] * (1 + 2 * 3)


def test_latents_are_replicated_and_heads_sharded(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", **VARIANTS["deepseek-v3"][1])
    alone, group = tiny_runner(tmp_path), ThreadGroup(tmp_path, 2, tensor_parallel_size=2)
    whole = alone.kv_memory().layout
    for rank in group.runners:
        attention = rank.worker.model.layers[0].self_attn
        assert isinstance(attention, LatentAttention)
        layers = (attention.a_proj, attention.q_b_proj, attention.kv_b_proj, attention.o_proj)
        sizes = [(layer.out_features, layer.in_features) for layer in layers if layer is not None]
        assert sizes == [(48 + 32 + 16, 64), (2 * (24 + 16), 48), (2 * (24 + 20), 32), (64, 2 * 20)]
        assert rank.pool.spec == alone.pool.spec
        layout = rank.kv_memory().layout
        assert layout_refusal(layout, whole) == layout_refusal(whole, layout) == ""


def test_a_chunk_ends_only_when_all_ranks_have_its_keys_and_values(tmp_path: Path) -> None:
    """Whoever is given pages of a group learns from the first rank alone that the chunk is computed."""
    save_tiny_model(tmp_path, "qwen3")
    group = ThreadGroup(tmp_path, 2, tensor_parallel_size=2)
    first, second = group.runners
    last_layer, ended = second.worker.model.layers[-1], Event()
    attend = last_layer.attend

    def late(*arguments: Any) -> Any:
        assert not ended.wait(0.3)
        return attend(*arguments)

    def run(rank: ModelRunner) -> None:
        if rank is second:
            last_layer.attend = late  # type: ignore[method-assign]  # this rank is slow
        rank.collect(rank.launch(Batch([Row(0, 0, 20, TOKENS[:20], table, None)], 0)))
        if rank is first:
            ended.set()

    table = PageDealer(first).table(20)
    group.run(run)
    assert ended.is_set()


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("variant", ["qwen3-tied", "gemma2-tight-caps", "olmo2", "qwen3-moe", "deepseek-v2-lite"])
def test_layer_progress_is_reported_only_when_all_ranks_have_the_layer(
    variant: str, samples: bool, tmp_path: Path
) -> None:
    """Though the others are slower in each layer: whoever is given pages reads those of all ranks."""
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    group = ThreadGroup(tmp_path, 2, tensor_parallel_size=2)
    first, second = group.runners
    first.executor.capture(reports_layers=True)
    layers = list(second.worker.model.layers)
    attended, reported, ahead = 0, list[GroupLayers](), list[tuple[int, int]]()

    def look() -> None:
        ahead.extend((one.num_done(), attended) for one in reported)

    def slowed(attend: Callable[..., Any]) -> Callable[..., Any]:
        def late(*arguments: Any) -> Any:
            nonlocal attended
            for _ in range(5):
                time.sleep(0.01)
                look()
            result = attend(*arguments)
            attended += 1
            return result

        return late

    for layer in layers:
        layer.attend = slowed(layer.attend)  # type: ignore[method-assign]  # this rank is slow
    table = PageDealer(first).table(20)

    def run(rank: ModelRunner) -> None:
        report = None
        if rank is first:
            report = lambda own: reported.append(GroupLayers(own, len(layers)))  # noqa: E731  # of this rank alone
        row = Row(0, 0, 20, TOKENS[:20], table, GREEDY if samples else None)
        rank.collect(rank.launch(Batch([row], 0, report_layers=report)))
        if rank is first:
            look()
            reported[0].has_ended = True
            look()

    group.run(run)
    assert all(done <= there for done, there in ahead)
    assert {done for done, _ in ahead} == set(range(len(layers) + 1)), "layers are told of one by one, as they come"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("variant", ["qwen2", "gemma2-tight-caps", "phi3"])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_quantisation_of_dense_layers_equals_one_process(
    kind: str, variant: str, size: int, tmp_path: Path
) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    alone = tiny_runner(tmp_path, quantization=kind)
    expected = run_chunks(alone, TOKENS, PageDealer(alone).table(40), [40])
    group = ThreadGroup(tmp_path, size, quantization=kind, tensor_parallel_size=size)
    made = group.run(lambda rank: run_chunks(rank, TOKENS, PageDealer(rank).table(40), [40]))
    assert (made[0] - expected).abs().max() < 2e-4


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Ranks have whole groups of 128 columns."""


@pytest.mark.parametrize("kind", ["int4", "w8a8-int8"])
@pytest.mark.parametrize(("variant", "shape"), [("qwen2", WIDE), ("olmo2", WIDE), ("qwen2", {})])
def test_tensor_parallel_calibration_equals_one_process(
    kind: str, variant: str, shape: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layer to the last integer, but for groups that ranks cut, and behind norms that ranks share.

    In later ones a sum in another order can round another way, and all that follows makes up for that.
    """
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **(changes | shape))
    rows = torch.arange(960).view(4, 240) * 7 % 190 + 5
    monkeypatch.setattr("mini_infer_engine.runtime.worker.calibration_rows", lambda _: rows)
    alone = tiny_runner(tmp_path, quantization=kind)
    group = ThreadGroup(tmp_path, 2, quantization=kind, tensor_parallel_size=2)
    expected = run_chunks(alone, TOKENS, PageDealer(alone).table(40), [40])
    made = group.run(lambda rank: run_chunks(rank, TOKENS, PageDealer(rank).table(40), [40]))
    assert torch.equal(made[0], made[1])
    assert torch.nn.functional.cosine_similarity(made[0], expected).mean() > (0.9 if kind == "int4" else 0.98)
    models = [one.worker.model for one in (alone, *group.runners)]
    norms = [[norm.weight for layer in model.layers for norm, _ in layer.normed_products()] for model in models]
    for own, *others in zip(*norms, strict=True):
        assert all(torch.allclose(own, other, rtol=1e-4) for other in others)
    first, *shares = (model.layers[0].mlp for model in models)
    if shape and variant == "qwen2":
        for name in ("integers", "weight_scale"):
            whole, *parts = (getattr(mlp.down_proj, name) for mlp in (first, *shares))
            assert torch.equal(whole, torch.cat(parts, dim=1) if kind == "int4" or name == "integers" else parts[0])
        rows_of = [mlp.gate_up_proj.integers.chunk(2) for mlp in (first, *shares)]
        for part in range(2):  # gate and up
            whole, *parts = (one[part] for one in rows_of)
            assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("whole", [False, True])
def test_quantised_experts_are_sharded_over_ranks(whole: bool, tmp_path: Path) -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False}
    save_tiny_model(tmp_path, "qwen3_moe", **shape)
    alone = tiny_runner(tmp_path, quantization="fp8")
    expected = run_chunks(alone, TOKENS, PageDealer(alone).table(40), [40])
    group = ThreadGroup(tmp_path, 2, quantization="fp8", tensor_parallel_size=2, enable_expert_parallel=whole)
    layers = group.runners[0].worker.model.layers
    assert len(layers[0].mlp.weights()[0].values) == (2 if whole else 4)
    made = group.run(lambda rank: run_chunks(rank, TOKENS, PageDealer(rank).table(40), [40]))
    assert (made[0] - expected).abs().max() < 2e-4
    fp8_checkpoints.quantize_folder(tmp_path, "fp8-block")
    _check(tmp_path, 2, enable_expert_parallel=whole)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("quantize", [fp8_checkpoints.quantize_folder, fp4_checkpoints.quantize_folder])
def test_quantised_latent_attention_and_shared_experts_are_sharded(
    quantize: Callable[[Path, str], Any], whole: bool, tmp_path: Path
) -> None:
    shape = {"q_lora_rank": 64, "v_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64}
    save_tiny_model(tmp_path, "deepseek_v2", **(DEEPSEEK | shape))
    quantize(tmp_path, "fp8-block" if quantize is fp8_checkpoints.quantize_folder else "nvfp4")
    _check(tmp_path, 2, enable_expert_parallel=whole)


@pytest.mark.parametrize("whole", [False, True])
def test_each_rank_quantises_its_shard_of_latent_attention_and_experts(whole: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK)
    runner = tiny_runner(tmp_path)
    expected = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES)
    group = ThreadGroup(tmp_path, 2, quantization="int8", tensor_parallel_size=2, enable_expert_parallel=whole)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES))
    assert torch.equal(found[0], found[1])
    assert torch.nn.functional.cosine_similarity(found[0], expected).mean() > 0.98
    assert max(rank.worker.weight_bytes for rank in group.runners) < 0.4 * runner.worker.weight_bytes


def test_expert_parallelism_is_refused_when_experts_do_not_divide(tmp_path: Path) -> None:
    requested = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    save_tiny_model(tmp_path / "odd", "qwen3_moe", **(VARIANTS["qwen3-moe"][1] | {"num_experts": 5}))
    with pytest.raises(ModelError, match=r"enable_expert_parallel.*experts = 5"):
        ThreadGroup(tmp_path / "odd", 2, **requested)
    save_tiny_model(
        tmp_path / "shared", "deepseek_v2", **(DEEPSEEK | {"n_shared_experts": 1, "moe_intermediate_size": 41})
    )
    with pytest.raises(ModelError, match=r"shared experts.*= 41"):
        ThreadGroup(tmp_path / "shared", 2, **requested)
    save_tiny_model(tmp_path / "dense", "qwen3")
    save_tiny_model(tmp_path / "no mixture", "deepseek_v2", **(DEEPSEEK | {"first_k_dense_replace": 3}))
    for name in ("dense", "no mixture"):
        with pytest.raises(ModelError, match="enable_expert_parallel"):
            ThreadGroup(tmp_path / name, 2, **requested)
    with pytest.raises(ValueError, match="enable-expert-parallel"):
        EngineSettings(model="m", enable_expert_parallel=True, data_parallel_size=2)


@pytest.mark.parametrize("form", fp8_checkpoints.FORMATS)
def test_fp8_checkpoints_are_sharded_with_their_scales(form: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=32)
    fp8_checkpoints.quantize_folder(tmp_path, form)
    _check(tmp_path, 2)


def test_mixed_quantised_checkpoints_are_sharded_layer_by_layer(tmp_path: Path) -> None:
    """Attention by blocks of 16 columns and the rest, the head too, by channel; one layer is not quantised."""
    save_tiny_model(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=32)
    plain = "model.layers.1.mlp.down_proj"
    attention = Group("nvfp4", ("re:.*self_attn.*",), tuple(f"self_attn.{part}_proj" for part in "qkvo"))
    rest = Group("compressed-channel", ("Linear",), ("gate_proj", "up_proj", "down_proj", "lm_head"))
    quantize_mixed(tmp_path, [Group("", (plain,), (plain,)), attention, rest], ignore=())
    _check(tmp_path, 2)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_each_rank_quantises_its_shard_of_the_weights(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=64)
    runner = tiny_runner(tmp_path)
    expected = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES)
    group = ThreadGroup(tmp_path, 2, quantization=kind)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES))
    assert torch.equal(found[0], found[1])
    rounded = tiny_runner(tmp_path, quantization=kind)
    alone = run_chunks(rounded, TOKENS, PageDealer(rounded).table(len(TOKENS)), SIZES)
    nearness = [torch.nn.functional.cosine_similarity(made, expected).mean() for made in (found[0], alone)]
    assert nearness[0] > nearness[1] - 0.1


def test_latent_attention_is_refused_before_allocation_when_it_cannot_be_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK)
    with pytest.raises(ModelError, match=r"num_attention_heads = 4.*8"):
        ThreadGroup(tmp_path, 8)
    odd = DEEPSEEK | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}
    for changes, words in (
        ({}, "the experts' intermediate size = 40"),
        ({"moe_intermediate_size": 42, "intermediate_size": 100}, "intermediate_size = 100"),
    ):
        save_tiny_model(tmp_path, "deepseek_v2", **(odd | changes))
        with pytest.raises(ModelError, match=f"{words} .*3 ranks"):
            ThreadGroup(tmp_path, 3)


def test_a_model_is_refused_by_name_when_it_cannot_be_sharded(tmp_path: Path) -> None:
    save_tiny_model(
        tmp_path, "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=97
    )
    for size, words in ((4, "num_attention_heads = 6"), (2, "num_key_value_heads = 3"), (3, "intermediate_size = 97")):
        with pytest.raises(ModelError, match=f"{words} .*{size} ranks"):
            ThreadGroup(tmp_path, size)
