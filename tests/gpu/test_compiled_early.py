"""Every kernel that requests need is compiled by the time that the runner is there: a late one holds up all of them."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from triton import knobs

from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY


@pytest.mark.parametrize("changes", [{}, {"long_prefill_token_threshold": 37}, {"max_num_batched_tokens": 4096}])
def test_no_kernel_is_compiled_while_requests_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    # A head size that no other test has: what those compiled does not serve here.
    save_tiny_model(tmp_path, "qwen3", head_dim=48, max_position_embeddings=2048)
    settings = make_settings(tmp_path, dtype="bfloat16", max_num_seqs=96, max_model_len=1024, **changes)
    runner = make_runner(settings)
    late: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **compiled: late.append(compiled["repr"]))
    texts(make_engine(settings, runner), mixed_requests(200, 199, 900))
    assert not late
