"""Implements a service's backend on this machine: processes in place of pods, and an endpoints file in place of the
watch.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec

from mini_infer_contract.launch import Endpoint, EndpointsFile, PendingEngine, ServiceReport
from mini_infer_contract.peer_auth import read_peer_secret
from mini_infer_contract.rollouts import GatewayRollouts
from mini_infer_contract.scaling import GatewayLoads
from mini_infer_operator.canary.state import read_canary
from mini_infer_operator.canary.window import CanaryWindow
from mini_infer_operator.gpus import requests_gpu
from mini_infer_operator.launch import Launch, grace_s
from mini_infer_operator.local.commands import engine_command
from mini_infer_operator.local.gpus import choose_gpus, gpus_of
from mini_infer_operator.local.host_memory import engine_folder
from mini_infer_operator.local.paused_edits import PausedEdits
from mini_infer_operator.local.peer_key import write_peer_key
from mini_infer_operator.local.ports import HOST, free_port_range, free_ports
from mini_infer_operator.local.requests_file import read_requests
from mini_infer_operator.local.status_file import write_status
from mini_infer_operator.local.supervise import OrphanReaper, SupervisedProcess, stop, supervise
from mini_infer_operator.objects.engine_roles import post_role
from mini_infer_operator.objects.model_implementations import ModelImplementations
from mini_infer_operator.observe import Observed, ObservedCanary, ObservedWorkload, SwitchableEngine
from mini_infer_operator.parse import InvalidServiceError, read_file, read_presets
from mini_infer_operator.plan.limits import times_of
from mini_infer_operator.plan.plan import Plan, Workload
from mini_infer_operator.plan.role_switches import roles_are_interchangeable
from mini_infer_operator.presets.resolve import resolve_service
from mini_infer_operator.resource import InferenceService, RoleSpec
from mini_infer_operator.scaling.plan_state import Fleet
from mini_infer_operator.scaling.service_scaler import Change, ServiceScaler
from mini_infer_operator.scaling.spec import planned_spec, policies_of
from mini_infer_operator.status import EventType, PermanentFailure

UNROUTE_S = 1.0
"""Seconds between removing an engine from the endpoints file and SIGTERM: the gateway has read the file by then."""


@dataclass(slots=True)
class Engine:
    """One engine process, with the role, revision and index that it belongs to."""

    role: str
    """The role that it has now."""
    revision: str
    index: int
    launch: Launch
    process: SupervisedProcess
    gpus: tuple[str, ...] = ()
    """The GPUs that the process may see, also after a restart; empty to inherit those that we may see, if any."""
    began_s: float = field(default_factory=time.monotonic)
    start_s: float | None = None
    """Seconds of its first start, as far as anybody has looked; None until it was ready."""
    sent_role: str = ""
    """The role that the process was started with or has taken since."""
    ports: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Ports for HTTP, events, replay and transfer; new ones at every start."""
    weights_port: int = 0
    """First of the ports of its weights, two for each rank; new at every start."""


