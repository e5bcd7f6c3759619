"""Writes the Grafana dashboards in charts/mini-infer/dashboards from the tables below: one line a panel.

usage: dashboards.py [FOLDER]

A test holds the files to these tables, and every metric and label in them to what running programs export.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "charts/mini-infer/dashboards"
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

GATEWAY = 'namespace=~"$namespace", pod=~"$pod"'
ENGINE = 'namespace=~"$namespace", pod=~"$pod"'
TTFB = "mini_infer_gateway_time_to_first_byte_seconds"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: a title, its queries as (legend, PromQL), and how values are shown."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    """Grafana's name: s, reqps, percentunit, short, ops."""
    kind: str = "timeseries"
    width: int = 8
    description: str = ""
    stack: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file. `variables` are (name, the metric and label whose values it offers)."""

    name: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[tuple[str, str], ...] = ()


def quantiles(metric: str, matchers: str, by: str, legend: str) -> tuple[tuple[str, str], ...]:
    """p50, p95 and p99 of a histogram."""
    inside = f"{{{matchers}}}" if matchers else ""
    rate = f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket{inside}[$__rate_interval]))"
    return tuple((f"p{q} {legend}".strip(), f"histogram_quantile(0.{q}, {rate})") for q in (50, 95, 99))


def rate(metric: str, matchers: str, by: str) -> str:
    """The sum of a counter's rate."""
    inside = f"{{{matchers}}}" if matchers else ""
    return f"sum by ({by}) (rate({metric}{inside}[$__rate_interval]))"


def ratio(above: str, below: str, matchers: str, by: str) -> str:
    """One counter's rate as a share of another's."""
    return f"{rate(above, matchers, by)} / {rate(below, matchers, by)}"


MODEL = 'model=~"$model"'

FLEET = Dashboard(
    "fleet",
    "mini-infer / Fleet",
    (
        (
            "Now",
            (
                Panel(
                    "Ready engines",
                    (("{{model}}", f'max by (model) (mini_infer_gateway_endpoints{{state="ready", {MODEL}}})'),),
                    kind="stat",
                    width=6,
                    description="As the gateway that sees most of them counts.",
                ),
                Panel(
                    "Requests in flight",
                    (("{{model}}", f"sum by (model) (mini_infer_gateway_in_flight_requests{{{MODEL}}})"),),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Failed requests",
                    (("{{model}}", f"model:mini_infer_gateway_errors:ratio_rate5m{{{MODEL}}}"),),
                    "percentunit",
                    kind="stat",
                    width=6,
                    description="Share of requests that ended in a 5xx or broke off, over 5 minutes.",
                ),
                Panel(
                    "Generated tokens per second",
                    (("all engines", "sum(rate(mini_infer_engine_generation_tokens_total[$__rate_interval]))"),),
                    kind="stat",
                    width=6,
                ),
            ),
        ),
        (
            "What clients see",
            (
                Panel("Requests", (("{{model}}", rate("mini_infer_gateway_requests_total", MODEL, "model")),), "reqps"),
                Panel("Time to first byte", quantiles(TTFB, MODEL, "model", "{{model}}"), "s"),
                Panel(
                    "Prefix cache hits",
                    (
                        (
                            "{{model}}",
                            ratio(
                                "mini_infer_gateway_hit_tokens_total",
                                "mini_infer_gateway_prompt_tokens_total",
                                MODEL,
                                "model",
                            ),
                        ),
                    ),
                    "percentunit",
                    description="Share of prompt tokens that the chosen engine already held.",
                ),
            ),
        ),
        (
            "Cached prompt tokens by tier",
            tuple(
                Panel(
                    f"Tokens a second from {place}",
                    (
                        (
                            "{{model}}",
                            rate("mini_infer_gateway_hit_tier_tokens_total", f'{MODEL}, tier="{tier}"', "model"),
                        ),
                    ),
                    description="By the tier of each block's fastest copy, as the gateway's index knows it.",
                )
                for tier, place in (("device", "the device"), ("host", "main memory"), ("disk", "the disk"))
            ),
        ),
        (
            "Engines",
            (
                Panel(
                    "Engines by state",
                    (
                        (
                            "{{model}} {{state}}",
                            f"max by (model, state) (mini_infer_gateway_endpoints{{{MODEL}}})",
                        ),
                    ),
                    stack=True,
                ),
                Panel(
                    "Running and waiting requests",
                    (
                        ("running {{model_name}}", "sum by (model_name) (vllm:num_requests_running)"),
                        ("waiting {{model_name}}", "sum by (model_name) (vllm:num_requests_waiting)"),
                    ),
                ),
                Panel(
                    "KV pages in use",
                    (("{{model_name}}", "avg by (model_name) (vllm:kv_cache_usage_perc)"),),
                    "percentunit",
                ),
                Panel(
                    "Tokens per second",
                    (
                        ("prompt", "sum(rate(mini_infer_engine_prompt_tokens_total[$__rate_interval]))"),
                        ("generated", "sum(rate(mini_infer_engine_generation_tokens_total[$__rate_interval]))"),
                    ),
                    width=12,
                ),
                Panel(
                    "Preemptions",
                    (("{{pod}}", "sum by (pod) (rate(mini_infer_engine_preemptions_total[$__rate_interval]))"),),
                    "ops",
                    width=12,
                ),
            ),
        ),
    ),
    (("model", "label_values(mini_infer_gateway_endpoints, model)"),),
)

