"""An operator in the control loop, tick by tick under the virtual clock."""

import re
from dataclasses import replace

import numpy as np
import pytest
from operator_fakes import RELEASED, Rig, hand
from runtime_fakes import DT_NS, FakeDriver

from vla_stack.runtime.dispatch import Help
from vla_stack.schema import Camera, Dim


def at(events: dict, otherwise=lambda k: []):
    return lambda k: events[k] if k in events else otherwise(k)


def test_nothing_moves_before_the_start_and_the_policy_after_it():
    rig = Rig(at({10: ["start"]}))
    rig.run(ticks=30)
    assert rig.console.phases()[:11] == ["reset"] * 10 + ["auto"]
    assert not rig.sent[:11].any() and rig.port.requests[0].k_obs == 10
    np.testing.assert_array_equal(rig.sent[11:30, 0], np.arange(11, 30))


@pytest.mark.parametrize("takeover", range(8, 20))
def test_no_policy_action_is_dispatched_after_the_takeover_tick(takeover):
    """Exact test 5; the fake policy's actions are the numbers of their ticks."""
    rig = Rig(at({0: ["start"], takeover: ["takeover"]}))
    log = rig.run(ticks=40)
    assert rig.console.replies[f"takeover@{takeover}"] == {"ok": True, "error": "", "phase": "hold", "tick": takeover}
    assert set(log.rids[takeover:]) == {-1}
    np.testing.assert_array_equal(rig.sent[takeover:], np.repeat(rig.sent[takeover - 1 : takeover], 40 - takeover, 0))
    assert log.executor["rejected.epoch"] <= 1 and max(r.k_obs for r in rig.port.requests) < takeover
    assert {row.step for row in rig.port.rows} == set(range(1, takeover))  # holds, as the first wait, are not


def test_a_cancelled_takeover_asks_the_policy_anew():
    rig = Rig(at({0: ["start"], 12: ["takeover"], 15: ["cancel"]}))
    rig.run(ticks=30)
    assert {r.epoch for r in rig.port.requests if r.k_obs < 12} != {r.epoch for r in rig.port.requests if r.k_obs > 12}
    assert min(r.k_obs for r in rig.port.requests if r.k_obs > 12) == 15
    np.testing.assert_array_equal(rig.sent[16:30, 0], np.arange(16, 30))


def drive(k):
    return [RELEASED] if k < 2 else [hand()]


def test_a_velocity_is_integrated_from_the_last_command_and_applied_in_its_tick():
    rig = Rig(at({0: ["start", RELEASED]}, drive), policy=False)
    rig.run("teleop", ticks=12)
    np.testing.assert_allclose(np.diff(rig.sent[1:, 0]), 0.1, atol=1e-6)
    assert rig.sent[1, 0] == 0 and rig.sent[2, 0] == np.float32(0.1)


@pytest.mark.parametrize("end", ["released", "centred", "silent"])
def test_a_robot_that_is_commanded_in_velocities_stops_with_the_hand(end):
    """A wheeled base: what the stick says is the command, and a command that was given once is not given for ever."""

    class Base(FakeDriver):
        def __init__(self, clock):
            super().__init__(clock)
            dims = (Dim("x.vel", "m/s", -0.5, 0.5), self.spec.action[1])
            self.spec = replace(self.spec, state=dims, action=dims)

    def script(k):
        last = {"released": [RELEASED], "centred": [hand(velocity=[0.0, 0.0])], "silent": []}[end]
        return [hand(velocity=[0.3, 0.0])] if 2 <= k < 12 else last if k > 2 else [RELEASED]

    rig = Rig(at({0: ["start", RELEASED]}, script), driver=Base, policy=False)
    rig.run("teleop", ticks=40)
    np.testing.assert_array_equal(rig.sent[2:12, 0], np.full(10, np.float32(0.3)))
    assert not rig.sent[20:, 0].any() and (np.diff(rig.sent[11:, 0]) <= 0).all()
    assert len(rig.driver.sent) == 40  # a driver that holds by itself where nobody writes was fed all the time


def test_the_stored_action_is_what_the_driver_got_bit_for_bit():
    """Exact test 6, with a driver that clips."""

    class Clipping(FakeDriver):
        def write(self, action):
            return super().write(np.clip(action, -0.5, np.float32(0.7)))

    rig = Rig(at({0: ["start", RELEASED]}, drive), driver=Clipping, policy=False)
    rig.run("teleop", ticks=20)
    assert [row.step for row in rig.port.rows] == list(range(2, 20))
    got = np.array(rig.driver.sent)[2:20]
    assert got[-1, 0] == np.float32(0.7)
    assert np.array([row.action for row in rig.port.rows]).tobytes() == got.tobytes()


