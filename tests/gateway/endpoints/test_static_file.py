"""The endpoints file: both formats, replacement, and what a bad one does."""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from mini_infer_gateway.endpoints.base import Listed
from mini_infer_gateway.endpoints.static_file import EndpointsFileError, StaticFile, listed_in, read_endpoints
from tests.support.running_gateway import until

GOOD = {"endpoints": [{"name": "a", "url": "http://127.0.0.1:1", "model": "m"}]}


def test_endpoints_file_reads_the_same_when_written_as_json_or_yaml(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps(GOOD))
    (tmp_path / "e.yaml").write_text("endpoints:\n- name: a\n  url: http://127.0.0.1:1\n  model: m\n")
    assert read_endpoints(tmp_path / "e.json") == read_endpoints(tmp_path / "e.yaml")


def test_an_endpoint_is_not_ready_when_the_file_marks_it_draining(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps({"endpoints": [{**GOOD["endpoints"][0], "draining": True}]}))
    assert [listed.ready for listed in listed_in(read_endpoints(path))] == [False]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "e.yaml"),
        ("endpoints: [{name: a, url: 'http://x'}]", "model"),
        ("endpoints: [{name: a, url: 'http://x', model: 1}]", "Expected `str`"),
        ("endpoints: [{name: a, url: 'http://x', model: m, revision: 2026-13-45}]", "month"),
        ("endpoints: " + "9" * 5000, "digits"),
        ("[" * 5000 + "]" * 5000, "e.yaml"),
        ("endpoints: [{name: a, url: 'x:1', model: m}]", "must be http://host:port"),
        ("endpoints: [{name: a, url: 'http://h:99999', model: m}]", "Port out of range"),
        ("endpoints: [{name: a, url: 'http://[::1', model: m}]", "Invalid IPv6 URL"),
        ("endpoints: [{name: a, url: 'http://h:1', events: 'h:2', model: m}]", "must be tcp://host:port"),
        ("endpoints: [{name: a, url: 'http://h:1', events: 'tcp://h', model: m}]", "must be tcp://host:port"),
        ("endpoints: [{name: a, url: 'http://h:1', replay: 'tcp://h:70000', model: m}]", "Port out of range"),
        ("endpoints: [{name: a, url: 'http://h:1', transfer: 'http://h:1', model: m}]", "transfer 'http://h:1'"),
        (
            "endpoints: [{name: a, url: 'http://x', model: m}, {name: a, url: 'http://y', model: m}]",
            "'a' is used twice",
        ),
    ],
)
def test_the_error_names_file_and_fault_when_the_endpoints_file_is_invalid(
    content: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(content)
    with pytest.raises(EndpointsFileError, match=r"e\.yaml") as error:
        read_endpoints(path)
    assert complaint in str(error.value)


async def test_the_last_valid_list_is_kept_when_the_endpoints_file_becomes_invalid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_gateway.endpoints.static_file.POLL_S", 0.01)
    caplog.set_level(logging.ERROR)
    path = tmp_path / "e.json"
    lists: list[Sequence[Listed]] = []
    task = asyncio.create_task(StaticFile(str(path)).run(lists.append))

    def replace(content: str) -> None:
        (tmp_path / "new").write_text(content)
        (tmp_path / "new").rename(path)

    try:
        await until(lambda: "waiting for a good one" in caplog.text)
        replace(json.dumps(GOOD))
        await until(lambda: len(lists) == 1)
        replace("{")
        await until(lambda: "the last good list stays" in caplog.text)
        await asyncio.sleep(0.05)
        assert len(lists) == 1
        assert len(caplog.records) == 2
        replace(json.dumps({"endpoints": []}))
        await until(lambda: len(lists) == 2)
        assert list(lists[1]) == []
    finally:
        task.cancel()
