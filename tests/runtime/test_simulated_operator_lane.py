"""The simulated operator's events, sent as a page sends them, give the same labels in the real control loop."""

import gymnasium as gym
import numpy as np
import pytest
from operator_fakes import RELEASED, Rig, hand
from rac_toys import play

import sim
from vla_stack.methods.rac.familiar import FamiliarStates
from vla_stack.methods.rac.operator import OperatorConfig, SimulatedOperator
from vla_stack.schema import Chunks


@pytest.mark.parametrize("mode", ["rac", "hg_dagger"])
def test_lockstep_and_control_loop_agree_on_every_frame(mode):
    env = gym.make(sim.TASKS["stack"].id, cameras=(), privileged=True, disable_env_checker=True).unwrapped
    robot, familiar = env.spec_robot, None

    def still(observations, seeds):
        return Chunks(np.array([np.tile(o.state[:5], (8, 1)) for o in observations], np.float32))

    def one(number, mode):
        expert = sim.make_expert(env)
        operator = SimulatedOperator(OperatorConfig(end=mode == "rac"), expert, familiar, robot.dt, 0, number)
        return play(env, number, mode, 60, still, operator, familiar)

    demos = [one(e, "teleop") for e in range(3)]
    frames = [(f.features, f.subtask, e) for e, out in enumerate(demos) for f in out.frames]
    familiar = FamiliarStates(*(np.array(column) for column in zip(*frames, strict=True)))
    out = one(7, mode)
    env.close()
    assert {"takeover", "engage", "recovered"} <= {event for _, event in out.log}

    events: dict[int, list] = {0: ["start"]}
    for tick, event in out.log:
        if event != "engage":
            events.setdefault(tick, []).append(event)
    engaged = sorted((tick, event == "engage") for tick, event in out.log if event in ("takeover", "engage", "cancel"))

    def script(k):
        held = next((grip for tick, grip in reversed(engaged) if tick <= k), False)
        return [*events.get(k, []), hand() if held else RELEASED]

    rig = Rig(script)
    log = rig.run(mode, ticks=out.ticks)
    assert all(reply["ok"] for reply in rig.console.replies.values()), rig.console.replies
    seen = [
        (r.step, r.labels["segment_type"], r.labels["segment_index"], r.labels["control_source"]) for r in rig.port.rows
    ]
    own = [
        (f.observation.step, *(f.labels[n] for n in ("segment_type", "segment_index", "control_source")))
        for f in out.frames
        if f.labels["control_source"] or log.rids[f.observation.step] >= 0  # in lockstep nobody waits for the policy
    ]
    assert [row for row in seen if row[0] < out.ticks] == own
