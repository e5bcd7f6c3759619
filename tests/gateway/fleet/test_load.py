"""The ledger: an endpoint's own report plus exactly those of our requests that it cannot contain."""

from mini_infer_contract.events import LoadReport
from mini_infer_gateway.fleet.load import LoadLedger


def report(running: int, queued: int, *accepted: str) -> LoadReport:
    return LoadReport(0.0, running, 0, queued, 0.0, list(accepted))


def test_without_reports_our_own_requests_count_until_they_end() -> None:
    ledger = LoadLedger()
    first, second = ledger.start("e", "1", 100), ledger.start("e", "2", 50)
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (2, 150)
    ledger.answered(first)
    assert ledger.load("e").queued_tokens == 50
    ledger.finish(first)
    ledger.finish(second)
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (0, 0)


def test_a_report_replaces_what_it_names_and_nothing_else() -> None:
    ledger = LoadLedger()
    ledger.start("e", "1", 100)
    ledger.start("e", "2", 50)
    ledger.report("e", report(7, 1000, "1", "another gateway's"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (8, 1050)
    assert ledger.in_flight("e") == 2
    ledger.report("e", report(3, 0, "2"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 0)


def test_an_id_that_a_client_uses_twice_is_not_lost_with_its_first_end() -> None:
    ledger = LoadLedger()
    ledger.report("e", report(0, 0))
    first, _ = ledger.start("e", "same", 10), ledger.start("e", "same", 20)
    ledger.finish(first)
    assert ledger.load("e").queued_tokens == 20


def test_requests_under_one_id_all_count_until_each_is_reported() -> None:
    ledger = LoadLedger()
    ledger.report("e", report(0, 0))
    for _ in range(3):
        ledger.start("e", "same", 10)
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 30)
    ledger.report("e", report(1, 10, "same"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 30)
    ledger.report("e", report(3, 30, "same", "same"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 30)


def test_a_ticket_outlives_its_endpoint() -> None:
    ledger = LoadLedger()
    flight = ledger.start("e", "1", 10)
    ledger.remove("e")
    ledger.finish(flight)
    assert ledger.in_flight("e") == 0


def test_two_gateways_that_hear_the_same_agree() -> None:
    ledgers = [LoadLedger(), LoadLedger()]
    ledgers[0].start("e", "1", 100)
    ledgers[1].start("e", "2", 50)
    for ledger in ledgers:
        ledger.report("e", report(2, 150, "1", "2"))
    assert ledgers[0].load("e") == ledgers[1].load("e")
