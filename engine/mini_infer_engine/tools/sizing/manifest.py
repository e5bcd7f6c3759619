"""Writes the InferenceService of a fit as YAML, with the prediction in comments above it."""

from dataclasses import dataclass
from math import ceil

import yaml

from mini_infer_contract.resource_names import GROUP, KIND, VERSION
from mini_infer_engine.tools.sizing.fit import Fit, Load, Targets
from mini_infer_engine.tools.sizing.gpu import Gpu
from mini_infer_engine.tools.sizing.precision import BF16, Precision

_SEQUENCES_STEP = 32
_MEMORY_GIB = 8
"""Main memory of an engine's processes and caches; weights go through pages of the file system's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that is served, and where it runs."""

    name: str
    uri: str
    gpu: Gpu
    precision: Precision
    host_mib: int = 0
    """Main memory of each engine for blocks of the prefix cache; 0 for none."""
    host_tokens: int = 0
    """Tokens that fit into it."""

    @property
    def host(self) -> str:
        """`host_mib` as Kubernetes writes it."""
        return f"{self.host_mib >> 10}Gi" if self.host_mib % 1024 == 0 else f"{self.host_mib}Mi"


def manifest(subject: Subject, fit: Fit, load: Load, targets: Targets) -> str:
    """Returns the text of a file for `kubectl apply`."""
    return "".join(f"# {line}\n" for line in explanation(subject, fit, load, targets)) + yaml.safe_dump(
        _service(subject, fit), sort_keys=False
    )


def explanation(subject: Subject, fit: Fit, load: Load, targets: Targets) -> list[str]:
    """Returns sentences that say what is expected of the engines, and which limit decides."""
    found, gpu = fit.prediction, subject.gpu.name
    engines = f"{fit.replicas} engine{'s' if fit.replicas > 1 else ''} of {fit.tensor} {gpu}"
    tier = [
        f"Main memory has room for {subject.host_tokens:,} tokens more, whose hits cost a copy; {subject.host} is "
        "added to the memory that a pod requests."
    ]
    return [
        f"{load.requests_per_s:g} requests/s of {load.prompt_tokens:,} + {load.output_tokens:,} tokens"
        + (f", {load.cached_tokens:,} of them cached" if load.cached_tokens else "")
        + f": {engines}.",
        f"Expected: first token within {found.ttft_s * 1e3:.0f} ms (95 %; target {targets.ttft_s * 1e3:g}), "
        f"{found.itl_s * 1e3:.2f} ms between tokens (mean; target {targets.itl_s * 1e3:g}),",
        f"{found.rows:.0f} sequences at a time, {found.kv_share:.0%} of {fit.kv_tokens:,} tokens of KV cache in use.",
        f"One engine serves up to {fit.engine_requests_per_s:.2f} requests/s; then {fit.bound}.",
        *(tier if subject.host_mib else []),
        f"Modelled for {subject.precision.name} weights, without speculation; measured figures are within a tenth "
        "(docs/sizing.md).",
    ]


def _service(subject: Subject, fit: Fit) -> dict[str, object]:
    rows = ceil(max(1, fit.prediction.busy_rows) / _SEQUENCES_STEP) * _SEQUENCES_STEP
    parallel = {"parallelism": {"tensor": fit.tensor}} if fit.tensor > 1 else {}
    quantization = {} if subject.precision is BF16 else {"quantization": subject.precision.name}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": subject.name},
        "spec": {
            "model": {"uri": subject.uri},
            **({"kvCache": {"host": subject.host}} if subject.host_mib else {}),
            "unified": {
                "replicas": fit.replicas,
                **parallel,
                "engine": {"maxNumSeqs": rows, **quantization},
                "resources": {
                    "requests": {"cpu": 2 + 2 * fit.tensor, "memory": f"{_MEMORY_GIB * fit.tensor}Gi"},
                    "limits": {"nvidia.com/gpu": fit.tensor},
                },
                "template": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": subject.gpu.product}}},
            },
        },
    }
