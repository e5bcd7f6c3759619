"""How many admitted requests meet their latency targets above capacity: by arrival (fcfs), and by slack (slo).

    python benchmarks/slo_scheduling.py --models qwen2.5-7b --out FILE
    python benchmarks/slo_scheduling.py --models tiny --device cpu --chat-prompt 32 --doc-prompt 1024 --out FILE
    python benchmarks/slo_scheduling.py --models modelled --out FILE

Chats and long documents arrive at random times, `--load` times as many as one loaded model can serve, the same under
each policy. Capacity is measured first: all requests at once. Targets are multiples of what is measured on the idle
engine, unless they are given in milliseconds. Times count from the moment at which a request should have been sent.
The model "modelled" has no weights: each pass takes the time that --pass-ms and its kind say, by a clock of its own.
"""

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from common.budget import Budget
from common.engines import SETTINGS, SMOKE_MODEL, SMOKE_SETTINGS
from common.isolation import isolated
from common.models import model_folder, vocabulary
from common.report import log_line, make_parser, percentile, print_table, save, words
from common.targets import Target, verdict_cells

if TYPE_CHECKING:
    from mini_infer_engine.core.batch import Batch
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.core.request import LatencyTargets, Request
    from mini_infer_engine.core.result import PassResult

MODELLED = "modelled"
POLICIES = ("fcfs", "slo")
KINDS = ("chat", "doc")
_SHARE = "admitted that meet their targets"
_TARGETS = {_SHARE: Target(0.95, at_least=True)}
_DOC_TTFT, _CHAT_TTFT, _INTERVAL = 8.0, 4.0, 3.0
"""Default targets as multiples: of a document's time to its first token alone, and of a full batch's token interval."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one run. Prompts and outputs of chats vary from half to one and a half of these lengths."""

    seconds: float = 60.0
    """Time over which they arrive."""
    load: float = 1.5
    """Arrivals a second, as a multiple of what the engine can serve."""
    doc_share: float = 0.1
    chat_prompt: int = 300
    chat_output: int = 150
    doc_prompt: int = 8192
    doc_output: int = 100
    probes: int = 128
    """Requests that are sent at once to measure capacity."""
    max_num_seqs: int = 128
    chat_ttft_ms: float = 0.0
    doc_ttft_ms: float = 0.0
    itl_ms: float = 0.0
    vocabulary: int = 150_000
    pass_ms: float = 8.0
    """Of "modelled": a pass; the next two are what each decode row and each prompt token add to it."""
    row_ms: float = 0.06
    prompt_token_ms: float = 0.05


SMOKE = Load(
    seconds=1.0, chat_prompt=12, chat_output=6, doc_prompt=200, doc_output=6, probes=8, max_num_seqs=8, vocabulary=4000
)


class Clock:
    """The machine's clock, with the names of the module `time`."""

    monotonic, time = staticmethod(time.monotonic), staticmethod(time.time)

    def wait_until(self, due_s: float) -> None:
        """Returns at this monotonic time."""
        time.sleep(max(0.0, due_s - time.monotonic()))


