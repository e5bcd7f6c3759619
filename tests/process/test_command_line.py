import argparse

import pytest

from mini_infer_process.command_line import duration, guess, parse_flags, seconds, whole_number


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="try", usage="try", allow_abbrev=False)
    made.add_argument("--max-queue", type=whole_number(0, 10))
    made.add_argument("--idle-timeout", type=seconds)
    return made


@pytest.mark.parametrize(
    ("flag", "text", "complaint"),
    [
        ("--max-queue", "11", "'11' is not an integer from 0 up to 10"),
        ("--max-queue", "-1", "'-1' is not an integer from 0 up to 10"),
        ("--max-queue", "1.5", "'1.5' is not an integer"),
        ("--max-queue", "", "'' is not an integer"),
        ("--max-queue", "+-5", "'+-5' is not an integer"),
        ("--max-queue", "9" * 5000, "is not an integer from 0 up to 10"),
        ("--idle-timeout", "inf", "'inf' is not a number of seconds from 0"),
        ("--idle-timeout", "soon", "'soon' is not a number of seconds from 0"),
        ("--max-quue", "1", "unrecognized arguments: --max-quue=1: did you mean --max-queue?"),
    ],
)
def test_the_error_names_a_flag_when_it_or_its_value_is_wrong(
    flag: str, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(parser(), [f"{flag}={text}"])
    assert complaint in capsys.readouterr().err


def test_flag_values_in_their_range_are_parsed() -> None:
    options = parse_flags(parser(), ["--max-queue", "10", "--idle-timeout", "0.5"])
    assert (options.max_queue, options.idle_timeout) == (10, 0.5)
    assert guess("--nothing-like-it", parser()) == ": --help lists all flags"


@pytest.mark.parametrize(
    ("text", "wanted_s"), [("60", 60), ("0.5", 0.5), ("0", 0), ("90s", 90), ("10m", 600), ("1h30m", 5400)]
)
def test_a_duration_is_seconds_or_as_kubectl_writes_it(text: str, wanted_s: float) -> None:
    assert duration(text) == wanted_s


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1", "-1s", "1m1x", "m", "1d", "s1", "१s"])
def test_a_duration_is_refused_when_it_is_neither(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="90s"):
        duration(text)
