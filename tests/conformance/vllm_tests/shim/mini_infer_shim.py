"""The pytest plugin that lets vLLM's server tests run against mini-infer: it stands in for vLLM's own modules.

`tests.utils` is replaced by `shim_utils`, named models by the demo model, and a module of vLLM that a test imports by
one whose every name skips the test that uses it: such a test is of vLLM's insides, not of a server.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

DEMO_MODEL = os.environ["CONFORMANCE_DEMO_MODEL"]
SOURCES = Path(os.environ["CONFORMANCE_SOURCES"])


class _AbsentType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"needs vLLM's own {cls.__module__}.{cls.__qualname__}", allow_module_level=True)

    def __add__(cls, other: Any) -> Any:
        return cls(other)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}", cls.__module__)


def absent(name: str, module: str) -> type:
    """Something of vLLM's that may be named, and skips the test that calls it."""
    return _AbsentType(name, (), {"__module__": module, "__qualname__": name})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name, self.__name__)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below `vllm`, and the helpers of vLLM's test tree that belong to its insides."""

    own = ("vllm", "gpt_oss", "tests.v1", "tests.conftest")

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if any(name == own or name.startswith(own + ".") for own in self.own):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _known().get(module.__name__, {}).items():
            setattr(module, name, value)


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False


class _ModelConfig:
    """As far as the tests ask: the size of the vocabulary."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._config = json.loads((Path(DEMO_MODEL) / "config.json").read_text())

    def get_vocab_size(self) -> int:
        return int(self._config["vocab_size"])


def demo_tokenizer(*args: Any, **kwargs: Any) -> Any:
    """The demo model's tokenizer, whatever model is named."""
    from transformers import PreTrainedTokenizerFast  # only some tests need it, and it takes a second

    return PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)


def _known() -> dict[str, dict[str, Any]]:
    from shim_utils import free_port

    version = os.environ["CONFORMANCE_VERSION"]
    of_vllm = types.SimpleNamespace(__version__=version, _prev_minor_version=lambda: "0.25")
    return {
        "vllm": {"__version__": version, "version": of_vllm},
        "vllm.version": {"__version__": version},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.config": {"ModelConfig": _ModelConfig},
        "vllm.tokenizers": {"get_tokenizer": demo_tokenizer},
        "vllm.utils.network_utils": {"get_open_port": free_port},
        "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": lambda *a, **k: DEMO_MODEL},
        "tests.v1.utils": {"check_request_balancing": lambda *args, **kwargs: None},  # between data-parallel ranks
        "vllm._aiter_ops": {"is_aiter_found_and_supported": lambda: False},
    }


def _torch() -> types.ModuleType:
    """As far as the tests ask: the limits of its integers."""
    import numpy

    module = _Module("torch")
    module.__dict__.update(long=numpy.int64, iinfo=numpy.iinfo)
    return module


def _patch_hub() -> None:
    """Named models are neither downloaded nor looked up."""
    import huggingface_hub
    import transformers

    huggingface_hub.snapshot_download = lambda *args, **kwargs: DEMO_MODEL
    transformers.AutoTokenizer.from_pretrained = demo_tokenizer


@pytest.fixture
def local_asset_server() -> None:
    """vLLM's server of pictures, which only its multimodal tests ask something of."""


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("core_model", "slow_test", "skip_global_cleanup", "cpu_model", "optional", "distributed"):
        config.addinivalue_line("markers", mark)


def pytest_unconfigure(config: pytest.Config) -> None:
    from shim_utils import stop_all

    stop_all()


sys.meta_path.insert(0, _Finder())
sys.path.insert(0, str(SOURCES))
_patch_hub()
sys.modules.setdefault("torch", _torch())  # after transformers, which looks whether there is one
