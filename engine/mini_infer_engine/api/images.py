"""Reads the images of requests for all dialects, within the server's limits. Knows no dialect and no socket."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.core.request import ImageInput
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.text.text_model import TextModel
from mini_infer_engine.text.tokenizing import ImageFiles, ImagePrompt
from mini_infer_prompts.image_sources import ImageSource
from mini_infer_web.api_errors import ApiError

_VALUE_BYTES = 4
_NO_PROCESSOR = (
    "images cannot be read: this model's folder has no preprocessor_config.json, or one of an unknown form, or its "
    "tokenizer lacks the token of images"
)


async def image_files(
    text: TextModel,
    model: ModelInfo | None,
    param: str,
    images: Sequence[Sequence[ImageSource]],
    reserve: Callable[[int], None],
) -> ImageFiles | None:
    """Returns the images of a request's prompts by their URLs; None if the model reads none, so that they are refused.

    Raises ApiError 400 if they are too many, or one cannot be read. `reserve` is called with the numbers of
    bytes that are fetched.
    """
    if model is None or not model.vision:
        return None
    most = max(images, key=len, default=())
    if len(most) > model.max_images:
        raise ApiError(
            400,
            f"{param} holds {len(most)} images in one prompt, and this server takes {model.max_images} "
            "(--limit-mm-per-prompt): send fewer",
            param=param,
            code="too_many_images",
        )
    if not most:
        return {}
    if text.images is None:
        raise ApiError(400, _NO_PROCESSOR, param=most[0].path, code="no_image_processor")
    sources = [source for prompt in images for source in prompt]
    return await text.images.files(sources, text.in_slices, reserve)


async def image_inputs(
    state: ApiServerState, prompts: list[list[int]], copies: int, stack: ExitStack
) -> list[list[ImageInput]]:
    """Returns the images of each prompt with their values; empty if there are none. `stack` keeps their place in
    memory.

    Raises ApiError 429 if there is no room for them, 400 if one cannot be decoded.
    """
    reader = state.text.images
    placed = [prompt.images if isinstance(prompt, ImagePrompt) else () for prompt in prompts]
    if reader is None or not any(placed):
        return []
    num_values = sum(image.size.num_values for images in placed for image in images)
    stack.enter_context(state.admission.image_values(_VALUE_BYTES * copies * num_values))
    return [await reader.inputs(images) for images in placed]
