"""Interventions over the operator's events: whose action is executed, and that no frame is made while nobody acts."""

from functools import partial

import numpy as np
from rl_toys import GAMMA, SMALL, collector, stored

from vla_stack.intervention import Phase
from vla_stack.methods.off_policy.human_intervention import HumanIntervention
from vla_stack.methods.replay_buffer import ReplayBuffer, Source
from vla_stack.methods.wsrl import Wsrl, WsrlLearner
from vla_stack.runtime.clock import VirtualClock

RATES = np.array([0.5])


class Script:
    """Messages by the number of the look, and what was answered."""

    def __init__(self, **at):
        self.at, self.looks, self.sent = {int(k[1:]): v for k, v in at.items()}, 0, []

    def receive(self):
        self.looks += 1
        return self.at.get(self.looks, [])

    def post(self, kind, **fields):
        self.sent.append((kind, fields))
        return True


def event(name):
    return {"kind": "event", "id": name, "name": name}


def teleop(engaged, velocity=None):
    return {"kind": "teleop", "engaged": engaged, "velocity": velocity}


def acted(script, steps, slots=1, limit=50):
    human = HumanIntervention(script, RATES, 0.1, VirtualClock())
    method = Wsrl(arm="sac", sac=SMALL, warmup=0, horizon=4)
    made = WsrlLearner(method, stored(), ReplayBuffer(9, 2, 1, 1, GAMMA), 0)
    episodes = collector(made, num_envs=slots, agent=human, limit=limit)
    return human, [episodes.step()[0] for _ in range(steps)]


def test_a_takeover_waits_for_the_hand_which_acts_until_it_hands_back():
    script = Script(
        _3=[event("takeover")], _5=[teleop(True, [0.25])], _6=[teleop(True, [9.0])], _7=[event("hand_back")]
    )
    hand, steps = acted(script, 6)
    source = [Source(s.source[0]).name for s in steps]
    assert source == ["ONLINE", "ONLINE", "HUMAN", "HUMAN", "ONLINE", "ONLINE"]
    assert [float(s.action[0, 0]) for s in steps[2:4]] == [0.5, 1.0]  # velocity over rate, and its limit
    assert script.looks == 9  # six steps, the next one, and two looks while the takeover was held
    assert [f["ok"] for kind, f in script.sent if kind == "reply"] == [True, True]
    assert hand.machine.phase is Phase.AUTO


def test_a_released_hand_waits_and_a_lost_one_gives_control_back():
    script = Script(
        _1=[event("takeover"), teleop(True, [0.1])], _2=[teleop(False)], _4=[{"kind": "lost"}], _5=[event("recovered")]
    )
    _, steps = acted(script, 3)
    assert [Source(s.source[0]).name for s in steps] == ["HUMAN", "ONLINE", "ONLINE"]
    refused = [f for kind, f in script.sent if kind == "reply" and not f["ok"]]
    assert len(refused) == 1 and "no recovery" in refused[0]["error"]


def test_an_episode_may_end_in_a_persons_hands():
    _, steps = acted(Script(_1=[event("takeover"), teleop(True, [0.1])]), 5, limit=2)
    assert [bool(s.truncated[0]) for s in steps] == [False, True] * 2 + [False]
    assert all(Source(s.source[0]) is Source.HUMAN for s in steps)


def test_only_the_first_environment_is_a_persons():
    _, steps = acted(Script(_1=[event("takeover"), teleop(True, [0.1])]), 2, slots=2)
    assert [s.source.tolist() for s in steps] == [[Source.HUMAN, Source.ONLINE]] * 2


def test_interventions_join_the_demonstrations():
    from vla_stack.methods.off_policy.loop import keep_interventions

    demos = stored(20, capacity=60)
    before = demos.total
    script = Script(_3=[event("takeover"), teleop(True, [0.25])], _5=[event("hand_back")])
    _, steps = acted(script, 6)
    for step in steps:
        keep_interventions(demos, step)
    rows = demos.rows()[before:]
    assert (demos.columns["source"][rows] == Source.HUMAN).all() and len(rows) == 2
    assert demos.columns["truncated"][rows].tolist() == [False, True]  # what followed was not the person's
    batch = partial(demos.sample, 50, 2, np.random.default_rng(0))()
    assert set(batch.index.tolist()) <= set(range(before + 2))
