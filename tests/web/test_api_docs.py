"""/docs in a real browser, at gateway and engine: Swagger UI from files of the server alone lists an operation."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_web.api_docs import DOCS_PATHS, docs_file
from tests.engine.server.dry_server import DryServer
from tests.support.running_gateway import running_gateway, until

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no browser: apt-get install chromium")


@pytest.fixture(scope="module")
def engine() -> Iterator[DryServer]:
    with DryServer("--dry-run-step-ms", "1") as server:
        yield server


def shown(url: str, profile: Path) -> str:
    """The page's document once its scripts have run."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}")
    command = [str(BROWSER), *flags, "--virtual-time-budget=30000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.mark.parametrize("path", DOCS_PATHS)
def test_the_policy_allows_no_inline_script_and_no_other_host(path: str) -> None:
    file = docs_file(path)
    policy = dict(file.headers)[b"content-security-policy"]
    assert b"script-src 'self';" in policy
    assert b"http" not in policy
    assert file.body


@needs_browser
def test_a_browser_lists_the_operations_when_it_opens_the_docs_of_an_engine(engine: DryServer, tmp_path: Path) -> None:
    page = shown(engine.url + "/docs", tmp_path)
    assert "/v1/chat/completions" in page
    assert "/invocations" in page


@needs_browser
async def test_a_browser_lists_the_operations_when_it_opens_the_docs_of_a_gateway(
    engine: DryServer, tmp_path: Path
) -> None:
    async with running_gateway(Endpoint(name="e", model="dry", url=engine.url, revision="r")) as gateway:
        await until(lambda: gateway.app.fleet.is_ready)
        page = await asyncio.to_thread(shown, gateway.url + "/docs", tmp_path)
    assert "/v1/chat/completions" in page


async def test_favicon_is_served_without_a_warning(engine: DryServer, caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway() as gateway, httpx.AsyncClient() as client:
        icon = await client.get(gateway.url + "/favicon.ico")
        assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
        assert (await client.get(engine.url + "/favicon.ico")).status_code == 204
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "favicon" in record.message]
