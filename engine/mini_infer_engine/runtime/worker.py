"""Loads a model to its device: config, weights, dtype. It knows neither batches nor the page pool."""

import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from mini_infer_engine.communication.collectives import NO_COLLECTIVES, Collectives
from mini_infer_engine.communication.stage_link import NO_LINK, StageLink
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.kv_groups import KVCacheConfig
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.kv_selection import budget_tokens
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.config.parallelism.pipeline_parallel import WHOLE, PipelineStage, split_layers
from mini_infer_engine.device import choose_device
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.hidden_draft import HiddenDraft
from mini_infer_engine.models.kv_spec import KVQuantization, KVSpec
from mini_infer_engine.models.registry import class_of
from mini_infer_engine.models.sparse_decoder import SparseConfig
from mini_infer_engine.models.weights.checkpoint import Checkpoint
from mini_infer_engine.models.weights.loader import (
    fill_randomly,
    fit_checkpoint,
    load_weights,
    open_checkpoint,
    with_stored_encoder,
    with_stored_head,
)
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint
from mini_infer_engine.models.weights.without_memory import without_memory
from mini_infer_engine.quantization.gguf_layers import pack_gguf_blocks
from mini_infer_engine.quantization.layers import quantize_layers
from mini_infer_engine.quantization.on_load import Quantization, quantize_on_load, round_alike
from mini_infer_engine.runtime.calibration import calibrate, calibrates, calibration_rows, restore
from mini_infer_engine.runtime.calibration_cache import calibration_file, keep_calibrated, read_calibrated
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_storage import kv_quantization_of
from mini_infer_engine.runtime.pooler import IDENTITY, Pooler, load_pooler
from mini_infer_engine.runtime.recurrent.limits import check_stages
from mini_infer_engine.runtime.weight_loading import WeightLoading
from mini_infer_engine.speculation.draft_files import DraftFiles, Eagle3Files, find_draft, resolve_speculative_model
from mini_infer_engine.speculation.head import SpeculativeHead, load_head
from mini_infer_engine.speculation.hidden_draft_files import complete_draft, open_hidden_draft
from mini_infer_engine.weight_transfer.exchange import LoadedWeights
from mini_infer_engine.weight_transfer.peers import WeightPeers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelWorker:
    """A process's share of a model. The memory plan calls the model's `finish_loading`, since it knows the context."""

    config: ModelConfig
    model: CausalModel
    device: torch.device
    dtype: torch.dtype
    collectives: Collectives = NO_COLLECTIVES
    draft: "ModelWorker | None" = None
    """The small model that drafts tokens, or None."""
    head: SpeculativeHead | None = None
    """The head that drafts tokens from the model's hidden states, or None."""
    kv_quantization: KVQuantization | None = None
    """Format in which keys and values are stored; None means `dtype`."""
    link: StageLink = NO_LINK
    """The link to the other stages of a pipeline."""
    pooler: Pooler = IDENTITY
    """The layers that make embeddings or scores of hidden states."""
    loading: WeightLoading = field(default_factory=WeightLoading)
    """The model's weights, which may still be on their way; `finish_loading` comes once more after them."""
    selection_tokens: int | None = None
    """Tokens in the pages that a decode attends to; None means all."""

    @classmethod
    def load(
        cls,
        settings: EngineSettings,
        config: ModelConfig,
        directory: Path | None,
        collectives: Collectives = NO_COLLECTIVES,
        link: StageLink = NO_LINK,
        peers: WeightPeers | None = None,
        *,
        defers: bool = False,
    ) -> "ModelWorker":
        """Loads the weights of `directory`, or a rank's part of them; dummy weights do not read it. `peers` may have
        the model's weights, but not those of a draft model or a head. With `defers`, weights may still be on their way
        when this returns.

        Raises:
            ModelError: the weights do not fit the config or the device.
        """
        device = choose_device(settings)
        dtype = dtype_of(settings, config, device)
        if settings.enable_expert_parallel and not _has_experts(config):
            raise ModelError(f"{config.architecture} has no experts: leave enable_expert_parallel out for this model.")
        parallel = replace(collectives.parallel, whole_experts=settings.enable_expert_parallel)
        config = replace(config, tensor_parallel=parallel, stage=_stage(config, link))
        class_of(config).check_split(config)
        _warn_of_slow_products(settings, config, device)
        kv_quantization = kv_quantization_of(settings, config, device)
        model, checkpoint = _open_model(settings, config, directory, dtype)
        peers = WeightPeers(settings) if peers is None else peers
        peers.identify(config, directory, device, dtype)
        if defers and checkpoint is not None and _computes_before_weights(settings, model, checkpoint, device):
            pooler = load_pooler(config.pooler, config.hidden_size, device, checkpoint, settings.seed)
            _take_memory(model, device, dtype)
            loading = _begin_loading(model, checkpoint, directory, device, peers)
            made = cls(model.config, model, device, dtype, collectives, kv_quantization=kv_quantization, pooler=pooler)
            return replace(made, loading=loading)
        loaded = peers.fill(model, checkpoint, directory, device)
        is_filled = loaded.source == "peer"
        if loaded.fallback:
            model, checkpoint = _open_model(settings, config, directory, dtype)
        if isinstance(model, DecoderModel) and not is_filled:
            round_alike(model, collectives)
        draft = cls._load_draft(settings, config, directory, device, dtype, model)
        head = _load_head(settings, config, device, dtype)
        pooler = load_pooler(config.pooler, config.hidden_size, device, checkpoint, settings.seed)
        if is_filled:
            model = model.eval()
        else:
            begin_s = time.monotonic()
            model = _fill_model(model, checkpoint, settings, device, dtype)
            loaded = replace_fields(loaded, num_bytes=weight_bytes(model), seconds=round(time.monotonic() - begin_s, 3))
        loading = WeightLoading(loaded)
        made = cls(model.config, model, device, dtype, collectives, draft, head, kv_quantization, link, pooler, loading)
        return made if settings.kv_selection == "none" else replace(made, selection_tokens=budget_tokens(settings))

    @classmethod
    def _load_draft(
        cls,
        settings: EngineSettings,
        config: ModelConfig,
        directory: Path | None,
        device: torch.device,
        dtype: torch.dtype,
        target: CausalModel,
    ) -> "ModelWorker | None":
        """Loads the model that drafts tokens for the target, whole on each rank."""
        if speculation_of(settings) is not None and config.tensor_parallel.size > 1:
            raise ModelError(
                "speculative_method does not go with tensor_parallel_size above 1 yet: leave out one of them."
            )
        found = None if directory is None else find_draft(settings, config, directory)

        def quantize(model: DecoderModel) -> None:
            if config.quantization is not None:
                quantize_layers(model, config.quantization)

        hidden = open_hidden_draft(settings, found, target, directory, dtype, quantize)
        if hidden is not None:
            made = _fill_model(*hidden, settings, device, dtype)
            assert isinstance(made, HiddenDraft), "it was opened as one"
            complete_draft(made, found.directory if isinstance(found, Eagle3Files) and hidden[1] is not None else None)
            return cls(made.config, made, device, dtype)
        if not isinstance(found, DraftFiles):
            return None
        own = msgspec.structs.replace(
            settings,
            quantization=None,
            quantize_lm_head=False,
            quantize_embeddings=False,
            speculative_method=None,
            speculative_model=None,
        )
        model, checkpoint = _open_model(own, found.config, found.directory, dtype)
        model = _fill_model(model, checkpoint, own, device, dtype)
        return cls(model.config, model, device, dtype)

    @property
    def loaded(self) -> LoadedWeights:
        """The way in which the model's weights were loaded, once they are."""
        return self.loading.wait()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of the model."""
        return weight_bytes(self.model)

    def weight_tensors(self) -> list[Tensor]:
        """Returns all weights on the device, including those of the draft model or the speculative head."""
        head = () if self.head is None else self.head.parameters()
        draft = [] if self.draft is None else self.draft.weight_tensors()
        return [*weight_tensors(self.model), *head, *self.pooler.parameters(), *draft]

    def kv_spec(self, page_size: int, kv_cache: KVCacheConfig | None = None) -> KVSpec:
        """Returns the layout of a page of so many tokens, of all layers or as these KV groups have them."""
        spec = replace(self.model.kv_spec(page_size, self.dtype), quantization=self.kv_quantization)
        return spec if kv_cache is None else replace(spec, num_layers=kv_cache.layers_per_page)

    def page_bytes(self, page_size: int, kv_cache: KVCacheConfig | None = None) -> int:
        """Returns the bytes of such a page, including the bounds of its keys and the draft model's, whose page has all
        of its layers.
        """
        own = self.kv_spec(page_size, kv_cache).page_bytes + self.bounds_bytes(page_size, kv_cache)
        if self.draft is None:
            return own
        return own + self.draft.page_bytes(page_size) + self.hidden_bytes(page_size)

    @property
    def hidden_width(self) -> int:
        """Numbers that are stored of each token for a draft that reads hidden states; 0 if there is none."""
        model = None if self.draft is None else self.draft.model
        return model.hidden_width if isinstance(model, HiddenDraft) else 0

    def hidden_bytes(self, page_size: int) -> int:
        """Returns the bytes of these hidden states in a page."""
        return page_size * self.hidden_width * self.dtype.itemsize

    def hidden_pages(self, page_size: int, num_pages: int, num_host_pages: int = 0) -> HiddenPages | None:
        """Allocates the pages of these hidden states; None if there are none."""
        if not self.hidden_width:
            return None
        return HiddenPages(num_pages, page_size, self.hidden_width, self.dtype, self.device, num_host_pages)

    def bounds_bytes(self, page_size: int, kv_cache: KVCacheConfig | None = None) -> int:
        """Returns the bytes of the bounds of a page's keys; 0 if decodes select no pages."""
        return 0 if self.selection_tokens is None else KeyBounds.page_bytes(self.kv_spec(page_size, kv_cache))

    def key_bounds(self, spec: KVSpec, num_pages: int, num_host_pages: int = 0) -> KeyBounds | None:
        """Allocates the bounds of the keys of these pages; None if decodes select no pages."""
        if self.selection_tokens is None:
            return None
        return KeyBounds(spec, num_pages, self.selection_tokens // spec.page_size, self.device, num_host_pages)

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot of recurrent state; 0 if no layer has one."""
        spec = self.model.state_spec(self.dtype)
        return 0 if spec is None else spec.slot_bytes

    def calibrate(self, settings: EngineSettings, directory: Path | None) -> None:
        """Rounds weights by the committed texts if requested, together with all ranks, which must be connected.

        Weights are rounded to the nearest if layers cannot run alone, or if there is no tokenizer.
        """
        kind = settings.quantization
        is_configured = kind in ("int4", "w8a8-int8") and settings.quantization_calibration == "auto"
        if kind is None or not is_configured or settings.load_format == "dummy" or self.loaded.source == "peer":
            return
        rows = None if directory is None else calibration_rows(directory)
        if rows is None or not isinstance(self.model, DecoderModel) or not calibrates(self.model):
            how = f"{kind} weights are rounded to the nearest{'' if kind == 'int4' else ', not smoothed'}"
            log.warning("%s: calibration needs a tokenizer.json, plain KV and no pipeline.", how)
            return
        file = None
        if directory is not None and self.collectives.parallel.size == 1:
            file = calibration_file(directory, rows, kind, self.dtype, self.device, settings.hf_overrides)
            if self._restore(file):
                log.info("%s weights were calibrated before, and are read from %s", kind, file)
                return
        layers, begin = len(self.model.layers), time.monotonic()
        log.info("%s weights are calibrated with %d tokens, %d layers: it may take minutes", kind, rows.numel(), layers)
        with torch.inference_mode():
            made = calibrate(self.model, rows.to(self.device), kind, self.collectives)
        log.info("%s weights were calibrated with %d tokens in %.1f s", kind, rows.numel(), time.monotonic() - begin)
        if file is not None:
            keep_calibrated(file, made)

    def _restore(self, file: Path) -> bool:
        """Returns True if the layers are rounded as an earlier start has calibrated them."""
        if (kept := read_calibrated(file)) is None:
            return False
        assert isinstance(self.model, DecoderModel), "other models are not quantised"
        try:
            with torch.inference_mode():
                restore(self.model, kept)
        except ValueError as error:
            log.warning("%s is of another model (%s): weights are calibrated again", file, error)
            return False
        return True

    def finish_loading(self, max_positions: int) -> None:
        """Finishes loading of the model and of its draft model, for contexts of up to `max_positions`."""
        self.model.finish_loading(max_positions)
        if self.draft is not None:
            self.draft.finish_loading(max_positions)


def _has_experts(config: ModelConfig) -> bool:
    """Returns False if the model has no experts; one that runs through transformers finds out by its plan."""
    return config.model_impl == "transformers" or (isinstance(config, SparseConfig) and bool(config.sparse_layers))


def _stage(config: ModelConfig, link: StageLink) -> PipelineStage:
    """Returns the rank's pipeline stage with its layers. Raises ModelError if there are more stages than layers."""
    if link.size == 1:
        return WHOLE
    head_layers = config.vocab_size * config.hidden_size / class_of(config).layer_weights(config)
    try:
        stages = split_layers(config.num_layers, link.size, head_layers)
    except ValueError as error:
        raise ModelError(f"{config.architecture}: {error}.") from None
    check_stages(config, stages)
    layers = stages[link.index]
    if config.vision is not None and link.index == 0 and len(layers) < config.vision.num_deepstack:
        raise ModelError(
            f"{config.architecture}: features of images are added in the first {config.vision.num_deepstack} layers, "
            f"and the first stage has {len(layers)}: use a smaller --pipeline-parallel-size, or serve text alone with "
            "--limit-mm-per-prompt '{\"image\": 0}'."
        )
    log.info("stage %d of %d: layers %d to %d", link.index, link.size, layers[0], layers[-1])
    return PipelineStage(link.index, link.size, layers)


def _load_head(
    settings: EngineSettings, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> SpeculativeHead | None:
    speculation = speculation_of(settings)
    if speculation is None or speculation.method != "head" or speculation.model is None:
        return None
    if config.model_impl == "transformers":
        raise ModelError(
            f"speculative_method = 'head': {config.architecture} runs through transformers, which does not collect "
            "hidden states of layers yet: use 'ngram' or 'draft_model'."
        )
    dummy = settings.load_format == "dummy"
    directory = resolve_speculative_model(speculation.model, weights=not dummy)
    sizes = config.hidden_size, config.num_layers, config.vocab_size
    return load_head(directory, *sizes, device, dtype, dummy=dummy, seed=settings.seed)


def weight_tensors(model: CausalModel) -> list[Tensor]:
    """Returns all weights of a model, including copies in a CPU's blocked order."""
    blocked = (module.blocked for module in model.modules() if isinstance(module, Linear))
    return [
        *model.parameters(),
        *model.tied_head_parameters(),
        *(tensor for tensor in blocked if tensor is not None),
    ]


def weight_bytes(model: CausalModel) -> int:
    """Returns the bytes of all weights of a model."""
    return sum(tensor.numel() * tensor.itemsize for tensor in weight_tensors(model))


def dtype_of(settings: EngineSettings, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype in which the model computes, and in which its unquantised weights are stored."""
    if settings.dtype != "auto":
        return torch.float32 if settings.dtype == "float32" else torch.bfloat16
    # float16 checkpoints run in bfloat16: the same size, and no overflow.
    return torch.float32 if device.type == "cpu" or config.dtype == "float32" else torch.bfloat16


def _warn_of_slow_products(settings: EngineSettings, config: ModelConfig, device: torch.device) -> None:
    """Warns that on a CPU quantised weights save memory and cost time: plain torch widens them for each product."""
    kind = settings.quantization or ("the checkpoint's" if config.quantization is not None else None)
    if device.type != "cpu" or kind is None:
        return
    if kind == "fp8":
        log.warning("on a CPU fp8 weights are rounded and then widened: they take as much memory and time as others")
    else:
        log.warning("on a CPU %s quantised weights save memory, but are slower than those of no quantization", kind)


def _check_quantization(settings: EngineSettings, config: ModelConfig) -> None:
    """Raises ModelError if the settings quantise weights that are quantised already, or contradict each other."""
    if settings.quantization is not None and config.model_impl == "transformers":
        raise ModelError(
            f"quantization = {settings.quantization!r}: {config.architecture} runs through transformers, whose layers "
            "are not quantised yet: leave it out."
        )
    if settings.quantization is not None and settings.gguf_blocks == "packed":
        raise ModelError("gguf_blocks = 'packed' keeps a file's own rounding: leave it or quantization out.")
    if settings.quantization is None:
        for name in ("quantize_lm_head", "quantize_embeddings"):
            if getattr(settings, name):
                raise ModelError(f"{name} goes with quantization alone: say how weights are rounded, or leave it out.")
        return
    if settings.quantize_embeddings and config.tie_word_embeddings and not settings.quantize_lm_head:
        raise ModelError(
            "quantize_embeddings: the output layer of this model is the embeddings, which would stay in memory for it: "
            "give quantize_lm_head, too, or leave it out."
        )
    if config.quantization is not None:
        raise ModelError(
            f"quantization = {settings.quantization!r}: the checkpoint is quantised already: leave it out."
        )


def _on_meta(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: Quantization | None,
    *,
    rounds_head: bool,
    rounds_embeddings: bool,
) -> CausalModel:
    """Returns the model without memory: parameters are in `dtype`, except those that set their own."""
    with without_memory(dtype):
        model = class_of(config)(config)
        if isinstance(model, DecoderModel) and config.quantization is not None:
            quantize_layers(model, config.quantization)
        if isinstance(model, DecoderModel) and quantization is not None:
            quantize_on_load(model, quantization, rounds_head=rounds_head, rounds_embeddings=rounds_embeddings)
    return model


def _open_model(
    settings: EngineSettings, config: ModelConfig, directory: Path | None, dtype: torch.dtype
) -> tuple[CausalModel, Checkpoint | None]:
    """Returns the model without memory, and the checkpoint for it. Misfits are errors before memory is taken."""
    checkpoint = None
    if settings.load_format != "dummy":
        assert directory is not None, "only dummy weights need no folder"
        checkpoint = open_checkpoint(directory, config)
        config = with_stored_head(with_stored_encoder(config, checkpoint, directory), checkpoint, directory)
    _check_quantization(settings, config)
    model = _on_meta(
        config,
        dtype,
        settings.quantization,
        rounds_head=settings.quantize_lm_head,
        rounds_embeddings=settings.quantize_embeddings,
    )
    if settings.quantization is None:
        with without_memory(dtype):
            pack_gguf_blocks(model, checkpoint, settings.gguf_blocks, choose_device(settings))
    if checkpoint is not None and directory is not None:
        fit_checkpoint(model, checkpoint, directory)
    return model, checkpoint


def _computes_before_weights(
    settings: EngineSettings, model: CausalModel, checkpoint: Checkpoint, device: torch.device
) -> bool:
    """Returns True if passes may run over this model while its weights come: none changes its form after loading, and
    what is derived from weights is derived again at each call of `finish_loading`. None is converted on the GPU, whose
    memory is measured meanwhile.
    """
    config = model.config
    is_plain = settings.quantization is None and config.quantization is None and not config.norm_offset
    is_alone = speculation_of(settings) is None and settings.kv_selection == "none" and config.vision is None
    is_decoder = isinstance(model, DecoderModel) and config.pooler.task != "classify" and not config.pooler.dense
    is_stored = isinstance(checkpoint, SafetensorsCheckpoint)
    if not (device.type == "cuda" and is_plain and is_alone and is_decoder and is_stored):
        return False
    placements = model.checkpoint_tensors().items()
    return all(checkpoint.tensors[name].dtype == placement.target.dtype for name, placement in placements)


def _begin_loading(
    model: CausalModel, checkpoint: Checkpoint, directory: Path | None, device: torch.device, peers: WeightPeers
) -> WeightLoading:
    """Begins to fill the memory of a model, which is all zeros before, so that passes compute with finite numbers."""
    model.eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.zero_()
    tensors = peers.tensors_of(model)
    torch.cuda.synchronize(device)  # other streams fill it

    def load() -> LoadedWeights:
        torch.cuda.set_device(device)
        loaded = peers.fill(model, checkpoint, directory, device, tensors)
        if loaded.source == "peer":
            return loaded
        begin_s = time.monotonic()
        with torch.inference_mode():
            load_weights(model, checkpoint)
        return replace_fields(loaded, num_bytes=weight_bytes(model), seconds=round(time.monotonic() - begin_s, 3))

    return WeightLoading.begin(load)


def _take_memory(model: CausalModel, device: torch.device, dtype: object) -> None:
    """Gives a model its memory. Raises ModelError if there is not enough."""
    try:
        model.take_memory(device)
    except RuntimeError as error:  # what a CPU's allocator raises, and torch.OutOfMemoryError, which is one
        if device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
            raise  # the GPU itself is at fault, not the weights
        raise ModelError(
            f"the weights take {weight_bytes(model) / 1e9:,.1f} GB as {dtype}, and {device} has less memory free: "
            "choose a smaller model, a smaller dtype or another device."
        ) from None


def _fill_model(
    model: CausalModel,
    checkpoint: Checkpoint | None,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> CausalModel:
    _take_memory(model, device, dtype)
    with torch.inference_mode():
        if checkpoint is None:
            fill_randomly(model, settings.seed)
        else:
            load_weights(model, checkpoint)
    return model.eval()
