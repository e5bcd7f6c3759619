"""Builds an engine with its runner from settings. Only here does a process decide if it needs torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.options.hf_overrides import parse_hf_overrides
from mini_infer_engine.config.options.media_limits import DEFAULT_MOST_IMAGES, parse_most_images
from mini_infer_engine.config.options.settings import EngineSettings, num_ranks
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.config.pooling.pooler_config import PoolerConfig
from mini_infer_engine.core.batch import Runner
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core_process.blocks_identity import blocks_identity
from mini_infer_engine.core_process.disk_tier import open_disk
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.core_process.shared_tier import open_shared_tier
from mini_infer_engine.dry.dry_run import DRY_MODEL, DryRun
from mini_infer_engine.kv_host.shared_index import SharedHostIndex
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.transport import OpenTransport
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.pooling.engine import PoolingEngine
from mini_infer_engine.pooling.engine_choice import runs_in_pooling_engine
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, ServedWeights, WeightExchange
from mini_infer_process.interpreter import no_collection

if TYPE_CHECKING:
    from mini_infer_engine.distributed.parallel_runner import ParallelRunner, Watched
    from mini_infer_engine.runtime.model_runner import ModelRunner
    from mini_infer_prompts.prompt import PromptAssets

_DRY_KV_CACHE_BYTES = 2 * 10**9


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to run, with the facts that its text side needs."""

    engine: Engine
    model: ModelInfo
    model_revision: str
    """Root of the keys of cached blocks."""
    memory: KVMemory
    """The page pool, for KV transfer; in a tensor-parallel group the first rank's."""
    open_transport: OpenTransport
    weight_server: ServedWeights | None = None
    """The server of the first rank's weights; None if there is none."""
    warm_up: Callable[[], bool] = lambda: False
    """Does one part of the start that was deferred, between two steps. Returns False if nothing is left."""


@dataclass(frozen=True, slots=True)
class BuiltPoolingEngine:
    """An engine of a model that generates nothing: it has no pages, and no KV transfer."""

    engine: PoolingEngine
    model: ModelInfo


def build_engine(
    settings: EngineSettings,
    dry_run: DryRun | None = None,
    *,
    record_events: bool = True,
    watched: "Watched | None" = None,
    moves_kv: bool = False,
    weights: WeightExchange = NO_EXCHANGE,
) -> BuiltEngine | BuiltPoolingEngine:
    """Loads the model and creates its engine. Raises ValueError with the reason if the model or the settings are at
    fault.

    `watched` reports the end of a group of ranks to this process, beside the engine's exceptions. `moves_kv` prepares
    the engine to exchange keys and values with other engines. `weights` names engines from which weights may come, and
    the port at which they are served.
    """
    if dry_run is not None:
        return _build_dry(settings, dry_run, record_events)
    folder = resolve_model(settings.model, settings.revision, weights=settings.load_format != "dummy")
    fields = Fields.read(folder / "config.json").overridden(parse_hf_overrides(settings.hf_overrides))
    if runs_in_pooling_engine(fields, folder, settings.model_impl):
        return _build_pooling(settings, folder, fields, record_events, moves_kv=moves_kv)
    return _build_real(settings, record_events, watched, moves_kv, weights)


