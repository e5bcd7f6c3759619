from mini_infer_contract.events import LoadReport, Snapshot, encode, merge_snapshots, read_snapshot
from mini_infer_engine.data_parallel.load import total_load
from tests.engine.data_parallel.test_engine_blocks import stored


def test_load_reports_are_summed_over_engines() -> None:
    reports = [
        LoadReport(
            5.0, running=3, waiting=1, queued_tokens=100, kv_usage=0.5, prefill_tokens_per_s=10.0, host_tokens_per_s=5.0
        ),
        LoadReport(
            7.0, running=1, waiting=0, queued_tokens=20, kv_usage=0.1, prefill_tokens_per_s=30.0, host_tokens_per_s=6.0
        ),
    ]
    total = total_load(reports, ["a"], "unified")
    assert total == LoadReport(
        7.0, 4, 1, 120, 0.3, ["a"], "unified", prefill_tokens_per_s=40.0, host_tokens_per_s=11.0, engines=2
    )


def test_snapshots_are_merged() -> None:
    parts = [encode(Snapshot(9, [stored(1, 2)])), encode(Snapshot(3, [])), encode(Snapshot(4, [stored(3)]))]
    sequence, chains = read_snapshot(merge_snapshots(17, parts))
    assert (sequence, list(chains)) == (17, [stored(1, 2), stored(3)])
