"""Lists which architectures run, by which implementation, with which features.

`mini-infer models` and docs/models.md are made of it. It imports neither torch nor transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mini_infer_engine.config.model.architectures import HYBRIDS, MODELS, MTP, TEXT_PARTS
from mini_infer_engine.config.model.transformers_architectures import THROUGH_TRANSFORMERS, TransformersArchitecture
from mini_infer_engine.config.model.vision import FAMILIES
from mini_infer_engine.config.pooling.read_pooler import ENCODERS
from mini_infer_engine.gguf.architectures import ARCHITECTURES

GpuSupport = Literal["yes", "eager"]
_NAMED_LLAMA_IN_GGUF = "MistralForCausalLM"
"""A model whose GGUF files are of the architecture llama."""
_FILE_ALONE = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4UnifiedForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
    }
)
"""Models that `--model-impl transformers` refuses: with latent attention, or layers of different heads."""
_SPARSE = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
"""Models with sparse attention, which need `--enforce-eager` on a GPU and check no guesses there."""
_UNQUANTISED = frozenset({"Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"})
"""Models that run from original weights alone."""


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """One architecture with its features."""

    architecture: str
    """The name in `architectures` of config.json."""
    implementation: Literal["native", "transformers"]
    """The implementation that `--model-impl auto` chooses."""
    model_type: str
    """The module in `models/` of a native model, transformers' `model_type` of another."""
    gpu: GpuSupport
    """yes: its results were compared on a GPU; eager: with `--enforce-eager` alone."""
    tensor_parallel: bool
    quantised: bool
    """True if quantised checkpoints are read, and `--quantization` rounds others."""
    gguf: bool
    speculation: Sequence[str]
    """The values of `--speculative-method` that go with it, on one device."""
    cpu: bool = True
    reads_images: bool = False
    through_transformers: bool = True
    """True if `--model-impl transformers` runs it, too."""
    generates: bool = True
    """False if it makes embeddings and scores alone, in the pooling engine."""


def supported_models() -> list[ModelSupport]:
    """Returns all architectures that are tested: native ones, those that run through transformers, encoders."""
    in_gguf = {_NAMED_LLAMA_IN_GGUF, *(each.name for each in ARCHITECTURES.values())}
    native = [
        ModelSupport(
            architecture=name,
            implementation="native",
            model_type=module,
            gpu="eager" if name in _SPARSE else "yes",
            tensor_parallel=True,
            quantised=name not in _UNQUANTISED,
            gguf=name in in_gguf,
            speculation=_speculation(name),
            through_transformers=name not in HYBRIDS | _FILE_ALONE,
        )
        for name, module in MODELS.items()
    ]
    through = [_through_transformers(name, each) for name, each in THROUGH_TRANSFORMERS.items() if name not in MODELS]
    native += [_with_images(name) for name in FAMILIES]
    return native + through + [_encoder(name, model_type) for name, model_type in ENCODERS.items()]


def _speculation(name: str) -> tuple[str, ...]:
    """Returns the methods of speculative decoding of a native model."""
    if name in _SPARSE:
        return ()
    return ("ngram", "draft_model", "head", "eagle3", *(("mtp",) if name in MTP else ()))


def _with_images(name: str) -> ModelSupport:
    """Returns a model whose decoder is a file of ours, and whose vision encoder is transformers'."""
    return ModelSupport(
        architecture=name,
        implementation="native",
        model_type=MODELS[TEXT_PARTS[name]],
        gpu="yes",
        tensor_parallel=True,
        quantised=True,
        gguf=False,
        speculation=_speculation(TEXT_PARTS[name]),
        reads_images=True,
        through_transformers=False,
    )


def _encoder(name: str, model_type: str) -> ModelSupport:
    return ModelSupport(
        architecture=name,
        implementation="transformers",
        model_type=model_type,
        gpu="yes",
        tensor_parallel=False,
        quantised=False,
        gguf=False,
        speculation=(),
        generates=False,
    )


def _through_transformers(name: str, architecture: TransformersArchitecture) -> ModelSupport:
    return ModelSupport(
        architecture=name,
        implementation="transformers",
        model_type=architecture.model_type,
        gpu="yes" if architecture.gpu == "graphs" else "eager",
        tensor_parallel=architecture.tensor_parallel,
        quantised=False,
        gguf=False,
        speculation=("ngram", "draft_model"),
    )
