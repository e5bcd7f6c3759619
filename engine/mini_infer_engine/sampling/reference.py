"""Samples tokens from logits: the meaning and order of the parameters are vLLM's (temperature, min-p, top-k, top-p).

Randomness is a pure function of (noise seed, output index, place in the vocabulary), so that a choice depends on
nothing but the request itself: neither on batch mates, place in the batch, chunking nor device. It knows no request and
no text.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.core.batch import Row
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.sampling.token_groups import GROUP_TOKENS, RUN_TOKENS, TILE_GROUPS
from mini_infer_engine.sampling.parameters import GREEDY_TEMPERATURE

# Constants of splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2714064.2660195).
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1
# Tokens of one run of each group of a tile, and such stripes in a tile.
_STRIPE, _STRIPES = TILE_GROUPS * RUN_TOKENS, GROUP_TOKENS // RUN_TOKENS


@dataclass(slots=True)
class SamplingInputs:
    """Parameters of the sampling rows of a pass. `random` is None if all are greedy."""

    random: "RandomInputs | None"
    suppressed: tuple[Tensor, Tensor] | None
    """Pairs (row, token id) that may not be chosen."""


@dataclass(slots=True)
class RandomInputs:
    """Parameters of the rows that are not greedy, one line a row."""

    rows: Tensor | None  # [random] int64, indices of sampling rows; None: all of them
    keys: Tensor  # [random, 1] int64
    temperature: Tensor  # [random, 1] fp32
    log_min_p: Tensor | None  # [random, 1] fp32; -inf: off
    truncation: "TruncationInputs | None"


@dataclass(slots=True)
class TruncationInputs:
    """Parameters of the random rows that have top-k or top-p, one line a row."""

    rows: Tensor | None  # [truncated] int64, indices of random rows; None: all of them
    top_k: Tensor  # [truncated, 1] int64, 1 <= top_k <= vocab
    top_p: Tensor  # [truncated, 1] fp64; 2 where off, which no rounding reaches
    widest: int
    """The largest top_k: no token of a lower rank needs sorting."""


def build_sampling(rows: Sequence[Row], vocab_size: int, device: torch.device) -> SamplingInputs:
    """Returns the parameters of rows that sample, without waiting for the device."""
    pairs = [(index, token) for index, row in enumerate(rows) for token in row.suppressed_token_ids]
    suppressed = None
    if pairs:
        row_ids, token_ids = to_device(np.array(pairs, dtype=np.int64).T.copy(), device).unbind(0)
        suppressed = (row_ids, token_ids)
    sampled = [(index, row, row.sampling) for index, row in enumerate(rows) if row.sampling is not None]
    drawn = [(index, row, one) for index, row, one in sampled if one.temperature >= GREEDY_TEMPERATURE]
    if not drawn:
        return SamplingInputs(None, suppressed)
    params = [one for _, _, one in drawn]
    has_min_p = any(one.min_p > 0 for one in params)
    log_min_p = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params]
    random = RandomInputs(
        rows=_indices([index for index, _, _ in drawn], len(rows), device),
        keys=to_device(np.array([[noise_key(row.noise_seed, row.output_index)] for _, row, _ in drawn]), device),
        temperature=to_device(np.array([[one.temperature] for one in params], dtype=np.float32), device),
        log_min_p=to_device(np.array(log_min_p, dtype=np.float32)[:, None], device) if has_min_p else None,
        truncation=None,
    )
    truncated = [index for index, one in enumerate(params) if 0 < one.top_k < vocab_size or one.top_p < 1]
    if truncated:
        top_k = [params[index].top_k if 0 < params[index].top_k < vocab_size else vocab_size for index in truncated]
        top_p = [params[index].top_p if params[index].top_p < 1 else 2.0 for index in truncated]
        random.truncation = TruncationInputs(
            rows=_indices(truncated, len(params), device),
            top_k=to_device(np.array(top_k, dtype=np.int64)[:, None], device),
            top_p=to_device(np.array(top_p, dtype=np.float64)[:, None], device),
            widest=max(top_k),
        )
    return SamplingInputs(random, suppressed)


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Returns the chosen tokens, [rows] int64, from [rows, vocab] logits of any float type."""
    if inputs.suppressed is not None:
        logits = logits.index_put(inputs.suppressed, logits.new_tensor(-math.inf))
    if inputs.random is None:
        return _argmax(logits)
    random = inputs.random
    if random.rows is None:
        return _draw(logits.float(), random)
    return _argmax(logits).index_copy_(0, random.rows, _draw(logits.index_select(0, random.rows).float(), random))


