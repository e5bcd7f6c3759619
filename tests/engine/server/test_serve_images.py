"""A server with a model that reads images: OpenAI's client in, the answer out, the same again from the cache."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.engine.server.dry_server import EngineServer
from tests.support.image_folders import image_bytes, image_part, random_image, text_part
from tests.support.vision_folders import save_model_with_files


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("vision")
    save_model_with_files(folder, "qwen2_5_vl")
    (folder / "a.png").write_bytes(image_bytes(random_image(30, 20)))
    limits = ["--limit-mm-per-prompt", '{"image": 2}', "--allowed-local-media-path", str(folder)]
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "m", *limits]
    with EngineServer("--model", str(folder), *flags) as engine:
        yield engine


def ask(server: EngineServer, *content: Any) -> Any:
    with openai.OpenAI(api_key="k", base_url=f"{server.url}/v1") as client:
        return client.chat.completions.create(
            model="m",
            max_tokens=4,
            temperature=0,
            messages=[{"role": "user", "content": list(content)}],
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )


def test_an_image_is_answered_and_cached_when_it_is_sent_twice(server: EngineServer) -> None:
    question = [image_part(image_bytes(random_image(30, 20))), text_part("What is this, and where was it taken?")]
    first, again = ask(server, *question), ask(server, *question)
    other = ask(server, image_part(image_bytes(random_image(30, 20, seed=2))), *question[1:])
    assert first.choices[0].token_ids == again.choices[0].token_ids
    assert again.usage.prompt_tokens_details.cached_tokens > other.usage.prompt_tokens_details.cached_tokens


def test_a_file_of_the_allowed_folder_is_the_image_that_it_contains(server: EngineServer) -> None:
    folder = server.process.args[server.process.args.index("--model") + 1]  # type: ignore[index, union-attr]
    by_file = ask(server, {"type": "image_url", "image_url": {"url": f"file://{folder}/a.png"}}, text_part("?"))
    by_data = ask(server, image_part(image_bytes(random_image(30, 20))), text_part("?"))
    assert by_file.choices[0].token_ids == by_data.choices[0].token_ids


def test_more_images_are_refused_when_a_flag_limits_them(server: EngineServer) -> None:
    with pytest.raises(openai.BadRequestError, match="messages") as refused:
        ask(server, *[image_part(image_bytes(random_image(9, 9)))] * 3)
    assert refused.value.code == "too_many_images"
