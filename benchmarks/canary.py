"""Canaries of `mini-infer up` with real engines of the demo model: bad revisions that go back, and good ones that stay.

Clients stream chats all the time. Each edit of the service is a new revision: slow, with a wrong chat template, with
broken quantisation, leaking or crashing; or good, with other options of the engine. For each the script prints what
became of it, after how many seconds and why, and how many requests failed meanwhile. Engines, gateway and operator are
processes on this machine; `tests/e2e/canaries.py` makes the same edits on a cluster.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import yaml

from benchmarks.canary_faults.models import BASE, QUESTIONS, make_models
from benchmarks.common.report import make_parser, save
from mini_infer_operator.local.ports import free_ports

FAULTS = Path(__file__).parent / "canary_faults"
ROLL_BACK_LIMIT_S = 180.0
"""Seconds from an edit, within which a bad revision must be rolled back."""


Status = Mapping[str, Any]


class Target(Protocol):
    """What runs the service: `mini-infer up`, or a cluster."""

    async def status(self) -> Status:
        """Returns the service's status; empty before it has one. Raises RuntimeError if nothing will come any more."""

    async def write(self, document: Mapping[str, Any]) -> None:
        """Edits the service."""


@dataclass(frozen=True)
class Place:
    """Where engines find the models and the faults."""

    models_uri: str
    """The prefix of the models' URIs, without a slash at its end."""
    faults: str
    """The folder of `sitecustomize.py`, as engines see it."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """The part of the engines' template that brings the faults there: `spec`, and `container`."""


@dataclass(frozen=True)
class Edit:
    """An edit of the service that makes a new revision."""

    name: str
    is_good: bool
    model: str = BASE
    engine: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """The value of CANARY_FAULT; empty for none."""

    def template(self, place: Place) -> dict[str, Any]:
        """Returns the template of engines with the fault; empty without one."""
        if not self.fault:
            return {}
        variables = {"PYTHONPATH": place.faults, "CANARY_FAULT": self.fault}
        env = [{"name": name, "value": value} for name, value in variables.items()]
        return {**place.template, "container": {**place.template.get("container", {}), "env": env}}


def edits(crash_s: float, slow_ms: float) -> list[Edit]:
    """Five bad ones and five good ones, in turn."""
    bad = [
        Edit("slow", False, fault=f"slow:{slow_ms:g}"),
        Edit("wrong chat template", False, model="template"),
        Edit("broken quantisation", False, model="quantised"),
        Edit("leak", False, fault="leak:12"),
        Edit("crash", False, fault=f"crash:{crash_s:g}"),
    ]
    good = [
        Edit("fewer tokens a pass", True, engine={"maxNumBatchedTokens": 512}),
        Edit("float32 for bfloat16", True, engine={"dtype": "float32"}),
        Edit("no prefix cache", True, engine={"enablePrefixCaching": False}),
        Edit("fewer requests at a time", True, engine={"maxNumSeqs": 16}),
        Edit("a shorter context", True, engine={"maxModelLen": 2048}),
    ]
    return [edit for pair in zip(bad, good, strict=True) for edit in pair]


def service(place: Place, edit: Edit, pause_s: int, least: int) -> dict[str, Any]:
    """Returns the InferenceService with this edit."""
    engine = {"device": "cpu", "kvCacheMemory": "128Mi", "maxModelLen": 4096} | dict(edit.engine)
    role: dict[str, Any] = {"replicas": 1, "engine": engine}
    if template := edit.template(place):
        role["template"] = template
    shares: list[dict[str, Any]] = [{"mirror": "50%"}, {"weight": "20%"}, {"weight": "35%"}, {"weight": "50%"}]
    canary = {
        "steps": [share | {"pauseSeconds": pause_s} for share in shares],
        "analysis": {"minRequests": least, "answers": {"samples": 5}},
    }
    rollout = {"minReadySeconds": 2, "canary": canary}
    spec = {"model": {"uri": f"{place.models_uri}/{edit.model}", "name": "demo"}, "unified": role, "rollout": rollout}
    return {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": spec,
    }


