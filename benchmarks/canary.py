"""Canaries of `mini-infer up` with real engines of the demo model: bad revisions that go back, and good ones that stay.

Clients stream chats all the time. Each edit of the service is a new revision: slow, with a wrong chat template, with
broken quantisation, leaking or crashing; or good, with other options of the engine. For each the script prints what
became of it, after how many seconds and why, and how many requests failed meanwhile. Engines, gateway and operator are
processes on this machine.
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks.canary_faults.models import BASE, QUESTIONS, make_models
from benchmarks.common.report import make_parser, save
from mini_infer_operator.local.ports import free_ports

FAULTS = Path(__file__).parent / "canary_faults"


def env(fault: str) -> dict[str, Any]:
    """The engine's container with a fault."""
    variables = {"PYTHONPATH": str(FAULTS.resolve()), "CANARY_FAULT": fault}
    return {"container": {"env": [{"name": name, "value": value} for name, value in variables.items()]}}


@dataclass(frozen=True)
class Edit:
    """An edit of the service that makes a new revision."""

    name: str
    is_good: bool
    model: str = BASE
    engine: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] | None = None


def edits(crash_s: float, slow_ms: float) -> list[Edit]:
    """Five bad ones and five good ones, in turn."""
    bad = [
        Edit("slow", False, template=env(f"slow:{slow_ms:g}")),
        Edit("wrong chat template", False, model="template"),
        Edit("broken quantisation", False, model="quantised"),
        Edit("leak", False, template=env("leak:12")),
        Edit("crash", False, template=env(f"crash:{crash_s:g}")),
    ]
    good = [
        Edit("fewer tokens a pass", True, engine={"maxNumBatchedTokens": 512}),
        Edit("float32 for bfloat16", True, engine={"dtype": "float32"}),
        Edit("no prefix cache", True, engine={"enablePrefixCaching": False}),
        Edit("fewer requests at a time", True, engine={"maxNumSeqs": 16}),
        Edit("a shorter context", True, engine={"maxModelLen": 2048}),
    ]
    return [edit for pair in zip(bad, good, strict=True) for edit in pair]


def service(models: Path, edit: Edit, pause_s: int, least: int) -> dict[str, Any]:
    """The InferenceService with this edit."""
    engine = {"device": "cpu", "kvCacheMemory": "128Mi", "maxModelLen": 4096} | dict(edit.engine)
    role: dict[str, Any] = {"replicas": 1, "engine": engine}
    if edit.template is not None:
        role["template"] = edit.template
    shares: list[dict[str, Any]] = [{"mirror": "50%"}, {"weight": "20%"}, {"weight": "35%"}, {"weight": "50%"}]
    canary = {
        "steps": [share | {"pauseSeconds": pause_s} for share in shares],
        "analysis": {"minRequests": least, "answers": {"samples": 5}},
    }
    rollout = {"minReadySeconds": 2, "canary": canary}
    spec = {"model": {"uri": f"file://{models / edit.model}", "name": "demo"}, "unified": role, "rollout": rollout}
    return {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": spec,
    }


