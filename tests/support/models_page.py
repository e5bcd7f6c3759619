"""docs/models.md out of the architectures that are tested: `python -m tests.support.models_page > docs/models.md`."""

from mini_infer_engine.config.model.architectures import HYBRIDS
from mini_infer_engine.config.model.transformers_architectures import REFUSED
from mini_infer_engine.models.support import ModelSupport, supported_models

_HEAD = """\
# Which models run, and from which code

Written by `python -m tests.support.models_page`; a test compares it with what is tested. `--model-impl auto` takes a
file of ours where there is one, and transformers' own code otherwise. `/v1/models` names the code that runs
(`model_impl`), and so do the log and the status of an InferenceService (`modelImpl`). `mini-infer models` prints the
same list, with `--json` for programs.
"""
_COLUMNS = {
    "CPU": "{models}: logits equal those of transformers; {backend}: greedy text equals that of `generate`",
    "GPU": "{gpu}; models through transformers that were compared on an H200: `eager` with `--enforce-eager` alone",
    "TP": "{sharded}, {sharding}: several ranks compute what one process does",
    "quantised": "{quantised}, and tests of checkpoints beside it ([quantization.md](quantization.md))",
    "GGUF": "{gguf}",
    "speculation": "{features}, {backend}",
}
"""The tests that show each column, by the keys of `_TESTS`."""
_TESTS = {
    "models": "engine/models/test_models.py",
    "backend": "engine/models/test_transformers_backend.py",
    "gpu": "gpu",
    "sharded": "engine/distributed/test_sharded_models.py",
    "sharding": "engine/models/test_transformers_sharding.py",
    "quantised": "engine/models/test_quantization_on_load.py",
    "gguf": "engine/gguf",
    "features": "engine/test_features.py",
}
_NATIVE = """\
## By files of ours
With pipelines, KV transfer and all else that [can be combined](features.md), too.
"""
_HYBRID = """\
Hybrids have layers with a recurrent state instead of keys and values ([ADR 61](adr/0061-recurrent-state.md)). They run
chunked, batched, preempted, and with a prefix cache that resumes from checkpoints of the state
([test_recurrent_models.py](../tests/engine/models/test_recurrent_models.py)), on CPUs, and on GPUs in CUDA graphs.
Quantised checkpoints are read, and weights are rounded, as those of other decoders
([test_quantized_hybrids.py](../tests/engine/models/test_quantized_hybrids.py)); experts that a checkpoint stores as one
tensor, or that have no gates, are rounded by `--quantization` alone. Speculation goes with hybrids on CPUs. What they
do not go with yet is refused by its name at the start.
"""
_IMAGES = """\
These models read images, too ([ADR 64](adr/0064-images.md)). Their decoder is one of the files above, their encoder
transformers'. Logits and greedy texts equal those of transformers on random tiny models, chunked, cached, batched,
preempted and on two ranks ([test_vision_models.py](../tests/engine/models/test_vision_models.py)).
`--limit-mm-per-prompt '{"image": 0}'` leaves the encoder out.
"""
_THROUGH = """\
## Through transformers
Its modules compute everything but attention, which reads our page pool: prefix cache, chunked prefill, KV groups of
sliding windows, sampling, structured output and the APIs are those of our own models
([ADR 59](adr/0059-any-decoder-through-transformers.md)). They run from unquantised safetensors. The greedy text of a
random model of each equals that of `generate` over 64 tokens, whole, chunked, cached, batched and preempted, on a CPU,
and on two and four ranks that of one process (`make test-models`). Ranks follow the model's own plan (`tp_plan`); where
transformers has none, `--tensor-parallel-size` is refused.

A decoder that is not listed runs if its attention asks for nothing that the kernels lack. That is found out at its
start, before weights are read.
"""
_POOLING = """\
## Embeddings and scores
All of the above make [embeddings](embeddings.md), and so do bare decoders of the same families; with a classification
head they make classes and scores. Encoders run in the pooling engine. Their embeddings, scores and classes equal those
of transformers on random tiny models, on a CPU ([test_encoders.py](../tests/engine/pooling/test_encoders.py)).
"""
_REFUSED = """\
## Refused
A start is refused with the reason, the nearest architecture that runs, and the flag. Tested are:
"""
_HEADING = f"{' | '.join(_COLUMNS)} |"
_RULE = "|---|---|---|---|---|---|---|---|"


def _row(model: ModelSupport) -> str:
    code = f"`{model.model_type}`"
    if model.implementation == "native":
        code = f"[{model.model_type}.py](../engine/mini_infer_engine/models/{model.model_type}.py)"
    flags = ("yes" if flag else "" for flag in (model.tensor_parallel, model.quantised, model.gguf))
    methods = ", ".join(f"`{method}`" for method in model.speculation)
    cells = (f"`{model.architecture}`", code, "yes" if model.cpu else "", model.gpu, *flags, methods)
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    models = supported_models()
    hybrids = [_row(model) for model in models if model.architecture in HYBRIDS]
    images = [_row(model) for model in models if model.reads_images]
    others = [model for model in models if not model.reads_images and model.architecture not in HYBRIDS]
    native = [_row(model) for model in others if model.implementation == "native"]
    through = [_row(model) for model in models if model.implementation == "transformers" and model.generates]
    encoders = [
        f"| `{model.architecture}` | `{model.model_type}` | {model.gpu} |" for model in models if not model.generates
    ]
    refused = [f"| `{architecture}` | {reason} |" for architecture, reason in REFUSED.items()]
    links = {key: f"[{path.rpartition('/')[2]}](../tests/{path})" for key, path in _TESTS.items()}
    tests = [f"| {column} | {shown.format(**links)} |" for column, shown in _COLUMNS.items()]
    return "\n".join(
        [
            _HEAD,
            "| column | its tests |\n|---|---|",
            *tests,
            "",
            _NATIVE,
            f"| architecture | file | {_HEADING}\n{_RULE}",
            *native,
            "",
            _HYBRID,
            f"| architecture | file | {_HEADING}\n{_RULE}",
            *hybrids,
            "",
            _IMAGES,
            f"| architecture | file | {_HEADING}\n{_RULE}",
            *images,
            "",
            _THROUGH,
            f"| architecture | `model_type` | {_HEADING}\n{_RULE}",
            *through,
            "",
            _POOLING,
            "| architecture | `model_type` | GPU |\n|---|---|---|",
            *encoders,
            "",
            _REFUSED,
            "| architecture | reason |\n|---|---|",
            *refused,
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