class Clients:
    """Streams chats at a rate until stopped."""

    def __init__(self, url: str, session: aiohttp.ClientSession, per_second: float, tokens: int) -> None:
        self._url, self._session, self._pause_s, self._tokens = url, session, 1 / per_second, tokens
        self.outcomes: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Sends until cancelled, and then waits for what is under way."""
        number = 0
        try:
            while True:
                task = asyncio.create_task(self._chat(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                number += 1
                await asyncio.sleep(self._pause_s)
        finally:
            await asyncio.gather(*self._tasks)

    async def _chat(self, number: int) -> None:
        question = f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"
        messages = [{"role": "user", "content": question}]
        body = {"model": "demo", "messages": messages, "max_tokens": self._tokens, "stream": True}
        try:
            async with self._session.post(self._url + "/v1/chat/completions", json=body) as response:
                text = (await response.read()).decode()
                whole = response.status == 200 and "data: [DONE]" in text and '"error"' not in text
                self.outcomes["ok" if whole else f"HTTP {response.status}: {text[-300:]}"] += 1
        except aiohttp.ClientError as error:
            self.outcomes[type(error).__name__] += 1


@dataclass
class Up:
    """A running `mini-infer up`."""

    folder: Path
    process: "subprocess.Popen[str]"

    async def status(self) -> Status:
        """Returns the service's status. Raises RuntimeError if the process has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"mini-infer up ended with {self.process.returncode}")
        path = self.folder / ".mini-infer" / "demo" / "status.json"
        found: Status = json.loads(path.read_text())["status"] if path.exists() else {}
        return found

    async def write(self, document: Mapping[str, Any]) -> None:
        """Edits the service."""
        (self.folder / "cr.new").write_text(yaml.safe_dump(dict(document)))
        (self.folder / "cr.new").replace(self.folder / "cr.yaml")


