"""Penalties for repeated tokens: their formula, what is counted in which slot, and whole texts against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.core.batch import Row
from mini_infer_engine.kernels.sampling.penalty_state import MAX_COUNT
from mini_infer_engine.sampling.penalties import Penalties
from mini_infer_engine.text.validation import ParameterError, check_sampling
from tests.support.tiny_models import save_tiny_model

CPU = torch.device("cpu")
VOCABULARY = 199
PROMPTS = [[(place * step + 7) % 190 + 3 for place in range(length)] for step, length in ((37, 5), (11, 40), (3, 70))]
OUTPUT_TOKENS = 40
PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.4},
    {"presence_penalty": -0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {},
]


def first_row(slot: int, known: list[int], outputs: int = 0, **changes: float) -> Row:
    params = SamplingParams(temperature=0.0, **changes)
    return Row(slot, 0, len(known), known, [0], params, output_index=outputs, known_token_ids=known)


def penalised(logits: list[float], prompt: list[int], output: list[int], changes: dict[str, float]) -> list[float]:
    """The definition, token by token."""
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            repetition = changes.get("repetition_penalty", 1.0)
            value = value / repetition if value > 0 else value * repetition
        value -= changes.get("presence_penalty", 0.0) * (token in output)
        result.append(value - changes.get("frequency_penalty", 0.0) * output.count(token))
    return result


def test_penalties_change_logits_by_their_definition() -> None:
    penalties = Penalties(3, 8, CPU)
    changes = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    penalties.begin(first_row(2, [1, 4, 4, 6], outputs=2, **changes))
    penalties.begin(first_row(0, [1, 4]))
    penalties.count([2, 0], torch.tensor([5, 4]))
    logits = torch.tensor([[3.0, 2.0, -1.0, 0.5, 4.0, -2.0, 1.0, 0.0]] * 2)
    actual = penalties.applied(logits, [0, 2])
    assert actual[0].tolist() == logits[0].tolist()
    assert actual[1].tolist() == penalised(logits[1].tolist(), [1, 4], [4, 6, 5], changes)
    # Minus infinity, which is what may not be chosen, stays it.
    assert penalties.applied(torch.full((1, 8), -torch.inf), [2]).max() == -torch.inf


def test_penalties_do_nothing_for_slots_without_them() -> None:
    penalties = Penalties(2, 8, CPU)
    penalties.begin(first_row(1, [3]))
    logits = torch.ones(2, 8)
    assert not penalties.concern([0, 1])
    assert penalties.applied(logits, [0, 1]) is logits
    penalties.count([0, 1], torch.tensor([3, 3]))
    assert not penalties.counts.any()


def test_a_new_sequence_is_not_penalised_for_the_previous_one_in_its_slot() -> None:
    penalties = Penalties(1, 8, CPU)
    penalties.begin(first_row(0, [3], repetition_penalty=2.0))
    penalties.begin(first_row(0, [4], repetition_penalty=2.0))
    assert penalties.applied(torch.ones(1, 8), [0])[0].tolist() == [1, 1, 1, 1, 0.5, 1, 1, 1]
    penalties.begin(first_row(0, [5]))
    assert not penalties.concern([0])


def test_a_count_stays_where_it_is_when_it_is_full() -> None:
    penalties = Penalties(1, 8, CPU)
    penalties.begin(first_row(0, [3], frequency_penalty=1.0))
    penalties.counts[0] = MAX_COUNT
    for _ in range(3):
        penalties.count([0], torch.tensor([3]))
    assert penalties.counts[0].tolist() == [MAX_COUNT] * 8
    penalties.counts[0] = MAX_COUNT - 1
    for _ in range(3):
        penalties.count([0], torch.tensor([3]))
    assert penalties.counts[0].tolist() == [MAX_COUNT - 1] * 3 + [MAX_COUNT + 1] + [MAX_COUNT - 1] * 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_tiny_model(directory, "qwen3")


@pytest.fixture(scope="module")
def expected(saved: tuple[Path, Any]) -> list[list[int]]:
    """Greedy texts of each prompt with each set of penalties, one whole forward pass a token."""
    model = saved[1]
    texts = []
    for prompt in PROMPTS:
        for changes in PENALTIES:
            output: list[int] = []
            while len(output) < OUTPUT_TOKENS:
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt + output])).logits[0, -1]
                values = penalised(logits.tolist(), prompt, output, changes)
                output.append(max(range(VOCABULARY), key=values.__getitem__))
            texts.append(output)
    return texts


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step_depth": 0, "max_num_seqs": 3},
        {"long_prefill_token_threshold": 16, "max_num_seqs": 8},
        {"kv_cache_memory": 16 * 3 * 2 * 2 * 24 * 4 * 40, "max_num_seqs": 16},
    ],
    ids=["one step ahead", "no step ahead", "chunked", "preempted"],
)
def test_greedy_text_with_penalties_equals_the_definition(
    saved: tuple[Path, Any], expected: list[list[int]], settings: dict[str, Any]
) -> None:
    keywords = {"max_model_len": 256, "kv_cache_memory": 32_000_000} | settings
    llm = LLM(str(saved[0]), dtype="float32", device="cpu", skip_tokenizer_init=True, **keywords)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in PENALTIES]
    params = [
        SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, **changes)
        for _ in PROMPTS
        for changes in PENALTIES
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert bool(llm._engine.stats().preemptions) == ("kv_cache_memory" in settings)


def test_repetition_penalty_equals_transformers(saved: tuple[Path, Any], expected: list[list[int]]) -> None:
    model = saved[1]
    model.generation_config.eos_token_id = None
    for prompt, text in zip(PROMPTS, expected[:: len(PENALTIES)], strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT_TOKENS, **PENALTIES[0]
        )
        assert made[0, len(prompt) :].tolist() == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", float("nan")),
    ],
)
def test_penalties_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        check_sampling(SamplingParams(**{name: value}), VOCABULARY, has_text=True)
    assert caught.value.param == name
