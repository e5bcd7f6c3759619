"""Compiles kernels before the first request, or loads them from Triton's cache: several at a time, since one by one
they would be most of a cold start.

It knows for which shapes and requests kernels differ, not how passes are launched.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from threading import Semaphore

import torch
from triton import AsyncCompileMode

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.kernels.compilations import noticed_compilations
from mini_infer_engine.kernels.copy_pages import copy_pages
from mini_infer_engine.kernels.embed_decode import gather_places
from mini_infer_engine.kernels.gemm.gemm_rules import K_SPLITS
from mini_infer_engine.kernels.gemm.tuned_configs import LARGE_M_ROWS
from mini_infer_engine.kernels.moe.expert_tiles import MEAN_ROWS
from mini_infer_engine.kernels.norm.rms_norm import add_rms_norm
from mini_infer_engine.kernels.policy import KernelPolicy
from mini_infer_engine.kernels.sampling.penalise import count_sampled, penalised
from mini_infer_engine.kernels.sampling.token_mask import apply_token_masks
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.packed import PackedMethod
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.runtime.attention.triton_backends import TritonBackend
from mini_infer_engine.runtime.cuda.sampling import CudaSampling
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.worker import ModelWorker

_COMPILERS = 16
"""Kernels that compile at a time. Batches that need the same kernel wait for one of them: otherwise each would compile
it, 130 kernels instead of 39.
"""
_LOADERS = 2
"""Passes that load their kernels at a time, until one has to be compiled."""
_LOOK_EVERY_S = 0.02
"""Seconds between two looks whether a kernel was compiled that the cache lacked."""
_DECODE_ROWS = (1, 9, 17, 33, 65, 129, 257)
"""Numbers of decode rows from which products or decode attention have another kernel."""
_PROMPT_TOKENS = (16, 32, 64, 512, 4096)
_WITH_CONFIGS_BY_ROWS = (Mechanism.LARGE_M_GEMM, Mechanism.INT8_GEMM)
"""Kernels that have another config, and so are compiled anew, for other numbers of rows above MAX_M."""

Work = Callable[[], object]


def run_in_threads(common: Sequence[Work], rare: Iterable[Work], device: torch.device, *, defers: bool) -> None:
    """Runs work for the kernels that it compiles. With `defers`, runs what is `rare` only if another kernel has to be
    compiled: then Triton's cache is cold, and a request would wait for the compiler.
    """
    # Kernels that the cache has are loaded by Python, which runs one thread at a time, and weights come meanwhile.
    turns = Semaphore(_LOADERS)

    def on_device(works: Iterable[Work]) -> None:
        torch.cuda.set_device(device)
        with torch.inference_mode():
            for work in works:
                work()

    def in_turn(work: Work) -> None:
        with turns:
            on_device([work])

    with (
        noticed_compilations() as has_compiled,
        ThreadPoolExecutor(_COMPILERS) as compilers,
        AsyncCompileMode(compilers),
        ThreadPoolExecutor(len(common) + 1) as threads,
    ):

        def start(work: Work) -> Future[object]:
            return threads.submit(copy_context().run, work)

        # All on one stream: what kernels leave to each other in the workspace stays theirs.
        started: set[Future[object]] = set() if defers else {start(partial(on_device, rare))}
        started |= {start(partial(in_turn, work)) for work in common}
        pending = started
        while pending and not has_compiled.is_set():
            pending = wait(pending, _LOOK_EVERY_S).not_done
        if has_compiled.is_set():
            turns.release(len(common))
            if defers:
                started.add(start(partial(on_device, rare)))
        for future in started:
            future.result()


def warmup_batches(
    model: CausalModel, policy: KernelPolicy, pool: KVPool, max_num_seqs: int, most_tokens: int
) -> list[Batch]:
    """Returns passes of at most `most_tokens` that have every common kernel in its variants between them.

    They write to the first pages of the pool, whose contents nobody may need.
    """
    params, num_more = SamplingParams(), len(pool.kv_cache.groups) - 1

    def row(slot: int, tokens: int) -> Row:
        pages = list(range(-(-tokens // pool.spec.page_size)))
        return Row(slot, 0, tokens, [0] * tokens, pages, params, more_page_tables=[pages] * num_more)

    decodes = [rows for rows in _DECODE_ROWS if rows <= min(max_num_seqs, most_tokens)]
    prompts = (*_PROMPT_TOKENS, *_expert_tokens(model), *_large_m_tokens(model, policy))
    batches = [Batch([row(slot, 1) for slot in range(rows)], rows) for rows in decodes]
    return batches + [Batch([row(0, tokens)], 0) for tokens in {min(tokens, most_tokens) for tokens in prompts}]


def _expert_tokens(model: CausalModel) -> Iterator[int]:
    """Yields numbers of tokens for which grouped GEMM has each of its tile heights."""
    specs = {module.spec for module in model.modules() if isinstance(module, SparseMoE)}
    for spec, mean_rows in itertools.product(specs, MEAN_ROWS.values()):
        yield max(2, spec.num_stacked * mean_rows // spec.experts_per_token)


def _large_m_tokens(model: CausalModel, policy: KernelPolicy) -> tuple[int, ...]:
    """Returns numbers of tokens for which products with quantised weights have each of their configs."""
    if not any(map(policy.uses, _WITH_CONFIGS_BY_ROWS)):
        return ()
    layers = (module for module in model.modules() if isinstance(module, Linear))
    return LARGE_M_ROWS if any(isinstance(layer.method, PackedMethod) for layer in layers) else ()


def rare_kernels(worker: ModelWorker, pool: KVPool, sampling: CudaSampling, attention: TritonBackend) -> Iterator[Work]:
    """Yields work that compiles page updates, plain sampling, sums of products, log probabilities, and attention of
    passes that are not captured, each in a fraction of a second.

    So no request waits for a compiler. The work changes nothing that sequences have.
    """
    null, state, penalties = pool.null_page, sampling.state, sampling.penalties
    logits = torch.zeros((1, worker.config.vocab_size), dtype=worker.dtype, device=worker.device)
    padding = torch.full((1,), state.padding_slot, dtype=torch.int32, device=worker.device)
    scores = penalised(logits, padding, penalties)  # fp32, as what a bias or a ban has changed is
    no_mask = torch.zeros((1, 1 + -(-worker.config.vocab_size // 32)), dtype=torch.int32, device=worker.device)
    no_copy = torch.tensor([[null, null, 0]], dtype=torch.int32, device=worker.device)
    yield state.compile_updates
    yield partial(copy_pages, pool.pages, no_copy)
    for values, filtered in itertools.product((logits, scores), (False, True)):
        yield partial(sampling.sample, values, padding, filtered=filtered)
    yield partial(penalised, scores, padding, penalties)
    for values in (logits, scores):
        yield partial(apply_token_masks, values, no_mask)
    yield partial(count_sampled, padding, state.state, penalties)
    yield partial(gather_places, padding.long(), state.state)
    yield from sampling.logprobs.kernels(logits, padding, state.state.last_tokens)
    if isinstance(worker.model, DecoderModel):
        yield partial(_compile_sums, worker.model, worker)
    yield partial(attention.compile_rare, state.page_tables[:, -1:], worker.dtype)


def _compile_sums(model: DecoderModel, worker: ModelWorker) -> None:
    """Compiles the norm that adds the partial sums of a product."""
    width = model.config.hidden_size
    summands = torch.zeros((max(K_SPLITS), 1, width), dtype=worker.dtype, device=worker.device)
    norms = (module for module in model.modules() if isinstance(module, RMSNorm))
    norm = next(norm for norm in norms if norm.weight.shape == (width,))
    for splits in K_SPLITS:
        add_rms_norm(summands[0].clone(), summands[:splits], norm.weight, norm.eps)