def _build_dry(settings: EngineSettings, dry_run: DryRun, record_events: bool) -> BuiltEngine:
    from mini_infer_engine.dry import vocabulary as dry_model
    from mini_infer_engine.dry.scripted_runner import (
        EMBEDDING_SIZE,
        PAGE_SIZE_TOKENS,
        PRETENDED_BYTES_PER_TOKEN,
        ScriptedRunner,
    )
    from mini_infer_engine.kv_transfer.transports.open_transport import open_transport

    if speculation_of(settings) is not None:
        raise ValueError("a dry run has no model for which tokens could be guessed: leave out speculative_method")
    page_size = settings.page_size or PAGE_SIZE_TOKENS
    pool_bytes = settings.kv_cache_memory or _DRY_KV_CACHE_BYTES
    num_pages = pool_bytes // (PRETENDED_BYTES_PER_TOKEN * page_size)
    is_shared = settings.kv_transport == "shm"
    runner = ScriptedRunner(num_pages, dry_run.step_ms / 1000, page_size, dry_run.script, is_shared=is_shared)
    max_model_len = settings.max_model_len or dry_model.MAX_MODEL_LEN
    grammars = _grammars(settings, dry_model.dry_assets, dry_model.VOCAB_SIZE, dry_model.EOS_TOKEN_IDS)
    engine = Engine(
        settings,
        runner,
        dry_model.EOS_TOKEN_IDS,
        max_model_len,
        DRY_MODEL,
        record_events=record_events,
        grammars=grammars,
    )
    info = _model_info(runner, max_model_len, dry_model.VOCAB_SIZE)
    info = msgspec.structs.replace(info, hidden_size=EMBEDDING_SIZE, revision=DRY_MODEL)
    info = msgspec.structs.replace(info, pooler=PoolerConfig(size=EMBEDDING_SIZE))
    memory = runner.kv_memory()
    opens = partial(open_transport, memory=memory)
    return BuiltEngine(engine, info, DRY_MODEL, memory, opens)


