"""Calibrated int4: layers run alone as they do in passes, and the demo model keeps its answers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from demo.dataset import ChatEncoder, held_out_chats
from demo.entries import load_entries
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps
from mini_infer_engine.quantization.gptq import gptq_groups, propagation
from mini_infer_engine.quantization.on_load import RoundToNearestMethod
from mini_infer_engine.runtime.calibration import ROW_TOKENS, _DenseAttention, calibrates, calibration_rows
from tests.support.demo_reference import reference_model
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

GEMMA = {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0}


@pytest.mark.parametrize(
    ("architecture", "changes"), [("qwen3", {}), ("gemma2", GEMMA), ("mistral", {"sliding_window": 7})]
)
def test_calibration_layers_equal_those_of_paged_passes(
    architecture: str, changes: dict[str, object], tmp_path: Path
) -> None:
    reference = save_tiny_model(tmp_path, architecture, **changes)
    tokens = [[(7 * position + 31 * row) % 190 + 5 for position in range(24)] for row in range(2)]
    runner = tiny_runner(tmp_path)
    model = runner.worker.model
    with torch.inference_mode():
        rows = torch.tensor(tokens)
        attention = _DenseAttention(rows.shape, rows.device)
        state = model.forward(TorchOps(), model.embed(TorchOps(), rows.flatten()), attention)
        assert isinstance(state, ResidualState)
        made = model.logits(TorchOps(), state).view(2, 24, -1)
    expected = torch.stack([reference_logits(reference, row) for row in tokens])
    assert (made - expected).abs().max() < 1e-3
    assert calibrates(model)


def test_weights_are_rounded_to_nearest_when_there_is_no_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "qwen3")
    assert calibration_rows(tmp_path) is None
    tiny_runner(tmp_path, quantization="int4")
    assert "rounded to the nearest:" in caplog.text
    tiny_runner(tmp_path, quantization="w8a8-int8")
    assert "rounded to the nearest, not smoothed:" in caplog.text


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "olmo2"])
def test_gptq_uses_the_inputs_of_the_quantised_model(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that GPTQ gets are those of the finished model's inputs, and of how the unquantised model's differ."""
    save_tiny_model(tmp_path, architecture, **(GEMMA if architecture == "gemma2" else {}))
    rows = torch.arange(240).view(10, 24) * 7 % 190 + 5
    monkeypatch.setattr("mini_infer_engine.runtime.worker.calibration_rows", lambda _: rows)
    sums = []

    def record(weight: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hessian, group, drift = arguments
        sums.append((hessian, drift))
        return gptq_groups(weight, hessian, group, drift)

    monkeypatch.setattr("mini_infer_engine.runtime.calibration.gptq_groups", record)
    rounded, exact = (
        read_by_products(tiny_runner(tmp_path, quantization=kind).worker.model, rows) for kind in ("int4", None)
    )
    assert len(sums) == len(rounded) == len(exact)
    for (hessian, drift), x, y in zip(sums, rounded, exact, strict=True):
        torch.testing.assert_close(hessian, x.t() @ x, rtol=1e-3, atol=1e-3)
        strength = propagation(*x.shape)
        assert (drift is None) == (strength == 0.0)
        if drift is not None:
            torch.testing.assert_close(drift, strength * (y - x).t() @ x, rtol=1e-3, atol=1e-3)
    assert sum(drift is not None for _, drift in sums) >= len(sums) // 2
    assert not any(torch.equal(x, y) for x, y in zip(rounded[1:], exact[1:], strict=True))


def read_by_products(model: DecoderModel, rows: torch.Tensor) -> list[torch.Tensor]:
    """What each linear layer of the decoder's layers reads in a pass over `rows`, in the order of computation."""
    found: list[torch.Tensor] = []
    products = [module for module in model.model.layers.modules() if isinstance(module, Linear)]
    hooks = [linear.register_forward_pre_hook(lambda _, x: found.append(x[0].clone())) for linear in products]
    with torch.inference_mode():
        model.forward(TorchOps(), model.embed(TorchOps(), rows.flatten()), _DenseAttention(rows.shape, rows.device))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "olmo2"])
def test_smoothing_weights_and_norms_keeps_the_logits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding left out, logits stay; norms of olmo2 stand behind products, and keep their weights."""
    save_tiny_model(tmp_path, architecture, **(GEMMA if architecture == "gemma2" else {}))
    monkeypatch.setattr("mini_infer_engine.runtime.calibration.rounded_rows", lambda weight, _: (weight, torch.ones(1)))

    def keep(_: RoundToNearestMethod, layer: Linear, weight: torch.Tensor, scale: torch.Tensor) -> None:
        del scale
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)

    monkeypatch.setattr(RoundToNearestMethod, "keep_rows", keep)
    rows = torch.arange(48).view(2, 24) * 7 % 190 + 5
    monkeypatch.setattr("mini_infer_engine.runtime.worker.calibration_rows", lambda _: rows)
    plain, smooth = tiny_runner(tmp_path), tiny_runner(tmp_path, quantization="w8a8-int8")
    tokens = list(range(5, 45))
    expected, actual = (run_chunks(runner, tokens, PageDealer(runner).table(40), [40]) for runner in (plain, smooth))
    assert (actual - expected).abs().max() < 1e-3
    norms = [
        (one, other)
        for (name, one), (_, other) in zip(
            plain.worker.model.named_parameters(), smooth.worker.model.named_parameters(), strict=True
        )
        if "layernorm" in name
    ]
    changed = sum(not torch.equal(one, other) for one, other in norms)
    assert changed == (0 if architecture == "olmo2" else 2 * len(plain.worker.model.layers))


@pytest.mark.parametrize(("kind", "least"), [("int4", 0.96), ("w8a8-int8", 0.99)])
def test_the_demo_model_keeps_its_answers_when_quantised(
    kind: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest token, teacher-forced, over what the assistant says in chats whose phrasings it never saw.

    A quarter of the texts is enough for this model, and for its layers to be rounded in a quarter of the time.
    """
    monkeypatch.setattr("mini_infer_engine.runtime.calibration._MOST_ROWS", 16)
    rows = calibration_rows(DEMO_DIRECTORY)
    assert rows is not None
    assert rows.shape == (16, ROW_TOKENS)
    encoder = ChatEncoder()
    chats = encoder.encode_many([encoder.render(chat) for chat in held_out_chats(load_entries(), seed=77)[:25]])
    reference = reference_model()
    runner = tiny_runner(DEMO_DIRECTORY, quantization=kind, dtype="float32")
    right = counted = 0
    for chat in chats:
        message_part = torch.tensor([*encoder.loss_mask(chat)[1:], False])
        actual = run_chunks(runner, chat, PageDealer(runner).table(len(chat)), [len(chat)]).argmax(-1)
        expected = reference_logits(reference, chat).argmax(-1)
        right += int((actual == expected)[message_part].sum())
        counted += int(message_part.sum())
    assert right / counted >= least