_TTFT = quantiles("mini_infer_engine_time_to_first_token_seconds", ENGINE, "", "")
ENGINES = Dashboard(
    "engine",
    "mini-infer / Engine",
    (
        (
            "Latency",
            (
                Panel("Time to first token", _TTFT, "s"),
                Panel(
                    "Between tokens",
                    quantiles("mini_infer_engine_inter_token_latency_seconds", ENGINE, "", ""),
                    "s",
                ),
                Panel(
                    "In the queue",
                    quantiles("mini_infer_engine_queue_time_seconds", ENGINE, "", ""),
                    "s",
                ),
            ),
        ),
        (
            "Work",
            (
                Panel("Running", (("{{pod}}", f"sum by (pod) (vllm:num_requests_running{{{ENGINE}}})"),)),
                Panel("Waiting", (("{{pod}}", f"sum by (pod) (vllm:num_requests_waiting{{{ENGINE}}})"),)),
                Panel(
                    "KV pages in use",
                    (("{{pod}}", f"max by (pod) (mini_infer_engine_kv_usage_ratio{{{ENGINE}}})"),),
                    "percentunit",
                ),
                Panel(
                    "Generated tokens per second",
                    (("{{pod}}", rate("mini_infer_engine_generation_tokens_total", ENGINE, "pod")),),
                ),
                Panel(
                    "Prompt tokens per second",
                    (("{{pod}}", rate("mini_infer_engine_prompt_tokens_total", ENGINE, "pod")),),
                ),
                Panel(
                    "Prompt tokens from the cache",
                    (
                        (
                            "{{pod}}",
                            ratio(
                                "mini_infer_engine_cached_tokens_total",
                                "mini_infer_engine_prompt_tokens_total",
                                ENGINE,
                                "pod",
                            ),
                        ),
                    ),
                    "percentunit",
                ),
            ),
        ),
        (
            "Steps",
            (
                Panel(
                    "Sequences of a step",
                    (
                        (
                            "{{pod}}",
                            ratio(
                                "mini_infer_engine_step_sequences_sum",
                                "mini_infer_engine_step_sequences_count",
                                ENGINE,
                                "pod",
                            ),
                        ),
                    ),
                ),
                Panel(
                    "Tokens of a step",
                    (
                        (
                            "{{pod}}",
                            ratio(
                                "mini_infer_engine_step_tokens_sum",
                                "mini_infer_engine_step_tokens_count",
                                ENGINE,
                                "pod",
                            ),
                        ),
                    ),
                ),
                Panel(
                    "Preemptions",
                    (("{{pod}}", rate("mini_infer_engine_preemptions_total", ENGINE, "pod")),),
                    "ops",
                ),
                Panel(
                    "Finished requests",
                    (("{{finish_reason}}", rate("mini_infer_engine_requests_total", ENGINE, "finish_reason")),),
                    "reqps",
                    width=12,
                    stack=True,
                ),
                Panel(
                    "Draining",
                    (("{{pod}}", f"max by (pod) (mini_infer_engine_draining{{{ENGINE}}})"),),
                    width=12,
                ),
                Panel(
                    "Latency targets",
                    (
                        (
                            "{{kind}} {{result}}",
                            rate("mini_infer_engine_latency_targets_total", ENGINE, "kind, result"),
                        ),
                        ("refused", f"sum (rate(mini_infer_engine_slo_refusals_total{{{ENGINE}}}[$__rate_interval]))"),
                    ),
                    "reqps",
                    width=24,
                    description="Targets of finished requests, and requests refused because theirs could not be met.",
                ),
            ),
        ),
        (
            "Lower tiers of the KV cache",
            (
                Panel(
                    "Tokens from a tier",
                    (("{{tier}}", rate("mini_infer_engine_kv_tier_hit_tokens_total", ENGINE, "tier")),),
                    stack=True,
                    description="A second. What came from the device is not among them.",
                ),
                Panel(
                    "Prefetched tokens",
                    (
                        (
                            "hit {{tier}}",
                            rate("mini_infer_engine_kv_tier_prefetch_used_tokens_total", ENGINE, "tier"),
                        ),
                        (
                            "not hit {{tier}}",
                            rate("mini_infer_engine_kv_tier_prefetch_wasted_tokens_total", ENGINE, "tier"),
                        ),
                    ),
                    stack=True,
                    description="A second, when their prompt has come or their time has passed.",
                ),
                Panel(
                    "Digest mismatches",
                    (
                        (
                            "{{pod}} {{tier}}",
                            f"sum by (pod, tier) (increase(mini_infer_engine_kv_tier_mismatches_total"
                            f"{{{ENGINE}}}[$__rate_interval]))",
                        ),
                    ),
                    description="Pages that came back with other bytes and were computed again. After three the tier "
                    "is off.",
                ),
                Panel(
                    "Room in use",
                    (
                        (
                            "{{pod}} {{tier}}",
                            f"max by (pod, tier) (mini_infer_engine_kv_tier_bytes{{{ENGINE}}})"
                            f" / max by (pod, tier) (mini_infer_engine_kv_tier_capacity_bytes{{{ENGINE}}})",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Bytes copied",
                    (
                        (
                            "{{tier}} {{direction}}",
                            rate("mini_infer_engine_kv_tier_moved_bytes_total", ENGINE, "tier, direction"),
                        ),
                    ),
                    "Bps",
                    description="A second: load is towards the device, store away from it.",
                ),
                Panel(
                    "Tiers that are off",
                    (("{{pod}} {{tier}}", f"max by (pod, tier) (1 - mini_infer_engine_kv_tier_on{{{ENGINE}}})"),),
                    description="1 after three digest mismatches, an I/O error or a full disk, until the engine is "
                    "started anew. The engine's log has the reason.",
                ),
            ),
        ),
    ),
    (
        ("namespace", "label_values(mini_infer_engine_kv_usage_ratio, namespace)"),
        ("pod", 'label_values(mini_infer_engine_kv_usage_ratio{namespace=~"$namespace"}, pod)'),
    ),
)

GATEWAYS = Dashboard(
    "gateway",
    "mini-infer / Gateway",
    (
        (
            "Requests",
            (
                Panel(
                    "Requests by outcome",
                    (("{{outcome}}", rate("mini_infer_gateway_requests_total", GATEWAY, "outcome")),),
                    "reqps",
                    stack=True,
                ),
                Panel(
                    "Requests by status",
                    (("{{status}}", rate("mini_infer_gateway_requests_total", GATEWAY, "status")),),
                    "reqps",
                    stack=True,
                ),
                Panel(
                    "In flight",
                    (("{{pod}}", f"sum by (pod) (mini_infer_gateway_in_flight_requests{{{GATEWAY}}})"),),
                ),
                Panel("Time to first byte", quantiles(TTFB, GATEWAY, "", ""), "s"),
                Panel(
                    "Duration of a request",
                    quantiles("mini_infer_gateway_request_duration_seconds", GATEWAY, "", ""),
                    "s",
                ),
                Panel(
                    "Attempts by outcome",
                    (
                        (
                            "{{endpoint}} {{outcome}}",
                            f"sum by (endpoint, outcome) (rate(mini_infer_gateway_attempts_total"
                            f'{{{GATEWAY}, outcome!="ok"}}[$__rate_interval]))',
                        ),
                    ),
                    "reqps",
                    description="Requests to one engine that did not end well.",
                ),
            ),
        ),
        (
            "Queue at the gateway",
            (
                Panel(
                    "Requests that wait",
                    (("{{model}}", f"sum by (model) (mini_infer_gateway_queue_depth{{{GATEWAY}}})"),),
                    description="For an engine with room.",
                ),
                Panel(
                    "Time in the queue",
                    quantiles("mini_infer_gateway_queue_wait_seconds", GATEWAY, "", ""),
                    "s",
                ),
                Panel(
                    "Turned away",
                    (
                        (
                            "{{model}} {{reason}}",
                            rate("mini_infer_gateway_queue_refused_total", GATEWAY, "model, reason"),
                        ),
                    ),
                    "reqps",
                ),
            ),
        ),
        (
            "Routing",
            (
                Panel(
                    "Decisions by reason",
                    (("{{reason}}", rate("mini_infer_gateway_routing_decisions_total", GATEWAY, "reason")),),
                    "ops",
                    stack=True,
                ),
                Panel(
                    "Retries by reason",
                    (("{{reason}}", rate("mini_infer_gateway_retries_total", GATEWAY, "reason")),),
                    "ops",
                ),
                Panel(
                    "Prefix cache hits",
                    (
                        (
                            "{{pod}}",
                            ratio(
                                "mini_infer_gateway_hit_tokens_total",
                                "mini_infer_gateway_prompt_tokens_total",
                                GATEWAY,
                                "pod",
                            ),
                        ),
                    ),
                    "percentunit",
                    description="Gateways that know the same engines should agree.",
                ),
                Panel(
                    "Engines as each gateway sees them",
                    (("{{pod}} {{state}}", f"sum by (pod, state) (mini_infer_gateway_endpoints{{{GATEWAY}}})"),),
                    width=12,
                ),
                Panel(
                    "Engines that are left alone",
                    (
                        (
                            "{{endpoint}} {{cause}}",
                            f"max by (endpoint, cause) (mini_infer_gateway_circuit_open{{{GATEWAY}}}) > 0",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Age of KV events on arrival",
                    (("{{endpoint}}", f"max by (endpoint) (mini_infer_gateway_event_lag_seconds{{{GATEWAY}}})"),),
                    "s",
                    width=12,
                ),
                Panel(
                    "Gaps in KV events",
                    (("healed by {{healed}}", rate("mini_infer_gateway_event_gaps_total", GATEWAY, "healed")),),
                    "ops",
                    width=12,
                ),
            ),
        ),
        (
            "Prefill and decode apart",
            (
                Panel(
                    "Where prompts are computed",
                    (
                        (
                            "{{placement}}: {{reason}}",
                            rate("mini_infer_gateway_prefill_placements_total", GATEWAY, "placement, reason"),
                        ),
                    ),
                    "ops",
                    stack=True,
                    description="Of services with prefill engines, or with engines that fetch from each other.",
                ),
                Panel(
                    "First byte of what is computed apart",
                    (
                        (
                            "{{kind}}, mean",
                            ratio(
                                "mini_infer_gateway_first_token_apart_seconds_sum",
                                "mini_infer_gateway_first_token_apart_seconds_count",
                                GATEWAY,
                                "kind",
                            ),
                        ),
                    ),
                    "s",
                    description="Expected when it was sent, and as it came.",
                ),
                Panel(
                    "Apart from so many tokens on",
                    (("{{model}}", f"max by (model) (mini_infer_gateway_prefill_break_even_tokens{{{GATEWAY}}})"),),
                    description="Uncached prompt tokens, at the latest decision.",
                ),
            ),
        ),
        (
            "Cost of the gateway",
            (
                Panel(
                    "Overhead of the gateway",
                    quantiles("mini_infer_gateway_overhead_seconds", GATEWAY, "", ""),
                    "s",
                    width=12,
                    description="What it adds before a request goes out: parsing, tokenising, routing.",
                ),
                Panel(
                    "Time for tokenising",
                    quantiles("mini_infer_gateway_tokenize_seconds", GATEWAY, "", ""),
                    "s",
                    width=12,
                ),
                Panel(
                    "Event loop stood still",
                    (("{{pod}}", f"max by (pod) (mini_infer_gateway_event_loop_lag_seconds{{{GATEWAY}}})"),),
                    "s",
                    description="The longest time of the last minute.",
                ),
                Panel(
                    "Blocks in the prefix index",
                    (("{{pod}}", f"sum by (pod) (mini_infer_gateway_index_blocks{{{GATEWAY}}})"),),
                ),
                Panel(
                    "Time of a routing plugin per call",
                    (
                        (
                            "{{plugin}}",
                            ratio(
                                "mini_infer_gateway_plugin_seconds_total",
                                "mini_infer_gateway_plugin_calls_total",
                                GATEWAY,
                                "plugin",
                            ),
                        ),
                    ),
                    "s",
                    width=8,
                ),
            ),
        ),
    ),
    (
        ("namespace", "label_values(mini_infer_gateway_endpoints, namespace)"),
        ("pod", 'label_values(mini_infer_gateway_endpoints{namespace=~"$namespace"}, pod)'),
    ),
)


def burn(recorded: str, budget: float) -> tuple[tuple[str, str], ...]:
    """How many times faster than allowed the budget is used up, over four windows."""
    return tuple(
        (f"{{{{model}}}} {window}", f"model:mini_infer_gateway_{recorded}:ratio_rate{window}{{{MODEL}}} / {budget}")
        for window in ("5m", "30m", "1h", "6h")
    )


SLO = Dashboard(
    "slo",
    "mini-infer / Objectives",
    (
        (
            "99.9 % of requests end well",
            (
                Panel(
                    "Burn rate of the error budget",
                    burn("errors", 0.001),
                    width=16,
                    description="1 uses the budget up in exactly 30 days; above 14.4 over an hour an alert is raised.",
                ),
                Panel(
                    "Available over 6 h",
                    (("{{model}}", f"1 - model:mini_infer_gateway_errors:ratio_rate6h{{{MODEL}}}"),),
                    "percentunit",
                    kind="stat",
                ),
            ),
        ),
        (
            "95 % of answers begin within 2.5 s",
            (
                Panel("Burn rate of the first-byte budget", burn("slow_first_byte", 0.05), width=16),
                Panel(
                    "In time over 6 h",
                    (("{{model}}", f"1 - model:mini_infer_gateway_slow_first_byte:ratio_rate6h{{{MODEL}}}"),),
                    "percentunit",
                    kind="stat",
                ),
            ),
        ),
    ),
    (("model", "label_values(mini_infer_gateway_endpoints, model)"),),
)

OPERATOR = Dashboard(
    "operator",
    "mini-infer / Operator",
    (
        (
            "Services",
            (
                Panel(
                    "Services by reason",
                    (("{{reason}}", "max by (reason) (mini_infer_operator_services)"),),
                    width=12,
                    stack=True,
                    description="The reason of each InferenceService's condition Ready.",
                ),
                Panel(
                    "Duration of rollouts",
                    quantiles("mini_infer_operator_rollout_duration_seconds", "", "", ""),
                    "s",
                    width=12,
                ),
            ),
        ),
        (
            "Work",
            (
                Panel(
                    "Passes",
                    (("{{result}}", rate("mini_infer_operator_reconciles_total", "", "result")),),
                    "ops",
                ),
                Panel(
                    "Duration of a pass", quantiles("mini_infer_operator_reconcile_duration_seconds", "", "", ""), "s"
                ),
                Panel(
                    "Errors by reason",
                    (("{{reason}}", rate("mini_infer_operator_reconcile_errors_total", "", "reason")),),
                    "ops",
                ),
                Panel(
                    "Services that wait",
                    (("{{pod}}", "max by (pod) (mini_infer_operator_queue_depth)"),),
                ),
                Panel(
                    "Longest wait",
                    (("{{pod}}", "max by (pod) (mini_infer_operator_oldest_unsynced_seconds)"),),
                    "s",
                ),
                Panel(
                    "Silence of watches",
                    (("{{kind}}", "max by (kind) (mini_infer_operator_watch_age_seconds)"),),
                    "s",
                ),
            ),
        ),
        (
            "API server",
            (
                Panel(
                    "Requests to the API server",
                    (("{{verb}} {{kind}}", rate("mini_infer_operator_api_requests_total", "", "verb, kind")),),
                    "reqps",
                    width=12,
                ),
                Panel(
                    "Failed requests by status",
                    (
                        (
                            "{{verb}} {{kind}} {{status}}",
                            rate("mini_infer_operator_api_requests_total", 'status!~"2.."', "verb, kind, status"),
                        ),
                    ),
                    "reqps",
                    width=12,
                ),
            ),
        ),
    ),
)

DASHBOARDS: tuple[Dashboard, ...] = (FLEET, ENGINES, GATEWAYS, OPERATOR, SLO)


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard in Grafana's JSON model (schema 39: Grafana 10 and newer)."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in dashboard.rows:
        panels.append(
            {"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}, "panels": []}
        )
        top = _place(row, top + 1, panels)
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return {
        "uid": f"mini-infer-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["mini-infer"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(name, query) for name, query in dashboard.variables)]},
        "panels": panels,
    }


def _place(row: Sequence[Panel], top: int, panels: list[dict[str, Any]]) -> int:
    left = 0
    height = 4 if all(panel.kind == "stat" for panel in row) else 8
    for panel in row:
        if left + panel.width > COLUMNS:
            left, top = 0, top + height
        panels.append(_panel(panel, {"x": left, "y": top, "w": panel.width, "h": height}))
        left += panel.width
    return top + height


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 10, "showPoints": "never", "stacking": {"mode": "normal" if panel.stack else "none"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, **({"custom": custom} if panel.kind == "timeseries" else {})},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def text(dashboard: Dashboard) -> str:
    """The file's content."""
    return json.dumps(grafana(dashboard), indent=1) + "\n"


def main() -> None:
    """Write all of them."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for dashboard in DASHBOARDS:
        (folder / f"{dashboard.name}.json").write_text(text(dashboard))


if __name__ == "__main__":
    main()
