"""Keys: what is written where, who gets in, and what they may do."""

from __future__ import annotations

import os
import shlex
import stat
import threading
from types import SimpleNamespace

import pytest
import zmq
from serving_fakes import ROBOT, WAIT_S, TickPolicy, collect, observation

from vla_stack.cli import main as vla
from vla_stack.errors import UserError
from vla_stack.serving import messages, wire
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.dialer import no_server
from vla_stack.serving.keys import KeyFolder, Peer, Role
from vla_stack.serving.server import PolicyServer
from vla_stack.serving.sessions import LEASE_NS, Sessions
from vla_stack.serving.wire import Code, Kind, Message, WireError


@pytest.fixture
def server(tmp_path):
    """A server with keys on a loopback port, which only the peers of ``tmp_path/server/allowed.json`` can use."""
    KeyFolder(tmp_path / "server").create("gpu")
    server = PolicyServer(TickPolicy, "tcp://127.0.0.1:*", keys=KeyFolder(tmp_path / "server"))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def computer(tmp_path, name, server, role=Role.ROBOT) -> KeyFolder:
    """Keys of a peer that the server allows and that trusts the server."""
    folder, served = KeyFolder(tmp_path / name), KeyFolder(tmp_path / "server")
    public = folder.create(name).public
    if role:
        served.allow(public, name, role)
    folder.trust(server.endpoint, served.identity().public)
    return folder


def ask(server, folder: KeyFolder, message: Message) -> Message | None:
    """What a raw peer with these keys is answered; None if nothing comes."""
    identity, context = folder.identity(), zmq.Context()
    context.linger = 0  # a test that fails leaves it behind, and its end would wait for ever
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = identity.public.encode(), identity.secret.encode()
    socket.curve_serverkey = folder.server_key(server.endpoint).encode()
    socket.connect(server.endpoint)
    socket.send_multipart(wire.encode(message))
    answer = wire.decode(socket.recv_multipart()) if socket.poll(500 if message.kind is Kind.PING else 20_000) else None
    context.destroy(linger=0)
    return answer


def test_a_robot_with_keys_is_served(server, tmp_path):
    client = PolicyClient(server.endpoint, computer(tmp_path, "arm1", server))
    client.hello(ROBOT, timeout_s=WAIT_S)
    assert client.request(observation(3), rid=0, epoch=0, origin=3, seed=0)
    (chunk,) = collect(client, 1)
    assert chunk.actions[0, 0] == 3
    client.close()


def test_an_unknown_key_does_not_get_in(server, tmp_path):
    assert ask(server, computer(tmp_path, "stranger", server, role=None), Message(Kind.PING)) is None


def test_a_peer_without_keys_does_not_get_in(server):
    context = zmq.Context()
    context.linger = 0
    socket = context.socket(zmq.DEALER)
    socket.connect(server.endpoint)
    socket.send_multipart(wire.encode(Message(Kind.PING)))
    assert not socket.poll(300)
    context.destroy(linger=0)


def test_a_server_with_another_key_is_not_believed(server, tmp_path):
    folder = computer(tmp_path, "arm1", server)
    folder.trust(server.endpoint, KeyFolder(tmp_path / "impostor").create("x").public)
    client = PolicyClient(server.endpoint, folder)
    with pytest.raises(UserError, match="the one that is pinned"):
        client.hello(ROBOT, timeout_s=0.5)
    client.close()


def test_an_observer_may_look_and_not_touch(server, tmp_path):
    folder = computer(tmp_path, "screen", server, Role.OBSERVER)
    assert ask(server, folder, Message(Kind.PING)).kind is Kind.PONG
    answer = ask(server, folder, messages.hello(ROBOT, 0))
    assert answer.fields["code"] == Code.AUTH and "screen" in answer.fields["text"]


def test_a_revoked_key_loses_its_connection_s_rights(server, tmp_path):
    folder = computer(tmp_path, "arm1", server)
    client = PolicyClient(server.endpoint, folder)
    client.hello(ROBOT, timeout_s=WAIT_S)
    KeyFolder(tmp_path / "server").revoke("arm1")
    assert client.request(observation(), rid=0, epoch=0, origin=0, seed=0)
    (refusal,) = collect(client, 1)
    assert refusal.code == Code.AUTH
    client.close()


def test_one_key_drives_one_robot(server, tmp_path):
    folder = computer(tmp_path, "arm1", server)
    first, second = PolicyClient(server.endpoint, folder), PolicyClient(server.endpoint, folder)
    first.hello(ROBOT, timeout_s=WAIT_S)
    with pytest.raises(UserError, match="another process drives this robot"):
        second.hello(ROBOT, timeout_s=0.5)
    first.close()
    second.hello(ROBOT, timeout_s=WAIT_S)
    second.close()


