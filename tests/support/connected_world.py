"""An engine whose KV connector talks to peers of every kind: quick, slow, hung, gone, and hostile ones."""

from dataclasses import dataclass, field

import msgspec

from mini_infer_engine.core.request import KVSource, Request, SamplingParams
from mini_infer_engine.kv_transfer.connector import TransferConnector
from mini_infer_engine.kv_transfer.protocol import events
from tests.support.connected_engine import PEER, FakeWorker
from tests.support.engine_world import World
from tests.support.fake_runner import VOCABULARY, cell, expected_tokens

REASONS = ("late", "peer_lost", "refused", "transport")


@dataclass(kw_only=True)
class ConnectedWorld(World):
    """Beside clients there are peers, which want prompts and reads, and give some."""

    worker: FakeWorker
    connector: TransferConnector
    unsettled: list[int] = field(default_factory=list)
    """Jobs whose peers hang: they have given nothing, and may still write."""
    unread: list[events.Send] = field(default_factory=list)
    granted: list[events.Grant] = field(default_factory=list)
    requested: dict[str, Request] = field(default_factory=dict)
    """Prompts of peers, by key."""
    num_consumed: int = 0
    num_sent: int = 0
    num_requested: int = 0

    # -- Clients of trusted proxies

    def add_receiving(self) -> None:
        """A prompt that is to come from a peer."""
        how = self.draw.choice(("prefill", "prefill", "held", "prefix"))
        source = KVSource(address=PEER, how=how, retained_id="x" if how == "held" else "")
        self.start(msgspec.structs.replace(self.draw_request(), kv_source=source))

    def add_retained(self) -> None:
        """A prompt that is to be retained for a peer."""
        request = self.draw_request()
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1, min_tokens=0, ignore_eos=True)
        self.start(msgspec.structs.replace(request, sampling=sampling, retains_kv=True))

    # -- Peers

    def request_prefill(self) -> None:
        """A prompt of a peer, often one that cannot be; sometimes the peer is gone before the next step."""
        draw, key = self.draw, f"peer/{self.num_requested}"
        request = msgspec.structs.replace(self.draw_request(), request_id="theirs#1", resumed_token_ids=[])
        request = msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, min_tokens=0, max_tokens=draw.choice((1, 30)))
        )
        match draw.randrange(6):
            case 0:
                request = msgspec.structs.replace(request, prompt_token_ids=[1] * draw.choice((0, self.max_model_len)))
            case 1:
                request = msgspec.structs.replace(request, prompt_token_ids=[draw.choice((-1, 1 << 40)), 2])
            case 2:
                source = KVSource(address="tcp://third:1", how="prefill")
                request = msgspec.structs.replace(request, retains_kv=True, kv_source=source)
        self.num_requested += 1
        self.requested[key] = request
        self.worker.send_news(events.PrefillRequest(key, request, 0, self.runner.page_size))
        if draw.random() < 0.3:
            self.worker.send_news(events.JobEnded(key))

    def request_read(self) -> None:
        """A read of what is retained or cached, of tokens that sometimes are none."""
        draw, key = self.draw, f"peer/{self.num_requested}"
        self.num_requested += 1
        token_ids = list(draw.choice(self.histories)) or [1]
        retained_id = draw.choice(("", "r1", *self.connector._retained))
        if draw.random() < 0.2:
            token_ids = [-1] * 40
        self.worker.send_news(events.KVRequest(key, token_ids, "", retained_id, 0))
        if draw.random() < 0.2:
            self.worker.send_news(events.JobEnded(key))

    def send_nonsense(self) -> None:
        """Events of jobs that there are not."""
        draw = self.draw
        number = draw.choice((-1, 10**9))
        self.worker.send_news(
            draw.choice(
                (
                    events.TransferDone(number, 1, 1),
                    events.TransferFailed(number, "late", ""),
                    events.Settled(number),
                    events.SendDone("nobody", number),
                    events.JobEnded("nobody"),
                    events.KVRequest("nobody", [], "", "", 0),
                    events.PrefillRequest(
                        "nobody", Request(request_id="x", prompt_token_ids=[], sampling=SamplingParams()), 0, 1
                    ),
                )
            )
        )

    def answer(self, *, hangs: float = 0.3) -> None:
        """The peers do what the engine wants of them; some hang."""
        done, self.worker.done = self.worker.done, []
        for command in done:
            match command:
                case events.Take():
                    self._take_job(command, hangs)
                case events.Cancel(job):
                    if job in self.unsettled:
                        self.unsettled.remove(job)
                        self.worker.send_news(events.Settled(job))
                case events.Send():
                    self.unread.append(command)
                case events.SendEnd(key, token_id):
                    assert token_id == expected_tokens(self._request_of(key), self.max_model_len, (0,))[0]
                    self.num_sent += 1
                case events.Grant():
                    self.granted.append(command)
                case events.Refuse():
                    pass
        if self.draw.random() >= hangs:
            self._finish_reads()

    def settle(self) -> None:
        """Peers that hung go on, or are gone."""
        self.worker.send_news(*map(events.Settled, self.unsettled))
        self.unsettled.clear()

    def expire(self) -> None:
        """All leases of retained prompts end."""
        for key in self.connector._retained_leases.ends_s:
            self.connector._retained_leases.ends_s[key] = 0.0

    def _take_job(self, take: events.Take, hangs: float) -> None:
        draw, job = self.draw, take.job
        if draw.random() < hangs:
            self.unsettled.append(job)
            self.worker.send_news(events.TransferFailed(job, draw.choice(REASONS), "it hangs"))
            return
        match draw.randrange(4):
            case 0:
                self.worker.send_news(events.TransferFailed(job, draw.choice(REASONS), "no"))
            case 1:
                self.worker.send_news(events.TransferDone(job, take.num_tokens, draw.choice((VOCABULARY, 1 << 31))))
            case _:
                self._write(take)
                first = None
                if take.source.how == "prefill":
                    first = self._first_token(take.request)
                self.worker.send_news(events.TransferDone(job, take.num_tokens, first))
                self.num_consumed += 1
        self.worker.send_news(events.Settled(job))

    def _first_token(self, request: Request) -> int:
        assert not request.resumed_token_ids, "prompts alone are taken here"
        return expected_tokens(request, self.max_model_len)[0]

    def _write(self, take: events.Take) -> None:
        """What a peer computes, into the engine's pages."""
        size, before = self.runner.page_size, 0
        for position, token in enumerate([*take.request.prompt_token_ids, *take.request.resumed_token_ids]):
            before = cell(before, token)
            if position >= take.first_token:
                self.runner._cells[take.pages[position // size]][position % size] = before

    def _request_of(self, key: str) -> Request:
        request = self.requested[key]
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=1))

    def _finish_reads(self) -> None:
        self.worker.send_news(*(events.SendDone(give.key, give.serial) for give in self.unread))
        self.worker.send_news(*(events.JobEnded(grant.key) for grant in self.granted))
        self.unread.clear()
        self.granted.clear()

    def drain(self) -> None:
        """All peers answer, and all leases end."""
        for _ in range(200 + 3 * self.max_model_len * (1 + len(self.live) + len(self.requested))):
            unfinished = self.worker.done or self.unsettled or self.unread or self.granted or self.connector._retained
            if not self.engine.has_work and not unfinished:
                break
            self.answer(hangs=0.0)
            self.settle()
            self.expire()
            self.step()
        super().drain()
        assert self.connector.stats.pinned_pages == 0
        assert self.connector.stats.open_leases == 0
