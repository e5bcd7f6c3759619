"""Series for sparklines: rates between samples, and no more than a few minutes of them."""

from mini_infer_gateway.console.history import MAX_SAMPLES, History
from mini_infer_gateway.console.request_log import RequestLog
from mini_infer_gateway.fleet.load import Load
from tests.gateway.console.traces import Streamed, ask, decision

IDLE = Load(0, 0, 0, 0.25)


def test_rates_are_of_the_time_since_the_last_sample_when_requests_have_ended() -> None:
    history = History()
    log = RequestLog()
    history.sample({"e1": IDLE, "e2": IDLE}, log.take_counts(), 0.0)
    for _ in range(4):
        ask(log, engine="e1", tokens=10)
    history.sample({"e1": Load(3, 1, 100, 0.5), "e2": IDLE}, log.take_counts(), 2.0)
    now = history.latest("e1")
    assert now is not None
    assert (now.running, now.waiting, now.queued_tokens, now.kv_usage) == (3, 1, 100, 0.5)
    assert (now.requests_per_s, now.tokens_per_s, now.hit_share) == (2.0, 20.0, 0.5)
    other = history.latest("e2")
    assert other is not None
    assert (other.requests_per_s, other.tokens_per_s, other.hit_share) == (0.0, 0.0, None)


def test_tokens_count_once_when_a_stream_goes_on_over_several_samples() -> None:
    history = History()
    log = RequestLog()
    history.sample({"e1": IDLE}, {}, 0.0)
    stream, trace = Streamed(), log.begin({"request_id": "one", "path": "/v1/chat/completions"}, 0.0)
    trace.sent(decision("e1"), 0.0, 0.0)
    trace.streams(stream)
    counted = []
    for tokens in (10, 30):
        stream.tokens = tokens
        history.sample({"e1": IDLE}, log.take_counts(), float(tokens))
        counted.append(history.samples("e1")[-1].tokens_per_s)
    stream.tokens = 35
    trace.ended({}, 31.0)
    history.sample({"e1": IDLE}, log.take_counts(), 31.0)
    assert counted == [1.0, 1.0]
    assert history.samples("e1")[-1].tokens_per_s == 5.0


def test_an_engine_is_forgotten_when_it_is_no_longer_in_the_fleet() -> None:
    history = History()
    for number in range(2 * MAX_SAMPLES):
        history.sample({"e1": IDLE, "e2": IDLE}, {}, float(number))
    assert len(history.samples("e1")) == MAX_SAMPLES
    history.sample({"e2": IDLE}, {}, 1e6)
    assert history.latest("e1") is None
    assert history.samples("e1") == []
