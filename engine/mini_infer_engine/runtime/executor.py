"""Defines the interface of the executors that run forward passes on a CPU or a GPU, and chooses between them."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, TokenMasks
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.core.speculation.pass_times import GuessCosts
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.swap_digests import SwapCheck
from mini_infer_engine.runtime.worker import ModelWorker


class PassHandle(Protocol):
    """A launched pass."""

    swap_check: SwapCheck | None
    """The proof of what came back from main memory before it; None if that was nothing."""

    def result(self) -> PassResult:
        """Waits for the device and returns the results of the pass."""


class Executor(Protocol):
    """Runs batches over one model and one page pool, in the order of their launch."""

    default_page_size: int
    """Tokens a page, unless another size is configured."""
    max_speculative_rows: int
    """Most rows of a pass with draft tokens; 0 if this executor does not speculate."""
    guess_costs: GuessCosts
    """Times of passes with draft tokens that `capture` has measured, if any."""
    page_size_step: int
    """Page sizes must be multiples of it."""

    def __init__(self, worker: ModelWorker, pool: KVPool, settings: EngineSettings) -> None:
        """Allocates the state that passes need in addition to weights and pool."""

    def compile_kernels(self, most_tokens: int, *, defers: bool = False) -> None:
        """Compiles what passes need, over a temporary pool with room for one sequence of `most_tokens`.

        With `defers`, it may leave the kernels of rare requests for `warm_up`.
        """

    def capture(
        self, *, reports_layers: bool = False, loads: LayerwiseLoad | None = None, defers: bool = False
    ) -> None:
        """Records the passes whose shapes repeat. Call it before the first request and after the last change of memory.

        With `reports_layers`, passes call `Batch.report_layers` from now on, if this executor supports it. `loads` is
        what recorded passes with `Batch.layerwise_loads` wait for. With `defers`, it may leave what requests can do
        without for `warm_up`.
        """

    def warm_up(self) -> bool:
        """Does one part of what was deferred, mostly in less than a tenth of a second; call it between two passes.

        Returns False if nothing is left.
        """

    def graph_bytes(self) -> int:
        """Estimates the memory that `capture` takes, by capturing the largest graphs and freeing them."""

    def refuses(self, request: Request) -> str | None:
        """Returns the reason why no batch can ever contain this request, or None if it can be served."""

    def launch(self, batch: Batch) -> PassHandle:
        """Starts a pass without waiting for the device, as `batch.Runner.launch` specifies."""

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """Returns the draft tokens of a launched pass that waits for masks, by row of the batch."""

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """Samples the tokens of a launched pass that waits for masks, without waiting for the device."""

    def logits(self, batch: Batch) -> Tensor:
        """Returns the logits of every token of a pass, [tokens, vocab], as `launch` computes them, for tests and
        scoring.
        """


def executor_class(settings: EngineSettings, device_type: str) -> type[Executor]:
    """Returns the executor for a device ("cpu" or "cuda"). The `attention_backend` auto means triton on a GPU, torch
    elsewhere.

    Raises:
        ModelError: the configured backend cannot run here.
    """
    backend = settings.attention_backend
    obstacle = "it needs a GPU" if device_type != "cuda" else "" if find_spec("triton") else "triton is not installed"
    if backend == "flash" and not obstacle and not find_spec("flash_attn"):
        obstacle = "the package flash-attn is not installed"
    if backend in ("flash", "triton") and obstacle:
        raise ModelError(f"attention_backend = {backend!r}: {obstacle}. Use 'torch' or 'auto'.")
    if backend == "torch" or obstacle:
        from mini_infer_engine.runtime.cpu.executor import TorchExecutor

        return TorchExecutor
    from mini_infer_engine.runtime.cuda.executor import CudaExecutor, FlashPrefillExecutor

    return FlashPrefillExecutor if backend == "flash" else CudaExecutor