async def until(target: Target, condition: Callable[[Status], bool], limit_s: float) -> Status:
    """Waits for a condition on the status, and returns it. Raises TimeoutError."""
    end_s = time.monotonic() + limit_s
    while not condition(status := await target.status()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {limit_s:.0f} s: {json.dumps(status, indent=1)[-2000:]}")
        await asyncio.sleep(0.2)
    return status


def is_ready(status: Mapping[str, Any]) -> bool:
    """True if all that the spec asks for runs."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))


async def listed(session: aiohttp.ClientSession, url: str) -> None:
    """Waits until the gateway has read which engines there are."""
    while True:
        async with session.get(url + "/v1/models") as response:
            if (await response.json())["data"]:
                return
        await asyncio.sleep(0.1)


async def judge(
    target: Target, clients: Clients, edit: Edit, document: Mapping[str, Any], limit_s: float
) -> dict[str, Any]:
    """Makes one edit, and waits for what becomes of it."""
    before, sent, began_s = (await target.status()).get("revision"), clients.outcomes.total(), time.monotonic()
    failed = sent - clients.outcomes["ok"]
    await target.write(document)

    def started(status: Status) -> bool:
        return bool(status.get("canary")) and status["canary"]["revision"] not in (None, before)

    await until(target, started, 60)
    canary = (await until(target, lambda status: status["canary"]["phase"] != "Running", limit_s))["canary"]
    ended_s = time.monotonic() - began_s
    found = {
        "edit": edit.name,
        "expected": "Promoted" if edit.is_good else "RolledBack",
        "phase": canary["phase"],
        "seconds": round(ended_s, 1),
        "reason": canary["reason"],
        "message": canary["message"],
        "divergence": canary.get("divergence"),
        "replays": canary.get("replays", 0),
    }
    print(json.dumps(found), flush=True)
    if canary["phase"] == "Promoted":
        await until(target, is_ready, 120)
    found["requests"] = clients.outcomes.total() - sent
    found["failed"] = clients.outcomes.total() - clients.outcomes["ok"] - failed
    return found


async def run(target: Target, url: str, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Makes all edits, each from the last good one. The service is there with the base already."""
    current, found = Edit(BASE, True), list[dict[str, Any]]()
    chosen = edits(options.crash_s, options.slow_ms)
    if options.only:
        chosen = [edit for edit in chosen if any(word in edit.name for word in options.only.split(","))]
    await until(target, is_ready, 180)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        await listed(session, url)
        clients = Clients(url, session, options.rate, options.tokens)
        load = asyncio.create_task(clients.run())
        try:
            for edit in chosen:
                document = service(place, edit, options.pause_s, options.least)
                found.append(await judge(target, clients, edit, document, options.limit_s))
                if found[-1]["phase"] == "Promoted":
                    current = edit
                else:
                    await target.write(service(place, current, options.pause_s, options.least))
                    await until(target, lambda status: is_ready(status) and "canary" not in status, 180)
                save(options.out, {"edits": found, "outcomes": dict(clients.outcomes)})
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    return {"edits": found, "outcomes": dict(clients.outcomes)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `run` reads."""
    parser.add_argument("--pause-s", type=int, default=60, metavar="S", help="of each of the four steps (default: 60)")
    parser.add_argument("--rate", type=float, default=4.0, metavar="N", help="requests a second (default: 4)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="of each answer (default: 24)")
    parser.add_argument("--least", type=int, default=20, metavar="N", help="analysis.minRequests (default: 20)")
    parser.add_argument("--crash-s", type=float, default=120.0, metavar="S", help="until the crash (default: 120)")
    parser.add_argument("--slow-ms", type=float, default=60.0, metavar="MS", help="more for each pass (default: 60)")
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="S", help="for each edit (default: 900)")
    parser.add_argument("--only", default="", metavar="WORDS", help="edits whose names have one of them, by commas")


def verdict(found: Mapping[str, Any]) -> int:
    """Prints how many requests failed, and which edits ended otherwise than expected or went back after three minutes.
    Returns 0 if there are none.
    """
    failed = {outcome: count for outcome, count in found["outcomes"].items() if outcome != "ok"}
    total = sum(found["outcomes"].values())
    wrong = [one["edit"] for one in found["edits"] if one["phase"] != one["expected"]]
    wrong += [
        f"{one['edit']} (late)" for one in found["edits"] if one["phase"] == "RolledBack" and one["seconds"] > 180
    ]
    print(f"{total} requests, {sum(failed.values())} failed {failed or ''}; wrong: {', '.join(wrong) or 'none'}")
    return 0 if not failed and not wrong else 1


def main() -> int:
    """Starts `mini-infer up`, makes the edits, and ends it. Returns 0 if each ended as expected and nothing failed."""
    parser = make_parser(__doc__)
    add_flags(parser)
    options = parser.parse_args()
    if options.smoke:
        options.pause_s, options.least, options.only = 5, 5, options.only or "template"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left when a time limit ends it
    with tempfile.TemporaryDirectory() as root:
        folder, models = Path(root), Path(root) / "models"
        make_models(models)
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "mini_infer_operator.cli", "up", "-f", "cr.yaml", f"--port={port}"]
        place = Place(f"file://{models}", str(FAULTS.resolve()))
        document = service(place, Edit(BASE, True), options.pause_s, options.least)
        (folder / "cr.yaml").write_text(yaml.safe_dump(document))
        with (folder / "output").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, start_new_session=True, text=True
            )
            try:
                found = asyncio.run(run(Up(folder, process), f"http://127.0.0.1:{port}", place, options))
            except (TimeoutError, RuntimeError):
                print((folder / "output").read_text()[-6000:], flush=True)
                raise
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    save(options.out, found)
    return verdict(found)


if __name__ == "__main__":
    raise SystemExit(main())
