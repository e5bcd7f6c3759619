"""Divides a device's memory: weights, the largest pass, batch state, CUDA graphs, and pages for the rest.

On a GPU it measures, with a small temporary pool; the arithmetic is in `memory`.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace

from mini_infer_engine.config.model.kv_groups import KVCacheConfig
from mini_infer_engine.config.options.settings import ResolvedSettings
from mini_infer_engine.core.batch import Batch, Row, SwapSpace
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.runtime.eviction.attention_sums import sums_bytes
from mini_infer_engine.runtime.executor import Executor
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.page_count import CPU_KV_BYTES, available_memory, fit_context, pages_for
from mini_infer_engine.runtime.memory.quantized_pool import make_pool
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import NO_SLOTS, StateSlots, state_slots
from mini_infer_engine.runtime.worker import ModelWorker

if TYPE_CHECKING:  # it imports transformers
    from mini_infer_engine.models.vision.encoder import VisionEncoder

_MOST_BESIDE_TORCH = 2 << 30
"""Most bytes of a GPU that kernels, libraries and the driver take while an engine loads; less than one GiB was
observed.
"""
_DEFERRED_KERNEL_BYTES = 128 << 20
"""Most bytes of a GPU that the kernels of rare requests take, which are loaded once pages have their memory."""
# What a swap and a prefill reach: pinned memory over PCIe 5 and bf16 products on an H200; one core of a CPU.
_GPU_LINK_BYTES_PER_S, _GPU_FLOPS_PER_S = 50e9, 500e12
_CPU_COPY_BYTES_PER_S, _CPU_FLOPS_PER_S = 5e9, 50e9


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, except for pages and tokens. The needs of a CPU's passes are not counted: main memory has room
    for them.
    """

    num_pages: int
    page_bytes: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    slots: StateSlots = NO_SLOTS
    """Slots of recurrent state."""
    state: int = 0
    """Bytes of the executor's state for all sequences, and of scratch memory whose size is known before any pass."""
    peak: int = 0
    """Bytes that the largest pass takes temporarily."""
    graphs: int = 0
    """Bytes of captured CUDA graphs."""

    def __str__(self) -> str:
        parts = {
            "recurrent state": self.slots.num_bytes,
            "batch state": self.state,
            "largest pass": self.peak,
            "CUDA graphs": self.graphs,
        }
        details = "".join(f", {name} {size / 1e9:.2f} GB" for name, size in parts.items() if size)
        return f"KV cache {self.num_pages:,} pages, {self.num_pages * self.page_bytes / 1e9:.2f} GB{details}"


class MemoryInUse(NamedTuple):
    """Bytes of a GPU that are free, and that torch reserves and uses in this process. Zeros for a CPU."""

    free: int = 0
    reserved: int = 0
    allocated: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "MemoryInUse":
        """Returns the memory in use now."""
        if device.type != "cuda":
            return cls()
        return cls(
            torch.cuda.mem_get_info(device)[0],
            torch.cuda.memory_reserved(device),
            torch.cuda.memory_allocated(device),
        )

    @classmethod
    def at_start(cls, device: torch.device) -> "MemoryInUse":
        """Returns the memory in use before an engine takes any. Collects garbage first, so that an old engine's is
        freed.
        """
        if device.type == "cuda" and torch.cuda.memory_allocated(device):
            gc.collect()
        return cls.of(device)


class _Needs(NamedTuple):
    state: int
    peak: int
    graphs: int


def plan_memory(
    worker: ModelWorker,
    kind: type[Executor],
    settings: ResolvedSettings,
    page_size: int,
    before: MemoryInUse,
    kv_cache: KVCacheConfig,
    smallest: Callable[[int], int] = lambda pages: pages,
    *,
    defers: bool = False,
    await_weights: Callable[[], object] = lambda: None,
) -> MemoryPlan:
    """Returns the memory plan, given the device's memory before this engine took any. The weights must have their
    memory; `await_weights`, which is called once kernels are loaded, waits until it is filled.

    The pages are those of `kv_cache`. `smallest` returns the smallest of one number from each rank that shares the
    model: all ranks have equally many pages. With `defers`, kernels of rare requests are loaded later.

    Raises:
        ModelError: the settings do not fit model or machine.
    """
    page_bytes = worker.page_bytes(page_size, kv_cache)
    if settings.kv_policy == "h2o":
        page_bytes += sums_bytes(worker.kv_spec(page_size, kv_cache))
    if worker.device.type == "cpu":
        needs = _Needs(0, 0, 0)
        kv_bytes, available = settings.kv_cache_memory or CPU_KV_BYTES, available_memory()
    else:
        needs = _measure(worker, kind, settings, page_size, kv_cache, defers=defers, await_weights=await_weights)
        kv_bytes, available = _kv_bytes(worker.device, settings, before, sum(needs))
    slots = NO_SLOTS
    if kv_cache.state_group is not None:
        own = state_slots(worker.state_bytes, page_bytes / page_size, kv_bytes, settings)
        numbers = smallest(own.num_sequences), smallest(own.num_checkpoints)
        slots = StateSlots(own.slot_bytes, *numbers, own.num_drafts)
    pages = smallest(pages_for(kv_bytes, page_bytes, available, slots.num_bytes))
    longest = worker.config.max_position_embeddings
    most_tokens = kv_cache.most_tokens(pages, page_size, settings.chunk_tokens)
    context = fit_context(settings.max_model_len, longest, most_tokens)
    return MemoryPlan(pages, page_bytes, context, slots, **needs._asdict())


