"""Runs `mini-infer up`: one service on this machine until Ctrl-C. Owns and ends every process that it starts."""

import asyncio
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from mini_infer_operator.canary.policy import canary_policy
from mini_infer_operator.controller.queue import WorkQueue
from mini_infer_operator.local.backend import LocalBackend, file_version, notices, refuse_elsewhere
from mini_infer_operator.local.canary import follow_canary
from mini_infer_operator.local.commands import ENGINE, GATEWAY, gateway_command, reachable
from mini_infer_operator.local.gpus import visible_gpus
from mini_infer_operator.local.host_memory import host_memory
from mini_infer_operator.local.ports import why_busy
from mini_infer_operator.local.scaling import follow_gateway
from mini_infer_operator.local.supervise import OrphanReaper, SupervisedProcess, stop, supervise
from mini_infer_operator.parse import InvalidServiceError, read_file, read_presets
from mini_infer_operator.presets.resolve import resolve_service
from mini_infer_operator.reconcile import reconcile
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.scaling.spec import policies_of
from mini_infer_process.extras import install_hint
from mini_infer_process.listening import is_loopback
from mini_infer_web.api_keys import API_KEY_ENV

QUESTION = "What does textwrap.dedent do?"
END_GRACE_S = 10.0
"""Seconds for running answers after Ctrl-C; a second Ctrl-C does not wait."""
FILE_POLL_S = 0.5


class UpError(Exception):
    """Raised if `up` cannot start; the message says why and what to do."""


