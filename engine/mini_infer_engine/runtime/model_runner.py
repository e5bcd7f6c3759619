"""Computes tokens from batches: combines a model, its page pool and an executor of passes over both. It decides
nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from mini_infer_engine.communication.rank_group import ALONE_IN_GROUP, RankGroup
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.hf_overrides import parse_hf_overrides
from mini_infer_engine.config.options.kv_selection import budget_fault
from mini_infer_engine.config.options.settings import EngineSettings, ResolvedSettings, ranks_per_node, trusts_code
from mini_infer_engine.core.batch import Batch, TokenMasks
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMemory
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.device import choose_device, choose_threads
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.transport import Transport, TransportChoice
from mini_infer_engine.kv_transfer.transports.open_transport import open_transport
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.models.hidden_draft import HiddenDraft
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.attention.selection_limits import check_selection
from mini_infer_engine.runtime.attention.sparse_limits import check_sparse_attention
from mini_infer_engine.runtime.eviction.attention_sums import make_attention_sums
from mini_infer_engine.runtime.eviction.limits import check_eviction, eviction_obstacle
from mini_infer_engine.runtime.executor import Executor, PassHandle, executor_class
from mini_infer_engine.runtime.memory.device_memory import DeviceMemory, MemoryTag
from mini_infer_engine.runtime.memory.host_tier import HostTier
from mini_infer_engine.runtime.memory.kv_group_choice import choose_kv_groups
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.kv_storage import check_tier_dtype
from mini_infer_engine.runtime.memory.make_host_tier import OpenSharedPool, make_host_tier
from mini_infer_engine.runtime.memory.mixed_limits import check_mixed_heads
from mini_infer_engine.runtime.memory.page_count import available_memory, check_host_tier, check_swap
from mini_infer_engine.runtime.memory.quantized_pool import make_pool
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import host_states_in
from mini_infer_engine.runtime.memory_plan import MemoryInUse, plan_memory, swap_space_of
from mini_infer_engine.runtime.recurrent.limits import check_recurrent, request_obstacle
from mini_infer_engine.runtime.start_stages import StartStages
from mini_infer_engine.runtime.vision_limits import with_served_images
from mini_infer_engine.runtime.worker import ModelWorker
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, LoadedWeights, WeightExchange
from mini_infer_engine.weight_transfer.peers import WeightPeers
from mini_infer_engine.weight_transfer.server import WeightServer

log = logging.getLogger(__name__)


class ModelRunner:
    """The `batch.Runner` that has a model."""

    def __init__(
        self,
        worker: ModelWorker,
        pool: KVPool,
        executor: Executor,
        max_model_len: int,
        settings: ResolvedSettings,
        memory: DeviceMemory,
        weight_server: WeightServer | None = None,
        start_seconds: Mapping[str, float] | None = None,
        host_memory: HostTier | None = None,
    ) -> None:
        self.start_seconds = dict(start_seconds or {})
        """Seconds of each stage of loading, by its name."""
        self.weight_server = weight_server
        """The server of this rank's weights to engines that start; None if there is none."""
        self.settings = settings
        """The effective settings."""
        self.memory = memory
        """The owner of the memory that this engine keeps on its device."""
        self.worker, self.pool, self.executor = worker, pool, executor
        self.page_size, self.num_pages = pool.spec.page_size, pool.num_pages
        self.kv_cache = pool.kv_cache
        self.max_model_len = max_model_len
        self.swap_space = swap_space_of(worker, pool)
        self.host_memory = host_memory
        self.max_speculative_rows = executor.max_speculative_rows
        self.guess_costs = executor.guess_costs
        self.eviction_obstacle = eviction_obstacle(worker.config, worker.model.attention_layers, pool, max_model_len)

    @property
    def all_reduce(self) -> str:
        """Name of the mechanism by which ranks of this model communicate, for people."""
        return self.worker.collectives.kind

    @property
    def loaded(self) -> LoadedWeights:
        """The way in which this rank's weights were loaded."""
        return self.worker.loaded

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.worker.config

    @property
    def device(self) -> torch.device:
        """The device of weights and pages."""
        return self.worker.device

    def refuses(self, request: Request) -> str | None:
        """Returns the model's or the executor's reason why it can never serve this request, or None."""
        reason = None if self.pool.states is None else request_obstacle(request)
        return reason or self.executor.refuses(request)

    def launch(self, batch: Batch) -> PassHandle:
        """Starts the pass on the executor, without waiting for the device."""
        return self.executor.launch(batch)

    def guesses(self, handle: PassHandle) -> Mapping[int, Sequence[int]]:
        """Returns the draft tokens of a launched pass that waits for masks, by row."""
        return self.executor.guesses(handle)

    def sample(self, handle: PassHandle, masks: TokenMasks) -> None:
        """Has the executor sample a launched pass that waits for masks."""
        self.executor.sample(handle, masks)

    def warm_up(self) -> bool:
        """Does one part of the start that was deferred; between two passes. Returns False if nothing is left."""
        return self.executor.warm_up()

    def collect(self, handle: PassHandle) -> PassResult:
        """Waits for a launched pass and returns its results."""
        return handle.result()

    def spread_disk(self, local: DiskMemory, identity: str) -> DiskMemory:
        """Returns the tier on the disk: no other rank has a part of it."""
        del identity
        return local

    def kv_memory(self) -> KVMemory:
        """Returns the page pool as KV transfer sees it; in a tensor-parallel group this rank's own."""
        memory, parallel = self.pool.memory(), self.config.tensor_parallel
        copies = parallel.copies(self.config.num_kv_heads)
        layout, states = replace(memory.layout, tp_size=parallel.size, copies=copies), memory.states
        if states is not None:
            states = replace(states, layout=replace(states.layout, tp_size=parallel.size))
            layout = replace(layout, states=states.layout)
        return replace(memory, layout=layout, states=states)

    def open_transport(self, choice: TransportChoice, engine_id: str) -> Transport:
        """Returns the transport of pages from and to other engines. Raises ModelError if it cannot work here."""
        return open_transport(choice, engine_id, self.kv_memory())

    def logits(self, batch: Batch) -> Tensor:
        """Returns the logits of every token of a pass, [tokens, vocab]."""
        return self.executor.logits(batch)


