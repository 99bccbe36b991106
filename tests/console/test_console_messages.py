"""What pages may say: everything else is refused by name."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_stack.console.messages import COMMANDS, MAX_BYTES, Command, Hand, LeaseWish, Ping, Seen, Stop, as_text, read
from vla_stack.intervention import EVENTS
from vla_stack.schema import SchemaError

HAND = {"type": "teleop", "seq": 3, "t": 12.5, "engaged": True, "rewind": False, "velocity": [0.1, -2]}


def test_every_message_is_read():
    assert read(json.dumps(HAND), 2) == Hand(3, 12.5, True, False, (0.1, -2.0))
    assert read(json.dumps({**HAND, "velocity": None}), 2).velocity is None
    event = {"type": "event", "id": 1, "name": "instruct", "args": {"text": "tidy up"}}
    assert read(json.dumps(event), 2) == Command(1, "instruct", {"text": "tidy up"})
    assert read('{"type": "ping", "t": 1}', 2) == Ping(1.0)
    assert read('{"type": "lease", "want": "hand_over"}', 2) == LeaseWish("hand_over")
    assert read('{"type": "seen", "n": 7}', 2) == Seen(7)
    assert read('{"type": "estop"}', 2) == Stop()


def test_what_is_not_finite_is_missing_in_the_json_that_a_page_parses():
    state = {"state": [0.1, float("nan")], "recording": {"left_s": float("inf")}, "pair": (1, -float("inf")), "why": ""}
    want = {"state": [0.1, None], "recording": {"left_s": None}, "pair": [1, None], "why": ""}
    assert json.loads(as_text(state), parse_constant=pytest.fail) == want


def test_what_follows_from_the_hand_is_no_command():
    assert COMMANDS.isdisjoint({"engage", "rewind", "lost", "estop", "acquire", "release"})
    assert {"takeover", "recovered", "subtask_done", "hand_back", "keep", "undo"} <= COMMANDS
    assert COMMANDS - {"keep", "undo", "reset", "instruct"} <= set(EVENTS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"velocity": [0.1]}, "list of 2 numbers"),
        ({"velocity": [0.1, "1"]}, "finite"),
        ({"velocity": [0.1, True]}, "finite"),
        ({"engaged": 1}, "true nor false"),
        ({"seq": -1}, "whole number"),
        ({"seq": True}, "whole number"),
        ({"lease": "another's"}, "'lease' is unknown"),
        ({"t": "now"}, "finite"),
        ({"type": "telepathy"}, "telepathy"),
        ({"type": []}, "no message type"),
    ],
)
def test_a_wrong_hand_is_refused_by_name(change, words):
    with pytest.raises(SchemaError, match=words):
        read(json.dumps({**HAND, **change}), 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 2000,
        json.dumps({**HAND, "velocity": [float("nan"), 0.0]}),
        json.dumps({**HAND, "t": float("inf")}),
        json.dumps({**HAND, "t": 10**400}),
        json.dumps({**HAND, "velocity": [0.1, -(10**400)]}),
        json.dumps({"type": "ping", "t": 10**400}),
        '{"type": "event", "id": 1, "name": "engage", "args": {}}',
        '{"type": "event", "id": 1, "name": "start", "args": {"x": 1}}',
        '{"type": "event", "id": 1, "name": "instruct", "args": {"text": ""}}',
        '{"type": "event", "id": 1, "name": ["start"], "args": {}}',
        '{"type": "event", "id": 1, "name": "start", "args": []}',
        '{"type": "lease", "want": "all"}',
        '{"type": "estop", "lease": "x"}',
        '{"type": "seen", "n": -1}',
        '{"type": "seen", "n": 1.5}',
        '{"type": "ping", "t": 1}' + " " * MAX_BYTES,
    ],
)
def test_everything_else_is_refused(text):
    with pytest.raises(SchemaError):
        read(text, 2)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("ab1.", max_size=4),
    st.sampled_from(sorted(COMMANDS)),
    st.lists(st.integers() | st.floats() | st.text("ab1.", max_size=2), max_size=3),
    st.just({}),
    st.just([[]]),
)
KINDS = ("teleop", "event", "ping", "lease", "seen", "estop", "x")
KEYS = ("seq", "t", "engaged", "rewind", "velocity", "id", "name", "args", "want", "n")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_nothing_but_a_schema_error_comes_out(kind, body):
    try:
        read(json.dumps({"type": kind, **body}), 3)
    except SchemaError:
        pass
