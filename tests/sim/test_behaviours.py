"""What data for world models is made of."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import sim  # noqa: F401
from sim.behaviours import AWAY, SHARES, Kind, deal, make_behaviour
from vla_stack.rollout.collect import LINGER, CollectConfig, attempts


def test_behaviours_are_dealt_in_their_shares() -> None:
    kinds = [deal(seed) for seed in range(2000)]
    for kind, share in SHARES.items():
        assert abs(kinds.count(kind) / 2000 - share) < 0.03
    assert deal(5) == deal(5)


@pytest.mark.parametrize("kind", list(SHARES))
def test_a_behaviour_is_a_function_of_its_seed_and_moves_within_limits(kind: Kind) -> None:
    env = gym.make("sim/pick-v0", cameras=())
    films = []
    for _ in range(2):
        env.reset(seed=3)
        behaviour = make_behaviour(env, kind, seed=3)
        actions = []
        for _ in range(2 * AWAY):
            actions.append(behaviour.act())
            env.step(behaviour.perturb(actions[-1]))
        films.append(np.stack(actions))
    np.testing.assert_array_equal(*films)
    assert (films[0] >= env.action_space.low).all() and (films[0] <= env.action_space.high).all()  # type: ignore[attr-defined]
    assert np.ptp(films[0][:, :3], axis=0).max() > 0.03
    if kind == "look_away":
        subject = env.unwrapped.position(behaviour.subject)  # type: ignore[attr-defined]
        away = np.linalg.norm(films[0][:, :2] - subject[:2], axis=1)
        assert away[AWAY - 1] < 0.03 and away[2 * AWAY - 1] > 0.1


def test_an_episode_goes_on_after_success() -> None:
    config = CollectConfig("pick", mixed=True, privileged=True)
    number = next(i for i in range(100) if deal(config.env_seed(i)) == "expert")
    rollout = next(attempts(config, number, workers=0))
    won = np.flatnonzero(rollout.rewards)
    assert rollout.success and won[-1] - won[0] == LINGER == len(rollout.rewards) - 1 - won[0]


def test_who_grasps_beside_things_stays_beside_them_and_who_drops_things_goes_on() -> None:
    env = gym.make("sim/pick-v0", cameras=())
    won = {}
    for kind in ("expert", "beside", "drops"):
        results, opened = [], 0
        for seed in range(20):
            env.reset(seed=seed)
            behaviour, grippers = make_behaviour(env, kind, seed), []  # type: ignore[arg-type]
            for _ in range(40):
                action = behaviour.act()
                grippers.append(action[4])
                _, _, done, over, info = env.step(behaviour.perturb(action))
                if done or over:
                    break
            results.append(info["is_success"])
            opened += sum(a < 0.5 < b for a, b in zip(grippers, grippers[1:], strict=False))
        won[kind] = sum(results), opened
    assert won["expert"][0] >= 18 and won["beside"][0] <= 5 and won["drops"][0] >= 10
    assert won["expert"][1] == 0 and won["drops"][1] >= 5
