"""Batches to tokens on one device: the model, the page pool and the last token of every slot.

It knows neither requests nor why a batch looks as it does.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer_engine.attention.torch_reference import TorchAttention
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.layers.decoder import DecoderModel
from mini_infer_engine.models.registry import MODELS
from mini_infer_engine.models.weights.loader import fill_randomly, load_weights
from mini_infer_engine.runtime.inputs import PassInputs, build_inputs
from mini_infer_engine.runtime.kv_pool import KVPool, KVShape
from mini_infer_engine.runtime.memory import CPU_KV_BYTES, available_memory, fit_context, pages_for
from mini_infer_engine.sampling.penalties import Penalties
from mini_infer_engine.sampling.reference import build_sampling, sample

_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
_MOST_BESIDE_TORCH = 2 << 30
"""Bytes of a GPU that kernels, libraries and the driver take while an engine loads; seen: less than one."""


@dataclass(slots=True)
class PassHandle:
    """A launched pass: which rows sample, and where their tokens are once `done` has happened."""

    places: list[tuple[int, int]]
    """(row, index into the flat `tokens`)."""
    num_rows: int
    tokens: Tensor | None  # int64, in main memory
    done: torch.cuda.Event | None


class _MemoryInUse(NamedTuple):
    """Bytes of a GPU: nobody's, and what torch holds and uses of it in this process."""

    free: int = 0
    reserved: int = 0
    allocated: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "_MemoryInUse":
        """At this moment; of a CPU, nothing."""
        if device.type != "cuda":
            return cls()
        return cls(
            torch.cuda.mem_get_info(device)[0],
            torch.cuda.memory_reserved(device),
            torch.cuda.memory_allocated(device),
        )