def test_the_lease_of_a_silent_robot_ends():
    sessions = Sessions(limit=2, idle_ns=100 * LEASE_NS)
    old, _ = sessions.open(b"a", 0, "", now_ns=0, key="k")
    with pytest.raises(WireError, match="another process drives this robot"):
        sessions.open(b"b", 0, "", now_ns=LEASE_NS - 1, key="k")
    new, replaced = sessions.open(b"b", 0, "", now_ns=LEASE_NS, key="k")
    assert replaced is old and new.key == "k" and len(sessions) == 1


# -- files -------------------------------------------------------------------------------------------------------


def test_the_secret_is_private_and_never_overwritten(tmp_path):
    folder = KeyFolder(tmp_path / "keys")
    identity = folder.create("gpu")
    assert stat.S_IMODE((tmp_path / "keys/identity.json").stat().st_mode) == 0o600
    assert folder.identity() == identity and identity.secret not in repr(identity)
    with pytest.raises(UserError, match="identity.json exists"):
        folder.create("gpu")
    os.chmod(tmp_path / "keys/identity.json", 0o644)
    with pytest.raises(UserError, match="can be read by others"):
        folder.identity()


def test_the_verb(tmp_path, capsys):
    def run(*args: str) -> str:
        assert vla(["keys", "--keys", str(tmp_path), *args]) == 0
        return capsys.readouterr().out.strip()

    public = run("create", "gpu")
    assert run("show") == public and len(public) == 40
    other = KeyFolder(tmp_path / "arm").create("arm1").public
    run("allow", other, "--name", "arm1")
    run("allow", public, "--name", "screen", "--role", "observer")
    assert KeyFolder(tmp_path).allowed() == {other: Peer("arm1", Role.ROBOT), public: Peer("screen", Role.OBSERVER)}
    assert other in run("list")
    run("revoke", "arm1")
    assert other not in KeyFolder(tmp_path).allowed()
    run("trust", "gpu.lab:5555", public)
    assert KeyFolder(tmp_path).server_key("tcp://gpu.lab:5555") == public


def test_a_mistyped_key_takes_no_good_one_away(tmp_path):
    folder = KeyFolder(tmp_path)
    key, newer = KeyFolder(tmp_path / "arm").create("arm").public, KeyFolder(tmp_path / "new").create("arm").public
    folder.allow(key, "arm", Role.ROBOT)
    with pytest.raises(UserError, match="'nonsense' is not a key"):
        folder.allow("nonsense", "arm", Role.ROBOT)
    assert folder.allowed() == {key: Peer("arm", Role.ROBOT)}
    folder.allow(newer, "arm", Role.OBSERVER)  # a name stands for one key
    assert folder.allowed() == {newer: Peer("arm", Role.OBSERVER)}


def test_the_remedy_of_a_refused_key_can_be_pasted_into_a_shell():
    key = "a&b>c<d!e(f)$g" + "x" * 26
    refused = SimpleNamespace(
        public=key, trouble="does not allow this computer's key", refused=True, endpoint="tcp://x"
    )
    words = list(shlex.shlex(no_server(refused, "policy server", "").remedy, posix=True, punctuation_chars=True))
    assert words[words.index("allow") + 1] == key


def test_no_public_key_reads_as_an_option(tmp_path, monkeypatch):
    pairs = iter([(b"-" + b"a" * 39, b"s" * 40), (b"b" * 40, b"s" * 40)])
    monkeypatch.setattr("vla_stack.serving.keys.zmq.curve_keypair", lambda: next(pairs))
    assert KeyFolder(tmp_path).create("gpu").public == "b" * 40


@pytest.mark.parametrize(
    "args,text",
    [
        (("allow", "short", "--name", "x"), "'short' is not a key"),
        (("revoke", "nobody"), "'nobody' is not on the allow-list"),
        (("trust", "gpu.lab", "x"), "'gpu.lab' is not HOST:PORT"),
        (("show",), "this computer has no keys"),
    ],
)
def test_errors_are_one_line_with_a_remedy(tmp_path, capsys, args, text):
    assert vla(["keys", "--keys", str(tmp_path), *args]) == 1
    assert text in capsys.readouterr().err


def test_a_damaged_allow_list_stops_the_server_at_the_start(tmp_path):
    KeyFolder(tmp_path).create("gpu")
    (tmp_path / "allowed.json").write_text('{"short": {}}')
    with pytest.raises(UserError, match="is not a key|is damaged"):
        PolicyServer(TickPolicy, "tcp://127.0.0.1:*", keys=KeyFolder(tmp_path))
