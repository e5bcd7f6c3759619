from mini_infer_process.heap import TRIM_EVERY_S, HeapTrimmer


def test_the_heap_is_trimmed_once_a_minute_when_the_process_is_often_idle() -> None:
    trimmer = HeapTrimmer()
    times = [10.0, 11.0, 10.0 + TRIM_EVERY_S - 0.1, 10.0 + TRIM_EVERY_S, 11.0 + TRIM_EVERY_S]
    assert [trimmer.trim_if_due(now_s) for now_s in times] == [True, False, False, True, False]
