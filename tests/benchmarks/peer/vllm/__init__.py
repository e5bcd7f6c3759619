"""Our engine under the peer's name: a PEER_SITE for smoke runs."""

import os
import sys
from pathlib import Path
from typing import Any

NAMES = ("contract", "process", "web", "prompts", "apis", "engine", "gateway", "operator")
PARTS = [str(Path(__file__).parents[4] / part) for part in NAMES]
assert not set(PARTS) & set(os.environ["PYTHONPATH"].split(os.pathsep)), "a peer is shown our packages"
sys.path += PARTS
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], *PARTS])

from mini_infer_engine import LLM as OURS  # noqa: E402
from mini_infer_engine import SamplingParams as SamplingParams  # noqa: E402
from vllm.stepped import EngineArgs as EngineArgs  # noqa: E402
from vllm.stepped import LLMEngine as LLMEngine  # noqa: E402

SMOKE = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "kv_cache_memory": 4_000_000}


class LLM(OURS):
    """On a CPU, whatever is asked for."""

    def __init__(self, model: str, **keywords: Any) -> None:
        has_weights = any(Path(model).glob("*.safetensors"))
        assert keywords["load_format"] == ("auto" if has_weights else "dummy"), (
            "weights are made where some are written"
        )
        if speculative := keywords.get("speculative_config"):
            keywords["speculative_config"] = ours_of(speculative)
            assert keywords.pop("worker_extension_cls") == "common.vllm_acceptance.Acceptance"
        assert keywords.pop("additional_config"), "vLLM's own"
        super().__init__(model, **keywords | SMOKE)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[int]:
        """Of the workers' extension, which our engine has not."""
        assert (method, len(args)) in (("set_acceptance", 1), ("passes_so_far", 0))
        return [0]


def ours_of(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM's speculation by the names of ours, without a set acceptance; a head of its kind lies beside ours."""
    assert config["rejection_sample_method"] == "synthetic"
    assert len(config["synthetic_acceptance_rates"]) == config["num_speculative_tokens"]
    methods = {"draft_model": "draft_model", "eagle3": "head", "ngram_gpu": "ngram"}
    own = {name: value for name, value in config.items() if not name.startswith(("rejection", "synthetic"))}
    own["method"] = methods[config["method"]]
    if config["method"] == "eagle3":
        assert (Path(config["model"]) / "model.safetensors").exists()
        own["model"] = str(Path(config["model"]).with_name("head"))
    return own
