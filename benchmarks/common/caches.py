"""Where engines and servers keep compiled code between runs: a folder for each, so that cold is cold for both."""

from pathlib import Path

_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CACHE_ROOT": "vllm",
    "XDG_CACHE_HOME": "xdg",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def cache_variables(folder: Path) -> dict[str, str]:
    """Environment variables that send every cache of a process into `folder`."""
    return {name: str(folder / part) for name, part in _CACHES.items()}