def up(path: Path, host: str, port: int, *, verbose: bool) -> int:
    """Runs until a signal. Returns the exit code."""
    try:
        documents = read_file(path)
        if len(documents) > 1:
            raise UpError(f"{path} holds {len(documents)} InferenceServices: put each in a file of its own")
        service = resolve_service(documents[0], read_presets(path)).service
        refuse_elsewhere(service)
        _require_installed()
        busy = why_busy(host, port)
        if busy:
            raise UpError(busy)
        folder = Path(".mini-infer") / service.metadata.name
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"), host_memory(folder):
            for left in (*folder.glob("*.log"), *folder.glob("requests.json")):
                left.unlink()
            return asyncio.run(_run(path, service, folder.resolve(), host, port, verbose=verbose))
    except (InvalidServiceError, UpError) as error:
        print(f"mini-infer up: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or Path(".mini-infer").resolve()
        print(f"mini-infer up: cannot write {where}: {error.strerror or error}", file=sys.stderr)
        return 1


async def _run(path: Path, service: InferenceService, folder: Path, host: str, port: int, *, verbose: bool) -> int:
    ended = asyncio.Event()
    signals = _signals(ended)
    gpus = visible_gpus()
    if not is_loopback(host) and policies_of(service):
        _print_line(f"note: scaling needs the gateway's reports, which --host {host} does not serve: numbers stay")
    if not is_loopback(host) and canary_policy(service) is not None:
        _print_line(f"note: a canary needs the gateway's reports, which --host {host} does not serve: promote by hand")
    for line in notices(service, gpus):
        _print_line(f"note: {line}")
    url = f"http://{reachable(host)}:{port}"
    reaper = await OrphanReaper.start(sys.executable)
    async with aiohttp.ClientSession(trust_env=False) as session:
        queue: WorkQueue[str]

        async def work(_: str) -> float | None:
            return await reconcile(backend)

        def changed() -> None:
            queue.add("service")

        queue = WorkQueue(work, resync_s=5.0)
        backend = LocalBackend(path, folder, reaper, session, gpus, _print_line, changed, url)
        backend.endpoints_path.write_text('{"endpoints": []}')
        gateway = SupervisedProcess(
            "gateway",
            folder / "gateway.log",
            lambda: gateway_command(host, port, backend.endpoints_path, backend.peer_key_path),
        )
        tasks = [
            asyncio.create_task(_follow_file(path, changed), name="follow the file"),
            asyncio.create_task(follow_gateway(backend, session, url, _print_line, changed), name="scale"),
            asyncio.create_task(follow_canary(backend, session, url, changed), name="judge canaries"),
            asyncio.create_task(_greet(backend, gateway, url, folder), name="greet"),
        ]
        if verbose:
            tasks.append(asyncio.create_task(_follow_logs(folder), name="follow the logs"))
        gateway.task = asyncio.create_task(
            supervise(gateway, reaper, session, _print_line), name="supervise the gateway"
        )
        changed()
        await ended.wait()
        _print_line("ending: engines finish what they run; Ctrl-C again to end at once")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await queue.close()
        closing = asyncio.create_task(_close(backend, gateway), name="close")
        second = asyncio.create_task(signals.get(), name="second signal")
        await asyncio.wait([closing, second], return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            closing.cancel()
        second.cancel()
        await asyncio.gather(closing, second, return_exceptions=True)
        await reaper.close()  # kills whatever is left
    _print_line("everything has ended")
    return 0


async def _close(backend: LocalBackend, gateway: SupervisedProcess) -> None:
    await backend.close(END_GRACE_S)
    await stop(gateway, grace_s=5.0)


async def _greet(backend: LocalBackend, gateway: SupervisedProcess, url: str, folder: Path) -> None:
    """Prints how to use the service once everything is ready."""
    while True:
        ready = {c["type"]: c["status"] for c in backend.status.get("conditions", ())}.get("Ready") == "True"
        if ready and gateway.ready:
            break
        await asyncio.sleep(0.1)
    model = backend.status["model"]
    has_key = bool(os.environ.get(API_KEY_ENV))
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
    key = f' -H "authorization: Bearer ${API_KEY_ENV}"' if has_key else ""
    curl = f"curl {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}"
    command = shlex.quote(command_path())
    chat = f"OPENAI_API_KEY=${API_KEY_ENV} {command} chat" if has_key else f"{command} chat"
    keys = f"key ${API_KEY_ENV}" if has_key else "any key"
    _print_line(
        f"\nOpen {url}/ in a browser: the console, to chat and to see what runs.\n\n"
        f"{model} answers at {url}/v1 (OpenAI API, {keys}). Try:\n\n  {curl}\n\n  {chat} --url {url}\n\n"
        f"Logs are in {folder}. Ctrl-C ends everything."
    )


def command_path(name: str = "mini-infer") -> str:
    """Returns how to call one of our commands from here: by its bare name only if the shell finds this very one."""
    beside = Path(sys.executable).parent / name
    if not beside.exists() or shutil.which(name) == str(beside):
        return name
    here = Path.cwd()
    return str(beside.relative_to(here)) if beside.is_relative_to(here) else str(beside)


async def _follow_file(path: Path, changed: Callable[[], None]) -> None:
    version = file_version(path)
    while True:
        await asyncio.sleep(FILE_POLL_S)
        if (latest := file_version(path)) not in {version, None}:
            version = latest
            _print_line(f"{path} was edited")
            changed()


async def _follow_logs(folder: Path) -> None:
    offsets: dict[Path, int] = {}
    while True:
        _print_news(folder, offsets)
        await asyncio.sleep(0.3)


def _print_news(folder: Path, offsets: dict[Path, int]) -> None:
    """Prints whole lines that processes wrote since the last call, with their names before them."""
    for log in sorted(folder.glob("*.log")):
        with log.open("rb") as file:
            file.seek(offsets.get(log, 0))
            complete, newline, _ = file.read().rpartition(b"\n")
        offsets[log] = offsets.get(log, 0) + len(complete) + len(newline)
        for line in complete.decode(errors="replace").splitlines():
            _print_line(f"[{log.stem}] {line}")


def _signals(ended: asyncio.Event) -> "asyncio.Queue[int]":
    """Sets `ended` at the first signal, and queues every later one."""
    later: asyncio.Queue[int] = asyncio.Queue()

    def arrived(number: int) -> None:
        if ended.is_set():
            later.put_nowait(number)
        ended.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, arrived, number)
    return later


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the folder for this process: a second `up` of the same service would fight over its files."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UpError(f"{path.parent} is in use: this service runs already, from this folder") from None
        yield


def _require_installed() -> None:
    for module, extra in ((ENGINE, "engine"), (GATEWAY, "gateway")):
        if importlib.util.find_spec(module.split(".", 1)[0]) is None:
            raise UpError(f"the {extra} is not installed here: {install_hint('all')}")


def _print_line(line: str) -> None:
    print(line, flush=True)
