"""An engine on the fake runner with a real KV connector, and in the place of its transfer thread a list and a queue."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_transfer import KVTransferStats
from mini_infer_engine.core.request import KVSource, Output, Request, SamplingParams
from mini_infer_engine.kv_transfer.connector import TransferConnector
from mini_infer_engine.kv_transfer.estimates import Load
from mini_infer_engine.kv_transfer.protocol.events import Command, Event, Take
from mini_infer_engine.kv_transfer.worker import TransferWorker

PEER = "tcp://peer:1"
FROM_PEER = KVSource(address=PEER, how="prefill")


@dataclass
class FakeWorker:
    """What the connector sees of a `TransferWorker`."""

    events: "queue.SimpleQueue[Event]" = field(default_factory=queue.SimpleQueue)
    failure: BaseException | None = None
    load: Load = field(default_factory=Load)
    stats: KVTransferStats = field(default_factory=KVTransferStats)
    done: list[Command] = field(default_factory=list)
    """Commands of the core that no test has looked at."""
    on_take: Callable[[Take], None] = lambda take: None
    """What a peer does as soon as it is asked."""
    identity: Any = field(
        default_factory=lambda: SimpleNamespace(
            engine_id="me", memory=SimpleNamespace(layout=SimpleNamespace(tp_size=1, states=None))
        )
    )

    def do(self, command: Command) -> None:
        self.done.append(command)
        if isinstance(command, Take):
            self.on_take(command)

    def drain_wakes(self) -> None: ...

    def send_news(self, *news: Event) -> None:
        """To the core, in this order."""
        for event in news:
            self.events.put(event)

    def count(self, **changes: int) -> None:
        self.stats = replace(self.stats, **changes)  # type: ignore[arg-type]  # a test's own names


def connect(
    engine: Engine, *, lease_s: float = 30.0, has_states: bool = False, **more: Any
) -> tuple[FakeWorker, TransferConnector]:
    """Gives an engine a connector. `more` are the connector's keywords."""
    worker = FakeWorker()
    worker.identity.memory.layout.states = SimpleNamespace() if has_states else None
    connector = TransferConnector(
        cast("TransferWorker", worker),
        engine.scheduler,
        "revision",
        ("host", 1),
        lease_s=lease_s,
        falls_back=True,
        queued_tokens=lambda: 0,
        **more,
    )
    engine.kv_connector = connector
    return worker, connector


def request(name: str, num_tokens: int, max_tokens: int = 1, **more: Any) -> Request:
    """A prompt that begins like no other."""
    first = sum(map(ord, name)) % 50
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompt = [(first + n) % 50 for n in range(num_tokens)]
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, **more)


def steps(engine: Engine, count: int = 20) -> list[Output]:
    """The outputs of so many steps."""
    return [output for _ in range(count) for output in engine.step()]
