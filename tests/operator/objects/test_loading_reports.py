"""An engine's report of its own start becomes one Event, whatever it answers."""

import asyncio
from datetime import UTC, datetime

import aiohttp
import pytest

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_operator.objects import engine_starts
from mini_infer_operator.objects.engine_starts import EngineStarts
from mini_infer_operator.objects.loading_reports import LoadingReports
from tests.operator.objects.test_model_implementations import server_of
from tests.operator.objects.test_start_stages import BEGIN, pod

SERVICE = ("default", "demo")
START = b'"start_seconds": {"imports": 3.14, "memory plan": 1}'
ANSWERS = {
    "a peer's weights": (
        b'{"status": "ready", %s, "weights": {"source": "peer", "peer": "p:1", "num_bytes": 15200000000}}' % START,
        "imports 3.1 s, memory plan 1.0 s; 15.2 GB of weights from a peer",
    ),
    "no weights": (b"{%s}" % START, "imports 3.1 s, memory plan 1.0 s"),
    "an older engine's": (b'{"status": "ready"}', None),
    "another server's": (b"<html>", None),
    "a negative time": (b'{"start_seconds": {"imports": -1}}', None),
    "no number": (b'{"start_seconds": {"imports": NaN}}', None),
    "control sequences": (b'{"start_seconds": {"\\u001b[31m": 1}}', None),
    "many stages": (b'{"start_seconds": {%s}}' % b",".join(b'"%s": 1' % (b"a" * n) for n in range(1, 18)), None),
    "another source": (b'{%s, "weights": {"source": "you"}}' % START, None),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_stages_become_one_sentence_or_none_when_an_engine_answers_anything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, expected = ANSWERS[name]
    changed: list[tuple[str, str]] = []
    async with server_of(lambda: answer) as (url, paths), aiohttp.ClientSession(auto_decompress=False) as session:
        monkeypatch.setattr(engine_starts, "pod_url", lambda pod, port: url if port == HTTP_PORT else None)
        reports = LoadingReports(session, changed.append)
        starts = EngineStarts(lambda stages: None, reports)
        starts.restart(BEGIN)
        assert len(starts.observe(SERVICE, [pod("1"), pod("2")])) == 1
        await asyncio.gather(*reports._queries.values())
        assert changed == ([] if expected is None else [SERVICE])
        sentences = starts.observe(SERVICE, [pod("1"), pod("2")])
        assert sentences == ([] if expected is None else [f"stages of that engine: {expected}"])
        assert starts.observe(SERVICE, [pod("1"), pod("2")]) == []
        await reports.close()
    assert paths == ["/readyz"], "one engine is asked, once"


async def test_nothing_is_announced_when_a_service_was_forgotten() -> None:
    async with server_of(lambda: ANSWERS["no weights"][0]) as (url, _), aiohttp.ClientSession() as session:
        reports = LoadingReports(session, lambda service: None)
        reports.ask(SERVICE, url)
        await asyncio.gather(*reports._queries.values())
        starts = EngineStarts(lambda stages: None, reports)
        starts.restart(datetime.now(UTC))
        starts.forget(SERVICE)
        assert starts.observe(SERVICE, []) == []
        await reports.close()
