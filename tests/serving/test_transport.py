"""The wire's own ends against stock ZeroMQ, in both directions; and what a peer may cost."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
import zmq
from serving_fakes import WAIT_S

from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.dialer import Dialer
from vla_stack.serving.listener import Listener, Mail, PeerGone

MEGABYTE = bytes(range(256)) * 4096


def keypair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline


def heard(listener: Listener) -> Mail:
    """The next message."""
    deadline = time.monotonic() + WAIT_S
    while not (mail := listener.receive(0.1)):
        assert time.monotonic() < deadline
    assert len(mail) == 1
    return mail[0]


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request, tmp_path):
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/socket"


@pytest.fixture(params=["null", "curve"])
def keys(request):
    """Of the server, and of its client."""
    if request.param == "null":
        return None, None
    server, client = keypair(), keypair()
    return Keys(CurveKeys(*server), client[0]), CurveKeys(*client, server=server[0])


class Keys(NamedTuple):
    """An admission of one key."""

    curve: CurveKeys
    allowed: str

    def admits(self, key: str) -> bool:
        return key == self.allowed


def stock(kind: int, keys: CurveKeys | None) -> zmq.Socket:
    socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, round(WAIT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, 50)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(WAIT_S * 1000))
    if keys:
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        if keys.server:
            socket.curve_serverkey = keys.server.encode()
        else:
            socket.curve_server = True
    return socket


FRAMES = [b"", b"a", b"x" * 255, b"x" * 256, MEGABYTE]


def test_a_stock_dealer_talks_to_our_listener(endpoint, keys):
    ours, theirs = keys
    listener = Listener(endpoint, ours, max_bytes=4 << 20)
    dealer = stock(zmq.DEALER, theirs)
    dealer.connect(listener.endpoint)
    dealer.send(b"hello")
    mail = heard(listener)
    assert mail.frames == [b"hello"] and mail.key == (theirs.public if theirs else "")
    listener.vouch(mail.peer)
    for _ in range(3):
        dealer.send_multipart(FRAMES)
        assert heard(listener).frames == FRAMES
        assert listener.send(mail.peer, FRAMES)
        until(lambda: not listener.receive(0.01) and dealer.poll(0))
        assert dealer.recv_multipart() == FRAMES
    dealer.close()
    until(lambda: not listener.receive(0.01) and not listener.peers)
    with pytest.raises(PeerGone):
        listener.send(mail.peer, [b"x"])
    listener.close()


def test_our_dialer_talks_to_a_stock_router(endpoint, keys):
    ours, theirs = keys
    router = stock(zmq.ROUTER, ours and ours.curve)
    router.bind(endpoint)
    dialer = Dialer(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), theirs, max_bytes=4 << 20)
    until(lambda: dialer.receive(0.01) or dialer.ready)
    for _ in range(3):
        assert dialer.send(FRAMES)
        until(lambda: dialer.receive(0.01) or router.poll(0))
        peer, *frames = router.recv_multipart()
        assert frames == FRAMES
        router.send_multipart([peer, *FRAMES])
        assert dialer.receive(WAIT_S) == [FRAMES]
    assert dialer.connections == 1
    dialer.close()
    router.close()


def test_both_ends_are_ours_and_the_connection_is_made_again(endpoint, keys):
    ours, theirs = keys
    listener = Listener(endpoint, ours)
    dialer = Dialer(listener.endpoint, theirs)
    talk(listener, dialer)
    listener.close()
    until(lambda: dialer.receive(0.005) or not dialer.ready)
    listener = Listener(dialer.endpoint, ours)
    talk(listener, dialer)
    assert dialer.connections == 2
    dialer.close()
    listener.close()


def talk(listener: Listener, dialer: Dialer) -> None:
    until(lambda: not listener.receive(0.005) and (dialer.receive(0.005) or dialer.ready))
    assert dialer.send([b"1", b"2"])
    assert heard(listener).frames == [b"1", b"2"]
