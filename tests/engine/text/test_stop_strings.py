from hypothesis import given
from hypothesis import strategies as st

from mini_infer_engine.text.stop_strings import StopStrings

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition, read letter by letter: (start, stop) of the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def push_all(filter_: StopStrings, pieces: list[str]) -> str:
    text = ""
    for piece in pieces:
        text += filter_.push(piece)
        if filter_.matched is not None:
            return text
    return text + filter_.flush()


@given(st.lists(letters, max_size=8), stops, st.booleans())
def test_text_ends_at_the_first_stop_string_for_any_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    filter_ = StopStrings(stops, include)
    shown = push_all(filter_, pieces)
    match = first_complete(text, stops)
    if match is None:
        assert (shown, filter_.matched) == (text, None)
    else:
        start, stop = match
        assert (shown, filter_.matched) == (text[: start + len(stop) if include else start], stop)


@given(letters, stops)
def test_only_a_possible_stop_string_is_buffered(text: str, stops: list[str]) -> None:
    filter_ = StopStrings(stops)
    shown = "".join(filter_.push(letter) for letter in text if filter_.matched is None)
    if filter_.matched is None:
        buffered = text[len(shown) :]
        assert buffered == "" or any(stop.startswith(buffered) for stop in stops)