class Clients:
    """Streams chats at a rate until stopped."""

    def __init__(self, url: str, session: aiohttp.ClientSession, per_second: float) -> None:
        self._url, self._session, self._pause_s = url, session, 1 / per_second
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
        body = {"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 24, "stream": True}
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

    @property
    def status(self) -> dict[str, Any]:
        """The service's status."""
        path = self.folder / ".mini-infer" / "demo" / "status.json"
        found: dict[str, Any] = json.loads(path.read_text())["status"] if path.exists() else {}
        return found

    def write(self, document: Mapping[str, Any]) -> None:
        """Edits the service."""
        (self.folder / "cr.new").write_text(yaml.safe_dump(dict(document)))
        (self.folder / "cr.new").replace(self.folder / "cr.yaml")

    async def until(self, condition: Any, limit_s: float) -> None:
        """Waits for a condition on the status. Raises TimeoutError."""
        end_s = time.monotonic() + limit_s
        while not condition(self.status):
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise TimeoutError(f"not within {limit_s:.0f} s: {json.dumps(self.status, indent=1)[-2000:]}")
            await asyncio.sleep(0.2)


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


async def judge(up: Up, clients: Clients, edit: Edit, document: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Makes one edit, and waits for what becomes of it."""
    before, sent, began_s = up.status.get("revision"), clients.outcomes.total(), time.monotonic()
    failed = sent - clients.outcomes["ok"]
    up.write(document)

    def started(status: Mapping[str, Any]) -> bool:
        return bool(status.get("canary")) and status["canary"]["revision"] not in (None, before)

    await up.until(started, 60)
    await up.until(lambda status: status["canary"]["phase"] != "Running", limit_s)
    ended_s, canary = time.monotonic() - began_s, up.status["canary"]
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
        await up.until(is_ready, 120)
    found["requests"] = clients.outcomes.total() - sent
    found["failed"] = clients.outcomes.total() - clients.outcomes["ok"] - failed
    return found


async def run(up: Up, url: str, models: Path, options: Any) -> dict[str, Any]:
    """Makes all edits, each from the base."""
    base, found = Edit(BASE, True), list[dict[str, Any]]()
    chosen = edits(options.crash_s, options.slow_ms)
    if options.only:
        chosen = [edit for edit in chosen if any(word in edit.name for word in options.only.split(","))]
    await up.until(is_ready, 180)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        await listed(session, url)
        clients = Clients(url, session, options.rate)
        load = asyncio.create_task(clients.run())
        current = base
        try:
            for edit in chosen:
                document = service(models, edit, options.pause_s, options.least)
                found.append(await judge(up, clients, edit, document, options.limit_s))
                if found[-1]["phase"] == "Promoted":
                    current = edit
                else:
                    up.write(service(models, current, options.pause_s, options.least))
                    await up.until(lambda status: is_ready(status) and "canary" not in status, 180)
                save(options.out, {"edits": found, "outcomes": dict(clients.outcomes)})
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    return {"edits": found, "outcomes": dict(clients.outcomes)}


def main() -> int:
    """Starts `mini-infer up`, makes the edits, and ends it. Returns 0 if each ended as expected and nothing failed."""
    parser = make_parser(__doc__)
    parser.add_argument("--pause-s", type=int, default=60, metavar="S", help="of each of the four steps (default: 60)")
    parser.add_argument("--rate", type=float, default=4.0, metavar="N", help="requests a second (default: 4)")
    parser.add_argument("--least", type=int, default=20, metavar="N", help="analysis.minRequests (default: 20)")
    parser.add_argument("--crash-s", type=float, default=120.0, metavar="S", help="until the crash (default: 120)")
    parser.add_argument("--slow-ms", type=float, default=60.0, metavar="MS", help="more for each pass (default: 60)")
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="S", help="for each edit (default: 900)")
    parser.add_argument("--only", default="", metavar="WORDS", help="edits whose names have one of them, by commas")
    options = parser.parse_args()
    if options.smoke:
        options.pause_s, options.least, options.only = 5, 5, options.only or "template"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left when a time limit ends it
    with tempfile.TemporaryDirectory() as root:
        folder, models = Path(root), Path(root) / "models"
        make_models(models)
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "mini_infer_operator.cli", "up", "-f", "cr.yaml", f"--port={port}"]
        document = service(models, Edit(BASE, True), options.pause_s, options.least)
        (folder / "cr.yaml").write_text(yaml.safe_dump(document))
        with (folder / "output").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, start_new_session=True, text=True
            )
            try:
                found = asyncio.run(run(Up(folder, process), f"http://127.0.0.1:{port}", models, options))
            except TimeoutError:
                print((folder / "output").read_text()[-6000:], flush=True)
                raise
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    save(options.out, found)
    failed = found["outcomes"].copy()
    failed.pop("ok", None)
    total = sum(found["outcomes"].values())
    wrong = [one["edit"] for one in found["edits"] if one["phase"] != one["expected"]]
    print(f"{total} requests, {sum(failed.values())} failed {failed or ''}; wrong: {', '.join(wrong) or 'none'}")
    return 0 if not failed and not wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
