"""What policies keep of a prompt, beside NVIDIA's kvpress on transformers: the same tokens in each layer and KV head.

Needs kvpress, which is in no group of dependencies, as it asks for an older transformers: `make test-kvpress`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from tests.support.tiny_models import save_tiny_model

kvpress = pytest.importorskip("kvpress", reason="needs kvpress: make test-kvpress")

PRESSES = {
    "streaming-llm": kvpress.StreamingLLMPress,
    "snapkv": kvpress.SnapKVPress,
    "snapkv-wide": kvpress.SnapKVPress,
    "h2o": kvpress.ObservedAttentionPress,
}


def kept_by_kvpress(policy: str, model: Any, prompt: list[int], budget: int) -> list[torch.Tensor]:
    """Returns the indexes that a press keeps in each layer, [kv_heads, budget], ascending."""
    ids, whole, pressed = torch.tensor([prompt]), transformers.DynamicCache(), transformers.DynamicCache()
    press = PRESSES[policy](compression_ratio=1 - (budget + 0.5) / len(prompt))
    if policy == "snapkv-wide":
        press.kernel_size = min(63, (len(prompt) - press.window_size) // 4 | 1)
    hook = press.forward_hook

    def with_positions(module: Any, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Tells the hook what transformers before 5.3 told it."""
        return hook(module, inputs, {"cache_position": torch.arange(len(prompt)), **kwargs}, output)

    press.forward_hook = with_positions
    with torch.no_grad():
        model(ids, past_key_values=whole)
        with press(model):
            model(ids, past_key_values=pressed)
    kept = []
    for all_of_layer, some in zip(whole.layers, pressed.layers, strict=True):
        same = (some.keys[0].unsqueeze(2) == all_of_layer.keys[0].unsqueeze(1)).all(-1)  # [kv_heads, kept, tokens]
        assert (same.sum(-1) == 1).all()
        kept.append(same.int().argmax(-1).sort().values)
    return kept


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", PRESSES)
@pytest.mark.parametrize(("num_tokens", "budget"), [(90, 70), (200, 66), (500, 128), (500, 400)])
def test_a_prompt_keeps_the_tokens_that_kvpress_keeps(
    architecture: str, policy: str, num_tokens: int, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path, architecture)
    model.set_attn_implementation("eager")
    prompt = [random.Random(num_tokens).randrange(3, 199) for _ in range(num_tokens)]
    seen: list[torch.Tensor] = []
    compact = KVPool.compact

    def spied(pool: KVPool, kept: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        seen.append(kept)
        compact(pool, kept, source, target)

    monkeypatch.setattr(KVPool, "compact", spied)
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": 8_000_000}
    llm = LLM(str(tmp_path), **settings, max_num_batched_tokens=150, kv_policy=policy, kv_budget=budget, max_num_seqs=4)
    llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    for layer, expected in enumerate(kept_by_kvpress(policy, model, prompt, budget)):
        made = seen[0][min(layer, len(seen[0]) - 1)]
        assert torch.equal(made.expand_as(expected), expected), f"layer {layer}"
