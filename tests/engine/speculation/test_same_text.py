"""With speculation the text is that of the engine without, token for token: greedy, sampled, and whatever is asked."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.runtime.cpu.speculation import right_tokens
from mini_infer_engine.runtime.model_runner import load_runner
from mini_infer_engine.speculation.head import HeadShape
from tests.support.tiny_models import save_head, save_tiny_model, shifted_positions

REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.8, max_tokens=33),
    SamplingParams(temperature=1.2, top_k=20, max_tokens=40),
    SamplingParams(temperature=0.9, top_p=0.7, max_tokens=21),
    SamplingParams(temperature=1.0, min_p=0.05, min_tokens=8, stop_token_ids=list(range(5, 40)), max_tokens=40),
    SamplingParams(temperature=0.0, min_tokens=12, stop_token_ids=list(range(20, 90)), max_tokens=40),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.1, max_tokens=30),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=20),
    SamplingParams(temperature=0.7, logit_bias={7: 4.0}, bad_words_token_ids=[[9], [4, 7]], max_tokens=30),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=0.3, max_tokens=None),
    SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft": {"num_speculative_tokens": 5},
    "one guess": {"num_speculative_tokens": 1},
    "head": {"speculative_method": "head", "num_speculative_tokens": 3},
    "head of few tokens": {"speculative_method": "head", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one that is nearly the same."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    model = save_tiny_model(target, "qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01 * parameter.std())
    model.save_pretrained(draft)
    return target, draft


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made however long a pass of a tiny model takes with them."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])


def requests(count: int = 1) -> list[Request]:
    made = []
    for index, sampling in enumerate(REQUESTS * count):
        prompt = [(place * 7 + index * 3) % 23 + 4 for place in range(3 + 11 * (index % 5))]
        made.append(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=index))
    return made


def run(folder: Path, requested: list[Request], **options: Any) -> tuple[list[tuple[object, ...]], EngineStats]:
    """What each request yields, and the counters at the end."""
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 4_000_000, "max_model_len": 160}
    settings = EngineSettings(model=str(folder), **(common | options))
    runner = load_runner(settings)
    engine = Engine(runner.settings, runner, (2,), runner.max_model_len, "revision", record_events=False)
    made: dict[str, list[Any]] = {request.request_id: [[], [], None] for request in requested}
    for request in requested:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            one = made[output.request_id]
            one[0] += output.token_ids
            one[1] += [(one_logprob.token_id, round(one_logprob.logprob, 3)) for one_logprob in output.logprobs]
            one[2] = output.finish_reason
    return [tuple(one) for one in made.values()], engine.stats()


def model_of(method: str, draft: Path, folder: Path) -> dict[str, str]:
    """What guesses, where that has files."""
    if method.startswith("head"):
        few = range(1, 199, 3) if method == "head of few tokens" else ()
        return {"speculative_model": str(save_head(folder / "head", 64, 3, few))}
    return {} if method == "ngram" else {"speculative_model": str(draft)}


Yielded = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> Yielded:
    """What the engine without speculation says."""
    return run(folders[0], requests())[0]


@pytest.mark.parametrize("step_depth", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_speculative_text_equals_the_plain_engines(
    folders: tuple[Path, Path], plain: Yielded, tmp_path: Path, method: str, step_depth: int
) -> None:
    target, draft = folders
    options = METHODS[method] | model_of(method, draft, tmp_path)
    guessed, stats = run(target, requests(), step_depth=step_depth, **options)
    assert guessed == plain
    assert stats.draft_tokens > 50
    assert (
        method == "ngram"
        or method.startswith("head")
        or sum(stats.accepted_tokens_by_position) > stats.draft_tokens / 3
    )


PAIRS = [[one, other] for one in range(1, 199, 7) for other in range(2, 199, 3)]
SAMPLING_FIELDS: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "biases": {"logit_bias": {7: 4.0, 9: -3.0}},
    "allowed tokens": {"allowed_token_ids": list(range(5, 60))},
    "bad words": {"bad_words_token_ids": [[token] for token in range(0, 199, 9)] + PAIRS},
    "all": {
        "logprobs": 0,
        "frequency_penalty": 0.5,
        "logit_bias": {11: 6.0},
        "bad_words_token_ids": [[11, 11, 11], [3]],
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_speculative_text_and_logprobs_equal_the_plain_engines_for_other_parameters(
    folders: tuple[Path, Path], tmp_path: Path, method: str
) -> None:
    """Text and numbers, while passes with guesses and without follow each other."""
    target, draft = folders
    options = METHODS[method] | model_of(method, draft, tmp_path)
    common = {"min_tokens": 5, "stop_token_ids": list(range(20, 30)), "max_tokens": 24}
    requested = [
        Request(
            request_id=f"{name} {temperature}",
            prompt_token_ids=[(place * 7 + index) % 23 + 4 for place in range(9 + 4 * index)],
            sampling=SamplingParams(temperature=temperature, **common, **more),
            noise_seed=index,
        )
        for index, (name, more) in enumerate(SAMPLING_FIELDS.items())
        for temperature in (0.0, 0.9)
    ]
    plain, _ = run(target, requested)
    with pytest.MonkeyPatch.context() as patch:
        turns = iter(range(1 << 20))
        levels = (1, 1, 0, 1, 0, 0, 1)
        patch.setattr(DraftController, "choose", lambda self, *_, **__: levels[next(turns) % 7] * self.levels[-1])
        guessed, stats = run(target, requested, **options)
    assert guessed == plain
    assert stats.drafts > 20


def test_ngram_drafts_are_accepted_when_a_model_repeats_itself(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", initializer_range=0.02)
    plain, _ = run(tmp_path, requests())
    guessed, stats = run(tmp_path, requests(), **METHODS["ngram"])
    assert guessed == plain
    assert sum(stats.accepted_tokens_by_position) > 20


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 16},
        {"max_num_seqs": 12, "kv_cache_memory": 600_000, "kv_swap_memory": 4_000_000},
        {"enable_prefix_caching": False, "page_size": 64},
    ],
    ids=["chunks", "preemption", "large pages"],
)
def test_speculative_text_is_unchanged_by_chunks_and_preemption(
    folders: tuple[Path, Path], plain: Yielded, options: dict[str, Any]
) -> None:
    target, draft = folders
    guessed, stats = run(target, requests(), speculative_model=str(draft), **options)
    assert guessed == plain
    assert stats.draft_tokens > 50
    assert stats.preemptions or "kv_swap_memory" not in options


@pytest.mark.parametrize("method", ["ngram", "draft", "head"])
def test_speculative_text_is_unchanged_when_positions_exceed_cache_indexes(
    folders: tuple[Path, Path], method: str
) -> None:
    """Rotation knows distances alone, so that a text further on is the same text."""
    target, draft = folders
    options = METHODS[method]
    if method == "head":
        options = options | {"speculative_model": str(save_head(target.parent / "head of shifted", 64, 3))}
    elif method == "draft":
        options = options | {"speculative_model": str(draft)}
    requested = [one for one in requests() if one.sampling.max_tokens and one.sampling.logprobs is None]
    plain, _ = run(target, requested)
    with shifted_positions(101):
        alone, _ = run(target, requested, max_model_len=256)
        guessed, stats = run(target, requested, max_model_len=256, **options)
    assert alone == plain
    assert guessed == plain
    assert stats.draft_tokens > 50
    assert method != "draft" or sum(stats.accepted_tokens_by_position) > stats.draft_tokens / 3


def test_all_drafts_are_accepted_when_the_draft_is_the_model(folders: tuple[Path, Path]) -> None:
    target, _ = folders
    requested = requests()[:4]
    _, stats = run(target, requested, speculative_model=str(target), num_speculative_tokens=3)
    assert stats.draft_tokens > 50
    assert sum(stats.accepted_tokens_by_position) > 0.8 * stats.draft_tokens, "ends of texts are all that it loses"


def test_speculative_sampling_has_the_models_distribution() -> None:
    """Chi-squared over what a wrong draft leaves: what is checked is what was sampled, so the draft has no say."""
    from mini_infer_engine.core.batch import Row
    from mini_infer_engine.sampling.reference import build_sampling, sample

    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.0])
    skewed = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.5, 0.0])  # of the draft
    counts: Counter[int] = Counter()
    draws, piece, accepted = 100_000, 5_000, 0
    for first in range(0, draws, piece):
        rows = [Row(0, 0, 1, None, [0], SamplingParams(), noise_seed=first + draw) for draw in range(piece)]
        inputs = build_sampling(rows, len(logits), torch.device("cpu"))
        drafts = sample(skewed.expand(piece, -1).clone(), inputs).tolist()
        sampled = sample(logits.expand(piece, -1).clone(), inputs).tolist()
        for draft, token in zip(drafts, sampled, strict=True):
            made = right_tokens([draft], [token, token])
            accepted += len(made) == 2
            counts[made[0]] += 1
    expected = (logits.softmax(dim=0) * draws).tolist()
    statistic = sum((counts[token] - share) ** 2 / share for token, share in enumerate(expected))
    assert statistic < 20.5, "the 99.9th percentile of five degrees of freedom"
    overlap = float(torch.minimum(logits.softmax(0), skewed.softmax(0)).sum())
    assert accepted / draws > overlap / (2 - overlap), "the bound of coupled draws (Daliri et al., arXiv:2408.07978)"


@pytest.mark.parametrize("vocab_size", [150, 211])
def test_a_draft_works_when_its_table_is_padded_otherwise(
    folders: tuple[Path, Path], plain: Yielded, tmp_path: Path, vocab_size: int
) -> None:
    """With the smaller one, tokens of the prompt and of the text have no row in the draft's table."""
    target, _ = folders
    save_tiny_model(tmp_path, "qwen3", vocab_size=vocab_size)
    tokenizer = json.dumps({"model": {"vocab": {"a": 0}}})
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    (target / "tokenizer.json").write_text(tokenizer)
    try:
        guessed, stats = run(target, requests(), speculative_model=str(tmp_path))
    finally:
        (target / "tokenizer.json").unlink()
    assert guessed == plain
    assert stats.draft_tokens > 50


