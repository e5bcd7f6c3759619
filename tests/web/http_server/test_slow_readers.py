"""Connections whose clients take nothing of what is sent to them."""

from mini_infer_web.http_server.slow_readers import SlowReaders


class Reader:
    def __init__(self) -> None:
        self.aborted = False

    def abort_for_memory(self) -> None:
        self.aborted = True


def test_the_peer_with_most_loses_its_oldest_when_there_are_too_many() -> None:
    readers = SlowReaders(4)
    greedy, other = [Reader() for _ in range(5)], Reader()
    for reader in greedy[:3]:
        readers.add(reader, "greedy")
    readers.add(other, "other")
    readers.remove(greedy[0], "greedy")
    readers.add(greedy[0], "greedy")  # It has read, and is the youngest now.
    for reader in greedy[3:]:
        readers.add(reader, "greedy")
    assert [reader.aborted for reader in greedy] == [False, True, True, False, False]
    assert not other.aborted


def test_a_connection_counts_once_when_it_is_added_and_removed_twice() -> None:
    readers, one, two = SlowReaders(1), Reader(), Reader()
    for _ in range(2):
        readers.add(one, "a")
    for _ in range(2):
        readers.remove(one, "a")
    readers.add(two, "b")
    assert not one.aborted
    assert not two.aborted