def _kv_bytes(device: torch.device, settings: ResolvedSettings, before: MemoryInUse, needed: int) -> tuple[int, int]:
    """Returns the bytes of a GPU for pages and recurrent state after `needed` bytes are reserved, and those that it has
    available.
    """
    now, total = MemoryInUse.of(device), torch.cuda.mem_get_info(device)[1]
    # What this process caches but does not use will be the pool's.
    available = now.free + now.reserved - now.allocated - needed
    beside_torch = before.free - now.free - (now.reserved - before.reserved)
    beside_torch = min(max(0, beside_torch), _MOST_BESIDE_TORCH)  # others may have taken or given back meanwhile
    used = now.allocated - before.allocated + beside_torch
    share = int(total * settings.gpu_memory_utilization) - used - needed
    return settings.kv_cache_memory or max(0, min(share, available)), available


def _measure(
    worker: ModelWorker,
    kind: type[Executor],
    settings: ResolvedSettings,
    page_size: int,
    kv_cache: KVCacheConfig,
    *,
    defers: bool = False,
    await_weights: Callable[[], object] = lambda: None,
) -> _Needs:
    """Measures the bytes of state, of the largest pass and of graphs, with a temporary pool for one sequence."""
    tokens = settings.max_num_batched_tokens
    length = min(tokens, settings.max_model_len or worker.config.max_position_embeddings)
    worker.finish_loading(length)
    pool = make_pool(worker.kv_spec(page_size, kv_cache), -(-length // page_size), worker.device, kv_cache=kv_cache)
    pool.hidden = worker.hidden_pages(page_size, pool.num_pages)
    pool.bounds = worker.key_bounds(pool.spec, pool.num_pages)
    if (state_spec := worker.model.state_spec(worker.dtype)) is not None:
        # No more sequences will run than have states in half of the memory that is free now.
        fitting = torch.cuda.mem_get_info(worker.device)[0] // 2 // state_spec.slot_bytes
        slots = StateSlots(state_spec.slot_bytes, max(1, min(settings.max_num_seqs, fitting)), 0)
        settings = replace(settings, max_num_seqs=slots.num_sequences)
        pool.states = StatePool(state_spec, slots, worker.device)
    before_state = torch.cuda.memory_allocated(worker.device)
    executor = kind(worker, pool, settings)
    state = torch.cuda.memory_allocated(worker.device) - before_state
    executor.compile_kernels(length, defers=defers)
    await_weights()  # loading takes memory, too
    before_pass = torch.cuda.memory_allocated(worker.device)
    torch.cuda.reset_peak_memory_stats(worker.device)
    executor.launch(_largest_pass(settings, length, tokens, pool.num_pages, len(kv_cache.groups))).result()
    peak = torch.cuda.max_memory_allocated(worker.device) - before_pass
    if worker.model.vision is not None:
        most_images = settings.mm_encoder_cache_tokens
        peak = max(peak, encoder_peak(worker.model.vision, most_images, worker.device))
        state += most_images * worker.model.vision.width * worker.dtype.itemsize
    graphs = executor.graph_bytes()
    del executor, pool
    gc.collect()
    torch.cuda.empty_cache()
    return _Needs(state + _DEFERRED_KERNEL_BYTES * defers, peak, graphs)


def encoder_peak(encoder: "VisionEncoder", most_tokens: int, device: torch.device) -> int:
    """Returns the bytes that the vision encoder takes temporarily for its largest image on a GPU."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    shape, grid = encoder.config.largest_image(most_tokens)
    with torch.inference_mode():
        encoder.encode(torch.zeros(shape, dtype=encoder.dtype, device=device), grid)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def _largest_pass(settings: ResolvedSettings, length: int, tokens: int, num_pages: int, num_groups: int = 1) -> Batch:
    """Returns a pass with the most decode rows and, beside them, the longest prompt chunk; its penalties need fp32
    logits.

    All KV groups write to the same pages, whose contents nobody reads.
    """
    params = SamplingParams(top_k=20, top_p=0.9)
    num_rows = min(settings.max_num_seqs, tokens)
    rows = [Row(slot, 0, 1, None, [0], params) for slot in range(num_rows - 1)]
    count = min(length, tokens - len(rows))
    last = SamplingParams(top_k=20, top_p=0.9, repetition_penalty=1.1)
    rows.append(Row(num_rows - 1, 0, count, [0] * count, list(range(num_pages)), last, known_token_ids=[0]))
    for row in rows:
        row.more_page_tables = [row.page_table] * (num_groups - 1)
    return Batch(rows, num_rows - 1)


def swap_space_of(worker: ModelWorker, pool: KVPool) -> SwapSpace:
    """Returns the pool's pages in main memory, and the costs of swapping and computing a token, estimated by size."""
    is_gpu = worker.device.type == "cuda"
    page_bytes = sum(part.shape[1] * part.itemsize for part in pool.words())
    bytes_per_token = page_bytes / pool.spec.page_size
    parameters = sum(parameter.numel() for parameter in worker.model.parameters())
    bytes_per_s = _GPU_LINK_BYTES_PER_S if is_gpu else _CPU_COPY_BYTES_PER_S
    states = pool.states
    return SwapSpace(
        num_pages=len(pool.host_pages),
        page_bytes=page_bytes,
        swap_s_per_token=bytes_per_token / bytes_per_s,
        compute_s_per_token=2 * parameters / (_GPU_FLOPS_PER_S if is_gpu else _CPU_FLOPS_PER_S),
        num_states=0 if states is None else len(states.host_states),
        swap_s_per_state=0.0 if states is None else states.spec.slot_bytes / bytes_per_s,
    )
