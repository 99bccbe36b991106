"""A peer ends any process that has a libzmq socket open to it: the reproducer that goes with the report to libzmq.

    python tools/bench/libzmq_abort.py [--seconds 10]

What is reported (libzmq 4.3.5; the lines are the same on its main branch): a bare ROUTER with its default high-water
mark, bound to TCP, is sent many small messages with ZMTP PING commands among them by peers that then reset their
connections. Expected: the connections are dropped. Seen: ``Assertion failed: !_io_error (src/stream_engine_base.cpp)``,
and the process aborts, within a second; no key is needed, and under CURVE any that is accepted does.

Cause: a full pipe stops the engine's input (``in_event_internal``). The reset then sets ``_io_error`` and leaves the
engine for the session to end. When the reader drains the pipe the engine goes on with what it has decoded so far, meets
the PING, and ``process_heartbeat_message`` calls ``out_event``, which asserts that ``_io_error`` is not set; the
heartbeat timer does the same where heartbeats are on. A guard would do: where ``_io_error`` is set, ``out_event``
returns, as it does where there is nothing to send. Related: issues 3937 and 4767, pull request 4830.

This project's own sockets do without libzmq wherever a peer can reach them (``serving/zmtp.py``).
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from attackers import FAMILIES, Peer

from results import parser


def router(pipe: Any) -> None:
    """Main function of the process that is attacked: reads whatever comes."""
    socket = zmq.Context().socket(zmq.ROUTER)
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        socket.recv_multipart()


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--seconds", type=float, default=10.0, help="of the attack (default: %(default)g)")
    seconds = p.parse_args().seconds
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=router, args=(theirs,), daemon=True)
    process.start()
    port, begun = ours.recv(), time.monotonic()
    while process.is_alive() and time.monotonic() < begun + seconds:
        FAMILIES["embedded ping"](partial(Peer, port), time.monotonic() + 0.5)
    took, code = time.monotonic() - begun, process.exitcode
    process.kill()
    how = "is alive" if code is None else f"ended after {took:.1f} s by {signal.Signals(-code).name}"
    print(f"libzmq {zmq.zmq_version()}: the process {how}")
    return int(code is not None)


if __name__ == "__main__":
    sys.exit(main())
