"""The model of passes beside published figures: times between tokens and to the first token, and tokens a second."""

from dataclasses import dataclass, replace

import pytest

from mini_infer_engine.tools.sizing.gpu import GPUS
from mini_infer_engine.tools.sizing.pass_times import PassTimes
from mini_infer_engine.tools.sizing.precision import BF16, FP8, Precision
from tests.engine.tools.sizing.shapes import shape_of


@dataclass(frozen=True)
class Published:
    """Figures of benchmarks/engine_offline.py or beside_vllm.py: prompts of 512 tokens where no length is named."""

    model: str
    itl_ms: tuple[float, float | None, float | None]
    """Time between tokens at batch 1, 8 and 32."""
    ttft_ms: dict[int, float]
    """Time to the first token by length of the prompt."""
    w2_tokens_per_s: float | None = None
    """256 requests of 512 + 256 tokens at once."""
    gpu: str = "h200"
    tensor: int = 1
    precision: Precision = BF16
    within: float = 0.10

    def __str__(self) -> str:
        return f"{self.model}-{self.precision.name}-{self.tensor}x{self.gpu}"


# 2026-11-22-engine-house-ab.json; of 1.5B 2026-11-22-full-run-b1d0b98.md and 2026-11-26-fourth-h200.md.
FOUR_SHAPES = [
    Published("qwen3-0.6b", (0.669, 0.815, 1.295), {512: 2.13, 4096: 10.36, 8192: 27.24}, 37_220),
    Published("qwen2.5-1.5b", (1.11, 1.173, 1.52), {512: 3.87, 4096: 19.8, 8192: 47.5}, 45_851),
    Published("qwen2.5-7b", (3.645, 3.752, 4.335), {512: 10.87, 4096: 90.7, 8192: 188.9}, 12_710),
    Published("qwen3-14b", (7.299, 7.518, 8.431), {512: 22.77, 4096: 180.0, 8192: 375.1}, 6_248),
]
# 2026-11-26-h200-vllm.json; of 7B docs/benchmarks.md.
FP8_SHAPES = [
    Published("qwen2.5-1.5b", (1.078, 1.088, 1.404), {512: 3.605, 4096: 15.08}, precision=FP8),
    Published("qwen2.5-7b", (2.53, None, None), {512: 8.71, 4096: 62.5}, 16_925, precision=FP8),
    Published("llama-3.1-8b", (2.796, 2.966, 3.929), {512: 7.938, 4096: 60.18}, precision=FP8),
    Published("qwen2.5-14b", (4.999, 5.204, 6.817), {512: 15.71, 4096: 112.6}, precision=FP8),
]
# Not used for the fit, or only with small weights: 2026-11-22-untuned-shapes.md, 2026-11-22-engine-house-h100.json,
# 2026-11-26-fourth-four-ranks.json, 2026-11-26-fourth-h200.md.
OTHERS = [
    Published("llama-3.2-1b", (0.757, 0.828, 1.07), {512: 2.44, 4096: 15.4, 8192: 36.6}, 57_180),
    Published("qwen2.5-7b", (4.962, 5.095, 5.761), {4096: 92.7, 8192: 185.6}, 12_098, gpu="h100"),
    Published("qwen2.5-7b", (2.250, 2.296, 2.583), {4096: 50.0}, tensor=2),
    Published("qwen2.5-7b", (1.447, 1.537, 1.920), {4096: 32.65}, tensor=4),
    Published("qwen2.5-14b", (4.24, 4.43, 5.22), {4096: 101.0}, tensor=2),
    Published("mistral-small-24b", (6.22, 6.64, 7.20), {4096: 154.0}, tensor=2),
]
# 2026-11-24-compared-passes.json: decode passes of a mixed batch of 7B, rows and milliseconds; about 700 tokens each.
SEVEN_B_PASSES = [(17, 4.20), (48, 5.42), (80, 6.26), (112, 6.85), (143, 7.80), (177, 8.93), (209, 9.50), (247, 10.2)]


@pytest.mark.parametrize("published", [*FOUR_SHAPES, *FP8_SHAPES, *OTHERS], ids=str)
def test_times_are_within_a_tenth_when_figures_of_the_shape_were_published(published: Published) -> None:
    shape = replace(shape_of(published.model), precision=published.precision)
    times = PassTimes(shape, GPUS[published.gpu], published.tensor)
    for batch, measured in zip((1, 8, 32), published.itl_ms, strict=True):
        if measured is not None:
            assert times.decode_s(batch, 640) * 1e3 == pytest.approx(measured, rel=published.within), f"batch {batch}"
    for tokens, measured in published.ttft_ms.items():
        assert times.prefill_s(tokens) * 1e3 == pytest.approx(measured, rel=published.within), f"{tokens} tokens"
    if published.w2_tokens_per_s is not None:
        prompts_s = 16 * times.prompts_s([(512, 0)] * 16)
        decodes_s = sum(times.decode_s(256, 512 + step) for step in range(256))
        tokens_per_s = 256 * 256 / (prompts_s + decodes_s)
        assert tokens_per_s == pytest.approx(published.w2_tokens_per_s, rel=published.within)


@pytest.mark.parametrize(("rows", "measured_ms"), SEVEN_B_PASSES)
def test_decode_passes_are_within_a_tenth_when_a_mixed_batch_runs(rows: int, measured_ms: float) -> None:
    times = PassTimes(shape_of("qwen2.5-7b"), GPUS["h200"])
    assert times.decode_s(rows, 700) * 1e3 == pytest.approx(measured_ms, rel=0.10)


def test_a_pass_is_never_shorter_when_it_has_more_rows_context_or_prompt() -> None:
    times = PassTimes(shape_of("qwen2.5-7b"), GPUS["h200"])
    by_rows = [times.decode_s(rows, 640) for rows in range(1, 257)]
    by_context = [times.decode_s(32, context) for context in range(0, 8192, 512)]
    by_prompt = [times.prefill_s(tokens) for tokens in range(1, 8192, 512)]
    by_cached = [times.prefill_s(128, tokens) for tokens in range(0, 8192, 512)]
    for series in (by_rows, by_context, by_prompt, by_cached):
        assert series == sorted(series)
