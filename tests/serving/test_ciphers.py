"""By which cipher messages go, and that nothing else opens them."""

import os

import pytest
import zmq

from vla_stack.serving import curve
from vla_stack.serving.curve import CurveClient, CurveKeys, CurveServer, computes_aes
from vla_stack.serving.zmtp import COMMAND, MORE, ProtocolError, metadata, properties

PICTURE = os.urandom(1000) + bytes(1000)


def pair(monkeypatch, offers: bytes):
    """Two ends that have shaken hands."""
    server_keys, client_keys = ([k.decode() for k in zmq.curve_keypair()] for _ in range(2))
    server = CurveServer(CurveKeys(*server_keys), lambda key: key == client_keys[0])
    client = CurveClient(CurveKeys(*client_keys, server=server_keys[0]))
    monkeypatch.setattr(client, "_offers", offers)
    server.begin(b"ROUTER")
    (said,) = client.begin(b"DEALER")
    for end in (server, client, server):
        (said,) = end.handshake(said)
    assert not client.handshake(said) and client.ready and server.ready and server.key == client_keys[0]
    return client, server


OFFERS = [b"AES-256-GCM", b"ChaCha20-Poly1305", b"", b"ROT13"]


@pytest.mark.parametrize("offers", OFFERS)
def test_both_ends_go_by_what_the_client_offers_and_the_server_knows(monkeypatch, offers):
    ends = pair(monkeypatch, offers)
    assert {end.cipher for end in ends} == {offers if offers in curve.CIPHERS else b""}
    for ours, theirs in (ends, ends[::-1]):
        sealed = []
        for flags, payload in ((MORE, b""), (0, PICTURE), (0, memoryview(PICTURE)), (COMMAND, b"\x04PING")):
            outside, parts = ours.seal(flags, payload)
            sealed.append(b"".join(parts))
            assert outside == 0 and len(sealed[-1]) == len(payload) + ours.overhead and bytes(20) not in sealed[-1]
            got, opened = theirs.open(0, memoryview(sealed[-1]))
            assert (got, bytes(opened)) == (flags, bytes(payload))
        assert sealed[1][16:] != sealed[2][16:]  # the same picture, another nonce


@pytest.mark.parametrize("offers", OFFERS[:3])
def test_what_was_changed_or_heard_before_is_refused(monkeypatch, offers):
    client, server = pair(monkeypatch, offers)
    frames = [b"".join(client.seal(0, PICTURE)[1]) for _ in range(40)]
    for frame, at in zip(frames, (8, 15, 16, 17, len(frames[0]) // 2, len(frames[0]) - 1), strict=False):
        with pytest.raises(ProtocolError):
            server.open(0, frame[:at] + bytes((frame[at] ^ 1,)) + frame[at + 1 :])
    server._heard = 8  # a changed number is as good as a large one
    assert bytes(server.open(0, frames[30])[1]) == PICTURE
    for frame in (frames[30], frames[29]):
        with pytest.raises(ProtocolError, match="used before"):
            server.open(0, frame)
    for frame in (b"", frames[31][:32], b"x" * 100):
        with pytest.raises(ProtocolError):
            server.open(0, frame)


def test_a_direction_does_not_open_its_own(monkeypatch):
    client, _ = pair(monkeypatch, OFFERS[0])
    with pytest.raises(ProtocolError):
        client.open(0, b"".join(client.seal(0, PICTURE)[1]))


def test_metadata_is_read_as_it_is_written():
    said = metadata(b"DEALER", cipher=b"AES-256-GCM")
    assert properties(said) == {"Socket-Type": b"DEALER", "X-Cipher": b"AES-256-GCM"}
    assert properties(b"") == {}
    for n in range(1, len(said)):
        if n != len(metadata(b"DEALER")):
            with pytest.raises(ProtocolError, match="malformed"):
                properties(said[:n])


def test_a_computer_says_whether_it_has_instructions_for_aes(tmp_path):
    about = tmp_path / "cpuinfo"
    assert computes_aes(about)
    about.write_text("flags : fpu sse2 aes avx2\n")
    assert computes_aes(about)
    about.write_text("Features : fp asimd evtstrm crc32 cpuid\n")
    assert not computes_aes(about)
