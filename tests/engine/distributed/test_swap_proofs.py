"""What each rank finds changed in main memory reaches the first rank, pass by pass."""

import pytest
import zmq

from mini_infer_engine.distributed.swap_proofs import ProofReceiver, ProofSender


def test_faults_of_all_ranks_are_those_of_one_pass() -> None:
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind("inproc://proofs")
    receiver = ProofReceiver(socket, 3, lambda: "")
    first, second = (ProofSender("inproc://proofs", rank) for rank in (1, 2))
    first.send([])
    first.send([4])
    second.send([1, 2])
    assert receiver.next() == {1, 2}
    second.send([4, 0])
    assert receiver.next() == {0, 4}
    socket.close(linger=0)


def test_a_lost_group_ends_the_wait_for_a_proof() -> None:
    socket = zmq.Context.instance().socket(zmq.PULL)
    receiver = ProofReceiver(socket, 2, lambda: "rank 1 has ended")
    with pytest.raises(RuntimeError):
        receiver.next()
    socket.close(linger=0)
