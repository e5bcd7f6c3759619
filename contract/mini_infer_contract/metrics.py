"""Metric and label names: what engine and gateway export and what dashboards, HPA and KEDA read.

Names with the prefix `vllm:` are vLLM's, because llm-d, WVA and the Gateway API inference extension read those.
"""

REQUESTS_WAITING = "vllm:num_requests_waiting"
REQUESTS_RUNNING = "vllm:num_requests_running"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
"""Share of the page pool in use, 0 to 1."""
CACHE_CONFIG_INFO = "vllm:cache_config_info"
LORA_REQUESTS_INFO = "vllm:lora_requests_info"
