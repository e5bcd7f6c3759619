"""Text from outside on a terminal."""

import io

import pytest
from rich.console import Console

from mini_infer_operator.cli.terminal import printable, printable_values
from mini_infer_operator.cli.top_views import screen
from tests.operator.cli.test_top import ENGINE, FLEET, REQUEST, SERVICE

ATTACKS = ("\x1b]52;c;cm0gLXJm\x07", "\x1b[2J", "\x9b31m", "\r", "\x08", "\x7f", "\x90x\x9c")


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_control_character_is_left_when_a_text_has_some(attack: str) -> None:
    shown = printable(f"before\n{attack}\tafter é 語")
    assert shown.startswith("before\n")
    assert shown.endswith("\tafter é 語")
    assert not any(
        character in shown.replace("\n", "").replace("\t", "") for character in map(chr, [*range(32), *range(127, 160)])
    )
    assert printable_values({attack: [attack, 1, None, True]}) == {
        printable(attack): [printable(attack), 1, None, True]
    }


@pytest.mark.parametrize("attack", ATTACKS)
def test_top_sends_no_control_sequence_when_names_and_reasons_have_some(attack: str) -> None:
    condition = {"type": "Ready", "status": "False", "reason": attack, "message": attack}
    service = SERVICE | {"name": attack, "models": [attack], "status": {"conditions": [condition]}}
    engine = ENGINE | {"name": attack, "state": attack, "reason": attack}
    request = REQUEST | dict.fromkeys(("model", "outcome", "key", "engine", "reason"), attack)
    fleet = FLEET | {"services": [service], "engines": [engine]}
    file = io.StringIO()
    Console(file=file, width=300, color_system=None).print(screen("http://x", fleet, [request], rows=5))
    assert not {"\x1b", "\x9b", "\x07", "\r", "\x08", "\x90"} & set(file.getvalue())
