"""Connects a rank to the socket at which the first rank receives reports of one kind."""

import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_client


def report_socket(address: str, secret: PeerSecret | None) -> zmq.Socket[bytes]:
    """Returns a PUSH socket that is connected to the first rank's address."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    zmq_limits.LOCAL.apply(socket)
    secure_client(socket, secret)
    socket.set(zmq.IPV6, 1)
    socket.connect(address)
    return socket
