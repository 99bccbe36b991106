"""The mapper from devices to velocities, in the browser that runs it."""

import pytest
from playwright.sync_api import Page
from toy_console import browser

from vla_stack.console.gateway import STATIC
from vla_stack.key_map import as_script

ARM = [
    {"name": "tcp_x.pos", "unit": "m", "max_rate": 0.65, "kind": "position"},
    {"name": "tcp_y.pos", "unit": "m", "max_rate": 0.65, "kind": "position"},
    {"name": "tcp_z.pos", "unit": "m", "max_rate": 0.05, "kind": "position"},
    {"name": "tcp_yaw.pos", "unit": "rad", "max_rate": 2.5, "kind": "angle"},
    {"name": "gripper.pos", "unit": "ratio", "max_rate": None, "kind": "gripper"},
]
JOINTS = [{"name": f"joint_{i}.pos", "unit": "rad", "max_rate": 2.0, "kind": "angle"} for i in range(4)]
WHEELS = (("x.vel", "m/s"), ("y.vel", "m/s"), ("theta.vel", "rad/s"))
AXES = ("right", "away", "up", "turn", "pitch", "roll", "grip")
QUIET = {"engaged": False, "rewind": False, "axes": dict.fromkeys(AXES, 0)}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser() as chromium:
        page = chromium.new_page()
        scripts = {"mapper.js": (STATIC / "mapper.js").read_text(), "keys.js": as_script()}
        page.route(
            "http://mapper.test/**",
            lambda route: route.fulfill(
                body=scripts.get(route.request.url.rsplit("/", 1)[1], "<!doctype html>"),
                content_type="text/javascript" if route.request.url.endswith(".js") else "text/html",
            ),
        )
        page.goto("http://mapper.test/")
        yield page


def call(page: Page, function: str, *args):
    code = "async ([f, args]) => (await import('/mapper.js'))[f](...args)"
    return page.evaluate(code, [function, list(args)])


def drive(page: Page, raw: dict, dims=ARM, facing=True, speed=0.1, wheels=False) -> list[float]:
    axes = call(page, "intent", raw)["axes"]
    return call(page, "velocity", axes, dims, {"speed": speed, "facing": facing, "wheels": wheels})


def keys(*names: str) -> dict:
    return {"keyboard": {"keys": list(names)}}


def test_nothing_pressed_is_nothing_asked(page):
    assert call(page, "intent", {}) == QUIET
    everything = {
        "keyboard": {"keys": []},
        "gamepad": {"axes": [0.05, -0.1, 0.02, 0], "buttons": [0] * 17},
        "phone": {"held": False, "tilt": [1, -2, 0]},
        "spacemouse": {"move": [10, -20, 5], "turn": [0, 30, 0], "buttons": 0},
        "touch": {"axes": {}, "held": False},
    }
    assert call(page, "intent", everything) == QUIET  # hands tremble and sticks do not rest at zero
    assert drive(page, everything) == [0] * 5


def test_the_operator_who_faces_the_robot_sees_away_as_towards_its_base(page):
    assert drive(page, keys("arrowup")) == pytest.approx([-0.1, 0, 0, 0, 0])
    assert drive(page, keys("arrowup"), facing=False) == pytest.approx([0.1, 0, 0, 0, 0])
    assert drive(page, keys("arrowright")) == pytest.approx([0, 0.1, 0, 0, 0])
    assert drive(page, keys("arrowright"), facing=False) == pytest.approx([0, -0.1, 0, 0, 0])
    assert drive(page, keys(",")) == pytest.approx([0, 0, 0, 0.6, 0])
    assert drive(page, keys("d"))[4] < 0 < drive(page, keys("e"))[4]


def test_no_dimension_is_asked_for_more_than_it_can(page):
    assert drive(page, keys("q"), speed=0.4) == pytest.approx([0, 0, 0.05, 0, 0])
    opposite = drive(page, {**keys("arrowup"), "touch": {"axes": {"away": -1}}})
    assert opposite == [0] * 5
    together = drive(page, {**keys("arrowup"), "touch": {"axes": {"away": 1}}})
    assert together == drive(page, keys("arrowup"))


def test_every_device_has_its_dead_man(page):
    for raw in (
        keys(" "),
        {"gamepad": {"axes": [], "buttons": [0, 0, 0, 0, 1]}},
        {"phone": {"held": True, "tilt": [0, 0, 0]}},
        {"spacemouse": {"move": [0, 0, 0], "turn": [0, 0, 0], "buttons": 1}},
        {"touch": {"axes": {}, "held": True}},
    ):
        assert call(page, "intent", raw) == {**QUIET, "engaged": True}
    assert call(page, "intent", keys("r")) == {**QUIET, "rewind": True}


