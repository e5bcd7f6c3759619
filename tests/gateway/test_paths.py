"""Which paths go on to engines: what other servers answer goes through by load, and engines' own pages do not."""

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from mini_infer_gateway.paths import FORM_PATHS, OTHER_SERVERS_PATHS, SCORING_PATHS
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway


async def test_scores_and_paths_of_other_servers_are_forwarded_by_load() -> None:
    async with (
        FakeEngine("a", events=False, assets=False) as a,
        FakeEngine("b", events=False, assets=False) as b,
        running_gateway(a.endpoint, b.endpoint) as gateway,
    ):
        a.chunk_delay_s = b.chunk_delay_s = 0.2

        async def send_request(path: str) -> Any:
            async with gateway.client.post(gateway.url + path, json={"model": "m", "query": path}) as response:
                assert response.status == 200
                return await response.json()

        for path in (*SCORING_PATHS, *OTHER_SERVERS_PATHS):
            answers = await asyncio.gather(send_request(path), send_request(path))
            assert [answer["path"] for answer in answers] == [path, path]
            assert [answer["asked"]["query"] for answer in answers] == [path, path]
            assert {answer["by"] for answer in answers} == {"a", "b"}, "the second goes where the first is not"


@pytest.mark.parametrize(
    "path", ["/drain", "/role", "/kv_snapshot", "/prompt_assets", "/reset_prefix_cache", "/v1/files"]
)
async def test_internal_engine_paths_are_not_reachable(path: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        async with gateway.client.post(gateway.url + path, json={"model": "m"}) as response:
            assert response.status == 404
        assert not engine.bodies


@pytest.mark.parametrize("path", FORM_PATHS)
async def test_multipart_forms_are_forwarded_with_their_model(path: str) -> None:
    audio = bytes(range(256)) * 500

    async def sent(model: str, **headers: str) -> tuple[int, Any]:
        form = aiohttp.FormData({"model": model, "language": "de"})
        form.add_field("file", audio, filename="a.wav")
        async with client.post(gateway.url + path, data=form, headers=headers) as response:
            return response.status, await response.json()

    async with (
        FakeEngine("a", model="org/speech", events=False, assets=False) as engine,
        running_gateway(msgspec.structs.replace(engine.endpoint, service="ns/speech")) as gateway,
        aiohttp.ClientSession() as client,
    ):
        for model in ("org/speech", "ns/speech"):
            reported = {"model": "org/speech", "language": "de", "bytes": len(audio)}
            assert await sent(model, authorization="Bearer any") == (200, reported)
        assert (await sent("nobody's", authorization="Bearer any"))[0] == 404
        assert (await sent("org/speech"))[0] == 415, "any web page may send it"


async def test_a_form_is_refused_when_a_web_page_could_send_it() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        async with gateway.client.post(gateway.url + "/v1/rerank", data=b"--x--", headers=headers) as response:
            assert response.status == 415
