import pytest

from mini_infer_engine.core.request import Output, Request, SamplingParams
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core_process import messages

FROM_API_SERVER = [
    messages.Add(
        Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(stop=["x"]), noise_seed=2**63 - 1)
    ),
    messages.Abort(["a", "b"]),
    messages.SnapshotRequest(3),
    messages.Prefetch(["a", "b"], 10.0),
    messages.Hint(Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(), lease_s=-1.0, noise_seed=1)),
    messages.Stop(),
    messages.Hello(),
]
FROM_CORE = [
    messages.Ready(messages.ModelInfo(max_model_len=1, vocab_size=2, page_size=16, num_pages=4)),
    messages.StepOutputs(
        [Output(request_id="a", token_ids=[1], finish_reason="stop", stop_reason=1)], EngineStats(kv_usage=0.5)
    ),
    messages.SnapshotReply(3, b"payload"),
    messages.Failed("why"),
]


@pytest.mark.parametrize("message", FROM_API_SERVER)
def test_what_the_front_says_arrives(message: messages.ApiServerMessage) -> None:
    assert messages.decode_from_api_server(messages.encode(message)) == message


@pytest.mark.parametrize("message", FROM_CORE)
def test_what_the_core_says_arrives(message: messages.CoreMessage) -> None:
    assert messages.decode_from_core(messages.encode(message)) == message


def test_a_clients_id_is_found_again_whatever_it_holds() -> None:
    names = [messages.core_id("a#b", 1), messages.core_id("a#b", 2), messages.core_id("c", 3)]
    assert len(set(names)) == 3
    assert messages.client_ids(names) == ["a#b", "c"]
