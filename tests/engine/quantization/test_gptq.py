"""GPTQ: products with inputs like those it was calibrated with come nearer than by rounding to the nearest."""

import pytest
import torch

from mini_infer_engine.quantization.gptq import clipped_range, gptq_groups, propagation
from mini_infer_engine.quantization.on_load import rounded_groups


def widened(integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> torch.Tensor:
    wide, middle = (each.repeat_interleave(group, 1)[:, : integers.shape[1]] for each in (scale, zero))
    return (integers - middle) * wide


def inputs(count: int, columns: int, *, seed: int) -> torch.Tensor:
    """Correlated, and a few columns far larger than others, as a model's are."""
    dice = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns // 4, columns, generator=torch.Generator().manual_seed(5))
    large = torch.where(torch.arange(columns) % 29 == 3, 8.0, 1.0)
    return (
        torch.randn(count, columns // 4, generator=dice) @ mixing + torch.randn(count, columns, generator=dice)
    ) * large


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (200, 128), (96, 32)])
def test_gptq_has_less_error_than_rounding_to_nearest(columns: int, group: int) -> None:
    weight = torch.randn(24, columns, generator=torch.Generator().manual_seed(1))
    seen, other = inputs(600, columns, seed=2), inputs(300, columns, seed=3)
    made = gptq_groups(weight, seen.t() @ seen, group)
    assert made[0].dtype == torch.uint8
    assert int(made[0].max()) <= 15
    assert torch.equal(made[1], made[1].half().float())
    error, nearest = (
        float((other @ (widened(*each, group) - weight).t()).square().mean())
        for each in (made, rounded_groups(weight, group))
    )
    assert error < 0.6 * nearest


def test_coordinate_descent_increases_no_rows_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are chosen before, so that integers are all that differs; the error is that of the damped sums."""
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
    seen, other = inputs(600, 256, seed=2), inputs(300, 256, seed=3)
    hessian = seen.t() @ seen
    descended = widened(*gptq_groups(weight, hessian, 128), 128) - weight
    monkeypatch.setattr("mini_infer_engine.quantization.gptq._SWEEPS", 0)
    plain = widened(*gptq_groups(weight, hessian, 128), 128) - weight
    damped = hessian + 0.1 * hessian.diagonal().mean() * torch.eye(256)
    after, before = (((error @ damped) * error).sum(1) for error in (descended, plain))
    assert bool((after <= before * (1 + 1e-4)).all())
    assert float(after.sum()) < 0.99 * float(before.sum())
    assert float((other @ descended.t()).square().sum()) < float((other @ plain.t()).square().sum())


def test_group_ranges_weigh_columns_less_when_others_can_compensate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch.randn(400, 64, generator=torch.Generator().manual_seed(2))
    seen[:, 7] = seen[:, 9]  # either weight can do for both
    weights: list[torch.Tensor] = []

    def record(part: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights.append(importance)
        return clipped_range(part, importance)

    monkeypatch.setattr("mini_infer_engine.quantization.gptq.clipped_range", record)
    gptq_groups(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), seen.t() @ seen, 64)
    (importance,) = weights
    apart = importance[[column for column in range(64) if column not in (7, 9)]]
    assert float(importance[[7, 9]].max()) < 0.5 * float(apart.min())


def test_gptq_compensates_for_the_drift_of_its_inputs() -> None:
    """Where their drift can be told from the inputs, products come nearer to those of the inputs as they were."""
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
    turned = torch.eye(256) + 0.02 * torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    seen, other = inputs(600, 256, seed=2), inputs(300, 256, seed=3)
    drifted = seen @ turned
    hessian, drift = drifted.t() @ drifted, 0.5 * (seen - drifted).t() @ drifted
    made, without = gptq_groups(weight, hessian, 128, drift), gptq_groups(weight, hessian, 128)
    error, before = (
        float((other @ turned @ widened(*each, 128).t() - other @ weight.t()).square().mean())
        for each in (made, without)
    )
    assert error < 0.5 * before
    unchanged = gptq_groups(weight, hessian, 128, torch.zeros(256, 256))
    assert torch.equal(unchanged[0], without[0])


def test_drift_compensation_is_weaker_with_few_tokens() -> None:
    assert propagation(16_384, 256) == pytest.approx(0.5, rel=0.02)
    assert propagation(16_384, 3_584) == pytest.approx(0.39, rel=0.01)
    assert propagation(16_384, 18_944) == 0


def test_gptq_rounds_to_nearest_when_the_hessian_is_not_finite() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    broken = torch.full((64, 64), float("inf"))
    made = widened(*gptq_groups(weight, broken, 32, broken), 32)
    assert torch.equal(made, widened(*gptq_groups(weight, torch.eye(64), 32), 32))


def test_gptq_ignores_columns_without_inputs() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    seen = inputs(100, 64, seed=2)
    seen[:, 10:20] = 0
    integers, scale, zero = gptq_groups(weight, seen.t() @ seen, 32)
    assert torch.isfinite(widened(integers, scale, zero, 32)).all()
    constant = gptq_groups(torch.zeros(2, 64), torch.zeros(64, 64), 32)
    assert not widened(*constant, 32).any()


def test_a_groups_range_is_clipped_when_that_lowers_the_error() -> None:
    part = torch.cat((torch.linspace(-1, 1, 127), torch.tensor([20.0]))).view(1, 128)
    ignored = torch.ones(128)
    ignored[-1] = 1e-6
    whole, _ = clipped_range(part, torch.ones(128))
    clipped, _ = clipped_range(part, ignored)
    assert float(clipped) < float(whole)
