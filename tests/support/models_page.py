"""docs/models.md out of the architectures that are tested: `python -m tests.support.models_page > docs/models.md`."""

from mini_infer_engine.config.model.architectures import HYBRIDS
from mini_infer_engine.config.model.transformers_architectures import REFUSED
from mini_infer_engine.models.support import ModelSupport, supported_models
from tests.support.model_cells import CELLS, cell, claims

_HEAD = """\
# Which models run, and from which code

Written by `python -m tests.support.models_page`; a test compares it with what is tested. `--model-impl auto` takes a
file of ours where there is one, and transformers' own code otherwise. `/v1/models` names the code that runs
(`model_impl`), and so do the log and the status of an InferenceService (`modelImpl`). `mini-infer models` prints the
same list, with `--json` for programs.

A filled cell names the case of its column's test that shows it; where it says yes, the case is the `model_type`
(models that read images have tests of their own, on a GPU [these](../tests/gpu/test_images.py)). A test checks that all
of them exist. `eager` needs `--enforce-eager` there. What an empty cell stands for is refused at the start. There are
no adapters (LoRA) yet. `make test` and `make test-models` run every case that needs no GPU; CI runs `make test`.
"""
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
tensor, or that have no gates, are rounded by `--quantization` alone. Speculation goes with hybrids, on GPUs too
([test_recurrent_speculation.py](../tests/gpu/test_recurrent_speculation.py)). Engines compute prompts for each other
([test_recurrent_transfers.py](../tests/engine/kv_transfer/test_recurrent_transfers.py)), and stages of a pipeline have
the states of their layers ([test_staged_models.py](../tests/engine/distributed/test_staged_models.py)). What they do
not go with yet is refused by its name at the start.
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
_COLUMNS = ("CPU", "GPU", "TP", "quantised", "GGUF")
_RULE = "|---|---|---|---|---|---|---|---|---|"
_KINDS = {
    "native": "files of ours",
    "hybrids": "hybrids",
    "transformers": "through transformers",
    "encoders": "encoders",
}


def _row(model: ModelSupport) -> str:
    is_native = model.implementation == "native"
    code = f"[{model.model_type}.py](../engine/mini_infer_engine/models/{model.model_type}.py)"
    cells = [f"`{model.architecture}`", code if is_native else f"`{model.model_type}`"]
    cells += [_cell(model, column) for column in _COLUMNS]
    cells.append(", ".join(f"`{method}`" for method in model.speculation))
    if is_native:
        cells.append(_cell(model, "transformers"))
    return f"| {' | '.join(cells)} |"


def _cell(model: ModelSupport, column: str) -> str:
    """Returns the case that shows a column, or how far it goes without one."""
    shown = cell(model, column)
    if shown is None:
        return "yes" if claims(model, column) else ""
    is_eager = column == "GPU" and model.gpu == "eager"
    if model.implementation == "native":
        return f"`{shown.name}`, eager" if is_eager else f"`{shown.name}`"
    return "eager" if is_eager else "yes"


def _tests() -> list[str]:
    """Returns a line for each test: where it is, and which cells it shows."""
    rows = []
    for key, test in CELLS.items():
        kind, _, column = key.partition(" ")
        file = f"[{test.path.rpartition('/')[2]}](../{test.path})"
        rows.append(f"| {_KINDS[kind]} | {column} | {file}: `{test.function}[{test.case.format('CASE')}]` |")
    return rows


def page() -> str:
    """The whole page."""
    models, heading = supported_models(), f"{' | '.join(_COLUMNS)} | speculation |"
    hybrids = [_row(model) for model in models if model.architecture in HYBRIDS]
    images = [_row(model) for model in models if model.reads_images]
    others = [model for model in models if not model.reads_images and model.architecture not in HYBRIDS]
    native = [_row(model) for model in others if model.implementation == "native"]
    through = [_row(model) for model in models if model.implementation == "transformers" and model.generates]
    encoders = [
        f"| `{model.architecture}` | `{model.model_type}` | {model.gpu} |" for model in models if not model.generates
    ]
    refused = [f"| `{architecture}` | {reason} |" for architecture, reason in REFUSED.items()]
    return "\n".join(
        [
            _HEAD,
            "| models | column | test |\n|---|---|---|",
            *_tests(),
            "",
            _NATIVE,
            f"| architecture | file | {heading} `--model-impl transformers` |\n{_RULE}",
            *native,
            "",
            _HYBRID,
            f"| architecture | file | {heading} `--model-impl transformers` |\n{_RULE}",
            *hybrids,
            "",
            _IMAGES,
            f"| architecture | file | {heading} `--model-impl transformers` |\n{_RULE}",
            *images,
            "",
            _THROUGH,
            f"| architecture | `model_type` | {heading}\n{_RULE.removesuffix('---|')}",
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
