"""Runs `mini-infer rollout`, which is for an InferenceService what `kubectl rollout` is for a Deployment."""

import asyncio
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mini_infer_operator.cli import cluster
from mini_infer_operator.cli.cluster import NotFoundError
from mini_infer_operator.cli.status_command import FAILED, NOT_READY, in_cluster
from mini_infer_operator.cli.terminal import printable
from mini_infer_operator.cli.views import condition, sentence
from mini_infer_operator.local.requests_file import read_requests, write_requests
from mini_infer_operator.local.status_file import ROOT, read_statuses
from mini_infer_operator.objects.history import change_to, differences, pinned_spec, spec_of
from mini_infer_operator.resource import ANNOTATION_ABORT, ANNOTATION_PROMOTE, LABEL_REVISION, NO_PRESET
from mini_infer_web.kubernetes_api import ApiServer

POLL_S = 1.0
RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"
"""The annotation that `kubectl rollout restart` writes into pod templates."""


def status(name: str, namespace: str, timeout_s: float) -> int:
    """Follows a rollout to its end. Returns the exit code: 0 if the spec runs, 1 if it cannot go on or time is up.

    Never gives up if `timeout_s` is 0, as `kubectl rollout status` does.
    """

    async def follow(server: ApiServer) -> int:
        printed, deadline = "", time.monotonic() + (timeout_s or math.inf)
        while True:
            service = await cluster.service(server, namespace, name)
            generation = service["metadata"].get("generation", 0)
            seen = (service.get("status") or {}).get("observedGeneration", -1)
            if sentence(service) != printed:
                printed = sentence(service)
                print(printable(printed), flush=True)
            if seen >= generation and condition(service, "Ready").get("status") == "True":
                return 0
            if seen >= generation and condition(service, "Stalled").get("status") == "True":
                return NOT_READY
            if time.monotonic() >= deadline:
                print(f"not done after {timeout_s:g} s; mini-infer why {name} -n {namespace} has details")
                return NOT_READY
            await asyncio.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))

    return in_cluster("rollout status", follow)


def history(name: str, namespace: str) -> int:
    """Prints the kept revisions, and what each changed."""

    async def read(server: ApiServer) -> int:
        service = await cluster.service(server, namespace, name)
        revisions = await cluster.children(server, "ControllerRevision", namespace, name)
        print("\n".join(history_lines(revisions, (service.get("status") or {}).get("revision", ""))))
        return 0

    return in_cluster("rollout history", read)


def undo(name: str, namespace: str, number: int | None) -> int:
    """Writes the spec of an earlier revision; replicas and rollout limits stay as they are."""

    async def write(server: ApiServer) -> int:
        service = await cluster.service(server, namespace, name)
        revisions = await cluster.children(server, "ControllerRevision", namespace, name)
        target = target_of(revisions, (service.get("status") or {}).get("revision", ""), number)
        kept = spec_of(target)
        if kept is None:
            raise NotFoundError(
                f"revision {target['revision']} was made by an older operator, which did not keep the spec: "
                "edit the service instead"
            )
        restored = restored_spec(service, kept)
        changes = differences(service["spec"], restored)
        if not changes:
            print(f"{name} is at revision {target['revision']} already")
            return 0
        await cluster.change_spec(server, namespace, name, change_to(service["spec"], restored))
        print("\n".join([f"{name} goes back to revision {target['revision']}:", *(f"  {line}" for line in changes)]))
        return 0

    return in_cluster("rollout undo", write)


