"""The ledger: an endpoint's own report plus exactly those of our requests that it cannot contain."""

from mini_infer_contract.events import LoadReport
from mini_infer_gateway.fleet.load import LoadLedger


def report(running: int, queued: int, *accepted: str) -> LoadReport:
    return LoadReport(0.0, running, 0, queued, 0.0, list(accepted))


def test_own_requests_count_as_load_until_they_end_when_an_endpoint_sends_no_reports() -> None:
    ledger = LoadLedger()
    first, second = ledger.start("e", "1", 100), ledger.start("e", "2", 50)
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (2, 150)
    ledger.answered(first)
    assert ledger.load("e").queued_tokens == 50
    ledger.finish(first)
    ledger.finish(second)
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (0, 0)


def test_a_load_report_replaces_only_the_requests_that_it_names() -> None:
    ledger = LoadLedger()
    ledger.start("e", "1", 100)
    ledger.start("e", "2", 50)
    ledger.report("e", report(7, 1000, "1", "another gateway's"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (8, 1050)
    assert ledger.in_flight("e") == 2
    ledger.report("e", report(3, 0, "2"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 0)


def test_the_second_request_still_counts_when_two_share_an_id_and_one_ends() -> None:
    ledger = LoadLedger()
    ledger.report("e", report(0, 0))
    first, _ = ledger.start("e", "same", 10), ledger.start("e", "same", 20)
    ledger.finish(first)
    assert ledger.load("e").queued_tokens == 20


def test_all_requests_count_until_each_is_reported_when_they_share_an_id() -> None:
    ledger = LoadLedger()
    ledger.report("e", report(0, 0))
    for _ in range(3):
        ledger.start("e", "same", 10)
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 30)
    ledger.report("e", report(1, 10, "same"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 30)
    ledger.report("e", report(3, 30, "same", "same"))
    assert (ledger.load("e").running, ledger.load("e").queued_tokens) == (3, 30)


def test_a_request_can_finish_when_its_endpoint_was_removed() -> None:
    ledger = LoadLedger()
    flight = ledger.start("e", "1", 10)
    ledger.remove("e")
    ledger.finish(flight)
    assert ledger.in_flight("e") == 0


def test_two_gateways_have_the_same_load_when_they_get_the_same_reports() -> None:
    ledgers = [LoadLedger(), LoadLedger()]
    ledgers[0].start("e", "1", 100)
    ledgers[1].start("e", "2", 50)
    for ledger in ledgers:
        ledger.report("e", report(2, 150, "1", "2"))
    assert ledgers[0].load("e") == ledgers[1].load("e")
