"""Reads the images of requests: first their files, whose headers say how many tokens they take, then their values."""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from mini_infer_engine.core.request import ImageInput
from mini_infer_engine.text.images.decoders import WORKERS, DecodedImage, ImageDecoders
from mini_infer_engine.text.images.media import MediaReader, MediaRules
from mini_infer_engine.text.tokenizing import PlacedImage, Sliced, whole
from mini_infer_process.interpreter import lower_thread_priority
from mini_infer_prompts.image_files import ImageFile, data_url_bytes, is_data_url, read_header
from mini_infer_prompts.image_prompts import ImageError, ImagePrompts
from mini_infer_prompts.image_sources import ImageSource
from mini_infer_web.api_errors import refuse_field

MAX_CACHED_BYTES = 256 << 20
"""Most bytes of values that are kept, so that each turn of a chat need not decode its images again."""
INVALID_IMAGE = "invalid_image"
"""The code of errors about an image."""

InSlices = Callable[[Sliced[dict[str, ImageFile]], int], Awaitable[dict[str, ImageFile]]]
"""Runs a job on a thread, by the number of its bytes."""


class ImageReader:
    """Reads images for one model."""

    def __init__(self, images: ImagePrompts, rules: MediaRules) -> None:
        self._images, self._rules = images, rules
        self._decoders = ImageDecoders(images)
        self._threads = ThreadPoolExecutor(WORKERS, "decode-images", initializer=lower_thread_priority)
        self._cached: OrderedDict[bytes, DecodedImage] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @cached_property
    def _media(self) -> MediaReader:
        return MediaReader(self._rules)

    async def files(
        self, sources: Sequence[ImageSource], in_slices: InSlices, reserve: Callable[[int], None] = lambda count: None
    ) -> Mapping[str, ImageFile]:
        """Returns the files of images by their URLs. Raises ApiError 400 that names the URL at fault.

        `reserve` is called with the numbers of bytes that are read for URLs that contain no data, and may raise
        ApiError. All of one call together have at most the bytes that the rules allow for one.
        """
        fetched = await self._fetched(self._media, sources, reserve)
        size_bytes = sum(len(source.url) for source in sources) + sum(map(len, fetched.values()))
        return await in_slices(_files(sources, fetched), size_bytes)

    def files_now(self, sources: Sequence[ImageSource]) -> Mapping[str, ImageFile]:
        """Returns what `files` returns, for callers without an event loop of this class. It blocks."""

        async def fetched() -> Mapping[str, bytes]:
            return await self._fetched(MediaReader(self._rules), sources, lambda count: None)

        # The caller may run in an event loop.
        with ThreadPoolExecutor(1) as thread:
            return whole(_files(sources, thread.submit(lambda: asyncio.run(fetched())).result()))

    async def _fetched(
        self, media: MediaReader, sources: Sequence[ImageSource], reserve: Callable[[int], None]
    ) -> Mapping[str, bytes]:
        """Returns the contents of URLs that contain no data."""
        others = {source.url: source for source in sources if not is_data_url(source.url)}
        allowance = _Allowance(self._rules.max_bytes, reserve)
        contents = await asyncio.gather(
            *(_read(media, source, allowance) for source in others.values()), return_exceptions=True
        )
        fetched: dict[str, bytes] = {}
        for url, content in zip(others, contents, strict=True):
            if isinstance(content, BaseException):
                raise content
            fetched[url] = content
        return fetched

    async def inputs(self, images: Sequence[PlacedImage]) -> list[ImageInput]:
        """Returns images with their values. Raises ApiError 400 that names the URL at fault."""
        loop = asyncio.get_running_loop()
        # One after the other: those of other requests come in between.
        return [await loop.run_in_executor(self._threads, self.input, image) for image in images]

    def input(self, image: PlacedImage) -> ImageInput:
        """Returns an image with its values. Raises ApiError 400 that names its URL."""
        try:
            decoded = self._decoded(image)
        except ImageError as error:
            refuse_field(image.source.path, str(error), code=INVALID_IMAGE)
        return ImageInput(
            offset=image.offset,
            num_tokens=image.size.num_tokens,
            digest=image.file.digest,
            grid=image.size.grid,
            shape=decoded.shape,
            pixels=decoded.values,
        )

    def _decoded(self, image: PlacedImage) -> DecodedImage:
        digest = image.file.digest
        with self._lock:
            if (found := self._cached.get(digest)) is not None:
                self._cached.move_to_end(digest)
                return found
        decoded = self._decoders.decode(image.file, image.size.num_values)
        if decoded.grid and decoded.grid != image.size.grid:
            raise RuntimeError(f"an image has the grid {decoded.grid}, and {image.size.grid} was computed for it")
        with self._lock:
            if digest not in self._cached and len(decoded.values) <= MAX_CACHED_BYTES // 4:
                self._cached[digest] = decoded
                self._cached_bytes += len(decoded.values)
                while self._cached_bytes > MAX_CACHED_BYTES:
                    self._cached_bytes -= len(self._cached.popitem(last=False)[1].values)
        return decoded


async def _read(media: MediaReader, source: ImageSource, allowance: "_Allowance") -> bytes:
    try:
        return await media.read(source.url, allowance.take)
    except ImageError as error:
        refuse_field(source.path, str(error), code=INVALID_IMAGE)


class _Allowance:
    """The bytes that may still be read for one request."""

    def __init__(self, limit_bytes: int, reserve: Callable[[int], None]) -> None:
        self._limit_bytes, self._left_bytes, self._reserve = limit_bytes, limit_bytes, reserve

    def take(self, count: int) -> None:
        """Counts bytes that were read. Raises ImageError if they are too many, and what `reserve` raises."""
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise ImageError(f"is one of several images of more than {self._limit_bytes} bytes: send fewer")
        self._reserve(count)


def _files(sources: Sequence[ImageSource], fetched: Mapping[str, bytes]) -> Sliced[dict[str, ImageFile]]:
    """Reads data URLs and headers, a slice at a time."""
    files: dict[str, ImageFile] = {}
    for source in sources:
        if source.url in files:
            continue
        try:
            if (data := fetched.get(source.url)) is None:
                data, digest = yield from data_url_bytes(source.url)
            else:
                digest = hashlib.sha256(data).digest()
            files[source.url] = read_header(data, digest)
        except ImageError as error:
            refuse_field(source.path, str(error), code=INVALID_IMAGE)
        yield
    return files