def _build_real(
    settings: EngineSettings, record_events: bool, watched: "Watched | None", moves_kv: bool, weights: WeightExchange
) -> BuiltEngine:
    runner = _load(settings, watched, moves_kv, weights)
    config = runner.config
    revision = f"{settings.model}@{settings.revision or ''}"
    folder = resolve_model(settings.model, settings.revision, weights=settings.load_format != "dummy")
    layout = runner.kv_memory().layout

    def assets() -> "PromptAssets":
        from mini_infer_prompts.prompt import PromptAssets  # with the templates, which no core renders

        return PromptAssets.from_directory(folder)

    engine = Engine(
        runner.settings,
        runner,
        config.eos_token_ids,
        runner.max_model_len,
        revision,
        record_events=record_events,
        grammars=_grammars(settings, assets, config.vocab_size, config.eos_token_ids),
        chunk_alignment=BLOCK_SIZE_TOKENS if layout.scale_bytes else 1,  # cuts like those of the prefix cache alone
        vision=config.vision,
        disk_memory=open_disk(settings, runner.host_memory, runner.page_size, runner.device.type, runner.spread_disk),
        shared_blocks=_shared_blocks(runner, record_events=record_events),
    )
    model = _model_info(runner, runner.max_model_len, config.vocab_size)
    if not runner.kv_cache.is_uniform:
        pages = runner.kv_cache.most_pages(runner.max_model_len, runner.page_size, runner.settings.chunk_tokens)
        model = msgspec.structs.replace(model, kv_cache_tokens=runner.num_pages * runner.max_model_len // pages)
    scheme = settings.quantization or ("" if config.quantization is None else config.quantization.name)
    kernels = _kernels(str(runner.device), settings, layout.dtype if layout.scale_bytes else "", scheme)
    if settings.tensor_parallel_size > 1:
        kernels["tensor_parallel_size"] = str(settings.tensor_parallel_size)
        kernels["all_reduce"] = runner.all_reduce
        model = msgspec.structs.replace(model, tensor_parallel_size=settings.tensor_parallel_size)
    if settings.pipeline_parallel_size > 1:
        kernels["pipeline_parallel_size"] = str(settings.pipeline_parallel_size)
        model = msgspec.structs.replace(model, pipeline_parallel_size=settings.pipeline_parallel_size)
    model = msgspec.structs.replace(model, kernels=kernels, hidden_size=config.hidden_size, revision=revision)
    model = msgspec.structs.replace(model, device_memory=runner.memory.bytes_by_tag(), model_impl=config.model_impl)
    model = msgspec.structs.replace(model, pooler=config.pooler)
    if config.vision is not None:
        most = parse_most_images(settings.limit_mm_per_prompt)
        most = DEFAULT_MOST_IMAGES if most is None else most
        model = msgspec.structs.replace(model, vision=config.vision.family, max_images=most)
    model = msgspec.structs.replace(model, weights=runner.loaded, start_seconds=runner.start_seconds)
    return BuiltEngine(
        engine, model, revision, runner.kv_memory(), runner.open_transport, runner.weight_server, _warm_up_of(runner)
    )


def _warm_up_of(runner: "ModelRunner | ParallelRunner") -> Callable[[], bool]:
    """Returns the warm-up of a runner; ranks of a group defer nothing."""
    from mini_infer_engine.runtime.model_runner import ModelRunner

    return runner.warm_up if isinstance(runner, ModelRunner) else lambda: False


def _shared_blocks(runner: "ModelRunner | ParallelRunner", *, record_events: bool) -> HostBlocks | None:
    """Returns the record of blocks in main memory that other engines share; None if no others do."""
    file = None if runner.host_memory is None else runner.host_memory.shared
    return None if file is None else SharedHostIndex(file, record_events=record_events)


def _build_pooling(
    settings: EngineSettings, folder: Path, fields: Fields, record_events: bool, *, moves_kv: bool
) -> BuiltPoolingEngine:
    """Loads a model that generates nothing into an engine without pages."""
    if moves_kv:
        raise ModelError("--transfer-port: this model has no keys and values to transfer: leave it out")
    with no_collection():
        from mini_infer_engine.pooling.build import load_pooling_engine
    engine, model = load_pooling_engine(settings, folder, fields, record_events=record_events)
    info = ModelInfo(
        max_model_len=engine.max_model_len,
        vocab_size=model.vocab_size,
        page_size=0,
        num_pages=0,
        revision=f"{settings.model}@{settings.revision or ''}",
        hidden_size=model.hidden_size,
        pooler=model.config,
        output_room=0,
        model_impl="transformers",
        device_memory={"weights": model.weight_bytes},
    )
    return BuiltPoolingEngine(engine, info)


def _load(
    settings: EngineSettings, watched: "Watched | None", moves_kv: bool, weights: WeightExchange
) -> "ModelRunner | ParallelRunner":
    with no_collection():
        from mini_infer_engine.runtime.model_runner import load_runner
    if num_ranks(settings) == 1:
        open_shared = partial(open_shared_tier, settings) if settings.kv_host_path else None
        return load_runner(settings, reports_layers=moves_kv, weights=weights, open_shared=open_shared, defers=True)
    from mini_infer_engine.distributed.parallel_runner import NOT_WATCHED, load_parallel

    return load_parallel(
        settings, watched or NOT_WATCHED, reports_layers=moves_kv, identify=partial(blocks_identity, settings)
    )


def _grammars(
    settings: EngineSettings, assets: "Callable[[], PromptAssets]", vocab_size: int, eos_token_ids: tuple[int, ...]
) -> GrammarCompiler | None:
    """Returns the compiler of grammars, or None if there is no tokenizer: then outputs cannot be constrained."""
    if settings.skip_tokenizer_init:
        return None

    def tokenizer() -> str:
        from mini_infer_prompts.tokenizer_files import load_tokenizer

        return load_tokenizer(assets().files).tokenizer.to_str()

    return GrammarCompiler(tokenizer, vocab_size, eos_token_ids)


def _kernels(device: str, settings: EngineSettings, kv_cache: str, weights: str) -> dict[str, str]:
    """Logs the kernels that run, and returns them as labels for /metrics."""
    from mini_infer_engine.kernels.report import kernel_report, log_kernels

    report = kernel_report(device, settings.attention_backend, settings.disable, kv_cache, weights)
    log_kernels(report)
    return report.labels


def describe_kernels() -> str:
    """Names the kernels that an engine would run on this machine, in one line, or says that torch is not installed."""
    if find_spec("torch") is None:
        return "none: torch is not installed"
    from mini_infer_engine.kernels.report import kernel_report

    return str(kernel_report())


def _model_info(runner: Runner, max_model_len: int, vocab_size: int) -> ModelInfo:
    return ModelInfo(
        max_model_len=max_model_len, vocab_size=vocab_size, page_size=runner.page_size, num_pages=runner.num_pages
    )
