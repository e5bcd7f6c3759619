"""Images through the HTTP app: what each dialect's request becomes for the core, and what is refused."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest

from mini_infer_contract.launch import Role
from mini_infer_engine.api.app import make_app
from mini_infer_engine.api.generation import Generation
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.text.images import decoders
from mini_infer_engine.text.images.decoder_process import Processor as ProcessorFile
from mini_infer_engine.text.images.decoder_process import image_processor
from mini_infer_engine.text.text_model import TextModel
from mini_infer_prompts.prompt import PromptAssets
from mini_infer_web.api_errors import ApiError
from tests.support.image_folders import (
    PROCESSORS,
    data_url,
    image_bytes,
    image_part,
    random_image,
    text_part,
    vision_assets,
    vision_files,
)

FIRST, SECOND = image_bytes(random_image(100, 60)), image_bytes(random_image(57, 90, seed=1), "JPEG")


class RecordingCore:
    """Ends every request after one token, and keeps what was sent to it."""

    failure: ApiError | None = None

    def __init__(self, model: ModelInfo) -> None:
        self.model: ModelInfo | None = model
        self.requests: list[Request] = []

    def submit(self, generation: Generation) -> None:
        for index, request in enumerate([reply.request for reply in generation.replies]):
            self.requests.append(request)
            output = Output(request_id=request.request_id, token_ids=[65], finish_reason="length")
            generation.push(index, output, time.perf_counter())

    def leave(self, generation: Generation) -> None: ...

    def silent_s(self, now_s: float) -> float:
        return 0.0

    async def snapshot(self) -> bytes:
        return b""

    def switch_role(self, role: Role) -> None: ...

    def hint(self, request: Request) -> None: ...

    def prefetch(self, request_ids: Sequence[str], ttl_s: float) -> None: ...


class Served:
    """An HTTP app in this process, with a core that records."""

    def __init__(self, family: str, *, assets: PromptAssets | None = None, options: Any = None, **model: Any) -> None:
        info = {"vision": family, "max_images": 4} | model
        self.core = RecordingCore(
            ModelInfo(**({"max_model_len": 2048, "vocab_size": 2000, "page_size": 16, "num_pages": 99} | info))
        )
        self.text = TextModel(("m",), assets or vision_assets(family), GenerationDefaults())
        self.state = ApiServerState(self.text, self.core, ServerMetrics("m"), options or ServerOptions(), 256)
        self.app: Any = make_app(self.state)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://engine/v1") as http:
            yield http

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async with self.client() as http:
            return await http.post(f"http://engine{path}", json={"model": "m"} | body)

    def taken(self) -> list[Request]:
        requests, self.core.requests = self.core.requests, []
        return requests


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("qwen2_5_vl")


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 1} | more


def expected_values(family: str, data: bytes) -> Any:
    """The values that transformers' own image processor makes of a file."""
    from transformers.image_utils import load_image

    values = (
        {"min_pixels": 3136, "max_pixels": 1003520, **PROCESSORS[family]}
        if family == "qwen2_5_vl"
        else {**PROCESSORS[family]}
    )
    return image_processor(ProcessorFile(family, values))(load_image(data_url(data)))


def anthropic_image(data: bytes) -> dict[str, Any]:
    encoded = data_url(data).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


def anthropic(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 1}


def responses(*content: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(content)}], "max_output_tokens": 1}


def input_image(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}


def input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


CONTENT = (image_part(FIRST), text_part("and"), image_part(SECOND), text_part("?"))
FORMS = {
    "/v1/chat/completions": chat(*CONTENT),
    "/invocations": chat(*CONTENT),
    "/v1/chat/completions/batch": {"messages": [chat(*CONTENT)["messages"]], "max_tokens": 1},
    "/v1/messages": anthropic(anthropic_image(FIRST), text_part("and"), anthropic_image(SECOND), text_part("?")),
    "/v1/responses": responses(input_image(FIRST), input_text("and"), input_image(SECOND), input_text("?")),
}