def restored_spec(service: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the service's spec with the fields of a kept revision, and without its preset, if it has one.

    A kept spec has the preset's fields of its time; the preset would add those of today.
    """
    restored = pinned_spec(service["spec"], kept)
    return {**restored, "preset": NO_PRESET} if (service.get("status") or {}).get("preset") else restored


def restart(name: str, namespace: str) -> int:
    """Replaces every engine by a new one of the same spec, as a rollout."""

    async def write(server: ApiServer) -> int:
        service = await cluster.service(server, namespace, name)
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        template = {"template": {"metadata": {"annotations": {RESTARTED_AT: stamp}}}}
        roles = [role for role in ("unified", "prefill", "decode") if service["spec"].get(role) is not None]
        await cluster.change_spec(server, namespace, name, dict.fromkeys(roles, template))
        print(f"{name} restarts: mini-infer rollout status {name} -n {namespace} follows it")
        return 0

    return in_cluster("rollout restart", write)


def decide(name: str, namespace: str, *, promote: bool) -> int:
    """Ends the analysis of a service's canary by hand: promotes the new revision, or rolls it back.

    A revision that was rolled back can still be promoted.
    """
    verb = "promote" if promote else "abort"
    annotation, other = (ANNOTATION_PROMOTE, ANNOTATION_ABORT)[:: 1 if promote else -1]
    if (here := _here(name)) is not None:
        revision = judged_revision(here, promote=promote)
        if revision is None:
            print(f"mini-infer rollout {verb}: {_no_canary(name, promote=promote)}", file=sys.stderr)
            return FAILED
        kept = read_requests(ROOT / name)
        write_requests(ROOT / name, replace(kept, annotations={annotation: revision}))
        print(_decided(name, revision, promote=promote))
        return 0

    async def write(server: ApiServer) -> int:
        revision = judged_revision(await cluster.service(server, namespace, name), promote=promote)
        if revision is None:
            raise NotFoundError(_no_canary(name, promote=promote))
        await cluster.annotate(server, namespace, name, {annotation: revision, other: None})
        print(_decided(name, revision, promote=promote))
        return 0

    return in_cluster(f"rollout {verb}", write)


def judged_revision(service: Mapping[str, Any], *, promote: bool) -> str | None:
    """Returns the revision that can be promoted or aborted now; None if there is none."""
    canary = (service.get("status") or {}).get("canary") or {}
    phases = ("Running", "RolledBack") if promote else ("Running",)
    return canary.get("revision") if canary.get("phase") in phases else None


def _here(name: str) -> Mapping[str, Any] | None:
    """Returns the service if a `mini-infer up` of it runs from this folder."""
    return next((item for item in read_statuses() if item["metadata"]["name"] == name), None)


def _no_canary(name: str, *, promote: bool) -> str:
    state = "is judged or was rolled back" if promote else "is judged"
    return f"no revision of {name} {state} now; mini-infer status {name} shows the canary"


def _decided(name: str, revision: str, *, promote: bool) -> str:
    return f"{name}: revision {revision} {'is promoted' if promote else 'is rolled back'}"


def pause(name: str, namespace: str, *, paused: bool) -> int:
    """Pauses or resumes a service's rollouts: edits wait while it is paused, and a canary stays at its step."""
    if _here(name) is not None:
        write_requests(ROOT / name, replace(read_requests(ROOT / name), paused=paused))
        print(_paused(name, paused=paused))
        return 0

    async def write(server: ApiServer) -> int:
        await cluster.service(server, namespace, name)
        await cluster.change_spec(server, namespace, name, {"rollout": {"paused": True if paused else None}})
        print(_paused(name, paused=paused))
        return 0

    return in_cluster(f"rollout {'pause' if paused else 'resume'}", write)


def _paused(name: str, *, paused: bool) -> str:
    return f"{name}: edits wait until `mini-infer rollout resume {name}`" if paused else f"{name}: edits roll out"


def history_lines(revisions: Sequence[Mapping[str, Any]], current: str) -> list[str]:
    """Returns a line for each revision, oldest first, and below it what it changed."""
    lines, before = [], None
    for item in sorted(revisions, key=lambda item: int(item["revision"])):
        name, spec = item["metadata"].get("labels", {}).get(LABEL_REVISION, "?"), spec_of(item)
        mark = "  (what the spec asks for)" if name == current else ""
        lines.append(f"{item['revision']:>4}  {name}  {item['metadata'].get('creationTimestamp', '')}{mark}")
        if spec is None:
            lines.append("        its spec was not kept (made by an older operator)")
        elif before is not None:
            lines += [f"        {line}" for line in differences(pinned_spec(spec, before), spec)]
        before = spec if spec is not None else before
    return lines or ["no revision is kept"]


def target_of(revisions: Sequence[Mapping[str, Any]], current: str, number: int | None) -> Mapping[str, Any]:
    """Returns the revision to go back to: the one with this number, else the newest before the current one."""
    if number is not None:
        for item in revisions:
            if int(item["revision"]) == number:
                return item
        available = ", ".join(sorted((str(item["revision"]) for item in revisions), key=int)) or "none"
        raise NotFoundError(f"there is no revision {number}; there are: {available}")
    others = [item for item in revisions if item["metadata"].get("labels", {}).get(LABEL_REVISION) != current]
    if not others:
        raise NotFoundError("there is no earlier revision")
    return max(others, key=lambda item: int(item["revision"]))
