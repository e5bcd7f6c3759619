"""docs/models.md out of the architectures that are tested: `python -m tests.support.models_page > docs/models.md`."""

from mini_infer_engine.config.model.architectures import MODELS as NATIVE
from tests.support.transformers_models import MODELS, REFUSED

_HEAD = """\
# Which models run, and from which code

Written by `python -m tests.support.models_page`; a test compares it with what is tested. `--model-impl auto` takes a
file of ours where there is one, and transformers' own code otherwise. `/v1/models` names the code that runs
(`model_impl`), and so does the log.

## By files of ours
On a CPU and on NVIDIA GPUs, on several devices, with quantised weights, KV transfer and speculation
([what can be combined](features.md)). Logits equal those of transformers
([test_models.py](../tests/engine/models/test_models.py)).
"""
_THROUGH = """\
## Through transformers
Its modules compute everything but attention, which reads our page pool: prefix cache, chunked prefill, KV groups of
sliding windows, sampling, structured output, guesses by n-grams and the APIs are those of our own models
([ADR 59](adr/0059-any-decoder-through-transformers.md)). They run on one device, from unquantised safetensors. The
greedy text of a random model of each equals that of `generate` over 64 tokens, whole, chunked, cached, batched and
preempted, on a CPU ([test_transformers_backend.py](../tests/engine/models/test_transformers_backend.py),
`make test-models`). On an H200 gpt2, cohere2, glm4 and starcoder2 make the same text, in CUDA graphs, and qwen2_moe
with `--enforce-eager`.

A decoder that is not listed runs if its attention asks for nothing that the kernels lack. That is found out at its
start, before weights are read.
"""
_REFUSED = """\
## Refused
A start is refused with the reason, the nearest model with a file of ours, and the flag. Tested are:
"""


def page() -> str:
    """The whole page."""
    native = [
        f"| `{name}` | [{module}.py](../engine/mini_infer_engine/models/{module}.py) |"
        for name, module in NATIVE.items()
    ]
    through = [f"| `{served.architecture}` | `{model_type}` |" for model_type, served in sorted(MODELS.items())]
    refused = [f"| `{each.architecture}` | {each.reason} |" for each in REFUSED.values()]
    return "\n".join(
        [
            _HEAD,
            "| architecture | file |\n|---|---|",
            *native,
            "",
            _THROUGH,
            "| architecture | `model_type` |\n|---|---|",
            *through,
            "",
            _REFUSED,
            "| architecture | reason |\n|---|---|",
            *refused,
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
