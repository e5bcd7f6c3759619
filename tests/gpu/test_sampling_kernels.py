"""The sampling kernels choose what sampler.py chooses, over steps, slots and parameters, and keep the state right."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.kernels.embed_decode import gather_decode_inputs, gather_places
from mini_infer_engine.kernels.sampling.sample import sample
from mini_infer_engine.kernels.sampling.sampling_state import HOST_RING_DEPTH, SUPPRESSED_WIDTH, SamplingState
from mini_infer_engine.kernels.sampling.state_update import update_pages
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState, refuses_suppressed
from mini_infer_engine.sampling.reference import build_sampling
from mini_infer_engine.sampling.reference import sample as sample_by_torch
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, POLICY, WORKSPACE, cases, normal

pytestmark = KERNELS
STOPS = [3, 7]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.3, top_k=1),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.8, top_k=10**9),
    SamplingParams(temperature=0.7, top_p=0.5),
    SamplingParams(temperature=1.5, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=STOPS),
    SamplingParams(temperature=1.0, top_k=5, min_tokens=2, stop_token_ids=STOPS),
    SamplingParams(temperature=0.9, top_p=0.9, min_tokens=2, stop_token_ids=STOPS),
]


def row_of_kind(slot: int, params: SamplingParams, output_index: int) -> Row:
    suppressed = tuple(params.stop_token_ids) if output_index < params.min_tokens else ()
    return Row(
        slot, 10 + slot, 1, [0], [0], params,
        noise_seed=slot * 7919 + 5, output_index=output_index, suppressed_token_ids=suppressed,
        position_offset=3 * slot,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "rounds"), cases([(97, FP32, 1)], [(4096, BF16, 8), (32_000, FP32, 8), (151_936, BF16, 4)])
)
def test_the_kernel_chooses_as_the_sampler_does(vocabulary: int, dtype: torch.dtype, rounds: int) -> None:
    # A row's ties at the edge of top-k weigh differently in the two, so bf16 logits, which have ties, use one filter.
    kinds = [params for params in PARAMS if dtype == FP32 or not (params.top_k and params.top_p < 1)] * rounds
    slots = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(4)).tolist()
    table = DeviceBatchState(len(kinds), 4, 0, DEVICE)
    table.begin([row_of_kind(slot, params, 0) for slot, params in zip(slots, kinds, strict=True)])
    spare = table.padding_slot
    on_device = torch.tensor([*slots, spare, spare], dtype=torch.int32, device=DEVICE)
    for step in range(4 if ON_GPU else 3):
        logits = normal(len(slots) + 2, vocabulary, dtype=dtype, seed=step) * 3
        logits[:, STOPS] = 30  # what may not be chosen is what would be
        rows = [row_of_kind(slot, params, step) for slot, params in zip(slots, kinds, strict=True)]
        on_host = logits[: len(slots)].float().cpu()
        expected = sample_by_torch(on_host, build_sampling(rows, vocabulary, torch.device("cpu")))
        sample(
            logits,
            on_device,
            table.state,
            workspace=WORKSPACE,
            programs=POLICY.sample_programs,
            filtered=table.has_filters(slots),
        )
        chosen = table.state.last_tokens.cpu()[slots]
        wrong = [kinds[index] for index in (chosen != expected).nonzero().flatten().tolist()]
        assert not wrong, (step, wrong)
        state = table.state
        assert state.on_host[slots, step % HOST_RING_DEPTH].tolist() == chosen.tolist()
        assert state.kv_lengths[slots].tolist() == [10 + slot + step + 1 for slot in slots]
        assert state.positions[slots].tolist() == [10 + 4 * slot + step + 1 for slot in slots]
        assert state.output_indexes[slots].tolist() == [step + 1] * len(slots)
    progress = (state.last_tokens, state.positions, state.kv_lengths, state.output_indexes)
    assert [int(one[spare]) for one in progress] == [0, 0, 0, 0]


@pytest.mark.parametrize(("rows", "programs"), cases([(3, 1), (3, 6), (3, 1000)], [(1, 1000), (31, 1), (31, 1056)]))
def test_parts_of_any_size_choose_as_the_sampler_does(rows: int, programs: int) -> None:
    """Three tiles, in one part, in two and in three; the best logits are in all of them, and some are suppressed."""
    vocabulary, kinds = 20_003, [PARAMS[1], PARAMS[0], PARAMS[-1]]
    table = DeviceBatchState(rows, 4, 0, DEVICE)
    rows_of_slots = [row_of_kind(slot, kinds[slot % 3], 0) for slot in range(rows)]
    table.begin(rows_of_slots)
    logits = normal(rows, vocabulary)
    expected = sample_by_torch(logits.cpu(), build_sampling(rows_of_slots, vocabulary, torch.device("cpu")))
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    sample(
        logits, slots, table.state, workspace=WORKSPACE, programs=programs, filtered=table.has_filters(slots.tolist())
    )
    assert table.state.last_tokens[:rows].tolist() == expected.tolist()


@pytest.mark.parametrize("rows", cases([1], [2, 31, 256, 1100]))
def test_greedy_takes_the_first_of_equals_for_any_number_of_rows(rows: int) -> None:
    """9000 comes before 9216, though the latter's group comes first."""
    vocabulary = 151_936 if ON_GPU else 20_000
    for first in (5, 1024, 8200, 9000):
        logits = normal(rows, vocabulary, dtype=BF16)
        logits[:, [vocabulary - 1, vocabulary // 2, 9216, first]] = logits.amax(dim=1, keepdim=True) + 1
        table = DeviceBatchState(rows, 4, 0, DEVICE)
        table.begin([row_of_kind(slot, SamplingParams(temperature=0.0), 0) for slot in range(rows)])
        slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        sample(logits, slots, table.state, workspace=WORKSPACE, programs=POLICY.sample_programs, filtered=False)
        assert table.state.last_tokens[:rows].tolist() == [first] * rows


def test_draws_follow_the_softmax() -> None:
    """20,000 draws (in the interpreter 200) of one distribution, each by another seed: shares within five sigma."""
    draws = 20_000 if ON_GPU else 200
    weights = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    table = DeviceBatchState(draws, 4, 0, DEVICE)
    table.begin([row_of_kind(slot, SamplingParams(temperature=1.0), 0) for slot in range(draws)])
    slots = torch.arange(draws, dtype=torch.int32, device=DEVICE)
    sample(
        weights.log().repeat(draws, 1).to(DEVICE),
        slots,
        table.state,
        workspace=WORKSPACE,
        programs=POLICY.sample_programs,
    )
    chosen = table.state.last_tokens[:draws].cpu()
    shares = torch.bincount(chosen, minlength=5) / draws
    assert ((shares - weights).abs() <= 5 * (weights * (1 - weights) / draws).sqrt()).all(), shares


def test_more_suppressed_ids_than_a_slot_holds_are_refused() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=list(range(SUPPRESSED_WIDTH)))
    assert refuses_suppressed(params, ()) is None
    refusal = refuses_suppressed(params, (SUPPRESSED_WIDTH,))
    assert refusal is not None
    assert str(SUPPRESSED_WIDTH) in refusal


@pytest.mark.parametrize(("rows", "width", "dtype"), cases([(3, 70, FP32)], [(1, 1024, BF16), (64, 3584, BF16)]))
def test_gather_reads_tokens_and_places_of_slots(rows: int, width: int, dtype: torch.dtype) -> None:
    slots = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(1))[:rows].to(torch.int32).to(DEVICE)
    generator = torch.Generator().manual_seed(2)
    state = SamplingState.zeros(rows + 5, DEVICE)
    for one in (state.last_tokens, state.positions, state.kv_lengths):
        one.copy_(torch.randint(0, 50, (rows + 5,), generator=generator))
    last_tokens, embedding = state.last_tokens, normal(50, width, dtype=dtype)
    hidden, *places = gather_decode_inputs(slots, state, embedding)
    assert torch.equal(hidden, embedding[last_tokens[slots]])
    expected_places = [state.positions[slots].long(), state.kv_lengths[slots].long()]
    assert all(map(torch.equal, places, expected_places))
    assert all(map(torch.equal, gather_places(slots.long(), state), expected_places))
    padding = int(slots[-1])
    expected_places[1][-1] = -1
    assert all(map(torch.equal, gather_places(slots, state, padding), expected_places))
    integers = (embedding.float() * 30).clamp(-127, 127).to(torch.int8)
    scales = torch.rand(50, generator=generator).to(DEVICE)
    hidden, *_ = gather_decode_inputs(slots, state, integers, first_token=3, scales=scales, dtype=dtype)
    tokens = last_tokens[slots] - 3
    expected = (integers[tokens].float() * scales[tokens, None]).to(dtype)
    assert torch.equal(hidden, expected.where((tokens >= 0)[:, None], 0))


@pytest.mark.parametrize("entries", cases([1, 300], [5000]))
def test_page_updates_reach_their_places_only(entries: int) -> None:
    tables = torch.full((100, 70), -1, dtype=torch.int32, device=DEVICE)
    places = torch.randperm(7000, generator=torch.Generator().manual_seed(entries))[:entries]
    update_pages(torch.stack((places, places * 3), dim=1).to(DEVICE), tables)
    expected = torch.full((7000,), -1, dtype=torch.int32)
    expected[places] = (places * 3).to(torch.int32)
    assert torch.equal(tables.flatten().cpu(), expected)
