"""Tokenizers of foreign servers: what they claim, what they may cost."""

import msgspec

from mini_infer_contract.prompt import PromptAssets
from tests.support.fake_engine import FakeEngine, byte_assets
from tests.support.running_gateway import running_gateway, until


def with_template(template: str) -> PromptAssets:
    return byte_assets().with_chat_template(template)


async def test_a_revision_is_computed_from_the_files_when_a_server_claims_anothers() -> None:
    """Whoever claims another team's hash for a template of its own costs itself its exact routing, whoever comes first."""
    honest = byte_assets()
    forged = msgspec.structs.replace(with_template("{{ raise_exception('poisoned') }}"), revision=honest.revision)
    async with FakeEngine("thief", model="t") as thief, FakeEngine("victim") as victim:
        thief.assets = forged
        async with running_gateway(thief.endpoint) as gateway:
            states = gateway.app.fleet.endpoints
            await until(lambda: states["thief"].subscriber.asked)
            gateway.source.publish_endpoints(thief.endpoint, victim.endpoint)
            await until(lambda: states["victim"].index_kind(gateway.app._clock()) == "exact")
            assert states["thief"].subscriber.assets_revision == ""
            async with gateway.chat("hi") as response:
                assert response.status == 200
                assert int(response.headers["x-mini-infer-prompt-tokens"]) > 0
