"""Captures the CUDA graphs of one executor, before the first request and after it, and finds the one that fits a pass.

It knows sizes and what memory graphs take, not what a graph computes nor when a pass needs another way.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad
from mini_infer_engine.kernels.policy import KernelPolicy
from mini_infer_engine.runtime.attention.triton_backends import TritonBackend
from mini_infer_engine.runtime.cuda.graph_sizes import GraphSizes, sizes_at_start
from mini_infer_engine.runtime.cuda.graphs import (
    CapturedModel,
    DecodeGraph,
    GraphMemory,
    PrefillGraph,
    decodes_beside,
    is_launch_bound,
    prefill_buckets,
)
from mini_infer_engine.runtime.cuda.sampling import CudaSampling
from mini_infer_engine.runtime.cuda.speculation import CudaSpeculation
from mini_infer_engine.runtime.inputs.layer_progress import LayerCounters
from mini_infer_engine.runtime.worker import ModelWorker

log = logging.getLogger(__name__)

_GRAPH_OBJECT_BYTES = 1 << 20
"""Bytes that the driver takes for a recorded graph, in addition to the memory that its kernels use."""


def prefill_shapes(
    settings: EngineSettings, policy: KernelPolicy, worker: ModelWorker, attention: TritonBackend, *, is_recurrent: bool
) -> dict[int, int]:
    """Returns the passes with prompts that are captured: the most decode rows of each by its tokens, ascending."""
    if settings.enforce_eager or not policy.uses(Mechanism.PREFILL_GRAPHS):
        return {}
    # The stages of a pipeline each compute a pass in one part, which hands on all of its tokens.
    separate = policy.uses(Mechanism.SEPARATE_DECODE_GRAPHS) and worker.link.size == 1
    launch_bound = separate and is_launch_bound(worker.weight_bytes)
    most_tokens = settings.max_num_batched_tokens or 1 << 30
    return {
        tokens: decodes_beside(tokens, settings.max_num_seqs, launch_bound=launch_bound)
        for tokens in prefill_buckets(most_tokens, launch_bound=launch_bound, is_recurrent=is_recurrent)
        if tokens <= attention.most_captured_tokens
    }


class CapturedGraphs:
    """The graphs of one executor's forwards. Those of sampling and speculation are captured with them."""

    def __init__(
        self,
        model: CapturedModel,
        shapes: Mapping[int, int],
        sampling: CudaSampling,
        speculation: CudaSpeculation | None,
        config: ModelConfig,
        settings: EngineSettings,
    ) -> None:
        """Captures nothing yet. `shapes` are those of `prefill_shapes`."""
        self._model, self._shapes, self._config, self._settings = model, shapes, config, settings
        self._sampling, self._speculation = sampling, speculation
        self.decode_graphs: dict[int, DecodeGraph] = {}
        """Captured decodes by their rows, of sizes that `CudaSampling.sizes` has."""
        self.prefill_graphs: dict[int, PrefillGraph] = {}
        """Captured passes with prompts by their tokens, ascending."""
        self.following_graphs: dict[int, PrefillGraph] = {}
        """Captured passes with prompts that follow loads, by their tokens."""
        self._prefill_sizes, self._following_sizes = GraphSizes(list(shapes)), GraphSizes([])
        self._loads: LayerwiseLoad | None = None
        self._memory: GraphMemory | None = None
        """The memory of all graphs; None before `capture`, and with `enforce_eager`."""

    # -- Which one a pass replays

    def decode(self, rows: int) -> DecodeGraph:
        """Returns the smallest captured decode with room for so many rows. There must be some."""
        return self.decode_graphs[self._sampling.bucket(rows)]

    def prefill(self, num_decodes: int, prefills: list[Row]) -> PrefillGraph | None:
        """Returns the smallest captured pass with room for these prompts, and for the decode rows if its kind takes
        any.
        """
        tokens = sum(row.count for row in prefills)
        self._prefill_sizes.requested(tokens)
        for size, graph in self.prefill_graphs.items():
            if size < tokens:
                continue
            beside = num_decodes if graph.num_decodes else 0
            if graph.fits(tokens + beside, beside, prefills):
                return graph
        return None

    def following(self, graph: PrefillGraph) -> PrefillGraph | None:
        """Returns the graph of the same size that waits for each layer of loads; None if it is not captured yet."""
        self._following_sizes.requested(graph.num_tokens)
        return self.following_graphs.get(graph.num_tokens)

    # -- Capture

    def capture(self, layers: LayerCounters | None, loads: LayerwiseLoad | None, *, defers: bool) -> None:
        """Records the graphs, largest first, so that all share the largest one's memory; none with `enforce_eager`.

        Passes with prompts count their layers in `layers`, if there are counters. With `loads`, they are recorded a
        second time for batches that follow loads: waits cost the others nothing. With `defers`, most graphs are left
        for `deferred`; passes use larger ones meanwhile, and follow no loads without one.
        """
        if self._settings.enforce_eager:
            return
        self._model, self._memory = replace(self._model, layers=layers), GraphMemory()
        if loads is not None:
            self._loads, self._following_sizes = loads, GraphSizes(list(self._shapes))
        with refused_capture(self._config):
            self._capture(self._memory, defers=defers)

    def _capture(self, memory: GraphMemory, *, defers: bool) -> None:
        started = time.perf_counter()
        at_start = sizes_at_start if defers else list
        chosen = [
            (self._capture_prefill, at_start(self._prefill_sizes.left)),
            (self._capture_following, [] if defers else self._following_sizes.left),
            (self._capture_decode, at_start(self._sampling.sizes.left)),
        ]
        total, hide = sum(len(sizes) for _, sizes in chosen), not sys.stderr.isatty()
        with torch.inference_mode(), tqdm(total=total, desc="Capturing CUDA graphs", disable=hide) as progress:
            for capture, sizes in chosen:
                for size in reversed(sizes):
                    capture(size, memory)
                    progress.update()
            if self._speculation is not None:
                self._speculation.capture(memory)
        torch.cuda.synchronize()
        later = sum(len(sizes.left) for sizes, _ in self._kinds())
        seconds = time.perf_counter() - started
        log.info("captured %d CUDA graphs in %.1f s, %d are left for later", total, seconds, later)

    def _kinds(self) -> list[tuple[GraphSizes, Callable[[int, GraphMemory], None]]]:
        """Returns the sizes of each kind of graph and what captures one, most urgent first."""
        return [
            (self._prefill_sizes, self._capture_prefill),
            (self._sampling.sizes, self._capture_decode),
            (self._following_sizes, self._capture_following),
        ]

    def _capture_prefill(self, tokens: int, memory: GraphMemory) -> None:
        graph = PrefillGraph(self._model, tokens, self._shapes[tokens], memory)
        self.prefill_graphs = dict(sorted([*self.prefill_graphs.items(), (tokens, graph)]))
        self._prefill_sizes.captured(tokens)

    def _capture_following(self, tokens: int, memory: GraphMemory) -> None:
        model = replace(self._model, loads=self._loads)
        self.following_graphs[tokens] = PrefillGraph(model, tokens, self._shapes[tokens], memory)
        self._following_sizes.captured(tokens)

    def _capture_decode(self, rows: int, memory: GraphMemory) -> None:
        self.decode_graphs[rows] = DecodeGraph(self._model, rows, memory)
        self._sampling.capture(rows, memory)

    def deferred(self, *, only_missed: bool = False) -> Iterator[Callable[[], None]]:
        """Yields the captures that `capture` has deferred, of graphs that passes lacked first, until none is left.

        With `only_missed`, it yields none but those.
        """
        while (memory := self._memory) is not None:
            kinds = self._kinds()
            missed = [(sizes.missed, capture) for sizes, capture in kinds if sizes.missed is not None]
            left = [] if only_missed else [(sizes.left[0], capture) for sizes, capture in kinds if sizes.left]
            if not missed and not left:
                return
            size, capture = (missed or left)[0]
            yield partial(capture, size, memory)

    def estimate_bytes(self) -> int:
        """Estimates the memory of `capture` by the largest prefill and the largest decode, whose memory the others
        share.

        Use it on a temporary executor only: its sampling graphs stay.
        """
        if self._settings.enforce_eager:
            return 0
        device, buckets = self._model.state.device, self._sampling.buckets
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device)[0]
        memory = GraphMemory()
        # Recording runs a graph: slots of the largest pass would go on beyond the last position.
        self._sampling.load([])
        with torch.inference_mode(), refused_capture(self._config):
            largest = list(self._shapes.items())[-1:]
            kept: list[object] = [PrefillGraph(self._model, *shape, memory) for shape in largest]
            kept.append(DecodeGraph(self._model, buckets[-1], memory))
            self._sampling.capture(buckets[-1], memory)
            if self._speculation is not None:
                self._speculation.capture(memory, only_largest=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used = before - torch.cuda.mem_get_info(device)[0]
        kept.clear()
        objects = len(self._shapes) * (2 if self._settings.kv_host_memory else 1) + 3 * len(buckets)
        objects += 0 if self._speculation is None else self._speculation.num_graphs
        return max(0, used) + objects * _GRAPH_OBJECT_BYTES


@contextmanager
def refused_capture(config: ModelConfig) -> Iterator[None]:
    """Raises ModelError with the remedy if passes of a model that runs through transformers cannot be recorded."""
    try:
        yield
    except RuntimeError as error:  # modules that read values on the host, such as loops over the experts that are hit
        if config.model_impl == "native" or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"{config.architecture} runs through transformers, and its passes cannot be recorded as CUDA graphs "
            f"({reason}): add --enforce-eager."
        ) from error
