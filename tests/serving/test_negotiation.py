"""HELLO: the bodies survive the wire, hostile ones do not, and a difference is named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import HORIZON, ROBOT, TickPolicy, observation

from vla_stack.schema import ActionChunk, Camera, Dim, SchemaError
from vla_stack.serving import messages, wire
from vla_stack.serving.wire import Kind, Message, WireError

POLICY = TickPolicy().spec
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def over_the_wire(message: Message) -> Message:
    return wire.decode([bytes(frame) for frame in wire.encode(message)])


def test_descriptions_survive_the_wire():
    assert messages.read_hello(over_the_wire(messages.hello(ROBOT, 0))) == ROBOT
    assert messages.read_welcome(over_the_wire(messages.welcome(POLICY, "sid", 0))) == POLICY


def test_a_large_robot_fits():
    dims = tuple(Dim(f"joint_{i}_with_a_long_name.pos", "rad", -3, 3, 2) for i in range(200))
    robot = replace(ROBOT, state=dims, action=dims)
    assert messages.read_hello(over_the_wire(messages.hello(robot, 0))) == robot


def test_observation_survives_the_wire():
    sent = observation(step=9, task="empile le cube, s'il te plaît")
    obs, origin, seed = messages.read_infer(over_the_wire(messages.infer(sent, "s", 0, 1, 12, 77)), ROBOT)
    assert (obs.step, obs.t_capture_ns, obs.task, origin, seed) == (9, 1009, sent.task, 12, 77)
    np.testing.assert_array_equal(obs.state, sent.state)
    for camera, image in sent.images.items():
        np.testing.assert_array_equal(obs.images[camera], image)


def test_cameras_that_the_policy_does_not_use_are_left_out():
    extra = replace(observation(), images={**observation().images, "rear": np.zeros((9, 9, 3), np.uint8)})
    obs, _, _ = messages.read_infer(over_the_wire(messages.infer(extra, "s", 0, 1, 0, 0)), ROBOT)
    assert list(obs.images) == ["front", "wrist"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": np.zeros(3, np.float32)}, r"state is float32\[3\]"),
        ({"state": np.zeros(2, np.float64)}, "state is float64"),
        ({"state": np.array([np.nan, 0], np.float32)}, "not finite in x.pos"),
        ({"images": {"front": np.zeros((6, 8, 3), np.uint8)}}, "camera 'wrist' is missing"),
        ({"images": {c: np.zeros((4, 4, 3), np.uint8) for c in ("front", "wrist")}}, "camera 'front' is uint8"),
    ],
)
def test_observation_that_does_not_fit_is_named(change, reason):
    sent = messages.infer(replace(observation(), **change), "s", 0, 1, 0, 0)
    with pytest.raises(WireError, match=reason):
        messages.read_infer(over_the_wire(sent), ROBOT)


@pytest.mark.parametrize(
    ("robot", "text"),
    [
        (replace(ROBOT, name="another name"), None),
        (replace(ROBOT, state=(replace(ROBOT.state[0], low=-9.0), ROBOT.state[1])), None),
        (replace(ROBOT, state=ROBOT.state[:1]), "state[1] is absent on the robot, gripper.pos (ratio) in the policy"),
        (
            replace(ROBOT, action=(Dim("y.pos", "m"), ROBOT.action[1])),
            "action[0] is y.pos (m, position) on the robot, x.pos (m, position) in the policy",
        ),
        (
            replace(ROBOT, action=(Dim("x.pos", "rad", kind="angle"), ROBOT.action[1])),
            "action[0] is x.pos (rad, angle) on the robot, x.pos (m, position) in the policy",
        ),
        (replace(ROBOT, cameras=ROBOT.cameras[:1]), "cameras are front on the robot, front, wrist in the policy"),
        (
            replace(ROBOT, cameras=(Camera("front", 480, 640), ROBOT.cameras[1])),
            "camera 'front' is 480x640 on the robot, 6x8 in the policy",
        ),
        (replace(ROBOT, rate_hz=30.0), "rate_hz is 30.0 on the robot, 10.0 in the policy"),
        (replace(ROBOT, action_kind="delta"), "action_kind is delta on the robot, absolute in the policy"),
    ],
)
def test_first_difference_is_named(robot, text):
    assert messages.robot_difference(robot, ROBOT) == text
    assert (text is None) == (robot.fingerprint() == ROBOT.fingerprint())


def test_policy_difference_covers_what_a_running_robot_relies_on():
    assert messages.policy_difference(POLICY, POLICY) is None
    for key, value in {"horizon": 9, "normalisation": "n2", "model_version": "m2", "d_train_max": 1}.items():
        assert key in messages.policy_difference(replace(POLICY, **{key: value}), POLICY)
    other = replace(POLICY, robot=replace(ROBOT, rate_hz=5.0))
    assert "rate_hz" in messages.policy_difference(other, POLICY)


@given(st.sampled_from([ROBOT.to_json(), POLICY.to_json()]), st.data())
@settings(max_examples=150, deadline=None)
def test_hostile_json_is_refused_or_read(body, data):
    """Any value anywhere in a description: a WireError or a description, nothing else."""
    body = json.loads(json.dumps(body))
    node = body
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        node[key] = data.draw(JSON)
        break
    tensor = np.frombuffer(json.dumps(body).encode(), np.uint8)
    message = Message(Kind.HELLO, "sid", tensors={messages.ROBOT: tensor, messages.POLICY: tensor})
    for read, difference, known in (
        (messages.read_hello, messages.robot_difference, ROBOT),
        (messages.read_welcome, messages.policy_difference, POLICY),
    ):
        try:
            text = difference(read(message), known) or ""
        except WireError as e:
            text = e.text
        wire.encode(wire.error(wire.Code.BAD_SCHEMA, text))  # a lone surrogate in a name must not break the answer


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"rate_hz": NaN}', b"1" * 10_000])
def test_bodies_that_are_no_description(text):
    tensors = {messages.ROBOT: np.array(list(text), np.uint8)}
    with pytest.raises(WireError):
        messages.read_hello(Message(Kind.HELLO, tensors=tensors))


def test_a_hello_of_nobody_is_a_question():
    assert messages.read_hello(over_the_wire(messages.hello(None, 0))) is None


def test_chunk_of_another_shape_is_refused():
    def reply(actions):
        return over_the_wire(messages.chunk(ActionChunk(actions, origin=4, k_obs=3, rid=1, session="s"), t_obs=0))

    good = messages.read_chunk(reply(np.ones((HORIZON, 2), np.float32)), POLICY)
    assert (good.origin, good.k_obs, good.rid, good.session) == (4, 3, 1, "s")
    for actions in (np.ones((HORIZON + 1, 2), np.float32), np.ones((HORIZON, 2), np.float64)):
        with pytest.raises(WireError, match=r"float32\[4, 2\]"):
            messages.read_chunk(reply(actions), POLICY)


def test_how_much_of_a_chunk_to_execute_travels_with_it():
    def over(execute):
        chunk = ActionChunk(np.ones((HORIZON, 2), np.float32), origin=4, k_obs=3, rid=1, session="s", execute=execute)
        return over_the_wire(messages.chunk(chunk, t_obs=0))

    assert messages.read_chunk(over(3), POLICY).execute == 3
    older = over(3)  # a peer that does not know the key leaves it out
    del older.fields["execute"]
    assert messages.read_chunk(older, POLICY).execute == 0
    for execute in (-1, HORIZON + 1):
        with pytest.raises(WireError, match=f"CHUNK wants {execute} of 4 actions executed"):
            messages.read_chunk(over(execute), POLICY)


def test_schema_error_is_what_from_json_promises():
    with pytest.raises(SchemaError):
        type(ROBOT).from_json({"name": "x"})
