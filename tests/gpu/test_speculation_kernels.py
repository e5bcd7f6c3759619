"""Guesses on the device: the kernels do what the functions of the CPU's path do."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.bans import completed_bans
from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.kernels.sampling.ban_words import ban_words
from mini_infer_engine.kernels.sampling.penalise import count_made, penalised_checks
from mini_infer_engine.kernels.sampling.sample import sample
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sampling.speculate import (
    chunk_inputs,
    expand_slots,
    keep_guess,
    look_up_guesses,
    settle_guesses,
)
from mini_infer_engine.runtime.cpu.speculation import right_tokens
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.sampling.penalties import Penalties
from mini_infer_engine.sampling.reference import build_sampling
from mini_infer_engine.sampling.reference import sample as sample_by_torch
from mini_infer_engine.speculation.ngram import look_up
from tests.gpu.device import DEVICE, KERNELS, ON_GPU, POLICY, WORKSPACE, normal

pytestmark = KERNELS
WIDTH = 64
INT32 = torch.int32
EVICTED = 1
"""Of each text: tokens that are not in the cache any more."""


def state_of(
    texts: list[list[int]], params: list[SamplingParams] | None = None
) -> tuple[DeviceBatchState, torch.Tensor]:
    """Slots whose texts end with a last token that is in no cache, and their history without it."""
    table = DeviceBatchState(len(texts), 4, 0, DEVICE)
    requested = params or [SamplingParams(temperature=0.0)] * len(texts)
    rows = [
        Row(slot, 0, len(text), text, [0], one, noise_seed=slot + 3, output_index=slot,
            suppressed_token_ids=tuple(one.stop_token_ids) if slot < one.min_tokens else ())
        for slot, (text, one) in enumerate(zip(texts, requested, strict=True))
    ]  # fmt: skip
    table.begin(rows)
    history = torch.full((len(texts) + 1, WIDTH), -7, dtype=INT32, device=DEVICE)
    for slot, text in enumerate(texts):
        history[slot, : len(text) - 1] = torch.tensor(text[:-1], dtype=INT32, device=DEVICE)
        table.state.last_tokens[slot] = text[-1]
        table.state.positions[slot] = len(text) - 1
        table.state.kv_lengths[slot] = len(text) - 1 - EVICTED
    return table, history


def on_device(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32, device=DEVICE)


@pytest.mark.parametrize("seed", range(4))
def test_look_up_finds_what_the_cpu_finds(seed: int) -> None:
    dice = random.Random(seed)
    texts = [[dice.randrange(3) for _ in range(dice.randrange(2, 50))] for _ in range(6)]
    table, history = state_of(texts)
    slots = on_device([4, 0, 1, 2, 3, 5, table.padding_slot])
    virtual = SamplingState.zeros(8, DEVICE)
    expand_slots(slots, table.state, history, virtual, 1)
    look_up_guesses(slots, table.state, history, 3, 4, 2)
    for slot, text in enumerate(texts):
        found = history[slot, len(text) : len(text) + 3].tolist()
        assert found == (look_up(text, 3, longest=4, shortest=2) or [-1, -1, -1]), text


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=4),
    SamplingParams(temperature=1.2, top_p=0.6),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, min_tokens=6, stop_token_ids=[2, 3]),
]


def test_each_position_is_sampled_as_if_it_were_decoded_alone() -> None:
    queries, vocabulary = 3, 97
    table, history = state_of([[5] * (slot + 2) for slot in range(len(PARAMS))], PARAMS)
    order = [3, 0, 5, 1, 4, 2]
    slots = on_device([*order, table.padding_slot])
    virtual = SamplingState.zeros(len(slots) * queries + 1, DEVICE)
    expand_slots(slots, table.state, history, virtual, queries)
    places = [slot + 1 + query for slot in order for query in range(queries)]
    assert virtual.positions[: len(places)].tolist() == places
    assert virtual.kv_lengths[: len(places)].tolist() == [place - EVICTED for place in places]
    logits = normal(len(slots) * queries, vocabulary) * 3
    logits[:, 2:4] = 20.0
    rows = [
        Row(0, 0, 1, None, [0], PARAMS[slot], noise_seed=slot + 3, output_index=slot + query,
            suppressed_token_ids=(2, 3) if slot + query < PARAMS[slot].min_tokens else ())
        for slot in order
        for query in range(queries)
    ]  # fmt: skip
    count = len(rows)
    expected = sample_by_torch(logits[:count].cpu().clone(), build_sampling(rows, vocabulary, torch.device("cpu")))
    own = torch.arange(len(slots) * queries, dtype=INT32, device=DEVICE)
    sample(logits, own, virtual, workspace=WORKSPACE, programs=POLICY.sample_programs, filtered=True)
    assert virtual.last_tokens[:count].tolist() == expected.tolist()
    assert table.state.output_indexes[: len(PARAMS)].tolist() == list(range(len(PARAMS))), "slots are as they were"


@pytest.mark.parametrize("queries", [2, 4, 6])
def test_what_was_sampled_up_to_the_first_wrong_guess_is_kept(queries: int) -> None:
    dice = random.Random(queries)
    texts = [[dice.randrange(9) for _ in range(dice.randrange(2, 20))] for _ in range(12)]
    table, history = state_of(texts)
    slots = on_device([*range(12), table.padding_slot])
    virtual = SamplingState.zeros(13, DEVICE)
    expand_slots(slots, table.state, history, virtual, 1)
    drafts = [[dice.randrange(2) for _ in range(queries - 1)] for _ in texts]
    for step in range(queries - 1):
        column = torch.tensor([row[step] for row in drafts] + [0], dtype=torch.int64, device=DEVICE)
        keep_guess(slots, table.state, history, column, step)
    sampled = [[dice.randrange(2) for _ in range(queries)] for _ in range(13)]
    limits = [dice.randrange(queries) for _ in texts]
    results = torch.full((13, queries + 1), -9, dtype=torch.int64, device=DEVICE)
    flat = torch.tensor(sampled, dtype=torch.int64, device=DEVICE).flatten()
    settle_guesses(slots, on_device([*limits, 0]), flat, table.state, history, results)
    for slot, text in enumerate(texts):
        made = right_tokens(drafts[slot][: limits[slot]], sampled[slot][: limits[slot] + 1])
        reported = results[slot].tolist()
        assert reported[0] == len(made)
        assert reported[1 : 1 + len(made)] == made
        assert table.state.last_tokens[slot] == made[-1]
        assert table.state.positions[slot] == len(text) - 1 + len(made)
        assert table.state.kv_lengths[slot] == len(text) - 1 - EVICTED + len(made)
        assert table.state.output_indexes[slot] == slot + len(made)
        assert history[slot, : len(text) + len(made)].tolist() == text + made
    assert table.state.positions[table.padding_slot] == table.state.kv_lengths[table.padding_slot] == 0
    assert results[12, 0] == 0


def test_inputs_are_the_tokens_behind_the_cached_ones_in_their_pages() -> None:
    page_size = 16
    texts = [list(range(10, 10 + length)) for length in (5, 17, 33)]
    table, history = state_of(texts)
    tables = torch.tensor([[7, 3, 9], [1, 4, 8], [6, 2, 5], [0, 0, 0]], dtype=INT32, device=DEVICE)
    tables = torch.stack((tables, tables + 10))  # of two KV groups
    slots = on_device([2, 0, 1, table.padding_slot])
    virtual = SamplingState.zeros(5, DEVICE)
    expand_slots(slots, table.state, history, virtual, 1)
    keep_guess(slots, table.state, history, torch.tensor([90, 91, -1, 0], device=DEVICE), 0)
    for offset, count in ((0, 2), (-1, 2)):
        made = chunk_inputs(
            slots, table.state, history, tables, page_size=page_size, offset=offset, count=count, vocabulary=100
        )
        for row, (slot, guess) in enumerate(zip((2, 0, 1), (90, 91, 0), strict=True)):
            tokens = [*texts[slot], guess]
            first = len(texts[slot]) - 1 + offset
            positions = range(first, first + count)
            own = slice(row * count, (row + 1) * count)
            assert made.token_ids[own].tolist() == [tokens[position] for position in positions]
            assert made.positions[own].tolist() == list(positions)
            indexes = [position - EVICTED for position in positions]
            for kv_index, pages in zip(made.kv_index, tables[:, slot].tolist(), strict=True):
                assert kv_index[own].tolist() == [pages[i // page_size] * page_size + i % page_size for i in indexes]
            assert made.ends[row] == first - EVICTED + count
        assert made.kv_index[:, 3 * count :].tolist() == [[-1] * count] * 2, "padding is written nowhere"


def test_penalties_count_the_guesses_before_each_position() -> None:
    """And afterwards what was made; slots without penalties, and padding, are as they were."""
    dice, queries, vocabulary = random.Random(3), 3, 61
    texts = [[dice.randrange(9) for _ in range(12)] for _ in range(4)]
    params = [
        SamplingParams(repetition_penalty=1.4),
        SamplingParams(),
        SamplingParams(presence_penalty=0.7, frequency_penalty=-0.3),
        SamplingParams(repetition_penalty=0.8, frequency_penalty=0.5),
    ]
    table, history = state_of(texts)
    on_gpu, reference = Penalties(5, vocabulary, DEVICE), Penalties(5, vocabulary, torch.device("cpu"))
    for slot, (text, one) in enumerate(zip(texts, params, strict=True)):
        row = Row(slot, 0, len(text), text, [0], one, output_index=5, known_token_ids=text)
        on_gpu.begin(row)
        reference.begin(row)
    order = [2, 0, 3, 1]
    slots = on_device([*order, table.padding_slot])
    guesses = {slot: [dice.randrange(9), dice.randrange(9)] for slot in order}
    virtual = SamplingState.zeros(16, DEVICE)
    expand_slots(slots, table.state, history, virtual, 1)
    for step in range(2):
        tokens = torch.tensor([*(guesses[slot][step] for slot in order), 0], dtype=torch.int64, device=DEVICE)
        keep_guess(slots, table.state, history, tokens, step)
    logits = normal(5 * queries, vocabulary)
    changed = penalised_checks(logits, slots, table.state.positions, history, on_gpu, queries).cpu()
    lines = [(slot, guesses[slot][:query]) for slot in order for query in range(queries)]
    own = logits[: len(lines)].cpu().clone()
    expected = reference.applied(own, [slot for slot, _ in lines], [before for _, before in lines])
    assert torch.allclose(changed[: len(lines)], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(changed[len(lines) :], logits[len(lines) :].cpu())

    made = [[7, 7, 3], [5], [4, 8, 4], []]
    results = torch.zeros((5, queries + 1), dtype=torch.int64, device=DEVICE)
    for line, tokens_made in zip(results, made, strict=False):
        line[0] = len(tokens_made)
        line[1 : 1 + len(tokens_made)] = torch.tensor(tokens_made, dtype=torch.int64)
    count_made(slots, results, on_gpu)
    reference.count_made(order, made)
    assert torch.equal(on_gpu.counts.cpu(), reference.counts)


def test_words_are_banned_behind_the_tokens_that_they_begin_with() -> None:
    queries, vocabulary = 3, 40
    texts = [[1, 2, 3, 4, 5], [4, 5], [9]]
    words = [(0, [4, 5, 6, 30]), (0, [3, 4, 5, 31]), (0, [33]), (1, [5, 6, 34]), (2, [1, 2, 9, 35]), (2, [9, 6, 7, 36])]
    table, history = state_of(texts)
    slots = on_device([0, 1, 2, table.padding_slot])
    expand_slots(slots, table.state, history, SamplingState.zeros(8, DEVICE), 1)
    for step, guess in enumerate((6, 7)):
        tokens = torch.tensor([guess] * 4, dtype=torch.int64, device=DEVICE)
        keep_guess(slots, table.state, history, tokens, step)
    packed = [[row, word[-1], len(word) - 1, *word[:-1], *[0] * (4 - len(word))] for row, word in words]
    scores = torch.zeros((12, vocabulary), device=DEVICE)
    ban_words(torch.tensor(packed, dtype=INT32, device=DEVICE), slots, table.state.positions, history, scores, queries)
    expected = torch.zeros(12, vocabulary)
    for row, text in enumerate(texts):
        for query in range(queries):
            own = [word for index, word in words if index == row]
            expected[row * queries + query, completed_bans(own, [*text, 6, 7][: len(text) + query])] = -torch.inf
    assert torch.equal(scores.cpu(), expected)
    assert expected.isinf().sum() == 3 + 4, "the word without beginning at three places, and four others"


def test_guessing_needs_no_host() -> None:
    """A chain of guesses and their check are kernels alone: nothing of them is read before the results are."""
    if not ON_GPU:
        pytest.skip("a CPU has nothing to wait for")
    table, history = state_of([[1, 2, 3]])
    slots, virtual = on_device([0]), SamplingState.zeros(4, DEVICE)
    results = torch.zeros((1, 3), dtype=torch.int64, device=DEVICE)
    expand_slots(slots, table.state, history, virtual, 2)  # compiled before it is watched
    with torch.cuda.device(DEVICE):
        torch.cuda.set_sync_debug_mode("error")
        try:
            expand_slots(slots, table.state, history, virtual, 2)
            look_up_guesses(slots, table.state, history, 1, 4, 2)
            settle_guesses(slots, slots, virtual.last_tokens, table.state, history, results)
        finally:
            torch.cuda.set_sync_debug_mode("default")
