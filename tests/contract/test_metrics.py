import inspect
import re

from mini_infer_contract import metrics
from mini_infer_engine.api import vllm_metric_names

NAMES = {name: value for name, value in vars(metrics).items() if name.isupper() and not name.startswith("_")}
LABELS = {name: value for name, value in NAMES.items() if name.startswith("LABEL_")}
OURS = {name: value for name, value in NAMES.items() if value.startswith("mini_infer_")}
VLLMS = {name: value for name, value in NAMES.items() if value.startswith("vllm:")}


def test_metric_names_are_unique_and_known() -> None:
    assert NAMES == LABELS | OURS | VLLMS
    assert len(set(NAMES.values())) == len(NAMES)


def test_our_metric_names_follow_prometheus_conventions() -> None:
    source = inspect.getsource(metrics)
    kinds = {name: re.search(rf'^{name} = .*\n"""(Counter|Gauge|Histogram): ', source, re.MULTILINE) for name in OURS}
    for name, kind in kinds.items():
        assert kind, f"{name} does not say what it is"
        assert OURS[name].endswith("_total") == (kind[1] == "Counter"), name
        assert re.fullmatch(r"mini_infer_(engine|gateway|operator)_[a-z_]+", OURS[name])
        assert not re.search(r"_(ms|milliseconds|percent|perc)(_|$)", OURS[name]), "base units only"
        assert name.split("_")[0].lower() == OURS[name].split("_")[2]


def test_vllm_metric_names_include_those_read_by_others() -> None:
    exported = {value for name, value in vars(vllm_metric_names).items() if name.isupper()}
    assert exported | set(VLLMS.values()) >= {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:iteration_tokens_total",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    }
