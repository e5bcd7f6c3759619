"""Runs `mini-infer plan`: prints the manifests that the operator would apply for a new service, without a cluster."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mini_infer_operator.images import EngineImages
from mini_infer_operator.objects.model_cache import model_cache_job
from mini_infer_operator.objects.render import render
from mini_infer_operator.observe import Observed
from mini_infer_operator.parse import InvalidServiceError, read_file, read_presets
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.pod_security import PodSecurity
from mini_infer_operator.presets.resolve import resolve_service
from mini_infer_operator.yaml_output import to_yaml


def show_plan(path: Path, form: str, images: EngineImages, presets: Path | None = None) -> int:
    """Prints the manifests to standard output and a summary to standard error. Returns the exit code.

    `presets` is a file or folder with InferencePresets, beside those in the file of the services.
    """
    try:
        available = [*read_presets(path), *(read_presets(presets) if presets is not None else ())]
        services = [resolve_service(document, available) for document in read_file(path)]
    except InvalidServiceError as error:
        print(f"mini-infer plan: {path} is not valid\n{error}", file=sys.stderr)
        return 2
    manifests: list[dict[str, Any]] = []
    for resolved in services:
        service = resolved.service
        if (failure := images.failure(service)) is not None:
            print(f"mini-infer plan: {service.metadata.name}: {failure.message}", file=sys.stderr)
            return 2
        if (refusal := PodSecurity().failure(service, service.roles)) is not None:
            print(f"mini-infer plan: {service.metadata.name}: by default {refusal.message}", file=sys.stderr)
        plan = make_plan(service, Observed(default_image=images.default_for(service)), datetime.now(UTC))
        manifests += render(service, plan, {}, None)
        launches = [workload.launch for workload in plan.workloads if workload.launch is not None]
        job = model_cache_job(service, launches[0], None, ())
        manifests += [job] if job is not None else []
        if (preset := resolved.preset) is not None:
            print(
                f"{service.metadata.namespace}/{service.metadata.name}: InferencePreset {preset.name} sets "
                f"{', '.join(preset.fields) or 'no field'}",
                file=sys.stderr,
            )
        for workload in plan.workloads:
            assert workload.launch is not None
            print(
                f"{service.metadata.namespace}/{service.metadata.name}: {workload.replicas} x {workload.role}, "
                f"model {workload.launch.model_name}, image {workload.launch.image}, revision {workload.revision}",
                file=sys.stderr,
            )
    if form == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2))
    else:
        print(to_yaml(manifests), end="")
    return 0
