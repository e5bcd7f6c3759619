"""Offline engines behind one call: token ids in, numbers of tokens out. Each is imported only where it runs."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

MODULES = {
    "ours": "mini_infer_engine",
    "baseline": "mini_infer_engine",
    "vllm": "vllm",
    "nano-vllm": "nanovllm",
    "transformers": "transformers",
}
CONTEXT_TOKENS = 16384
MEMORY_SHARE = 0.88
SETTINGS = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": CONTEXT_TOKENS,
    "gpu_memory_utilization": MEMORY_SHARE,
}
"""Of every engine and server with vLLM's flags."""
SMOKE_MODEL = "tiny"
SMOKE_SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 512,
    "kv_cache_memory": 4_000_000,
}
"""Of our engine, for any machine."""
_LEAST_SHARE = 0.1
"""vLLM starts if so much of the GPU is free; with a KV cache of given size it asks no more."""
_OF_MEASUREMENT = (
    "load_format",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_model_len",
    "speculative_config",
    "worker_extension_cls",
    "model_impl",
)
VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TQDM_DISABLE": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""It needs neither the network nor packages that a GPU machine may lack, and says little."""


class Engine(Protocol):
    """One model, loaded."""

    def run(self, prompts: list[list[int]], limits: list[int], temperature: float, **sampling: float) -> int:
        """Answer all prompts together, each with exactly its limit of tokens; returns how many were made.

        `sampling`: more of vLLM's sampling parameters, which engines without its API do not take.
        """


def base_name(name: str) -> str:
    """The engine of a variant: "vllm-inproc" is vllm."""
    return name.removesuffix("-inproc")


def peer_environment() -> dict[str, str]:
    """The environment of a peer's processes. PEER_SITE names a folder of packages that they see instead of ours."""
    environment = os.environ | VLLM_ENVIRONMENT
    if site := os.environ.get("PEER_SITE"):
        environment["PYTHONPATH"] = site
    return environment


def is_present(name: str) -> bool:
    """Whether the engine can be imported here."""
    if name == "baseline":
        return "BASELINE" in os.environ
    module = MODULES[base_name(name)]
    site = os.environ.get("PEER_SITE")
    return find_spec(module) is not None or bool(
        site and base_name(name) != "ours" and os.path.isdir(os.path.join(site, module))
    )


def load(name: str, model: str, settings: dict[str, Any]) -> Engine:
    """Load an engine in this process, which it then has for itself. Peers take no more settings than vllm_keywords."""
    if name == "baseline":  # BASELINE names another checkout of ours, whose packages come first from now on
        root = os.environ["BASELINE"]
        sys.path[:0] = [
            os.path.join(root, package) for package in ("contract", "process", "web", "prompts", "apis", "engine")
        ]
    if name in ("ours", "baseline"):
        return _Ours(model, settings)
    leave_our_packages()
    if base_name(name) == "vllm":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if name.endswith("-inproc") else "1"
        return _VLLM(model, settings)
    others: dict[str, Any] = {"nano-vllm": _NanoVLLM, "transformers": _Transformers}
    engine: Engine = others[name](model, settings["max_num_seqs"])
    return engine


def leave_our_packages() -> None:
    """From now on see what a peer's process sees, and let children see it."""
    ours = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    os.environ.update(peer_environment())
    if site := os.environ.get("PEER_SITE"):
        sys.path[:] = [site, *(folder for folder in sys.path if folder not in ours)]


def vllm_keywords(settings: dict[str, Any]) -> dict[str, Any]:
    """What every engine with vLLM's API is given; some are the measurement's."""
    own = {name: settings[name] for name in _OF_MEASUREMENT if name in settings}
    return SETTINGS | {"skip_tokenizer_init": True, "enable_prefix_caching": True} | own


def share_of_gpu(kv_bytes: int) -> dict[str, Any]:
    """Settings of an engine beside others on one GPU: a KV cache of so many bytes, and no claim to the rest."""
    return {"kv_cache_memory_bytes": kv_bytes, "gpu_memory_utilization": _LEAST_SHARE}


class _Vocal:
    """What has vLLM's offline API."""

    def __init__(self, module: Any, model: str, keywords: dict[str, Any]) -> None:
        self._params = module.SamplingParams
        self._llm = module.LLM(model=model, **keywords)

    def run(self, prompts: list[list[int]], limits: list[int], temperature: float, **sampling: float) -> int:
        params = [
            self._params(temperature=temperature, max_tokens=limit, ignore_eos=True, detokenize=False, **sampling)
            for limit in limits
        ]
        token_prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(token_prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class _Ours(_Vocal):
    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import mini_infer_engine

        super().__init__(mini_infer_engine, model, vllm_keywords(settings) | settings)


class _VLLM(_Vocal):
    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import vllm

        # By default it needs FlashInfer for prompts of gated delta nets, which compiles for minutes.
        super().__init__(
            vllm, model, vllm_keywords(settings) | {"additional_config": {"gdn_prefill_backend": "triton"}}
        )

    # Of an engine whose workers have the extension `vllm_acceptance`: see there.

    def set_acceptance(self, share: float) -> None:
        self._llm.collective_rpc("set_acceptance", args=(share,))

    def passes_so_far(self) -> int:
        passes: int = self._llm.collective_rpc("passes_so_far")[0]
        return passes


class _NanoVLLM:
    def __init__(self, model: str, max_num_seqs: int) -> None:
        import nanovllm
        from nanovllm.engine import llm_engine

        # It wants a tokenizer's files, for nothing that is measured.
        llm_engine.AutoTokenizer = _NoTokenizer
        self._params = nanovllm.SamplingParams
        self._llm = nanovllm.LLM(
            model, max_model_len=CONTEXT_TOKENS, max_num_seqs=max_num_seqs, gpu_memory_utilization=MEMORY_SHARE
        )

    def run(self, prompts: list[list[int]], limits: list[int], temperature: float, **_: float) -> int:
        # It has no greedy sampling: every token is drawn.
        params = [
            self._params(temperature=max(temperature, 0.01), max_tokens=limit, ignore_eos=True) for limit in limits
        ]
        return sum(len(output["token_ids"]) for output in self._llm.generate(prompts, params, use_tqdm=False))


class _NoTokenizer:
    eos_token_id = 0

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> "_NoTokenizer":
        return cls()

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class _Transformers:
    def __init__(self, model: str, max_num_seqs: int) -> None:
        import torch
        import transformers

        self._torch, self._transformers = torch, transformers
        device = "cuda" if torch.cuda.is_available() else "cpu"
        config = transformers.AutoConfig.from_pretrained(model)
        with torch.device(device):
            self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self._device = device

    def run(self, prompts: list[list[int]], limits: list[int], temperature: float, **_: float) -> int:
        """Static batches: all run until the longest limit; tokens beyond a row's own are waste and not counted."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = self._torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = self._torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        config = self._transformers.GenerationConfig(
            max_new_tokens=max(limits), min_new_tokens=max(limits), pad_token_id=0, **sampling
        )
        with self._torch.inference_mode():
            made = self._model.generate(
                ids.to(self._device), attention_mask=mask.to(self._device), generation_config=config
            )
        assert made.shape[1] == longest + max(limits)
        return sum(limits)
