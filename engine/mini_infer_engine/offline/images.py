"""Images as callers of `LLM` give them: in messages, or as objects of PIL beside a text. Knows no engine."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_engine.core.request import ImageInput
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.text.images.reader import ImageReader
from mini_infer_engine.text.text_model import TextModel
from mini_infer_engine.text.tokenizing import ImageFiles, ImagePrompt, chat_ids, image_prompt_ids, whole
from mini_infer_prompts.image_files import ImageFile, read_header
from mini_infer_prompts.image_prompts import ImageError
from mini_infer_prompts.image_sources import ImageSource, image_sources
from mini_infer_prompts.prompt import PromptEncoder, PromptText
from mini_infer_web.api_errors import ApiError


class OfflineImages:
    """Reads the images of prompts for one model. All its errors are ApiErrors or ValueErrors."""

    def __init__(self, encoder: PromptEncoder, reader: ImageReader, max_images: int) -> None:
        self._encoder, self._reader, self._max_images = encoder, reader, max_images

    @classmethod
    def of(cls, text: TextModel, model: ModelInfo) -> "OfflineImages | None":
        """Returns the reader of a model's images; None if it reads none."""
        if not model.vision or text.encoder is None or text.images is None:
            return None
        return cls(text.encoder, text.images, model.max_images)

    def in_chat(self, body: Mapping[str, Any]) -> tuple[list[int], Sequence[ImageInput]]:
        """Returns the token ids of a chat, and its images."""
        sources = image_sources(body.get("messages"))
        self._check_count(len(sources))
        files = self._reader.files_now(sources) if sources else {}
        return self._with_values(whole(chat_ids(self._encoder, dict(body), images=files)))

    def in_text(self, text: str, data: Mapping[str, Any]) -> tuple[list[int], Sequence[ImageInput]]:
        """Returns the token ids of a text that has the model's marker for each image, and the images."""
        others = [name for name in data if name != "image"]
        if others:
            raise ValueError(f"multi_modal_data has {others[0]!r}: images alone are read, as {{'image': ...}}")
        given = data.get("image")
        images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        self._check_count(len(images))
        paths = [("multi_modal_data", "image", index) for index in range(len(images))]
        files: ImageFiles = {str(index): _file(image, index) for index, image in enumerate(images)}
        layout = self._encoder.images
        if layout is None:
            raise ValueError("this model's folder does not say how images are read")
        sources = tuple(ImageSource(path, str(index)) for index, path in enumerate(paths))
        prompt = PromptText(layout.replace_markers(text, len(images)), True, sources)
        return self._with_values(whole(image_prompt_ids(self._encoder, prompt, ("prompt",), None, files)))

    def _check_count(self, count: int) -> None:
        if count > self._max_images:
            message = f"the prompt has {count} images, and this model takes {self._max_images} (limit_mm_per_prompt)"
            raise ApiError(400, f"{message}: give fewer", param="messages", code="too_many_images")

    def _with_values(self, token_ids: list[int]) -> tuple[list[int], Sequence[ImageInput]]:
        placed = token_ids.images if isinstance(token_ids, ImagePrompt) else ()
        return token_ids, [self._reader.input(image) for image in placed]


def _file(image: Any, index: int) -> ImageFile:
    """Returns an image of PIL as a file without loss, as it is: unlike a file's, its orientation is not looked at."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        kind = type(image).__name__
        raise ValueError(f"multi_modal_data: image {index} is a {kind}: give an image of PIL, or a list of them")
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "BMP")
    data = buffer.getvalue()
    try:
        return read_header(data, hashlib.sha256(data).digest())
    except ImageError as error:
        raise ValueError(f"multi_modal_data: image {index} {error}") from None