def _draw(logits: Tensor, random: RandomInputs) -> Tensor:
    """Draws from the softmax of the tokens that pass the filters."""
    logits = logits / random.temperature
    if random.log_min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + random.log_min_p, -math.inf)
    if (truncation := random.truncation) is not None:
        if truncation.rows is None:
            logits = _truncate(logits, truncation)
        else:
            logits = logits.index_copy(
                0, truncation.rows, _truncate(logits.index_select(0, truncation.rows), truncation)
            )
    return _race(logits, random.keys)


def _race(logits: Tensor, keys: Tensor) -> Tensor:
    """Samples by Gumbel-max, as an exponential race: the largest weight / noise is a draw in proportion to the weights.

    The race is among groups by the sums of their weights, then among the tokens of the group that won: the distribution
    is that of a race among all tokens, for a 64th of the noise.
    """
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    rows, vocab_size = weights.shape
    stripe = min(-(-vocab_size // RUN_TOKENS) * RUN_TOKENS, _STRIPE)
    stripes = min(-(-vocab_size // stripe), _STRIPES)
    if missing := -vocab_size % (stripe * stripes):
        weights = functional.pad(weights, (0, missing))
    masses = weights.view(rows, -1, stripes, stripe).sum(dim=2).view(rows, -1, RUN_TOKENS).sum(dim=-1)
    groups = masses.shape[-1]
    noise = exponential_noise(keys, GROUP_TOKENS + groups)
    group = _argmax(masses.div_(noise[:, GROUP_TOKENS:]))
    first_tokens, members = _group_layout(groups, stripes, logits.device)
    tokens = first_tokens[group] + members
    winner = _argmax(weights.gather(1, tokens).div_(noise[:, : stripes * RUN_TOKENS]))
    return tokens.gather(1, winner[:, None]).flatten()


@functools.lru_cache(maxsize=4)
def _group_layout(groups: int, stripes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the first token of each group, [groups, 1], and the offsets of the others, [stripes * RUN]; int64."""
    group = torch.arange(groups, device=device)[:, None]
    place = torch.arange(stripes * RUN_TOKENS, device=device)
    first = group // TILE_GROUPS * (_STRIPE * _STRIPES) + group % TILE_GROUPS * RUN_TOKENS
    return first, place // RUN_TOKENS * _STRIPE + place % RUN_TOKENS


def _argmax(logits: Tensor) -> Tensor:
    """Returns the first of the largest, [rows] int64. On a CPU numpy's argmax takes a tenth of the time of torch's."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _truncate(logits: Tensor, truncation: TruncationInputs) -> Tensor:
    """Drops tokens ranked after top_k, then those after the most likely tokens with mass top_p. Ties at the edge stay.

    The running sum is sequential and in double precision: a row's result must not depend on how many tokens others
    keep.
    """
    ranked = logits.topk(truncation.widest, dim=-1).values  # [rows, widest], descending
    weights = (ranked - ranked[:, :1]).double().exp()
    mass = weights.cumsum(dim=-1)
    total = mass.gather(1, truncation.top_k - 1)
    ranks = torch.arange(truncation.widest, device=logits.device)
    kept = (mass - weights < truncation.top_p * total) & (ranks < truncation.top_k)
    lowest = ranked.gather(1, kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)
    return logits.masked_fill(logits < lowest, -math.inf)


def noise_key(noise_seed: int, output_index: int) -> int:
    """Returns a signed 64-bit key for one choice of one request."""
    return _as_signed(_splitmix64((noise_base(noise_seed) + output_index) & _MASK_64))


def noise_base(noise_seed: int) -> int:
    """Returns the device's form of a request's seed: a signed 64-bit number to which the output index is added."""
    return _as_signed(_splitmix64(noise_seed & _MASK_64))


def exponential_noise(keys: Tensor, count: int) -> Tensor:
    """Returns Exp(1) noise, [rows, count] fp32, for [rows, 1] keys; each element depends on its key and index only."""
    bits = keys + _counters(count, keys.device)
    bits = (bits ^ _shift_right(bits, 30)) * _as_signed(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _as_signed(_MIX_2)
    bits = bits ^ _shift_right(bits, 31)
    # Small values decide, so they need the full resolution of a float near 0: -log1p(-u), not -log(u). None may be
    # infinite: the only candidate would lose.
    uniform = (_shift_right(bits, 11).float() * 2.0**-53 + 2.0**-54).clamp_(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


@functools.lru_cache(maxsize=4)
def _counters(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * _as_signed(_GOLDEN)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shifts int64 logically, which torch shifts arithmetically."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _splitmix64(state: int) -> int:
    bits = (state + _GOLDEN) & _MASK_64
    bits = ((bits ^ bits >> 30) * _MIX_1) & _MASK_64
    bits = ((bits ^ bits >> 27) * _MIX_2) & _MASK_64
    return bits ^ bits >> 31


def _indices(chosen: list[int], total: int, device: torch.device) -> Tensor | None:
    return None if len(chosen) == total else to_device(np.array(chosen, dtype=np.int64), device)