@pytest.mark.parametrize("path", FORMS)
async def test_the_core_gets_the_same_images_in_every_dialect(served: Served, path: str) -> None:
    answer = await served.post(path, FORMS[path])
    assert answer.status_code == 200, answer.text
    (request,) = served.taken()
    encoder = served.text.encoder
    assert encoder is not None
    for image, data in zip(request.images, (FIRST, SECOND), strict=True):
        made = expected_values("qwen2_5_vl", data)
        assert image.shape == made["pixel_values"].shape
        assert image.pixels == made["pixel_values"].tobytes()
        assert [*image.grid] == made["image_grid_thw"][0].tolist()
        assert image.num_tokens == made["image_grid_thw"][0].prod() // 4
        end = image.offset + image.num_tokens
        assert set(request.prompt_token_ids[image.offset : end]) == {encoder.placeholder_id}
        around = [request.prompt_token_ids[image.offset - 1], request.prompt_token_ids[end]]
        assert encoder.decode(around, skip_special_tokens=False) == "<|vision_start|><|vision_end|>"


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
async def test_values_equal_transformers_when_the_family_is_another(family: str) -> None:
    served = Served(family)
    answer = await served.post("/v1/chat/completions", chat(image_part(SECOND), text_part("?")))
    assert answer.status_code == 200, answer.text
    ((image,),) = [request.images for request in served.taken()]
    made = expected_values(family, SECOND)
    assert image.shape == made["pixel_values"].shape
    assert image.pixels == made["pixel_values"].tobytes()


COUNTED = {
    "/tokenize": ("/v1/chat/completions", "count"),
    "/v1/chat/completions/render": ("/v1/chat/completions", "token_ids"),
    "/v1/messages/count_tokens": ("/v1/messages", "input_tokens"),
    "/v1/responses/input_tokens": ("/v1/responses", "input_tokens"),
}


@pytest.mark.parametrize("path", COUNTED)
async def test_paths_that_count_tokens_count_those_of_images(served: Served, path: str) -> None:
    form, field = COUNTED[path]
    body = {name: value for name, value in FORMS[form].items() if "max" not in name}
    answer = await served.post(path, body)
    assert answer.status_code == 200, answer.text
    assert not served.taken()
    await served.post(form, FORMS[form])
    (request,) = served.taken()
    counted = answer.json()[field]
    assert (len(counted) if isinstance(counted, list) else counted) == len(request.prompt_token_ids)


async def test_openais_client_sends_images_and_streams(served: Served) -> None:
    async with (
        served.client() as http,
        openai.AsyncOpenAI(api_key="k", http_client=http, base_url="http://engine/v1") as client,
    ):
        stream = await client.chat.completions.create(
            model="m",
            max_tokens=1,
            stream=True,
            messages=[{"role": "user", "content": [image_part(FIRST), text_part("?")]}],  # type: ignore[arg-type, list-item, misc]  # parts as plain data
        )
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"
    ((image,),) = [request.images for request in served.taken()]
    assert image.shape == (32, 1176)


async def test_images_in_results_of_tools_reach_the_core(served: Served) -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text_part("seen"), anthropic_image(FIRST)]}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = await served.post("/v1/messages", {"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert [len(request.images) for request in served.taken()] == [1]


async def test_every_choice_has_the_images_when_a_request_has_several(served: Served) -> None:
    answer = await served.post("/v1/chat/completions", chat(image_part(FIRST), n=3))
    assert answer.status_code == 200, answer.text
    requests = served.taken()
    assert [len(request.images) for request in requests] == [1, 1, 1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(requests[0]), type=Request).images == requests[0].images


BROKEN = image_bytes(random_image(80, 80))[:3000]
PART = "messages[0].content[0].image_url.url"
REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "no URL": (chat({"type": "image_url"}), "messages[0].content[0].image_url", None),
    "no such scheme": (chat({"type": "image_url", "image_url": "ftp://host/a.png"}), PART[:-4], "invalid_image"),
    "http": (chat({"type": "image_url", "image_url": {"url": "http://host/a.png"}}), PART, "invalid_image"),
    "https": (chat({"type": "image_url", "image_url": {"url": "https://host/a.png"}}), PART, "invalid_image"),
    "file": (chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), PART, "invalid_image"),
    "no base64": (chat({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}), PART, "invalid_image"),
    "no image": (chat(image_part(b"hello")), PART, "invalid_image"),
    "truncated": (chat(image_part(BROKEN)), PART, "invalid_image"),
    "second truncated": (
        chat(image_part(FIRST), image_part(BROKEN)),
        PART.replace("content[0]", "content[1]"),
        "invalid_image",
    ),
    "out of proportion": (chat(image_part(image_bytes(random_image(2100, 10)))), PART, "invalid_image"),
    "too many": (chat(*[image_part(FIRST)] * 5), "messages", "too_many_images"),
    "very many": (chat(*[{"type": "image_url", "image_url": "data:,"}] * 6000), "messages", "too_many_images"),
    "nested": (chat([image_part(FIRST)]), "messages[0].content[0]", None),
    "marker in a text": (chat(image_part(FIRST), text_part("<|image_pad|>")), "messages[0].content[1].text", None),
    "truncation": (chat(image_part(FIRST), truncate_prompt_tokens=5), "truncate_prompt_tokens", None),
    "longer than the context": (
        chat(*[image_part(image_bytes(random_image(280, 280)))] * 3, text_part("x y " * 1000)),
        "messages",
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_is_refused_by_its_field_when_an_image_is_at_fault(served: Served, name: str) -> None:
    body, param, code = REFUSED[name]
    answer = await served.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert not served.taken()
    assert served.state.admission.num_image_bytes == served.state.admission.num_body_bytes == 0


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/messages", anthropic({"type": "image", "source": {"type": "file", "file_id": "f"}}), "source"),
        (
            "/v1/messages",
            anthropic({"type": "image", "source": {"type": "url", "url": "https://h/a"}}),
            "messages[0].content[0].source.url is fetched from nowhere",
        ),
        (
            "/v1/messages",
            anthropic(text_part("x"), anthropic_image(b"no image")),
            "messages[0].content[1].source.data is no image",
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": anthropic(anthropic_image(FIRST), anthropic_image(b"no image"))["messages"]},
            "messages[0].content[1].source.data is no image",
        ),
        (
            "/v1/responses",
            responses(input_image(FIRST), input_image(b"no image")),
            "input[0].content[1].image_url is no image",
        ),
        (
            "/v1/responses/input_tokens",
            responses(input_image(BROKEN[:4])),
            "input[0].content[0].image_url is no image",
        ),
        ("/v1/messages", anthropic({"type": "document", "source": {}}), "image, thinking"),
        ("/v1/responses", responses({"type": "input_image"}), "input[0].content[0].image_url"),
        ("/v1/responses", responses({"type": "input_image", "file_id": "f"}), "input[0].content[0].file_id"),
        ("/v1/responses", responses({"type": "input_file", "file_id": "f"}), "input_image"),
    ],
    ids=str,
)
async def test_other_dialects_refuse_images_in_their_own_words(
    served: Served, path: str, body: dict[str, Any], words: str
) -> None:
    answer = await served.post(path, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_images_are_refused_in_todays_words_when_the_model_reads_none() -> None:
    served = Served("", assets=vision_assets("qwen2_5_vl"))
    answer = await served.post("/v1/chat/completions", chat(image_part(FIRST)))
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "messages[0].content[0].type 'image_url' is not supported: this server reads text parts only",
    )