class TorchRunner:
    """The `batch.Runner` that has a model."""

    default_page_size: int = 16
    page_size_step: int = 16

    def __init__(self, settings: EngineSettings, config: ModelConfig, directory: Path | None = None) -> None:
        """Load the weights of `directory` (not read for dummy weights) and take the memory for the page pool.

        Raises:
            ModelError: the weights do not fit the config, or the settings do not fit model or machine.

        """
        self.config = config
        self.device = choose_device(settings)
        self.dtype = _dtype(settings, config, self.device)
        self.page_size = settings.page_size or self.default_page_size
        if self.page_size % self.page_size_step:
            raise ModelError(f"page_size = {self.page_size}: it must be a multiple of {self.page_size_step}.")
        if self.device.type == "cuda" and torch.cuda.memory_allocated(self.device):
            gc.collect()  # an engine that is garbage gives its memory back now, not while this one counts its own
        memory_before = _MemoryInUse.of(self.device)
        self.model = _load_model(settings, config, directory, self.device, self.dtype)
        self.last_tokens = torch.zeros(settings.max_num_seqs, dtype=torch.int64, device=self.device)
        # One slot more for the padded rows of graphs, which ask for nothing.
        self.penalties = Penalties(settings.max_num_seqs + 1, config.vocab_size, self.device)
        self.num_pages = self._count_pages(settings, memory_before)
        self.max_model_len = fit_context(
            settings.max_model_len, config.max_position_embeddings, self.num_pages * self.page_size
        )
        self.model.finish_loading(self.max_model_len)
        self._use_pool(self.num_pages)

    def refuses(self, request: Request) -> str | None:
        """See `Runner.refuses`."""
        return None

    def launch(self, batch: Batch) -> PassHandle:
        """See `Runner.launch`."""
        sampling = [index for index, row in enumerate(batch.rows) if row.sampling is not None]
        with torch.inference_mode():
            inputs, hidden = self._forward(batch, every_token=False)
            if not sampling:
                return PassHandle([], len(batch.rows), None, None)
            rows = [batch.rows[index] for index in sampling]
            slots = [row.slot for row in rows]
            for row in rows:
                if row.token_ids is not None:
                    self.penalties.begin(row)
            logits = self.penalties.applied(self.model.logits(hidden), slots)
            tokens = sample(logits, build_sampling(rows, self.config.vocab_size, self.device))
            self.penalties.count(slots, tokens)
            self.last_tokens.index_copy_(0, inputs.sample_slots, tokens)
            places = [(row, index) for index, row in enumerate(sampling)]
            if self.device.type == "cpu":
                return PassHandle(places, len(batch.rows), tokens, None)
            on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            on_host.copy_(tokens, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            done.record()
            return PassHandle(places, len(batch.rows), on_host, done)

    def collect(self, handle: PassHandle) -> list[int | None]:
        """See `Runner.collect`."""
        result: list[int | None] = [None] * handle.num_rows
        if handle.tokens is not None:
            if handle.done is not None:
                handle.done.synchronize()
            tokens = handle.tokens.flatten().numpy().data
            for row, place in handle.places:
                result[row] = tokens[place]
        return result

    def logits(self, batch: Batch) -> Tensor:
        """Logits of every token of a pass, [tokens, vocab]: what `launch` computes, for tests and scoring."""
        with torch.inference_mode():
            return self.model.logits(self._forward(batch, every_token=True)[1])

    def _forward(self, batch: Batch, *, every_token: bool) -> tuple[PassInputs, Tensor]:
        """Page copies, then the model: inputs, and hidden states of all tokens or of those that sample."""
        self.pool.copy(batch.copies)
        inputs = build_inputs(batch, self.page_size, self.pool.null_page, self.device)
        token_ids = inputs.token_ids
        if inputs.all_pending:
            token_ids = self.last_tokens.index_select(0, inputs.pending_slots)
        elif inputs.pending_slots.shape[0]:
            pending = self.last_tokens.index_select(0, inputs.pending_slots)
            token_ids = token_ids.index_copy(0, inputs.pending_tokens, pending)
        wanted = None if every_token or len(inputs.sample_rows) == inputs.num_tokens else inputs.sample_rows
        return inputs, self.model(token_ids, inputs.positions, self.backend.prepare(inputs), wanted)

    def _use_pool(self, num_pages: int) -> None:
        shape = KVShape.of(self.config, self.page_size, self.dtype)
        self.pool = KVPool(shape, num_pages, self.device)
        self.backend = TorchAttention(self.config, self.pool)

    def _drop_pool(self) -> None:
        """Let go of everything that holds the pool's memory."""
        del self.pool, self.backend

    def _count_pages(self, settings: EngineSettings, before: _MemoryInUse) -> int:
        """Pages of the pool, given the GPU's memory before this engine took any."""
        page_bytes = KVShape.of(self.config, self.page_size, self.dtype).page_bytes
        if self.device.type == "cpu":
            return pages_for(settings.kv_cache_memory or CPU_KV_BYTES, page_bytes, available_memory())
        peak = self._measure_peak(settings)
        now, total = _MemoryInUse.of(self.device), torch.cuda.mem_get_info(self.device)[1]
        # What this process caches but does not use will be the pool's; `peak` is what a pass takes on top.
        available = now.free + now.reserved - now.allocated - peak
        beside_torch = before.free - now.free - (now.reserved - before.reserved)
        beside_torch = min(max(0, beside_torch), _MOST_BESIDE_TORCH)  # others may have taken or given back meanwhile
        taken = now.allocated - before.allocated + beside_torch
        share = int(total * settings.gpu_memory_utilization) - taken - peak
        return pages_for(settings.kv_cache_memory or max(0, min(share, available)), page_bytes, available)

    def _measure_peak(self, settings: EngineSettings) -> int:
        """Bytes that the largest pass takes for a while, measured with a pool that is thrown away."""
        tokens = settings.max_num_batched_tokens or _BATCHED_TOKENS["cuda"]
        length = min(tokens, settings.max_model_len or self.config.max_position_embeddings)
        pages = -(-length // self.page_size)
        self.model.finish_loading(length)
        self._use_pool(pages)
        self._compile_kernels(length)
        asks = SamplingParams(top_k=20, top_p=0.9)
        num_rows = min(settings.max_num_seqs, tokens)
        rows = [Row(slot, 0, 1, [0], [0], asks) for slot in range(num_rows - 1)]
        count = min(length, tokens - len(rows))
        # Penalties, of one, have the logits of all in fp32.
        last = SamplingParams(top_k=20, top_p=0.9, repetition_penalty=1.1)
        rows.append(Row(num_rows - 1, 0, count, [0] * count, list(range(pages)), last, known_token_ids=[0]))
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.collect(self.launch(Batch(rows, num_rows - 1)))
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self._drop_pool()
        torch.cuda.empty_cache()
        return peak

    def _compile_kernels(self, most_tokens: int) -> None:
        """Compile what passes need, with a pool that is thrown away and holds one sequence of `most_tokens`."""


def weight_bytes(model: DecoderModel) -> int:
    """Bytes of all weights."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def choose_device(settings: EngineSettings) -> torch.device:
    """The device that the settings name; auto: a GPU where torch sees one. ModelError: a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ModelError("device = 'cuda', but torch sees no GPU here: use 'cpu' or 'auto'.")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if has_gpu and settings.device != "cpu"
        else torch.device("cpu")
    )


def _dtype(settings: EngineSettings, config: ModelConfig, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return torch.float32 if settings.dtype == "float32" else torch.bfloat16
    # float16 checkpoints run in bfloat16: the same size, and no overflow.
    return torch.float32 if device.type == "cpu" or config.dtype == "float32" else torch.bfloat16


def _load_model(
    settings: EngineSettings, config: ModelConfig, directory: Path | None, device: torch.device, dtype: torch.dtype
) -> DecoderModel:
    with torch.device("meta"):
        model = MODELS[config.architecture](config)
    model = model.to(dtype)
    try:
        model = model.to_empty(device=device).eval()
    except RuntimeError as error:  # what a CPU's allocator raises, and torch.OutOfMemoryError, which is one
        if device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
            raise  # the GPU itself is at fault, not the weights
        raise ModelError(
            f"the weights take {weight_bytes(model) / 1e9:,.1f} GB as {dtype}, and {device} has less memory free: "
            "choose a smaller model, a smaller dtype or another device."
        ) from None
    with torch.inference_mode():
        if settings.load_format == "dummy":
            fill_randomly(model, settings.seed)
        else:
            assert directory is not None, "only dummy weights need no folder"
            load_weights(model, directory)
    return model