class VirtualClock(Clock):
    """A clock that stands still but for what `ModelledRunner` adds."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.monotonic = self.time = lambda: self.now_s

    def wait_until(self, due_s: float) -> None:
        """Goes to this time."""
        self.now_s = max(self.now_s, due_s)


class ModelledRunner:
    """A runner without a model: a launch moves the clock on by the pass's time, up to a tenth of it more by chance."""

    page_size, max_speculative_rows = 128, 0

    def __init__(self, load: Load, clock: VirtualClock) -> None:
        from mini_infer_engine.config.model.kv_groups import UNIFORM
        from mini_infer_engine.core.batch import NO_SWAP

        self.max_model_len = load.doc_prompt + load.doc_output + 1
        self.num_pages = load.max_num_seqs * -(-self.max_model_len // self.page_size)
        self.kv_cache, self.swap_space, self.host_memory = UNIFORM, NO_SWAP, None
        self.eviction_obstacle = None
        self._load, self._clock, self._dice = load, clock, random.Random(5)

    def refuses(self, request: "Request") -> None:
        """Refuses nothing."""

    def launch(self, batch: "Batch") -> list[list[int]]:
        """Returns the same token for each row that samples."""
        load, rows = self._load, batch.rows
        prompt_tokens = sum(row.count for row in rows[batch.num_decodes :])
        pass_ms = load.pass_ms + load.row_ms * batch.num_decodes + load.prompt_token_ms * prompt_tokens
        self._clock.now_s += pass_ms / 1000 * (1 + 0.1 * self._dice.random())
        return [[7] if row.sampling is not None else [] for row in rows]

    def collect(self, handle: list[list[int]]) -> "PassResult":
        """Returns the tokens of a launched pass."""
        from mini_infer_engine.core.result import PassResult

        return PassResult(list(handle))


@dataclass(slots=True)
class Sent:
    """One request and what became of it. Times are monotonic."""

    kind: str
    request: "Request"
    due_s: float
    """Time at which it is to be sent."""
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    refused_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds to its first token."""
        return self.first_s - self.due_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between its tokens."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)

    @property
    def meets(self) -> bool:
        """True if it has met each of its targets."""
        targets = self.request.targets
        met_first = targets.ttft_ms is None or 1000 * self.ttft_s <= targets.ttft_ms
        return met_first and (targets.itl_ms is None or 1000 * self.itl_s <= targets.itl_ms)


def measure(settings: dict[str, Any], load: Load) -> Iterator[dict[str, Any]]:
    """Yields the capacity, and then the figures of each policy; one model for all, a new engine around it for each."""
    from mini_infer_engine.config.options.settings import EngineSettings
    from mini_infer_engine.core import engine as engine_module
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.core.request import LatencyTargets

    if settings["model"] == MODELLED:
        settings |= {"step_depth": 0}
        clock = engine_module.time = VirtualClock()
        runner = ModelledRunner(load, clock)
    else:
        from mini_infer_engine.runtime.model_runner import load_runner

        clock, runner = Clock(), load_runner(EngineSettings(**settings))

    def engine(policy: str) -> Engine:
        asked = EngineSettings(**settings | {"scheduling_policy": policy})
        return Engine(asked, runner, (), runner.max_model_len, "", record_events=False)

    probe = engine("fcfs")
    run(probe, at_once(load, 1, clock), clock)
    served = run(probe, at_once(load, 2, clock), clock)
    capacity = len(served) / (max(one.last_s for one in served) - served[0].due_s)
    alone_s = run(probe, [sent_of(load, "doc", random.Random(3), clock.monotonic(), "alone")], clock)[0].ttft_s
    interval_s = median(one.itl_s for one in full_batch(probe, load, clock))
    itl_ms = load.itl_ms or 1000 * _INTERVAL * interval_s
    targets = {
        "chat": LatencyTargets(ttft_ms=load.chat_ttft_ms or 1000 * _CHAT_TTFT * alone_s, itl_ms=itl_ms),
        "doc": LatencyTargets(ttft_ms=load.doc_ttft_ms or 1000 * _DOC_TTFT * alone_s, itl_ms=itl_ms),
    }
    yield {
        "capacity": {
            "requests/s": capacity,
            "document alone, ttft ms": 1000 * alone_s,
            "full batch, interval ms": 1000 * interval_s,
            **{f"{kind} ttft ms": targets[kind].ttft_ms for kind in KINDS},
            "itl ms": itl_ms,
        }
    }
    for policy in POLICIES:
        measured = engine(policy)
        run(measured, at_once(load, 1, clock), clock)
        found = figures(run(measured, arrivals(load, load.load * capacity, targets, clock), clock))
        log_line(f"  {policy}: {found[_SHARE]:.3f} of {found['admitted']} admitted, {found['refused']} refused")
        yield {policy: found}


def sent_of(
    load: Load, kind: str, dice: random.Random, due_s: float, name: str, targets: "LatencyTargets | None" = None
) -> Sent:
    """Returns one request of random tokens."""
    from mini_infer_engine.core.request import NO_TARGETS, Request, SamplingParams

    prompt, output = (getattr(load, f"{kind}_{part}") for part in ("prompt", "output"))
    if kind == "chat":
        prompt, output = (dice.randint(max(1, length // 2), length * 3 // 2) for length in (prompt, output))
    request = Request(
        request_id=name,
        prompt_token_ids=[dice.randrange(load.vocabulary) for _ in range(prompt)],
        sampling=SamplingParams(temperature=0, max_tokens=output, ignore_eos=True),
        targets=NO_TARGETS if targets is None else targets,
    )
    return Sent(kind, request, due_s)


def kinds(load: Load, dice: random.Random, count: int) -> list[str]:
    """Returns the kinds of so many requests, whose documents are exactly their share."""
    num_docs = max(1, round(load.doc_share * count))
    chosen = ["doc"] * num_docs + ["chat"] * (count - num_docs)
    dice.shuffle(chosen)
    return chosen


def at_once(load: Load, seed: int, clock: Clock) -> list[Sent]:
    """Returns requests without targets that are all sent now."""
    dice, now_s = random.Random(seed), clock.monotonic()
    made = [sent_of(load, kind, dice, now_s, f"r{i}") for i, kind in enumerate(kinds(load, dice, load.probes))]
    return [replace(one, due_s=clock.monotonic()) for one in made]


def full_batch(engine: "Engine", load: Load, clock: Clock) -> Sequence[Sent]:
    """Runs as many chats as there are slots and nothing else, and returns them."""
    dice, now_s = random.Random(4), clock.monotonic()
    return run(engine, [sent_of(load, "chat", dice, now_s, f"r{index}") for index in range(load.max_num_seqs)], clock)


def arrivals(load: Load, rate: float, targets: "dict[str, LatencyTargets]", clock: Clock) -> list[Sent]:
    """Returns requests that arrive at random times from a moment after their making on, the same in every run."""
    import msgspec

    dice = random.Random(0)
    count = max(2, round(load.seconds * rate))
    made = [
        sent_of(load, kind, dice, 0.0, f"r{index}", targets[kind])
        for index, kind in enumerate(kinds(load, dice, count))
    ]
    due_s = clock.monotonic()
    for one in made:
        due_s += dice.expovariate(rate)
        one.due_s = due_s
        one.request = msgspec.structs.replace(
            one.request, targets=msgspec.structs.replace(one.request.targets, since_s=due_s)
        )
    return made


def run(engine: "Engine", requests: Sequence[Sent], clock: Clock) -> Sequence[Sent]:
    """Sends each request when it is due, steps the engine until all have ended, and returns them with their times."""
    by_id = {one.request.request_id: one for one in requests}
    waiting = list(reversed(requests))
    while waiting or engine.has_work:
        now_s = clock.monotonic()
        while waiting and waiting[-1].due_s <= now_s:
            engine.add(waiting.pop().request)
        if not engine.has_work:
            clock.wait_until(waiting[-1].due_s)
            continue
        outputs = engine.step()
        now_s = clock.monotonic()
        for output in outputs:
            one = by_id[output.request_id]
            if output.retry_after_s is not None:
                one.refused_s = now_s
            elif output.finish_reason == "error":
                raise RuntimeError(output.error)
            elif output.token_ids:
                one.first_s, one.last_s = one.first_s or now_s, now_s
                one.num_tokens += len(output.token_ids)
    return requests


def figures(requests: Sequence[Sent]) -> dict[str, Any]:
    """Returns what is shown of one run."""
    admitted = [one for one in requests if not one.refused_s]
    refused = [one for one in requests if one.refused_s]
    took_s = max((one.last_s for one in admitted), default=requests[-1].due_s) - requests[0].due_s
    met = [one for one in admitted if one.meets]
    found: dict[str, Any] = {
        "sent": len(requests),
        "admitted": len(admitted),
        "refused": len(refused),
        _SHARE: len(met) / max(1, len(admitted)),
        "sent that meet their targets": len(met) / len(requests),
        "met requests/s": len(met) / took_s,
        "output tokens/s": sum(one.num_tokens for one in admitted) / took_s,
        "all tokens/s": sum(one.num_tokens + len(one.request.prompt_token_ids) for one in admitted) / took_s,
        "refused after, mean ms": 1000 * mean(one.refused_s - one.due_s for one in refused) if refused else None,
    }
    for kind in KINDS:
        of_kind = [one for one in admitted if one.kind == kind]
        found[f"{kind}s refused"] = sum(one.kind == kind for one in refused)
        for share in (50, 99):
            found[f"{kind} ttft p{share} ms"] = 1000 * percentile([one.ttft_s for one in of_kind], share / 100)
            found[f"{kind} itl p{share} ms"] = 1000 * percentile([one.itl_s for one in of_kind], share / 100)
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=words, default=words("qwen2.5-7b"), metavar="NAME,...")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--token-budget", type=int, default=0, metavar="TOKENS", help="0: the device's default")
    for name, default in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    load = SMOKE if options.smoke else Load(**{name: getattr(options, name) for name in asdict(Load())})
    shown: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"load": asdict(load), "policies": shown}
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for model in [SMOKE_MODEL, MODELLED] if options.smoke else options.models:
            if not budget.allows("a model"):
                continue
            log_line(model)
            folder = model if model == MODELLED else model_folder(model, Path(root))
            known = load if model == MODELLED else replace(load, vocabulary=vocabulary(folder, load.vocabulary))
            settings: dict[str, Any] = SETTINGS | {"model": folder, "enable_prefix_caching": False}
            if options.smoke or options.device == "cpu":
                settings |= SMOKE_SETTINGS
            if not options.smoke and options.device == "cpu":
                settings |= {"max_model_len": load.doc_prompt + load.doc_output + 1, "kv_cache_memory": 1 << 30}
            settings |= {
                "max_num_seqs": load.max_num_seqs,
                "max_num_batched_tokens": options.token_budget or (8192 if model == MODELLED else None),
            }
            found = shown.setdefault(model, {})

            def note(part: dict[str, Any]) -> None:
                found.update(part)
                save(options.out, result)

            with budget.spending("a model"):
                failed |= "error" in isolated(measure, settings, known, timeout_s=budget.left_s, note=note)
            show(model, found)
    return int(failed)


def show(model: str, found: dict[str, dict[str, Any]]) -> None:
    """Prints capacity and targets, and a column for each policy."""
    if "capacity" in found:
        print_table([model, "measured"], [[name, value] for name, value in found["capacity"].items()])
    measured = [policy for policy in POLICIES if policy in found]
    rows: list[list[Any]] = []
    for name in found[measured[0]] if measured else ():
        values = [found[policy][name] for policy in measured]
        target = _TARGETS.get(name)
        rows.append([name, *values, target and str(target)])
        if target:
            rows.append(["", *(verdict_cells(target, value)[1] for value in values), None])
    print_table([model, *measured, "target"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
