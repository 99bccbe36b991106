"""The simulated robot behaves like hardware: time passes by itself, commands take effect from outside."""

import time

import gymnasium
import numpy as np
import pytest

import sim
from robot_drivers import driver_type, make_driver
from sim.arm import ARM7
from vla_stack.errors import UserError
from vla_stack.runtime.driver import EpisodicDriver

PATIENCE_S = 120.0  # upper bound of waits; nothing depends on how long they take


@pytest.fixture(scope="module")
def arm():
    driver = make_driver("sim", task="pick", image_size=16, max_episode_steps=40)
    driver.connect()
    yield driver
    driver.disconnect()
    driver.disconnect()  # twice is fine


def later(arm, step: int):
    """The first reading of at least ``step``."""
    deadline = time.monotonic() + PATIENCE_S
    while (obs := arm.read()).step < step:
        assert time.monotonic() < deadline
    return obs


def start(arm, seed: int):
    """Reset and read its first step, again where a busy computer was too late for it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        instruction, obs = arm.reset(seed), arm.read()
        if obs.step == 0:
            return instruction, obs
        assert time.monotonic() < deadline


def test_it_is_an_episodic_driver_with_the_native_description(arm):
    assert isinstance(arm, EpisodicDriver)
    assert arm.spec.name == "native/arm7" and arm.spec.rate_hz == 10.0


def test_the_same_seed_is_the_same_start(arm):
    first, again, other = (start(arm, seed) for seed in (3, 3, 4))
    assert first[0] == again[0] and "cube" in first[0]
    np.testing.assert_array_equal(first[1].state, again[1].state)
    np.testing.assert_array_equal(first[1].images["front"], again[1].images["front"])
    assert not np.array_equal(first[1].state, other[1].state)
    first[1].check(arm.spec)


def test_any_number_of_episodes(arm):
    for seed in range(6):
        arm.reset(seed)
        assert later(arm, 1).step >= 1


def test_time_passes_without_commands_and_readings_are_stamped_on_its_grid(arm):
    arm.reset(0)
    readings = [arm.read(), later(arm, 2), later(arm, 4)]
    for obs in readings:
        assert obs.t_capture_ns <= time.monotonic_ns()
        assert (obs.t_capture_ns - readings[0].t_capture_ns) % 100_000_000 == 0
    assert readings[2].step >= 4
    np.testing.assert_allclose(readings[2].state[:3], readings[0].state[:3], atol=0.01)  # it held


def test_answered_in_time_it_is_the_environment_itself():
    """Every reading answered within its step gives the trajectory of gymnasium's lockstep, bit by bit."""
    rate_hz, seeds = 5.0, range(6)
    env = gymnasium.make("sim/pick-v0", image_size=16, control_hz=rate_hz)
    driver = make_driver("sim", task="pick", image_size=16, control_hz=rate_hz)
    driver.connect()
    answered = []
    for seed in seeds:  # a busy computer may miss a step: then the next seed is tried
        states, actions = lockstep(env, seed)
        driver.reset(seed)
        readings = []
        for step, action in enumerate(actions):
            readings.append(later(driver, step))
            driver.write(action)
        answered = [r.step for r in readings]
        if answered == list(range(len(actions))):
            np.testing.assert_array_equal([r.state for r in readings], states[:-1])
            break
    driver.disconnect()
    assert answered == list(range(len(actions)))


def lockstep(env, seed, steps=6):
    obs, _ = env.reset(seed=seed)
    expert = sim.make_expert(env, seed=seed)
    states, actions = [obs["agent_pos"]], []
    for _ in range(steps):
        actions.append(expert.act())
        states.append(env.step(actions[-1])[0]["agent_pos"])
    return states, actions


def test_commands_move_it_and_hold_stops_it(arm):
    arm.reset(0)
    start = arm.read()
    target = start.state[:5].copy()
    target[1] += 0.2
    for step in range(1, 12):
        np.testing.assert_array_equal(arm.write(target), target)
        moved = later(arm, step)
    assert moved.state[1] - start.state[1] > 0.1
    arm.hold()
    rest = later(arm, moved.step + 3)
    further = later(arm, rest.step + 4)
    assert abs(further.state[1] - rest.state[1]) < 0.01


def test_commands_are_clipped_to_the_range_and_that_is_reported(arm):
    arm.reset(0)
    arm.read()
    sent = arm.write(np.full(5, 9.0, np.float32))
    np.testing.assert_array_equal(sent, arm.spec.action_high)


def test_the_episode_ends_and_says_so(arm):
    arm.reset(1)
    later(arm, 40)
    status = arm.status()
    assert status["done"] and not status["is_success"]
    assert 0 < status["real_time_factor"] <= 1


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"task": "juggle"}, "there is no task 'juggle'"),
        ({"image_siz": 3}, "image_siz"),
        ({"visuals": "x"}, "visuals='x'"),
    ],
)
def test_mistakes_are_one_clear_line(kwargs, words):
    driver = make_driver("sim", **kwargs)
    with pytest.raises(UserError, match=words):
        driver.connect()
    driver.disconnect()


def test_reading_before_reset_says_so(arm):
    fresh = make_driver("sim", task="pick", image_size=16)
    fresh.connect()
    with pytest.raises(UserError, match="call reset"):
        fresh.read()
    fresh.disconnect()


def test_it_measures_and_takes_what_a_policy_on_states_was_trained_with():
    """Object poses in place of pictures, deltas in place of targets: of which holding is none."""
    wanted = ARM7.spec("ee_delta", (), 64, 20.0, privileged=True, tool_target=True)
    driver = make_driver("sim", task="pick", **driver_type("sim").capabilities.like(wanted))
    driver.connect()
    assert driver.spec == wanted
    driver.reset(0)
    first = driver.read()
    first.check(wanted)
    rest = later(driver, 8)  # nobody commands it: the measured pose, taken for a delta, would run away
    np.testing.assert_allclose(rest.state[:4], first.state[:4], atol=0.01)
    driver.disconnect()
