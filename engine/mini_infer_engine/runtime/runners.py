"""Which runner a machine gets. The only place that knows all of them."""

from importlib.util import find_spec

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.config.model_path import resolve_model
from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.runtime.runner import TorchRunner, choose_device


def load_runner(settings: EngineSettings) -> TorchRunner:
    """Find the model and load it: with our kernels and CUDA graphs on an NVIDIA GPU, else (or if asked for) with torch.

    Raises:
        ModelError: the model or the settings are at fault, or the backend asked for cannot run here.

    """
    runner = runner_class(settings, choose_device(settings).type)
    directory = resolve_model(settings.model, settings.revision, weights=settings.load_format != "dummy")
    return runner(settings, ModelConfig.from_directory(directory), directory)


def runner_class(settings: EngineSettings, device_type: str) -> type[TorchRunner]:
    """The class for a device ("cpu" or "cuda"); `attention_backend` auto means triton on a GPU, torch elsewhere."""
    backend = settings.attention_backend
    obstacle = "it needs a GPU" if device_type != "cuda" else "" if find_spec("triton") else "triton is not installed"
    if backend == "flash" and not obstacle and not find_spec("flash_attn"):
        obstacle = "the package flash-attn is not installed"
    if backend in ("flash", "triton") and obstacle:
        raise ModelError(f"attention_backend = {backend!r}: {obstacle}. Use 'torch' or 'auto'.")
    if backend == "torch" or obstacle:
        return TorchRunner
    from mini_infer_engine.runtime.graph_runner import GraphRunner

    return GraphRunner
