"""What does not fit is said in one line, at the door where it shows: environment, robot or dataset against a policy."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from vla_stack.data.store import check_same
from vla_stack.envs.making import check_fit, make
from vla_stack.errors import UserError
from vla_stack.schema import Camera, Dim, RobotSpec
from vla_stack.serving.messages import robot_difference

X, Y, G = Dim("x.pos", "m"), Dim("y.pos", "m"), Dim("gripper.pos", "ratio", kind="gripper")
TRAINED = RobotSpec("test/arm", (X, Y, G), (X, Y, G), (Camera("front", 64, 64), Camera("wrist", 64, 64)), 10.0)
FRONT, WRIST = TRAINED.cameras


def of(**changes):
    return replace(TRAINED, **changes)


ENVIRONMENT = [
    (
        of(action=(X, Dim("z.pos", "m"), G)),
        "has action [x.pos z.pos gripper.pos], the policy was trained on [x.pos y.pos",
    ),
    (of(action=(Y, X, G)), "has action [y.pos x.pos gripper.pos]"),
    (of(action=(X, Y)), "has action [x.pos y.pos]"),
    (of(action=(X, Dim("y.pos", "rad"), G)), "action 'y.pos' of sim/test-v0 is a position in rad"),
    (of(action=(X, Y, Dim("gripper.pos", "ratio"))), "action 'gripper.pos' of sim/test-v0 is a position in ratio"),
    (of(action_kind="delta"), "takes delta actions, the policy gives absolute ones"),
    (of(state=(X, Dim("z.pos", "m"), G)), "has state [x.pos z.pos gripper.pos]"),
    (of(state=(X, Y, G, Dim("joint_1.pos", "rad"))), "has state [x.pos y.pos gripper.pos joint_1.pos]"),
    (of(state=(Dim("x.pos", "rad"), Y, G)), "state 'x.pos' of sim/test-v0 is a position in rad"),
    (of(rate_hz=20.0), "runs at 20 Hz, the policy was trained at 10 Hz"),
    (of(cameras=(FRONT,)), "the policy needs camera 'wrist', sim/test-v0 has front"),
    (of(cameras=()), "the policy needs camera 'front', sim/test-v0 has "),
    (
        of(cameras=(FRONT, Camera("wrist", 48, 64))),
        "camera 'wrist' of sim/test-v0 is 48x64, the policy was trained at 64x64",
    ),
]
ROBOT = [
    (of(action=(X, Dim("z.pos", "m"), G)), "action[1] is "),
    (of(action=(X, Y)), "action[2] is absent on the robot"),
    (of(state=(X, Dim("y.pos", "rad"), G)), "state[1] is "),
    (of(cameras=(FRONT,)), "cameras are front on the robot, front, wrist in the policy"),
    (of(cameras=(FRONT, Camera("wrist", 48, 64))), "camera 'wrist' is 48x64 on the robot"),
    (of(rate_hz=20.0), "rate_hz is 20.0 on the robot, 10.0 in the policy"),
    (of(action_kind="delta"), "action_kind is delta on the robot, absolute in the policy"),
]
DATASET = [
    (of(action=(X, Dim("z.pos", "m"), G)), "whose action differ"),
    (of(state=(X, Dim("y.pos", "rad"), G)), "whose state differ"),
    (of(cameras=(FRONT, Camera("wrist", 48, 64))), "whose cameras differ"),
    (of(rate_hz=20.0), "whose rate_hz differ"),
]


@pytest.mark.parametrize(("env", "message"), ENVIRONMENT, ids=[message for _, message in ENVIRONMENT])
def test_a_policy_and_an_environment(env, message):
    with pytest.raises(UserError) as e:
        check_fit(env, TRAINED, "sim/test-v0")
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(("robot", "message"), ROBOT, ids=[message for _, message in ROBOT])
def test_a_policy_and_a_robot(robot, message):
    told = robot_difference(robot, TRAINED)
    assert told is not None and told.startswith(message) and "\n" not in told


@pytest.mark.parametrize(("robot", "message"), DATASET, ids=[message for _, message in DATASET])
def test_a_recording_and_a_dataset(robot, message):
    with pytest.raises(UserError) as e:
        check_same(Path("data/pick"), TRAINED, robot, {}, {})
    assert message in str(e.value) and "data/pick" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("field", ["action", "state"])
def test_who_searches_the_page_for_the_message_finds_it(field):
    with pytest.raises(UserError) as e:
        check_fit(of(**{field: (X, Y)}), TRAINED, "sim/test-v0")
    said = re.sub(r"\[.*?\]", "[...]", e.value.message).removeprefix("sim/test-v0 ")
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert any(said in line for line in page.read_text().splitlines() if line.startswith("## "))


def test_what_fits_is_not_refused():
    check_fit(TRAINED, TRAINED, "sim/test-v0")
    check_fit(of(cameras=(*TRAINED.cameras, Camera("top", 32, 32))), TRAINED, "sim/test-v0")  # more than is needed
    check_fit(of(action=(replace(X, low=-1.0, high=1.0), Y, G)), TRAINED, "sim/test-v0")  # ranges are the envelope's
    assert robot_difference(TRAINED, TRAINED) is None
    check_same(Path("data/pick"), TRAINED, TRAINED, {}, {})


def test_an_option_that_a_provider_does_not_know_is_named():
    with pytest.raises(UserError, match="^imagined:shipped does not take these options: .*colour"):
        make("imagined:shipped", options={"colour": 4})
