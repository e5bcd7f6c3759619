from dataclasses import replace

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from mini_infer_engine.api.histogram import Histogram
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.api.vllm_metrics import FinishedChoice
from mini_infer_engine.core.kv_tiers.stats import KVTierStats, TierStats
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.kernels.report import kernel_report
from mini_infer_engine.server.throughput import Throughput


def values(metrics: ServerMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 1)):
        histogram.observe(value, times)
    samples = {
        sample.labels.get("le", sample.name): sample.value for sample in histogram.family("h", "documentation").samples
    }
    assert samples == {"1.0": 3, "2.0": 4, "+Inf": 5, "h_count": 5, "h_sum": 13}


def test_queue_time_is_observed_once_per_admission() -> None:
    metrics = ServerMetrics("m")
    metrics.take_stats(EngineStats(admissions=2, queue_time_s=3.0, steps=1))
    metrics.take_stats(EngineStats(admissions=2, queue_time_s=3.0, steps=2))
    found = values(metrics)
    assert found["mini_infer_engine_queue_time_seconds_count"] == 2
    assert found["mini_infer_engine_queue_time_seconds_sum"] == 3
    assert found["mini_infer_engine_step_tokens_count"] == 2


def test_active_kernels_are_labels_of_one_info_metric() -> None:
    metrics = ServerMetrics("m")
    model = ModelInfo(max_model_len=1, vocab_size=2, page_size=16, num_pages=4)
    metrics.engines[0].model = model
    assert "mini_infer_engine_kernels_info" not in values(metrics)
    metrics.engines[0].model = msgspec.structs.replace(model, kernels=kernel_report("cpu").labels)
    families = text_string_to_metric_families(metrics.exposition().decode())
    (sample,) = (one for family in families for one in family.samples if one.name == "mini_infer_engine_kernels_info")
    assert sample.value == 1
    assert sample.labels["device"] == "cpu"
    assert sample.labels["gemm"] == sample.labels["prefill_attention"] == "torch"


def test_throughput_tells_differences_and_is_silent_when_idle() -> None:
    throughput = Throughput()
    assert throughput.line(EngineStats(), 0, 10) is None
    line = throughput.line(EngineStats(prompt_tokens=1000, cached_prompt_tokens=250, running=3, kv_usage=0.5), 200, 10)
    assert line == "prompt 100 tok/s, generation 20 tok/s, running 3, waiting 0, KV cache 50.0%, prefix hits 25%"
    assert throughput.line(EngineStats(prompt_tokens=1000, cached_prompt_tokens=250), 200, 10) is None


def test_draft_tokens_are_exported_when_there_are_any() -> None:
    metrics = ServerMetrics("m")
    assert not [name for name in values(metrics) if "spec_decode" in name]
    metrics.take_stats(EngineStats(drafts=10, draft_tokens=30, accepted_tokens_by_position=[8, 5, 2]))
    found = values(metrics)
    assert found["vllm:spec_decode_num_drafts_total"] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 30
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 15
    families = text_string_to_metric_families(metrics.exposition().decode())
    by_position = [
        (sample.labels["position"], sample.value)
        for family in families
        for sample in family.samples
        if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    ]
    assert by_position == [("0", 8), ("1", 5), ("2", 2)]


def test_vllm_metrics_equal_our_own() -> None:
    metrics = ServerMetrics("m")
    metrics.take_stats(EngineStats(prompt_tokens=100, cached_prompt_tokens=40, preemptions=2, steps=1, running=3))
    ended = FinishedChoice(
        reason="stop",
        duration_s=1.5,
        prompt_tokens=100,
        cached_tokens=40,
        output_tokens=7,
        queue_time_s=0.25,
        first_token_s=0.75,
        last_token_s=1.25,
    )
    left = FinishedChoice(reason="abort", duration_s=0.0, prompt_tokens=10, output_tokens=0, max_tokens=16)
    model = ModelInfo(max_model_len=128, vocab_size=2, page_size=16, num_pages=4)
    metrics.engines[0].model = model
    metrics.engines[0].count_choice(ended)
    metrics.engines[0].count_choice(left)
    found = values(metrics)
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (100, 40)
    assert (found["vllm:num_preemptions_total"], found["vllm:num_requests_running"]) == (2, 3)
    assert metrics.engines[0].finished == {"stop": 1, "abort": 1}, "who left counts"
    assert found["vllm:e2e_request_latency_seconds_sum"] == 1.5
    assert (found["vllm:request_prompt_tokens_sum"], found["vllm:request_generation_tokens_sum"]) == (110, 7)
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 70
    assert found["vllm:request_params_max_tokens_sum"] == 28 + 16
    phases = {"queue": 0.25, "prefill": 0.5, "decode": 0.5, "inference": 1.0}
    for phase, took_s in phases.items():
        assert found[f"vllm:request_{phase}_time_seconds_sum"] == took_s
        assert found[f"vllm:request_{phase}_time_seconds_count"] == 1, "not of one that was cut off"
    assert found["vllm:time_to_first_token_seconds_count"] == 0


def test_iteration_tokens_count_generated_and_prompt_tokens() -> None:
    metrics = ServerMetrics("m")
    for stats in (
        EngineStats(prompt_tokens=100, steps=1),
        EngineStats(prompt_tokens=100, generation_tokens=1, steps=2),
        EngineStats(prompt_tokens=130, generation_tokens=3, steps=3),
        EngineStats(prompt_tokens=130, generation_tokens=3, steps=4),
    ):
        metrics.take_stats(stats)
    found = values(metrics)
    assert found["vllm:iteration_tokens_total_count"] == 2
    assert found["vllm:iteration_tokens_total_sum"] == 133


def test_tiers_are_exported_by_name_when_there_are_some() -> None:
    metrics = ServerMetrics("m", engines=2)
    host = TierStats(capacity_bytes=100, used_bytes=50, blocks=8, hit_tokens=64, loaded_bytes=9, load_s=0.5)
    off = replace(host, is_on=False, mismatches=3, stored_bytes=7)
    metrics.take_stats(EngineStats(kv_tiers=KVTierStats({"host": host})), 0)
    metrics.take_stats(EngineStats(kv_tiers=KVTierStats({"host": host, "disk": off})), 1)
    families = text_string_to_metric_families(metrics.exposition().decode())
    found = {
        (sample.name.removeprefix("mini_infer_engine_kv_tier_"), *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
        if "_kv_tier_" in sample.name
    }
    assert found["bytes", "host"] == 100
    assert found["blocks", "disk"] == 8
    assert found["capacity_bytes", "host"] == 200
    assert (found["on", "host"], found["on", "disk"]) == (1, 0)
    assert found["hit_tokens_total", "host"] == 128
    assert (found["mismatches_total", "host"], found["mismatches_total", "disk"]) == (0, 3)
    assert (found["moved_bytes_total", "host", "load"], found["moved_bytes_total", "disk", "store"]) == (18, 7)
    assert found["seconds_total", "host", "load"] == 1


def test_statistics_with_tiers_are_the_same_when_they_were_sent() -> None:
    stats = EngineStats(running=1, kv_tiers=KVTierStats({"host": TierStats(blocks=8)}))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats
