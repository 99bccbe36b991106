"""What hostile peers may cost: nothing ends but their connection, and what belongs there goes on."""

from __future__ import annotations

import logging
import os
import re
import select
import selectors
import shlex
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from serving_fakes import ROBOT, WAIT_S, TickPolicy, barrier, collect, observation
from test_transport import Keys, heard, keypair, until

from vla_stack.errors import UserError
from vla_stack.serving import listener as listeners
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.dialer import Dialer
from vla_stack.serving.keys import KeyFolder, Role
from vla_stack.serving.listener import PER_ADDRESS, PER_KEY, SILENT_NS, STRANGER_BYTES, STRANGERS, Listener, PeerGone
from vla_stack.serving.server import PolicyServer
from vla_stack.serving.zmtp import MORE

ATTACK_S = 1.0
MEMORY = 64 << 20


@pytest.fixture
def attackers(load_tool):
    return load_tool("bench/attackers.py")


@pytest.fixture
def listener():
    listener = Listener("tcp://127.0.0.1:*", max_bytes=4 * STRANGER_BYTES)
    yield listener
    listener.close()


def port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def meanwhile(listener: Listener, act):
    """What ``act`` returns, on a thread while the listener is attended to."""
    done: list = []
    thread = threading.Thread(target=lambda: done.append(act()))
    thread.start()
    until(lambda: listener.receive(0.005) is None or done)
    thread.join()
    return done[0]


FAMILIES = ("flood and reset", "embedded ping", "unfinished message", "2000 idle connections", "slow readers")


@pytest.mark.parametrize("who", ["nobody", "robot", "observer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_robot_is_served_and_a_new_one_admitted_under_attack(family, who, attackers, tmp_path):
    folder = None
    if who != "nobody":
        folder = KeyFolder(tmp_path / "server")
        folder.create("server")
    server = PolicyServer(TickPolicy, "tcp://127.0.0.1:*", keys=folder)
    thread = threading.Thread(target=server.run)
    thread.start()

    def computer(name: str, role: Role) -> KeyFolder | None:
        if folder is None:
            return None
        keys = KeyFolder(tmp_path / name)
        folder.allow(keys.create(name).public, name, role)
        keys.trust(server.endpoint, folder.identity().public)
        return keys

    robot = PolicyClient(server.endpoint, computer("arm", Role.ROBOT))
    robot.hello(ROBOT, WAIT_S)
    theirs = computer("theirs", Role(who)) if folder else None
    curve = theirs and CurveKeys(theirs.identity().public, theirs.identity().secret, folder.identity().public)
    before = resident()
    connect = partial(attackers.Peer, port(server.endpoint), curve)
    attack = threading.Thread(target=attackers.FAMILIES[family], args=(connect, time.monotonic() + ATTACK_S))
    attack.start()
    rid = 0
    while attack.is_alive():
        assert robot.request(observation(rid), rid=rid, epoch=0, origin=rid, seed=0)
        assert collect(robot, 1)[0].rid == rid
        rid += 1
    newcomer = PolicyClient(server.endpoint, computer("new", Role.ROBOT))
    newcomer.hello(ROBOT, WAIT_S)
    assert resident() - before < MEMORY
    attack.join()
    for client in (robot, newcomer):
        client.close()
    server.stop()
    thread.join(WAIT_S)


def test_a_client_outlives_a_server_that_floods_and_resets(attackers):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = PolicyClient(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        attack = threading.Thread(target=attackers.rogue_server, args=(listening, time.monotonic() + ATTACK_S))
        attack.start()
        before = resident()
        while attack.is_alive():
            client.poll(5)
            client.ping()
        client.close()
        assert client.discarded["malformed"] > 0 and resident() - before < MEMORY


def test_a_message_has_one_limit_as_a_whole_before_memory_is_spent(listener, attackers):
    peer = meanwhile(listener, partial(attackers.Peer, port(listener.endpoint)))
    piece = STRANGER_BYTES // 8
    for _ in range(8):
        peer.socket.sendall(peer.frame(bytes(piece), MORE))
        until(lambda: listener.receive(0.005) is None or not next(iter(listener.peers.values())).unread)
    assert len(listener.peers) == 1
    peer.socket.sendall(peer.frame(b"x", MORE)[:2])  # what it would be: one byte too many
    until(lambda: not listener.receive(0.005) and not listener.peers)


def test_who_was_vouched_for_may_send_more(listener):
    dialer = Dialer(listener.endpoint)
    until(lambda: not listener.receive(0.005) and (dialer.receive(0.005) or dialer.ready))
    dialer.send([b"hello"])
    peer = heard(listener).peer
    listener.vouch(peer)
    assert dialer.send([bytes(3 * STRANGER_BYTES)])
    (mail,) = meanwhile_flushing(listener, dialer)
    assert len(mail.frames[0]) == 3 * STRANGER_BYTES
    listener.vouch(peer, False)
    assert dialer.send([bytes(3 * STRANGER_BYTES)])
    until(lambda: dialer.flush() or listener.receive(0.005) or not listener.peers)
    dialer.close()


def meanwhile_flushing(listener: Listener, dialer: Dialer) -> list:
    mail: list = []
    until(lambda: dialer.flush() or mail.extend(listener.receive(0.005)) or mail)
    return mail


def test_silent_connections_make_room_for_who_speaks(listener):
    address = ("127.0.0.1", port(listener.endpoint))
    silent = [socket.create_connection(address) for _ in range(3 * PER_ADDRESS)]
    dialer = Dialer(listener.endpoint)
    until(lambda: not listener.receive(0.005) and (dialer.receive(0.0) or dialer.ready))
    assert len(listener._unready) <= PER_ADDRESS <= STRANGERS
    dialer.send([b"hello"])
    peer = heard(listener).peer
    listener._keep_house(time.monotonic_ns() + SILENT_NS + 1)
    assert not listener._unready and peer not in listener.peers  # it has said nothing since, either
    for stream in silent:
        stream.close()
    dialer.close()


def test_neither_watchers_nor_newcomers_are_crowded_out_by_the_other_kind(listener):
    address = ("127.0.0.1", port(listener.endpoint))

    def joined() -> Dialer:
        dialer = Dialer(listener.endpoint)
        until(lambda: not listener.receive(0.005) and (dialer.receive(0.0) or dialer.ready))
        return dialer

    watcher = joined()
    watcher.send([b"here"])
    name = heard(listener).peer
    silent = [joined() for _ in range(2 * PER_ADDRESS)]
    assert name in listener.peers  # those who say nothing make room for each other
    speakers = []
    for _ in range(PER_ADDRESS):
        speakers.append(joined())
        speakers[-1].send([b"hello"])
        heard(listener)
    assert sum(c.spoken for c in listener.peers.values()) >= PER_ADDRESS // 2
    newcomer = socket.create_connection(address)
    before = set(listener.peers) | set(listener._unready)
    until(lambda: not listener.receive(0.005) and set(listener._unready) - before)
    (new,) = set(listener._unready) - before
    more = [joined() for _ in range(PER_ADDRESS // 4)]
    assert new in listener._unready  # nor do they have all places
    newcomer.close()
    for dialer in (watcher, *silent, *speakers, *more):
        dialer.close()


def test_who_has_left_makes_room_before_anybody_else(listener, attackers):
    staying = meanwhile(listener, partial(attackers.Peer, port(listener.endpoint)))
    until(lambda: not listener.receive(0.005) and listener.peers)  # a peer's half of the greeting may be done first
    (name,) = listener.peers
    gone = [meanwhile(listener, partial(attackers.Peer, port(listener.endpoint))) for _ in range(PER_ADDRESS - 1)]
    for peer in gone:
        peer.push(lambda p=peer: p.frame(b"x") * 4000)  # so much that nobody reads the rest, and hears of the reset
    until(lambda: listener.receive(0.005) is None or len(listener._held) == len(gone))
    for peer in gone:
        peer.reset()
    newcomer = meanwhile(listener, partial(attackers.Peer, port(listener.endpoint)))
    assert name in listener.peers and len(listener.peers) <= PER_ADDRESS
    until(lambda: listener.receive(0.005) is None or len(listener.peers) == 2)  # each is dropped in its turn
    assert name in listener.peers
    staying.socket.close()
    newcomer.socket.close()


def test_a_key_has_few_connections_and_crowds_out_itself_alone():
    server, crowd, other = keypair(), keypair(), keypair()

    class Both(Keys):
        def admits(self, key: str) -> bool:
            return key in (crowd[0], other[0])

    listener = Listener("tcp://127.0.0.1:*", Both(CurveKeys(*server), ""))
    lone = Dialer(listener.endpoint, CurveKeys(*other, server=server[0]))
    until(lambda: not listener.receive(0.005) and (lone.receive(0.0) or lone.ready))
    many = [Dialer(listener.endpoint, CurveKeys(*crowd, server=server[0])) for _ in range(2 * PER_KEY)]
    for dialer in many:
        until(lambda d=dialer: not listener.receive(0.005) and (d.receive(0.0) or d.ready))
    keys = [connection.key for connection in listener.peers.values()]
    assert keys.count(crowd[0]) == PER_KEY and keys.count(other[0]) == 1
    for dialer in (lone, *many):
        dialer.close()
    listener.close()


def test_who_does_not_read_loses_what_is_sent_and_then_the_connection(listener, attackers):
    peer = meanwhile(listener, partial(attackers.Peer, port(listener.endpoint)))
    (name,) = listener.peers
    sent = 0
    while listener.send(name, [bytes(1 << 20)]):
        sent += 1
        assert sent < 100
    listener._keep_house(time.monotonic_ns() + 10 * SILENT_NS)
    with pytest.raises(PeerGone):
        listener.send(name, [b"x"])
    peer.socket.close()


def test_a_robot_s_message_comes_first_and_of_strangers_one_message_in_a_call(listener, attackers):
    robot, *crowd = [meanwhile(listener, partial(attackers.Peer, port(listener.endpoint))) for _ in range(9)]
    listener.vouch(name := next(iter(listener.peers)))
    for peer in (*crowd, robot):
        peer.socket.sendall(3 * peer.frame(b"x"))
    for connection in listener.peers.values():
        until(lambda c=connection: select.select([c], [], [], 0)[0])
    assert [mail.peer for mail in listener.receive()] == 3 * [name]
    calls = [listener.receive() for _ in range(3 * len(crowd))]
    speakers = [[mail.peer for mail in call] for call in calls]
    assert all(len(call) == 1 for call in speakers)
    for n in range(3):  # each has said one before any says its next
        assert len({peer for (peer,) in speakers[n * len(crowd) : (n + 1) * len(crowd)]}) == len(crowd)
    for peer in (robot, *crowd):
        peer.socket.close()


def test_who_waits_for_the_listener_is_told_of_messages_that_were_read_and_have_their_turn(listener, attackers):
    """An owner that slept until its next look used to pay that sleep for each stranger before the newcomer: 20 peers
    that only ask kept an operator waiting for a second."""
    crowd = [meanwhile(listener, partial(attackers.Peer, port(listener.endpoint))) for _ in range(8)]
    for peer in crowd:
        peer.socket.sendall(3 * peer.frame(b"x"))
    for connection in listener.peers.values():
        until(lambda c=connection: select.select([c], [], [], 0)[0])
    heard = 0
    while select.select([listener], [], [], 0)[0]:
        heard += len(listener.receive())
    assert heard == 3 * len(crowd) and not listener._held
    for peer in crowd:
        peer.socket.close()


def test_what_a_stranger_said_that_has_reset_its_connection_is_not_heard(listener, attackers):
    peer = meanwhile(listener, partial(attackers.Peer, port(listener.endpoint)))
    peer.push(lambda: peer.frame(b"x") * 4000)
    until(lambda: listener._held or listener.receive(0.005) is None)
    peer.reset()
    mail: list = []
    until(lambda: mail.extend(listener.receive(0.005)) or not listener.peers)
    assert not mail


def test_the_selector_waits_for_nobody_whose_messages_wait(listener, attackers):
    """A stranger that floods is not read, and costs no turns."""
    peer = meanwhile(listener, partial(attackers.Peer, port(listener.endpoint)))
    peer.push(lambda: peer.frame(b"x") * 4000)
    until(lambda: listener._held or listener.receive(0.005) is None)
    while any(c.allowance.has(time.monotonic_ns()) for c in listener._held.values()):
        listener.receive()
    (name,) = listener._held
    assert not listener._turns.watched(name) & selectors.EVENT_READ
    peer.reset()


# -- why there is no connection ----------------------------------------------------------------------------------------


def test_unreachable_refused_and_encrypted_are_three_messages(tmp_path, servers, caplog):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    folder, mine = KeyFolder(tmp_path / "server"), KeyFolder(tmp_path / "mine")
    server_key, key = folder.create("server").public, mine.create("mine").public
    server = PolicyServer(TickPolicy, "tcp://127.0.0.1:*", keys=folder)
    thread = threading.Thread(target=server.run)
    thread.start()
    mine.trust(server.endpoint, server_key)
    plain = servers.start(TickPolicy())
    mine.trust(plain.endpoint, server_key)
    pasted = shlex.quote(key)
    for endpoint, keys, what in (
        (nobody, None, "nobody listens there -- start one with: vla serve"),
        (server.endpoint, mine, f"does not allow this computer's key -- there: vla keys allow {pasted} --name"),
        (server.endpoint, None, "the other end speaks with keys ... this one without keys -- there: vla keys show"),
        (plain.endpoint, mine, "the other end speaks without keys, this one with keys"),
    ):
        client = PolicyClient(endpoint, keys)
        with pytest.raises(UserError, match=".*".join(map(re.escape, what.split(" ... ")))):
            client.hello(ROBOT, timeout_s=10 * WAIT_S)  # it does not wait as long as that
        client.close()
    with caplog.at_level(logging.WARNING):
        until(lambda: key in caplog.text and "without keys" in caplog.text)  # the server says whom it refused
    server.stop()
    thread.join(WAIT_S)


def test_a_pinned_key_is_used_on_this_machine_too(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_KEYS", str(tmp_path / "mine"))
    folder, mine = KeyFolder(tmp_path / "server"), KeyFolder(tmp_path / "mine")
    folder.create("server")
    folder.allow(mine.create("mine").public, "mine", Role.ROBOT)
    server = PolicyServer(TickPolicy, "tcp://127.0.0.1:*", keys=folder)
    thread = threading.Thread(target=server.run)
    thread.start()
    mine.trust(server.endpoint, folder.identity().public)
    client = PolicyClient(server.endpoint)
    client.hello(ROBOT, WAIT_S)
    barrier(client)
    client.close()
    server.stop()
    thread.join(WAIT_S)


def test_the_defaults_leave_room_for_what_belongs_there():
    assert listeners.STRANGER_BYTES * listeners.STRANGERS <= 64 << 20
    assert listeners.PER_ADDRESS <= listeners.STRANGERS
