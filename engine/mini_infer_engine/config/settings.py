"""Every knob of the engine, read once and frozen. No torch here; flags are made from these in server/cli.py."""

from typing import Literal

import msgspec

from mini_infer_engine.config.mechanisms import parse_mechanisms


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is started with. Unit and reason stand under a field; names are vLLM's where it has one."""

    model: str
    """A folder in Hugging Face format, a hub id, or "demo"."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients may ask for; empty: `model` as given."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights, for benchmarks; only config.json is needed."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the checkpoint's on a GPU; float32 on a CPU, where bf16 is emulated and slower."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "torch", "flash", "triton"] = "auto"
    """auto: our Triton kernels on a GPU; flash: flash-attn for prompts; torch is the slow reference."""
    enforce_eager: bool = False
    """No CUDA graphs: slower, starts a little sooner, easier to debug."""
    disable: tuple[str, ...] = ()
    """Mechanisms of the GPU path that are switched off, to measure or to find a fault: config/mechanisms.py."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: what the model was made for."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens of one forward pass; None: 2,048 on a CPU, 8,192 on a GPU."""
    long_prefill_token_threshold: int = 0
    """Largest prefill chunk, in tokens; 0: only the token budget cuts. Smaller chunks mean smoother decoding."""
    page_size: int | None = None
    """Tokens a page, a multiple of 16; None: what attention likes (16 on a CPU, 128 on a GPU, 256 with flash-attn)."""
    kv_cache_memory: int | None = None
    """Bytes for the page pool; None: 2 GB on a CPU, what gpu_memory_utilization leaves on a GPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that this engine takes, whatever others on the same GPU hold."""
    enable_prefix_caching: bool = True
    step_depth: Literal[0, 1] = 1
    """Passes in flight while the host plans the next: 1 hides the host's work behind the device's."""
    skip_tokenizer_init: bool = False
    """Token-id prompts in, token ids out, no text."""
    seed: int = 0
    """Of dummy weights."""

    def __post_init__(self) -> None:
        """ValueError: `disable` names a mechanism that there is not."""
        parse_mechanisms(self.disable)