async def test_images_are_refused_when_the_folder_does_not_say_how_they_are_read() -> None:
    files = vision_files("qwen2_5_vl")
    del files["preprocessor_config.json"]
    served = Served("qwen2_5_vl", assets=PromptAssets.from_files(files))
    answer = await served.post("/v1/chat/completions", chat(image_part(FIRST)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_image_processor")
    assert (await served.post("/v1/chat/completions", chat(text_part("hi")))).status_code == 200


async def test_a_text_may_name_the_marker_when_a_chat_has_no_image(served: Served) -> None:
    answer = await served.post("/v1/chat/completions", chat(text_part("<|image_pad|>")))
    assert answer.status_code == 200, answer.text
    assert [request.images for request in served.taken()] == [[]]


async def test_a_request_gets_429_when_images_of_others_fill_the_memory() -> None:
    served = Served("qwen2_5_vl", options=ServerOptions(max_image_memory_bytes=1000))
    with served.state.admission.image_values(1):
        answer = await served.post("/v1/chat/completions", chat(image_part(FIRST)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert "--max-image-memory" in answer.text
    answer = await served.post("/v1/chat/completions", chat(image_part(FIRST)))
    assert answer.status_code == 200, "one request alone may always have its images"
    assert served.state.admission.num_image_bytes == 0


@contextmanager
def limits_of_decoders(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Iterator[Served]:
    make = decoders.ImageDecoders
    monkeypatch.setattr("mini_infer_engine.text.images.reader.ImageDecoders", lambda images: make(images, **limits))
    yield Served("qwen2_5_vl")


async def test_an_image_is_refused_when_its_decoder_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with limits_of_decoders(monkeypatch, timeout_s=0.001) as served:
        large = image_part(image_bytes(random_image(1000, 1000), "BMP"))
        answers = await asyncio.gather(*(served.post("/v1/chat/completions", chat(large)) for _ in range(2)))
        assert [answer.json()["error"]["param"] for answer in answers] == [PART, PART]


async def test_an_image_is_refused_when_its_decoder_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with limits_of_decoders(monkeypatch, memory_bytes=150 << 20) as served:
        large = image_part(image_bytes(random_image(1, 1).resize((8000, 8000)), "PNG"))
        answer = await served.post("/v1/chat/completions", chat(large))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, PART), answer.text
        answer = await served.post("/v1/chat/completions", chat(image_part(FIRST)))
        assert answer.status_code == 200, "the next image is decoded"
