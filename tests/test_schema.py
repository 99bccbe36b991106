import json
from dataclasses import replace

import numpy as np
import pytest

from vla_stack.schema import ActionChunk, Camera, Dim, Observation, PolicySpec, RobotSpec, SchemaError

SPEC = RobotSpec(
    name="toy",
    state=(
        Dim("x.pos", "m", -1, 1, 2),
        Dim("yaw.pos", "rad", kind="angle"),
        Dim("gripper.pos", "ratio", 0, 1, kind="gripper"),
    ),
    action=(
        Dim("x.pos", "m", -1, 1, 2),
        Dim("yaw.pos", "rad", kind="angle"),
        Dim("gripper.pos", "ratio", 0, 1, kind="gripper"),
    ),
    cameras=(Camera("front", 4, 6),),
    rate_hz=10.0,
)


def observation(**change):
    obs = Observation(state=np.zeros(3, np.float32), images={"front": np.zeros((4, 6, 3), np.uint8)}, task="move")
    return replace(obs, **change)


def test_specs_survive_json():
    policy = PolicySpec(robot=SPEC, horizon=16, normalisation="n", model_version="m", d_train_max=3)
    text = json.dumps(policy.to_json(), allow_nan=False)  # strict JSON: unbounded values must not leak as Infinity
    assert PolicySpec.from_json(json.loads(text)) == policy


@pytest.mark.parametrize(
    "broken",
    [
        {"name": None, "state": None},
        {"state": [{"nope": 1}]},
        {"state": [{"name": 3, "unit": "m"}]},
        {"state": [{"name": "x", "unit": "m", "low": "left"}]},
        {"action": [{"name": "x", "unit": "m", "kind": "foot"}]},
        {"action": ["x"]},
        {"cameras": [{"name": "front"}]},
        {"cameras": 5},
        {"rate_hz": "fast"},
        {"rate_hz": 0},
        {"rate_hz": float("nan")},
        {"rate_hz": 10**400},
        {"action_kind": "sideways"},
    ],
)
def test_malformed_spec_is_a_schema_error(broken):
    with pytest.raises(SchemaError):
        RobotSpec.from_json({**SPEC.to_json(), **broken})


def test_fingerprint_sees_what_must_match_and_nothing_else():
    assert replace(SPEC, name="other").fingerprint() == SPEC.fingerprint()
    assert replace(SPEC, rate_hz=20.0).fingerprint() != SPEC.fingerprint()
    assert replace(SPEC, rate_hz=20).fingerprint() == replace(SPEC, rate_hz=20.0).fingerprint()  # as read from JSON
    assert replace(SPEC, action=SPEC.action[::-1]).fingerprint() != SPEC.fingerprint()
    assert replace(SPEC, cameras=(Camera("front", 4, 8),)).fingerprint() != SPEC.fingerprint()


def test_observation_check_names_the_fault():
    observation().check(SPEC)
    with pytest.raises(SchemaError, match="yaw.pos"):
        observation(state=np.array([0, np.nan, 0], np.float32)).check(SPEC)
    with pytest.raises(SchemaError, match="front"):
        observation(images={"wrist": np.zeros((4, 6, 3), np.uint8)}).check(SPEC)
    with pytest.raises(SchemaError, match=r"uint8\[4, 6, 3\]"):
        observation(images={"front": np.zeros((6, 4, 3), np.uint8)}).check(SPEC)
    with pytest.raises(SchemaError, match="float64"):
        observation(state=np.zeros(3)).check(SPEC)


def test_chunk_covers_origin_to_end():
    chunk = ActionChunk(actions=np.zeros((8, 3), np.float32), origin=5, k_obs=5)
    assert (chunk.horizon, chunk.end) == (8, 13)
