"""Our engine under the peer's name: a PEER_SITE for smoke runs."""

import os
import sys
from pathlib import Path
from typing import Any

PARTS = [str(Path(__file__).parents[4] / part) for part in ("contract", "engine", "gateway", "operator")]
assert not set(PARTS) & set(os.environ["PYTHONPATH"].split(os.pathsep)), "a peer is shown our packages"
sys.path += PARTS
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], *PARTS])

from mini_infer_engine import LLM as OURS  # noqa: E402
from mini_infer_engine import SamplingParams as SamplingParams  # noqa: E402

SMOKE = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "kv_cache_memory": 4_000_000}


class LLM(OURS):
    """On a CPU, whatever is asked for."""

    def __init__(self, model: str, **keywords: Any) -> None:
        has_weights = any(Path(model).glob("*.safetensors"))
        assert keywords["load_format"] == ("auto" if has_weights else "dummy"), (
            "weights are made where some are written"
        )
        super().__init__(model, **keywords | SMOKE)
