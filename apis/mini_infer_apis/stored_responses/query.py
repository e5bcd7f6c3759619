"""Query parameters of the paths below /v1/responses, typed, and their checks."""

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from mini_infer_web.api_errors import ApiError

MAX_PAGE, DEFAULT_PAGE = 100, 20
_LONGEST_SHOWN = 100


class PageQuery(Struct, frozen=True):
    """The parameters of a page of a list, as OpenAI has them."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE, description="Items of a page.")] = DEFAULT_PAGE
    order: Annotated[Literal["asc", "desc"], Meta(description="The first, or the last of them first.")] = "desc"
    after: Annotated[str | None, Meta(description="The id of the item that goes before the page.")] = None


class RetrieveQuery(Struct, frozen=True):
    """The form in which a kept response is returned."""

    stream: Annotated[bool, Meta(description="As the events of one that was made with background and stream.")] = False
    starting_after: Annotated[
        int, Meta(ge=-1, le=2**53, description="The number of the event that goes before the first.")
    ] = -1


QueryType = TypeVar("QueryType", bound=Struct)


def read_query(query: dict[str, str], kind: type[QueryType]) -> QueryType:
    """Reads the parameters and skips those that `kind` does not know. Raises an ApiError 400 that names one that is
    wrong.
    """
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, place = str(error).rpartition(" - at `$.")
        name = re.split(r"\W", place)[0]
        shown = repr(query.get(name, ""))[:_LONGEST_SHOWN]
        raise ApiError(400, f"{name} is {shown}: {text}", param=name, code="invalid_value") from None