def load_runner(
    settings: EngineSettings,
    group: RankGroup = ALONE_IN_GROUP,
    *,
    reports_layers: bool = False,
    weights: WeightExchange = NO_EXCHANGE,
    open_shared: OpenSharedPool | None = None,
    defers: bool = False,
) -> ModelRunner:
    """Finds the model and loads it: with our kernels and CUDA graphs on an NVIDIA GPU, otherwise with torch.

    With `reports_layers`, passes report the progress of their layers if the executor supports it. `weights` names
    engines from which weights may come, and the port at which they are served. `open_shared` opens main memory for
    blocks that other engines share; without it the engine has its own. With `defers`, the runner is ready before it has
    all graphs and kernels, and the caller calls `warm_up` until it has.

    Raises:
        ModelError: the model or the settings are at fault, or the configured backend cannot run here.
    """
    device_type = choose_device(settings).type
    if device_type == "cpu":
        choose_threads(ranks_per_node(settings) * settings.data_parallel_size)
    kind = executor_class(settings, device_type)
    directory = resolve_model(settings.model, settings.revision, weights=settings.load_format != "dummy")
    config = read_config(
        directory,
        settings.model_impl,
        trust_remote_code=trusts_code(settings),
        overrides=parse_hf_overrides(settings.hf_overrides),
        reads_images=True,
    )
    return make_runner(
        settings,
        config,
        directory,
        kind,
        group,
        reports_layers=reports_layers,
        weights=weights,
        open_shared=open_shared,
        defers=defers,
    )


