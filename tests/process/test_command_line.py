import argparse

import pytest

from mini_infer_process.command_line import guess, parse_flags, seconds, whole_number


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