class LocalBackend:
    """The backend of the one service of `mini-infer up`. It owns its processes; `close` ends them."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        reaper: OrphanReaper,
        session: aiohttp.ClientSession,
        gpus: Sequence[str],
        report: Callable[[str], None],
        changed: Callable[[], None],
        gateway_url: str,
    ) -> None:
        self._path = path
        self._folder = folder
        self._reaper = reaper
        self._session = session
        self._implementations = ModelImplementations(session, lambda _: changed())
        self._gpus = gpus
        self._report = report
        self._changed = changed
        self._gateway_url = gateway_url
        self._engines: list[Engine] = []
        self._stops: set[asyncio.Task[None]] = set()
        self._stored: dict[str, Any] | None = None  # the last version of the file that was valid
        self._presets: list[dict[str, Any]] = []
        self._edits = PausedEdits()
        self._running_presets: Sequence[dict[str, Any]] = ()
        self._read_version: tuple[int, int] | None = None
        self._created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.endpoints_path = folder / "endpoints.json"
        self.peer_key_path = write_peer_key(folder)
        self._peer_token = read_peer_secret(self.peer_key_path).http_token()
        self._endpoints: list[Endpoint] = []
        self._scaler: ServiceScaler | None = None
        self._window: CanaryWindow | None = None
        self._launches: dict[tuple[str, str], Launch] = {}
        """The launches of each role and revision: a revision that is rolled back to may need more engines."""
        self._on_demand = ("", False)
        """The service's model name, and True if it may have no engine."""
        self.status: dict[str, Any] = {}

    async def read(self) -> Mapping[str, Any] | None:
        """Reads the file again if it changed. An edit that breaks a rule is reported; the last good version stays."""
        version = file_version(self._path)
        if version != self._read_version:
            self._read_version = version
            try:
                (document,), presets = read_file(self._path), read_presets(self._path)
                service = resolve_service(document, presets).service
                if self._stored is not None and service.metadata.name != self._stored["metadata"]["name"]:
                    raise InvalidServiceError("metadata.name: cannot change while it runs; stop and start again")
                refuse_elsewhere(service)
            except (ValueError, OSError) as error:
                self._report(f"{self._path}: {error}\n  going on with what ran before")
            else:
                generation = 1 + (self._stored or {"metadata": {"generation": 0}})["metadata"]["generation"]
                metadata = {**document["metadata"], "generation": generation, "creationTimestamp": self._created}
                self._stored, self._presets = {**document, "metadata": metadata}, presets
        if self._stored is None:
            return None
        decided = self._scaler.decided if self._scaler is not None else {}
        spec = planned_spec(self._stored["spec"], self.status, decided)
        asked, metadata = read_requests(self._folder), self._stored["metadata"]
        if asked.paused is not None:
            spec = {**spec, "rollout": {**(spec.get("rollout") or {}), "paused": asked.paused}}
        spec, self._running_presets = self._edits.running(spec, self._presets)
        if asked.annotations:
            metadata = {**metadata, "annotations": {**metadata.get("annotations", {}), **asked.annotations}}
        return {**self._stored, "metadata": metadata, "spec": spec, "status": self.status}

    @property
    def has_canary(self) -> bool:
        """True while a new revision is judged."""
        state = read_canary(self.status)
        return state is not None and state.is_running

    def take_rollouts(self, reports: Mapping[str, GatewayRollouts], now_s: float) -> None:
        """Takes what gateways report of the canary."""
        state = read_canary(self.status)
        if self._stored is None or state is None or not state.is_running:
            return
        metadata = resolve_service(self._stored, self._presets).service.metadata
        window = self._window = self._window or CanaryWindow(f"{metadata.namespace}/{metadata.name}")
        window.take(reports, state.revision, state.stable, state.step, now_s)

    @property
    def is_scaled(self) -> bool:
        """True if a role of the service has `scaling` that the planner owns."""
        return self._stored is not None and bool(policies_of(resolve_service(self._stored, self._presets).service))

    @property
    def is_asleep(self) -> bool:
        """True if no engine runs or starts."""
        return all(engine.process.stopping for engine in self._engines)

    def scale(self, reports: Mapping[str, GatewayLoads], now_s: float) -> list[Change]:
        """Takes reports of gateways, and returns the numbers of engines that change."""
        assert self._stored is not None
        metadata = resolve_service(self._stored, self._presets).service.metadata
        scaler = self._scaler = self._scaler or ServiceScaler(f"{metadata.namespace}/{metadata.name}")
        spec = planned_spec(self._stored["spec"], self.status, scaler.decided)
        service = resolve_service({**self._stored, "spec": spec}, self._presets).service
        engines = [engine for engine in self._engines if not engine.process.stopping]
        for engine in engines:
            if engine.process.ready and engine.start_s is None:
                engine.start_s = now_s - engine.began_s
        starts = [engine.start_s for engine in engines if engine.start_s is not None]
        policies = policies_of(service)
        fleets = {
            role: Fleet(
                service.roles[role].replicas, sum(engine.role == role and engine.process.ready for engine in engines)
            )
            for role in policies
        }
        start_s = median(starts) if starts else None
        is_pair = roles_are_interchangeable(service)
        return scaler.take(policies, fleets, reports, now_s, start_s, are_roles_interchangeable=is_pair)

    def presets(self) -> list[dict[str, Any]]:
        """Returns the InferencePresets of the file that apply now."""
        return list(self._running_presets)

    def running_spec(self, stored: Mapping[str, Any]) -> None:
        """Returns None: no revision is kept here, and presets do not go before the file does."""

    async def observe(self, service: InferenceService) -> Observed:
        """Counts the processes."""
        running: dict[tuple[str, str], list[SupervisedProcess]] = {}
        for engine in self._engines:
            if not engine.process.stopping:
                running.setdefault((engine.role, engine.revision), []).append(engine.process)
        now, min_ready = datetime.now(UTC), times_of(service).min_ready
        # why one ended was said when it did
        seen = [observed_processes(*key, running[key], min_ready, now) for key in sorted(running)]
        canary = self._window.observed() if self._window is not None and self.has_canary else ObservedCanary()
        observed = Observed(seen, model_impl=self._model_implementation(service), canary=canary)
        if not roles_are_interchangeable(service):
            return observed
        loads = self._scaler.engine_loads if self._scaler is not None else {}
        switchable = [
            SwitchableEngine(name, e.role, e.revision, e.process.ready, loads.get(name, 0.0))
            for e in self._engines
            if not e.process.stopping
            for name in (e.process.name,)
        ]
        return replace(observed, switchable=switchable)

    def _model_implementation(self, service: InferenceService) -> str | None:
        """Returns the code by which the newest ready engine computes, or None if none reports it."""
        ready = [engine for engine in self._engines if engine.process.ready and not engine.process.stopping]
        newest = max(ready, key=lambda engine: engine.process.changed_at, default=None)
        if newest is None:
            return None
        key = service.metadata.namespace, service.metadata.name
        url = f"http://{HOST}:{newest.ports[0]}"
        return self._implementations.of_service(key, f"{newest.process.name}-{newest.process.pid}", url)

    async def apply(self, service: InferenceService, plan: Plan) -> PermanentFailure | None:
        """Starts missing processes, writes the endpoints file, then ends processes that are no longer needed."""
        on_demand = any(policy.min_replicas == 0 for policy in policies_of(service).values())
        self._on_demand = service.model_name, on_demand
        roles = {switch.name: switch.after for switch in plan.switches}
        for engine in self._engines:
            engine.role = roles.get(engine.process.name, engine.role)
        await self._send_roles()
        desired = {(workload.role, workload.revision): workload for workload in plan.workloads}
        surplus: list[Engine] = []
        for workload in plan.workloads:
            surplus += self._fill(service, workload, sum(w.replicas for w in plan.workloads))
        surplus += [e for e in self._engines if (e.role, e.revision) not in desired and not e.process.stopping]
        for engine in surplus:
            engine.process.stopping = True
        self._write_endpoints(service)
        for engine in surplus:
            task = asyncio.create_task(self._retire(engine), name=f"stop {engine.process.name}")
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)
        return None

    async def _send_roles(self) -> None:
        """Sends their roles to engines that have switched. The next pass sends them again to one that does not answer;
        one that starts anew starts with its new role.
        """
        for engine in self._engines:
            if engine.process.ready and engine.sent_role != engine.role:
                answer = await post_role(
                    self._session, f"http://{HOST}:{engine.ports[0]}", engine.role, self._peer_token
                )
                if answer == "":
                    engine.sent_role = engine.role
                    self._report(f"{engine.process.name} serves as {engine.role} from now on")
                    self._changed()  # so that the status counts it in its new role
                elif answer is not None:
                    self._report(f"{engine.process.name} does not switch to the role {engine.role}: {answer}")

    def url(self, service: InferenceService) -> str:
        """Returns the local gateway's URL."""
        return self._gateway_url

    async def report(self, stored: Mapping[str, Any], status: dict[str, Any]) -> None:
        """Prints the progress of the service, if it changed."""
        before, after = _ready_message(self.status), _ready_message(status)
        if status != self.status:
            write_status(self._folder, stored, status)
        self.status = status
        self._write_file(f"{stored['metadata'].get('namespace', 'default')}/{stored['metadata']['name']}")
        if before != after:
            self._report(f"{stored['metadata']['name']}: {after}")

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """Prints decisions on a canary. The lines on the terminal report each start, end and change of the status."""
        if reason.startswith("Canary"):
            self._report(f"{reason}: {message}")

    async def close(self, limit_s: float) -> None:
        """Ends every engine and waits for it."""
        await self._implementations.close()
        for task in list(self._stops):
            task.cancel()
        await asyncio.gather(*self._stops, return_exceptions=True)
        await asyncio.gather(*(stop(engine.process, limit_s) for engine in self._engines))

    def _fill(self, service: InferenceService, workload: Workload, total: int) -> list[Engine]:
        """Starts engines until there are enough of `workload`. Returns the engines beyond that number."""
        key = (workload.role, workload.revision)
        mine = [e for e in self._engines if (e.role, e.revision) == key and not e.process.stopping]
        if len(mine) > workload.replicas:
            mine.sort(key=lambda engine: (not engine.process.ready, engine.index))
            return mine[workload.replicas :]
        launch = workload.launch or self._launches.get(key)
        if launch is not None:
            self._launches[key] = launch
            named = [e for e in self._engines if (e.launch.role, e.revision) == key and not e.process.stopping]
            free = (i for i in range(10_000) if i not in {engine.index for engine in named})
            for _ in range(workload.replicas - len(mine)):
                self._start(service, workload, launch, next(free), total)
        return []

    def _start(self, service: InferenceService, workload: Workload, launch: Launch, index: int, total: int) -> None:
        name = f"{service.metadata.name}-{workload.role}-{workload.revision}-{index}"
        threads = max(1, (os.cpu_count() or 1) // (total * launch.parallelism.ranks))
        used = [engine.gpus for engine in self._engines]
        role = service.roles.get(workload.role)  # gone if an edit that removed it was rolled back
        gpus = choose_gpus(gpus_of(role) if role is not None else 0, self._gpus, used)

        def make_command() -> Any:
            http_port, events_port, replay_port, transfer_port = free_ports(4)
            engine.sent_role = engine.role
            engine.ports = (http_port, events_port, replay_port, transfer_port)
            engine.weights_port = free_port_range(2 * launch.parallelism.ranks)
            return engine_command(
                replace(launch, role=engine.role),
                engine.ports,
                self.peer_key_path,
                threads=threads,
                gpus=gpus,
                kv_host=engine_folder(self._folder, f"{workload.role}-{index}"),
                kv_disk=self._folder / "kv-cache" / workload.role,
                weights_port=engine.weights_port,
                weights_peers=[
                    other.weights_port
                    for other in self._engines
                    if other is not engine and other.process.ready and not other.process.stopping
                ],
            )

        def changed(line: str) -> None:
            self._report(line)
            self._changed()

        process = SupervisedProcess(name, self._folder / f"{name}.log", make_command)
        engine = Engine(workload.role, workload.revision, index, launch, process, gpus)
        process.task = asyncio.create_task(
            supervise(process, self._reaper, self._session, changed), name=f"supervise {name}"
        )
        self._engines.append(engine)
        self._report(f"{name}: loading model {launch.model_name}")

    async def _retire(self, engine: Engine) -> None:
        await asyncio.sleep(UNROUTE_S)
        await stop(engine.process, grace_s(engine.launch))
        self._engines.remove(engine)
        self._report(f"{engine.process.name} has ended")

    def _write_endpoints(self, service: InferenceService) -> None:
        metadata = service.metadata
        self._endpoints = [
            Endpoint(
                name=engine.process.name,
                url=f"http://{HOST}:{engine.ports[0]}",
                model=engine.launch.model_name,
                service=f"{metadata.namespace}/{metadata.name}",
                service_created=self._created,
                role=engine.role,
                revision=engine.revision,
                events=f"tcp://{HOST}:{engine.ports[1]}",
                replay=f"tcp://{HOST}:{engine.ports[2]}",
                transfer=f"tcp://{HOST}:{engine.ports[3]}" if engine.launch.moves_cache else "",
                group=engine.process.name if engine.launch.parallelism.ranks > 1 else "",
                peer_auth="shared",
                draining=engine.process.stopping,
            )
            for engine in self._engines
            if engine.process.ready
        ]
        self._write_file(f"{metadata.namespace}/{metadata.name}")

    def _write_file(self, service: str) -> None:
        """Writes the endpoints, and what the console shows of the service beside them."""
        pending = [
            PendingEngine(
                name=engine.process.name,
                service=service,
                role=engine.role,
                revision=engine.revision,
                reason=engine.process.last_end or f"loading model {engine.launch.model_name}",
            )
            for engine in self._engines
            if not engine.process.ready and not engine.process.stopping
        ]
        model, on_demand = self._on_demand
        services = [
            ServiceReport(
                name=service, status=self.status, model=model, created=self._created, starts_on_demand=on_demand
            )
        ]
        content = EndpointsFile(endpoints=self._endpoints, services=services, pending=pending)
        write_atomically(self.endpoints_path, msgspec.json.encode(content))


def observed_processes(
    role: str, revision: str, processes: Sequence[SupervisedProcess], min_ready: timedelta, now: datetime
) -> ObservedWorkload:
    """Returns the engines of one revision, in the form that planning reads."""
    ready = [process.changed_at for process in processes if process.ready]
    unready = [process.changed_at for process in processes if not process.ready]
    return ObservedWorkload(
        role=role,
        revision=revision,
        replicas=len(processes),
        ready=len(ready),
        available=sum(since + min_ready <= now for since in ready),
        worked=any(process.worked for process in processes),
        unready_since=max(unready, default=None),
        progressed_at=max((process.changed_at for process in processes), default=None),
        available_at=min((since + min_ready for since in ready if since + min_ready > now), default=None),
        restarts=sum(process.restarts for process in processes),
        last_end=next((f"{process.name} {process.crash}" for process in processes if process.crash), ""),
    )


def refuse_elsewhere(service: InferenceService) -> None:
    """Raises InvalidServiceError for features that only a cluster has, and if a model folder does not exist."""
    uri = service.spec.model.uri
    if service.spec.model.cache is not None:
        raise InvalidServiceError(
            f"spec.model.cache: {uri} is copied by a Job of a cluster: for `mini-infer up` run `mini-infer fetch` and "
            "write file:///path/of/the/folder"
        )
    if uri.startswith("pvc://"):
        raise InvalidServiceError(
            f"spec.model.uri: {uri} is a volume of a cluster: for `mini-infer up` write file:///path/of/the/folder"
        )
    if uri.startswith("oci://"):
        raise InvalidServiceError(
            f"spec.model.uri: {uri} is an image that nodes of a cluster mount: for `mini-infer up` unpack it and write "
            "file:///path/of/the/folder"
        )
    if uri.startswith("file://") and not Path(uri.removeprefix("file://")).is_dir():
        raise InvalidServiceError(f"spec.model.uri: there is no folder {uri.removeprefix('file://')} on this machine")


def notices(service: InferenceService, gpus: Sequence[str]) -> list[str]:
    """Returns a line for each part of the service that works differently here than in a cluster."""
    lines = []
    if service.spec.image:
        lines.append(f"image {service.spec.image} is for a cluster: engines run from this Python environment")
    if service.spec.model.token_secret:
        lines.append("tokenSecret is for a cluster: a token is taken from the environment variable HF_TOKEN")
    for name, role in service.roles.items():
        lines += _about_gpus(name, role, len(gpus))
        if role.parallelism and (role.parallelism.nodes or 1) > 1:
            lines.append(f"{name} engines span nodes in a cluster: here all ranks of one run on this machine")
        if role.kv_cache and role.kv_cache.disk:
            lines.append(f"{name} engines keep KV cache on this disk, in .mini-infer/{service.metadata.name}/kv-cache")
        template = role.template
        if template and (template.spec or template.metadata):
            lines.append(f"{name}.template is for a cluster: of it only container.env values are used")
    return lines


def _about_gpus(name: str, role: RoleSpec, present: int) -> list[str]:
    requested = gpus_of(role)
    if requests_gpu(role) and not present:
        return [f"{name} asks for {requested} GPU an engine and this machine has none: engines run on the CPU"]
    if present and not requested:
        return []
    if present and requested > present:
        return [f"{name} asks for {requested} GPUs an engine and this machine has {present}: it gets those"]
    if present and role.replicas * requested > present:
        return [f"{role.replicas} engines share {present} GPU: set engine.kvCacheMemory so that they fit"]
    return []


def file_version(path: Path) -> tuple[int, int] | None:
    """Returns a value that changes when the file does; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that readers see the old content or the new, never a part."""
    if path.exists() and path.read_bytes() == content:
        return
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    temporary.replace(path)


def _ready_message(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions", ()):
        if condition["type"] == "Ready":
            return str(condition["message"])
    return ""