def make_runner(
    settings: EngineSettings,
    config: ModelConfig,
    directory: Path | None,
    kind: type[Executor],
    group: RankGroup = ALONE_IN_GROUP,
    *,
    reports_layers: bool = False,
    weights: WeightExchange = NO_EXCHANGE,
    open_shared: OpenSharedPool | None = None,
    defers: bool = False,
) -> ModelRunner:
    """Loads the weights, plans memory over what they leave, then creates pool, executor and its graphs.

    `group` are the processes that share the model; all make their runners at the same time.
    """
    page_size = settings.page_size or kind.default_page_size
    if page_size % kind.page_size_step:
        raise ModelError(f"page_size = {page_size}: it must be a multiple of {kind.page_size_step}.")
    if settings.kv_selection != "none" and (fault := budget_fault(settings, page_size)) is not None:
        raise ModelError(f"{fault}.")
    config = with_served_images(settings, config)
    for check in (check_recurrent, check_mixed_heads, check_sparse_attention, check_selection):
        check(settings, config, choose_device(settings).type, moves_kv=reports_layers)
    log.info("%s: model_impl = %s", config.architecture, config.model_impl)
    stages = StartStages()
    before = MemoryInUse.at_start(choose_device(settings))
    stages.end("device")
    peers = WeightPeers(settings, weights, group.smallest)
    # Ranks, and layers whose progress is reported, would have to warm up together.
    defers = defers and group is ALONE_IN_GROUP and not reports_layers
    worker = ModelWorker.load(settings, config, directory, group.collectives, group.link, peers, defers=defers)
    group.begin_together()
    worker.calibrate(settings, directory)
    stages.end("weights")
    resolved = settings.resolved(worker.device.type)
    if worker.draft is not None and isinstance(worker.draft.model, HiddenDraft):
        if reports_layers:
            raise ModelError(
                "--transfer-port: the hidden states that the draft reads are not sent to other engines yet: leave it "
                "out, or leave out speculative decoding."
            )
        resolved = replace(resolved, speculative_method=worker.draft.model.method)
    units = worker.kv_spec(page_size).layer_units
    kv_cache = choose_kv_groups(resolved, worker.config, moves_kv=reports_layers, units=units)
    defers = defers and resolved.speculative_method is None  # it measures its graphs

    def await_weights() -> None:
        stages.end("memory plan")
        worker.loading.wait()
        stages.end("weights")

    plan = plan_memory(
        worker,
        kind,
        resolved,
        page_size,
        before,
        kv_cache,
        group.smallest,
        defers=defers,
        await_weights=await_weights,
    )
    worker.loading.wait()
    log.info("memory: %s", plan)
    if kv_cache.state_group is not None:
        kv_cache = replace_fields(kv_cache, num_checkpoints=plan.slots.num_checkpoints)
        resolved = replace(resolved, max_num_seqs=plan.slots.num_sequences)
    stages.end("memory plan")
    worker.finish_loading(plan.max_model_len)
    spec = worker.kv_spec(page_size, kv_cache)
    check_tier_dtype(settings, worker.config, spec)
    check_swap(settings.kv_swap_memory, available_memory())
    # Ranks that have other layers have other pages.
    swap_bytes = group.share_of(settings.kv_swap_memory)
    host_states = group.smallest(host_states_in(swap_bytes, plan.slots.slot_bytes))
    swapped_bytes = spec.page_bytes + worker.hidden_bytes(page_size) + worker.bounds_bytes(page_size, kv_cache)
    host_pages = group.smallest((swap_bytes - host_states * plan.slots.slot_bytes) // swapped_bytes)
    is_shared = settings.kv_transport == "shm"
    pool = make_pool(spec, plan.num_pages, worker.device, host_pages, is_shared=is_shared, kv_cache=kv_cache)
    pool.attention_sums = make_attention_sums(spec, plan.num_pages, settings, worker.device)
    pool.hidden = worker.hidden_pages(page_size, plan.num_pages, host_pages)
    pool.bounds = worker.key_bounds(spec, plan.num_pages, host_pages)
    obstacle = eviction_obstacle(worker.config, worker.model.attention_layers, pool, plan.max_model_len)
    check_eviction(settings, obstacle, moves_kv=reports_layers)
    if (state_spec := worker.model.state_spec(worker.dtype)) is not None:
        pool.states = StatePool(state_spec, plan.slots, worker.device, host_states, is_shared=is_shared)
    if worker.device.type == "cuda":
        pool.prepare_swap()
    host_bytes = settings.kv_host_memory
    if open_shared is None:
        host_bytes //= settings.data_parallel_size
        check_host_tier(host_bytes, available_memory())
        host_bytes = group.share_of(host_bytes)
    else:
        open_shared = partial(open_shared, page_tokens=page_size, device=worker.device.type)
    host_memory = make_host_tier(
        pool, host_bytes, pool.identity(), settings.kv_tier_dtype, open_shared, smallest=group.smallest
    )
    if host_memory is not None:
        host_memory.follows_passes = any(group.window is not None for group in kv_cache.groups)
    memory = DeviceMemory(worker.device)
    memory.own(MemoryTag.WEIGHTS, worker.weight_tensors())
    beside = [kept.pages for kept in (pool.hidden, pool.bounds) if kept is not None]
    beside += [] if pool.attention_sums is None else [pool.attention_sums]
    memory.own(MemoryTag.KV_CACHE, [pool.storage, *beside])
    memory.own(MemoryTag.RECURRENT_STATE, [] if pool.states is None else [pool.states.storage])
    with memory.tag(MemoryTag.WORKSPACE):
        executor = kind(worker, pool, resolved)
    with memory.measure(MemoryTag.GRAPHS):
        loads = None if host_memory is None else host_memory.layers_to_capture
        executor.capture(reports_layers=reports_layers, loads=loads, defers=defers)
    log.info("memory of %s", memory)
    group.link.open()
    server = peers.serve(worker.model)
    stages.end("graphs")
    return ModelRunner(
        worker, pool, executor, plan.max_model_len, resolved, memory, server, stages.seconds, host_memory
    )