def test_devices_agree_on_directions(page):
    full = {
        "right": [keys("arrowright"), {"gamepad": {"axes": [1, 0, 0, 0]}}, {"spacemouse": {"move": [350, 0, 0]}}],
        "away": [keys("arrowup"), {"gamepad": {"axes": [0, -1, 0, 0]}}, {"spacemouse": {"move": [0, -350, 0]}}],
        "up": [keys("q"), {"gamepad": {"axes": [0, 0, 0, -1]}}, {"spacemouse": {"move": [0, 0, -350]}}],
        "turn": [keys(","), {"gamepad": {"axes": [0, 0, -1, 0]}}, {"phone": {"held": True, "tilt": [0, 0, 40]}}],
    }
    full["right"].append({"phone": {"held": True, "tilt": [0, 90, 0]}})
    full["away"].append({"phone": {"held": True, "tilt": [90, 0, 0]}})
    for axis, devices in full.items():
        for raw in devices:
            assert call(page, "intent", raw)["axes"] == {**QUIET["axes"], axis: 1}, raw


def test_shift_is_slow_but_not_for_the_gripper(page):
    slow, fast = drive(page, keys("arrowright", "e", "shift")), drive(page, keys("arrowright", "e"))
    assert slow[1] == pytest.approx(0.3 * fast[1]) and slow[4] == fast[4]


def test_an_arm_without_a_tool_is_driven_by_its_joints(page):
    assert drive(page, keys("arrowup"), JOINTS) == pytest.approx([0, 0.6, 0, 0])
    assert drive(page, keys("w"), JOINTS) == pytest.approx([0, 0, 0, 0.6])


LEKIWI = [
    *({"name": f"arm_{i}.pos", "unit": "rad", "max_rate": 2.0, "kind": "angle"} for i in range(5)),
    {"name": "arm_gripper.pos", "unit": "ratio", "max_rate": None, "kind": "gripper"},
    {"name": "x.vel", "unit": "m/s", "max_rate": None, "kind": "position"},
    {"name": "y.vel", "unit": "m/s", "max_rate": None, "kind": "position"},
    {"name": "theta.vel", "unit": "rad/s", "max_rate": None, "kind": "position"},
]


def test_no_key_of_an_arm_drives_the_base_below_it(page):
    for key in page.evaluate("async () => Object.keys((await import('/keys.js')).MOTIONS)"):
        assert drive(page, keys(key), LEKIWI, speed=0.03)[6:] == [0, 0, 0], key
    assert drive(page, keys("."), LEKIWI, speed=0.03) == pytest.approx([0, 0, 0, 0, -0.18, 0, 0, 0, 0])
    other = [{"name": "push", "unit": "N", "max_rate": None, "kind": "position"}]
    assert drive(page, keys("arrowright", "o"), [*other, *LEKIWI])[0] == 0


def test_a_base_below_an_arm_is_driven_in_its_place(page):
    forth = drive(page, keys("arrowup"), LEKIWI, facing=False, speed=0.03, wheels=True)
    assert forth[6:] == pytest.approx([0.03, 0, 0])
    for key in page.evaluate("async () => Object.keys((await import('/keys.js')).MOTIONS)"):
        assert drive(page, keys(key), LEKIWI, wheels=True)[:5] == [0] * 5, key
        assert drive(page, keys(key), JOINTS, wheels=True) == drive(page, keys(key), JOINTS), key  # which has no base
        assert drive(page, keys(key), ARM, wheels=True) == drive(page, keys(key), ARM), key


def test_a_base_alone_is_driven_at_the_speed_that_is_set(page):
    base = LEKIWI[6:]
    assert drive(page, keys("arrowup"), base, facing=False, speed=0.03) == pytest.approx([0.03, 0, 0])
    assert drive(page, keys("arrowright"), base, facing=False, speed=0.03) == pytest.approx([0, -0.03, 0])
    assert drive(page, keys(","), base, speed=0.03) == pytest.approx([0, 0, 0.18])
    assert drive(page, keys("arrowup"), base, speed=0.03) == pytest.approx([-0.03, 0, 0])
    assert drive(page, keys("o", "p", "q", "w"), base) == [0, 0, 0]


def test_no_key_means_two_things_in_one_mode(page):
    table = page.evaluate("async () => [(await import('/mapper.js')).COMMANDS, (await import('/keys.js')).MOTIONS]")
    commands, motions = table
    taken = [*motions, " ", "r", "shift"]
    assert not set(taken) & {key for key, _, _ in commands.values()}
    by_key = [key for name, (key, _, _) in commands.items() if name != "rearm"]  # that one is Start where stopped
    assert len(set(by_key)) == len(by_key)
    by_button = [button for name, (_, button, _) in commands.items() if name != "rearm" and button is not None]
    assert len(set(by_button)) == len(by_button)


def test_wheels_take_no_key_of_a_joint(page):
    base = [{"name": name, "unit": unit, "max_rate": None, "kind": "position"} for name, unit in WHEELS]
    for key in "wasd,.qezx":
        moved = drive(page, keys(" ", key), [*JOINTS, *base])
        assert moved[4:] == [0, 0, 0] and moved[:4] == drive(page, keys(" ", key), JOINTS)