@pytest.mark.parametrize("loss", ["released", "silent", "old", "frozen"])
def test_without_the_dead_man_nothing_moves(loss):
    """Exact test 10: released, gone, or too old although messages go on; and cameras that stand still."""

    def script(k):
        if k < 2:
            return [RELEASED, *(["start"] if k == 0 else [])]
        if k < 10:
            return [hand()]
        age = {"age_s": 0.1 * (k - 9)}
        return {"released": [hand(engaged=False)], "silent": [], "old": [hand(**age)], "frozen": [hand()]}[loss]

    rig = Rig(script, policy=False)
    if loss == "frozen":
        write = rig.driver.write

        def freeze(action):
            if len(rig.driver.sent) == 9:
                rig.driver.frozen_ns = rig.clock.now_ns()
            return write(action)

        rig.driver.write = freeze
    rig.run("teleop", ticks=30)
    limit = {"released": 10, "silent": 12, "old": 12, "frozen": 14}[loss]  # the tick after 0.2 s, or 0.3 s
    moving = np.flatnonzero(np.diff(rig.sent[:, 0]) != 0) + 1
    assert moving.max() < limit
    assert rig.console.phases()[limit:] == ["hold"] * (30 - limit)
    assert all(row.step < limit for row in rig.port.rows)


class TwoCameras(FakeDriver):
    """The second camera's picture is a tenth of a second older than the joints; from reading 10 on it stands still."""

    def __init__(self, clock):
        super().__init__(clock)
        self.spec = replace(self.spec, cameras=(*self.spec.cameras, Camera("wrist", 4, 6)))
        self.taken_ns = 0

    def read(self):
        obs = super().read()
        if self.calls["reads"] < 10:
            self.taken_ns = obs.t_capture_ns - DT_NS
        images = {"wrist": obs.images["front"], **obs.images}
        return replace(obs, images=images, image_t_ns={"wrist": self.taken_ns})


def test_a_camera_s_age_is_its_own_and_the_oldest_decides():
    rig = Rig(at({0: ["start", RELEASED]}, drive), driver=TwoCameras, policy=False)
    rig.run("teleop", ticks=30)
    ages = np.array([row.labels["cam_age_ms"] for row in rig.port.rows])
    np.testing.assert_allclose(ages[:, 1] - ages[:, 0], [100.0] * 7 + [200.0])
    assert [row.step for row in rig.port.rows] == list(range(2, 10))
    assert rig.console.phases()[11:30] == ["hold"] * 19  # though the joints were read at every tick
    assert "a camera's newest frame is" in rig.console.states[14]["why"]


def test_a_dead_man_that_outlived_its_input_must_be_released_before_it_counts_again():
    def script(k):
        if k < 2:
            return [RELEASED, *(["start"] if k == 0 else [])]
        return [] if 10 <= k < 15 else [RELEASED] if k == 20 else [hand()]

    rig = Rig(script, policy=False)
    rig.run("teleop", ticks=26)
    phases = rig.console.phases()
    assert set(phases[12:21]) == {"hold"} and set(phases[21:26]) == {"teleop"}


def intervention(k):
    events = {0: ["start"], 10: ["takeover"], 11: [RELEASED], 16: ["recovered"], 20: ["slip"], 23: ["recovered"]}
    return [*events.get(k, []), *([hand()] if k > 11 else [])]


def test_an_intervention_s_labels_and_its_end():
    """Exact tests 1, 2 and 3 through the loop."""
    rig = Rig(lambda k: [*intervention(k), *(["subtask_done"] if k == 27 else [])])
    log = rig.run(ticks=60)
    labels = [row.labels for row in rig.port.rows]
    segments = "".join(str(x["segment_type"]) for x in labels)
    assert re.fullmatch("1*(2+3+)+", segments) and segments == "1" * 9 + "2222" + "3333" + "222" + "3333"
    assert all(x["intervention"] == (x["segment_type"] in (2, 3)) for x in labels)
    assert (np.diff([x["segment_index"] for x in labels]) >= 0).all()
    assert [x["control_source"] for x in labels] == [0] * 9 + [1] * 15
    assert log.operator["phase"] == "end_intervened" and log.operator["human frames"] == 15
    assert len(log.rids) == 27  # nothing after


@pytest.mark.parametrize("event", ["cancel", "hand_back", "start"])
def test_after_a_human_has_moved_the_policy_does_not_come_back(event):
    rig = Rig(lambda k: [*intervention(k), *([event] if k > 12 else [])])
    log = rig.run(ticks=40)
    assert "auto" not in rig.console.phases()[10:] and set(log.rids[10:]) == {-1}
    assert not any(
        reply["ok"] for name, reply in rig.console.replies.items() if name.startswith(event) and "@0" not in name
    )


def test_hand_back_in_hg_dagger_asks_the_policy_with_what_is_seen_then():
    rig = Rig(lambda k: [*intervention(k), *(["hand_back"] if k == 25 else [])] if k <= 25 else [])
    rig.run("hg_dagger", ticks=40)
    assert rig.console.phases()[25] == "auto" and rig.port.requests[-1].k_obs >= 25
    np.testing.assert_array_equal(rig.sent[26:40, 0], np.arange(26, 40))


@pytest.mark.parametrize("mode", ["rac", "teleop"])
def test_the_e_stop_latches_until_it_is_rearmed(mode):
    script = at({0: ["start", RELEASED], 10: ["estop"], 14: ["takeover"], 20: ["rearm"]}, drive)
    rig = Rig(script)
    rig.run(mode, ticks=30)
    phases = rig.console.phases()
    assert set(phases[10:20]) == {"estop"} and phases[20] == "hold"
    assert {s["run"] for s in rig.console.states[10:20]} == {"stop"} and rig.driver.calls["stop"] == 1
    assert len(rig.driver.sent) == 30 - 10  # no command while stopped
    assert not rig.console.replies["takeover@14"]["ok"] and "rearm" in rig.console.replies["takeover@14"]["error"]
    assert (rig.sent[20:] == rig.sent[20]).all()  # an engaged hand is not enough: it was held all the time


def test_a_re_arm_that_was_on_its_way_does_not_undo_a_later_stop():
    late = {"kind": "event", "id": "late", "name": "rearm", "stops": 1}
    rig = Rig(at({0: ["start"], 10: ["estop"], 12: ["estop"], 20: ["rearm"]}))
    receive = rig.console.receive
    rig.console.receive = lambda: [*receive(), *([late] if rig.console.k == 12 else [])]
    rig.run(ticks=30)
    reply = rig.console.replies["late"]
    assert not reply["ok"] and "stopped again" in reply["error"]
    assert set(rig.console.phases()[10:20]) == {"estop"} and rig.console.phases()[20] == "hold"


def test_an_e_stop_between_episodes_holds_in_the_next():
    rig = Rig(at({1: ["start"], 5: ["rearm"], 6: ["start"]}))
    rig.console.script, script = (lambda k: ["estop"]), rig.console.script
    assert rig.lane.idle() == "emergency stop"
    rig.console.script, rig.console.k = script, -1
    rig.run(ticks=12)
    assert rig.console.phases()[:7] == ["estop"] * 5 + ["reset", "auto"]
    assert not rig.console.replies["start@1"]["ok"]


def test_losing_the_operator_holds_the_policy_too():
    rig = Rig(at({0: ["start"], 12: ["lost"], 16: [RELEASED], 17: [{"engaged": True}]}))
    log = rig.run(ticks=30)
    assert set(rig.console.phases()[12:17]) == {"hold"} and set(log.rids[12:17]) == {-1}
    assert rig.console.phases()[17] == "auto"


@pytest.mark.parametrize(("answer", "phase"), [([hand()], "auto"), (["takeover"], "hold"), (["fail"], "end_auto_fail")])
def test_a_call_for_help_waits_for_the_operator_s_answer(answer, phase):
    """It goes on by the dead-man, or becomes an intervention, or ends."""
    rig = Rig(at({0: ["start"], 20: answer}, lambda k: [RELEASED]), orders=[(12, Help("the monitor asks for help"))])
    rig.run(ticks=30)
    states = rig.console.states
    assert {(s["phase"], s["resumes"], s["why"]) for s in states[12:20]} == {
        ("hold", "auto", "the monitor asks for help")
    }
    assert states[11]["phase"] == "auto" and states[20]["phase"] == phase
    assert rig.driver.calls["stop"] == 0 and len(set(rig.sent[11:20, 0])) == 1


def test_who_has_taken_over_needs_no_call():
    rig = Rig(at({0: ["start"], 10: ["takeover"], 14: [hand()]}, lambda k: [RELEASED if k < 14 else hand()]))
    rig.port.orders.append((18, Help("too late")))
    rig.run(ticks=24)
    assert set(rig.console.phases()[15:24]) == {"recovery"}


def test_time_counts_from_the_start_and_ends_what_the_policy_does():
    rig = Rig(at({5: ["start"]}))
    log = rig.run(ticks=60, max_ticks=20)
    assert log.operator["phase"] == "end_auto_fail" and len(log.rids) == 25


def test_the_robot_s_own_success_ends_the_episode():
    rig = Rig(at({0: ["start"]}), driver=lambda clock: FakeDriver(clock, episode_ticks=20))
    assert rig.run(ticks=60).operator["phase"] == "end_auto_success"


@pytest.mark.parametrize(("said", "phase"), [("success", "end_auto_success"), ("fail", "end_auto_fail")])
def test_the_operator_s_verdict_stands_though_the_robot_says_done_in_the_same_tick(said, phase):
    rig = Rig(at({0: ["start"], 19: [said]}), driver=lambda clock: FakeDriver(clock, episode_ticks=20))
    summary = rig.run(ticks=60).operator
    assert (summary["phase"], summary["why"]) == (phase, said)


def test_a_target_goes_before_a_velocity():
    rig = Rig(at({0: ["start", RELEASED]}, lambda k: [RELEASED if k < 2 else hand(target=[0.5, 1.0])]), policy=False)
    rig.run("teleop", ticks=8)
    np.testing.assert_array_equal(rig.sent[2:8], np.tile(np.float32([0.5, 1.0]), (6, 1)))


def test_the_same_script_gives_the_same_log():
    logs = [Rig(intervention).run(ticks=40).to_message() for _ in range(2)]
    assert logs[0] == logs[1]