def test_a_draft_is_refused_before_loading_when_its_vocabulary_differs(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "target", "qwen3")
    save_tiny_model(tmp_path / "other", "qwen3", vocab_size=211)
    with pytest.raises(ModelError, match=r"211 tokens.* 199"):
        run(tmp_path / "target", [], speculative_model=str(tmp_path / "other"))


def test_a_head_is_refused_when_it_belongs_to_another_model(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "target", "qwen3")
    options = {"speculative_method": "head", "speculative_model": str(save_head(tmp_path / "wide", 96, 3))}
    with pytest.raises(ModelError, match=r"\[0, 2\].* 96.* 64"):
        run(tmp_path / "target", [], **options)
    options["speculative_model"] = str(save_head(tmp_path / "torn", 64, 3))
    shape = HeadShape(64, 48, 96, (0, 2))
    (tmp_path / "torn" / "config.json").write_text(json.dumps(shape.to_config()))
    with pytest.raises(ModelError, match=r"fuse.weight.*\[32, 128\].*\[48, 128\]"):
        run(tmp_path / "target", [], **options)


def test_a_draft_is_refused_when_its_context_is_shorter(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "target", "qwen3")
    save_tiny_model(tmp_path / "short", "qwen3", max_position_embeddings=64)
    with pytest.raises(ModelError, match=r"64 tokens.* 160"):
        run(tmp_path / "target", [], speculative_model=str(tmp_path / "short"))
