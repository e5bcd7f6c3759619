"""What executes forward passes: the interface of the CPU's executor and the GPU's, and the choice between them."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, TokenMasks
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.core.speculation.pass_times import GuessCosts
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.worker import ModelWorker


class PassHandle(Protocol):
    """A launched pass."""

    def result(self) -> PassResult:
        """Wait for the device, then what the pass made."""


class Executor(Protocol):
    """Runs batches over one model and one page pool, in the order of their launch."""

    default_page_size: int
    """Tokens a page, unless another size is configured."""
    max_speculative_rows: int
    """See `batch.Runner`."""
    guess_costs: GuessCosts
    """What `capture` has measured of passes with guesses, if anything."""
    page_size_step: int
    """Page sizes are multiples of it."""

    def __init__(self, worker: ModelWorker, pool: KVPool, settings: EngineSettings) -> None:
        """Take what state the passes need beside weights and pool."""

    def compile_kernels(self, most_tokens: int) -> None:
        """Compile what passes need, over a pool that is thrown away and holds one sequence of `most_tokens`."""

    def capture(self, *, tells_layers: bool = False) -> None:
        """Record the passes whose shapes repeat; before the first request, after the last change of memory.

        `tells_layers`: passes heed `Batch.tell_layers` from now on, where this executor can.
        """

    def graph_bytes(self) -> int:
        """An estimate of the memory that `capture` takes, by capturing the largest graphs and letting go of them."""

    def refuses(self, request: Request) -> str | None:
        """See `batch.Runner.refuses`."""

    def launch(self, batch: Batch) -> PassHandle:
        """Start a pass without waiting for the device. See `batch.Runner.launch`."""

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """See `batch.Runner.guesses`."""

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """See `batch.Runner.sample`."""

    def logits(self, batch: Batch) -> Tensor:
        """Logits of every token of a pass, [tokens, vocab]: what `launch` computes, for tests and scoring."""


def executor_class(settings: EngineSettings, device_type: str) -> type[Executor]:
    """The executor for a device ("cpu" or "cuda"); `attention_backend` auto means triton on a GPU, torch elsewhere.

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
