"""What clients send to end, freeze or grow an engine by its grammars, over HTTP: each costs its own request."""

import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.engine.server.dry_server import DryServer, children_of
from tests.support.hostile_grammars import LINKS, PRIME, chain, costly, rules_in_a_row, schemas, terminals_in_a_row

GROWTH_BYTES = 100 << 20
"""By which an engine may grow until its caches are full: less than what one of these schemas took at 9d998ffe."""
HEALTHY = {"type": "object", "properties": {"x": {"enum": [1, 20]}}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine() -> Iterator[DryServer]:
    with DryServer() as server:
        assert send_request(server, response_format=of_schema(HEALTHY)).status_code == 200
        yield server


def of_schema(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}


def send_request(server: DryServer, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hello"}]
    return server.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 40} | fields)


def tool(schema: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}} | schema}
    return {"tools": [{"type": "function", "function": function | {"strict": True}}]}


def resident_bytes(server: DryServer) -> int:
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (server.process.pid, server.core_pid))
    return sum(pages) * resource.getpagesize()


def cpu_of_all_s(server: DryServer) -> float:
    """Returns processor seconds of the server and of what tries grammars, ended processes included."""
    ticks = 0
    for pid in (server.process.pid, *server.core_pids, server.prover_pid, *children_of(server.prover_pid)):
        with suppress(FileNotFoundError, ProcessLookupError):  # its time is its parent's by now
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def refused(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text[:500]
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("length", [1000, 3000])
def test_a_schema_is_refused_when_its_definitions_form_a_long_chain(engine: DryServer, link: Any, length: int) -> None:
    schema = chain(link, length)
    core = engine.core_pid
    definitions = {"$defs": schema["$defs"]}
    structured: list[dict[str, Any]] = [
        {"response_format": of_schema(schema)},
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}},
        tool(definitions),
    ]
    for fields in structured:
        refused(send_request(engine, **fields))
    assert engine.core_pid == core
    assert send_request(engine, response_format=of_schema(HEALTHY)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"grammar": rules_in_a_row(3000)}},
        {"structured_outputs": {"grammar": terminals_in_a_row(4000)}},
        {"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}},
        {"structured_outputs": {"regex": "(" * 200 + "a" + "){1,9}" * 200}},
        {"response_format": of_schema(costly(PRIME))},
        {"response_format": of_schema({"type": "object", "properties": {f"p{index}": {} for index in range(5000)}})},
        {"response_format": of_schema({"properties": {"a": {"type": "string", "pattern": "[" * 9000}}})},
    ],
    ids=["rules", "terminals", "groups", "repetitions", "multipleOf", "properties", "pattern"],
)  # fmt: skip
def test_a_grammar_is_refused_when_it_needs_too_much_time_or_memory(engine: DryServer, fields: dict[str, Any]) -> None:
    started = engine.cpu_s
    assert "cannot be enforced" in refused(send_request(engine, **fields))
    first_s = engine.cpu_s - started
    before = engine.metric("mini_infer_engine_grammar_workers_ended_total")
    started = engine.cpu_s
    refused(send_request(engine, **fields))
    assert engine.metric("mini_infer_engine_grammar_workers_ended_total") == before, "it is remembered"
    assert engine.cpu_s - started < max(first_s, 5)


def test_a_healthy_client_is_not_delayed_when_others_send_costly_schemas(engine: DryServer) -> None:
    """24 of them: at 9d998ffe each took 160 MB for good, and other structured requests waited for 45 s."""
    before = resident_bytes(engine)
    hostile: list[dict[str, Any]] = []
    for index in range(8):  # beyond a limit, beyond a worker's memory, and as much as is served
        many = {f"p{number}": {"type": "string", "maxLength": number + index} for number in range(1000)}
        hostile += [
            {"response_format": of_schema(costly(PRIME + 2 * index))},
            {"structured_outputs": {"grammar": "start: " + " ".join(['"a"?'] * (20_000 + index))}},
            {"response_format": of_schema({"type": "object", "properties": many})},
        ]
    waits: list[float] = []
    with ThreadPoolExecutor(24) as threads:
        answers = [threads.submit(send_request, engine, **fields) for fields in hostile]
        for index in range(6):
            healthy = HEALTHY | {"properties": {"x": {"enum": [1, 20 + index]}}}
            started = cpu_of_all_s(engine)
            assert send_request(engine, response_format=of_schema(healthy)).status_code == 200
            waits.append(cpu_of_all_s(engine) - started)
    assert {answer.result().status_code for answer in answers} <= {200, 400}
    assert sorted(waits)[len(waits) // 2] < 5, "processor seconds: a busy machine takes no more of them"
    assert resident_bytes(engine) - before < GROWTH_BYTES


def test_only_its_own_request_fails_when_a_grammar_worker_is_killed(engine: DryServer) -> None:
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.001):
            for pid in children_of(engine.prover_pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        large = {"type": "object", "properties": {f"q{number}": {"type": "string"} for number in range(1000)}}
        answer = send_request(engine, response_format=of_schema(large))
    finally:
        ended.set()
        killer.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "grammar_check_lost")
    assert "retry-after" in answer.headers
    assert send_request(engine, response_format=of_schema(HEALTHY | {"title": "another"})).status_code == 200


def test_the_grammar_process_is_restarted_when_it_is_killed(engine: DryServer) -> None:
    os.kill(engine.prover_pid, signal.SIGKILL)
    codes = [
        send_request(engine, response_format=of_schema(HEALTHY | {"title": str(index)})).status_code
        for index in range(2)
    ]
    assert codes[1] == 200
    assert codes[0] in (200, 503)


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("name", ["path", "password", "int32", "uri-reference", "x" * 500])
def test_a_schemas_format_is_ignored_when_it_is_an_annotation(
    engine: DryServer, name: str, strict: bool | None
) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": name, "maxLength": 5}}}
    schema |= {"required": ["x"], "additionalProperties": False}
    answer = send_request(engine, response_format=of_schema(schema, strict))
    assert answer.status_code == 200, answer.text
    assert set(json.loads(answer.json()["choices"][0]["message"]["content"])) == {"x"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas())
def test_random_schemas_are_served_or_refused_and_the_engine_lives(engine: DryServer, schema: dict[str, Any]) -> None:
    core = engine.core_pid
    answer = send_request(engine, response_format=of_schema(schema), max_tokens=20)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "response_format"
        assert "any further" not in answer.text, "it ended in its middle"
    assert engine.core_pid == core


def test_engine_memory_is_flat_when_many_grammars_are_served(engine: DryServer) -> None:
    def serve(first: int, count: int) -> None:
        for index in range(first, first + count):
            pattern = f"^({'|'.join(f'{index}-{part}' for part in range(60))})$"
            assert (
                send_request(engine, response_format=of_schema({"type": "string", "pattern": pattern})).status_code
                == 200
            )

    serve(0, 150)  # caches are full then
    before = resident_bytes(engine)
    serve(150, 150)
    assert resident_bytes(engine) - before < 16 << 20
