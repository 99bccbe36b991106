"""Chunk views against brute force: discounts, ends inside a chunk, time limits, rings, Monte-Carlo returns."""

import numpy as np
import pytest
import torch

from vla_stack.errors import UserError
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition

GAMMA = 0.9


def filled(lengths, ends, slots=1, capacity=64, tail=0.0, open_steps=0):
    """A store of episodes; observation = (slot, episode, step), action = step, reward = a number of its own."""
    store = ReplayBuffer(capacity, 3, 1, slots, GAMMA, tail)
    rng = np.random.default_rng(0)
    episodes = [*zip(lengths, ends, strict=True)] + ([(open_steps, "open")] if open_steps else [])
    for e, (length, end) in enumerate(episodes):
        for t in range(length):
            over = t == length - 1
            stack = np.arange(slots)
            obs = np.stack([stack, np.full(slots, e), np.full(slots, t)], 1)
            store.add(
                Transition(
                    obs.astype(np.float32),
                    np.full((slots, 1), t, np.float32),
                    rng.normal(size=slots).astype(np.float32),
                    np.full(slots, over and end == "terminated"),
                    np.full(slots, over and end == "truncated"),
                    (obs + [0, 0, 1]).astype(np.float32),
                    *(np.zeros(slots, int) for _ in range(2)),
                    np.full(slots, int(Source.ONLINE)),
                )
            )
    return store


def brute(store, row, h):
    """k, reward, discount, actions and last next observation of the view at a row, step by step."""
    columns, slot = store.columns, row // store.capacity
    reward, actions, at = 0.0, [], row
    for i in range(h):
        reward += GAMMA**i * columns["reward"][at]
        actions.append(columns["action"][at, 0])
        if columns["terminated"][at] or columns["truncated"][at] or i == h - 1:
            alive = 0.0 if columns["terminated"][at] else GAMMA ** (i + 1)
            return reward, alive, actions + [actions[-1]] * (h - 1 - i), columns["next_obs"][at]
        at = slot * store.capacity + (at + 1) % store.capacity
    raise AssertionError


@pytest.mark.parametrize("h", [1, 2, 4, 9])
@pytest.mark.parametrize("capacity", [64, 17])  # the small one has wrapped
def test_views_equal_brute_force(h, capacity):
    store = filled([7, 5, 9, 3], ["terminated", "truncated", "terminated", "truncated"], 2, capacity)
    batch = store.sample(200, h, np.random.default_rng(1))
    for i, row in enumerate(batch.index.tolist()):
        reward, discount, actions, after = brute(store, row, h)
        assert batch.reward[i] == pytest.approx(reward, abs=1e-6)
        assert batch.discount[i] == pytest.approx(discount, abs=1e-6)
        assert batch.actions[i].tolist() == actions
        assert batch.next_obs[i].tolist() == after.tolist()


def test_of_an_episode_that_succeeded_every_step_may_be_drawn():
    lengths, ends = [150, 20, 30], ["terminated", "truncated", "terminated"]
    store = filled(lengths, ends, slots=2, capacity=256, tail=-1 / (1 - GAMMA), open_steps=10)
    again = ReplayBuffer(512, 3, 1, 2, GAMMA, store.tail)
    again.load_state_dict(store.state_dict())
    for kept in (store, again):
        batch = kept.sample(4000, 2, np.random.default_rng(0), succeeded=True)
        drawn = {(int(episode), int(step)) for _, episode, step in batch.obs.tolist()}
        assert drawn == {(0, t) for t in range(150)} | {(2, t) for t in range(30)}
    wrapped = filled(lengths, ends, capacity=40, open_steps=10)
    of = wrapped.sample(200, 1, np.random.default_rng(0), succeeded=True).obs[:, 1]
    assert set(of.tolist()) == {2.0}


def test_a_time_limit_bootstraps_from_the_final_observation_and_an_end_does_not():
    for end, discount in (("truncated", GAMMA**2), ("terminated", 0.0)):
        store = filled([5], [end])
        view = store.view(np.array([3]), 4)  # two steps are left of the episode
        assert view.discount.item() == pytest.approx(discount)
        assert view.next_obs[0].tolist() == [0, 0, 5]  # final, not the next episode's first


def test_chunks_never_reach_over_the_newest_step():
    store = filled([5], ["terminated"], open_steps=6, capacity=8)  # wrapped: an old episode lies behind the newest step
    batch = store.sample(500, 4, np.random.default_rng(0))
    starts = {(int(e), int(t)) for _, e, t in batch.obs.tolist()}
    assert starts == {(0, 3), (0, 4), (1, 0), (1, 1), (1, 2)}


def test_monte_carlo_returns_of_closed_episodes():
    tail = -1 / (1 - GAMMA)
    store = filled([4, 6], ["terminated", "truncated"], tail=tail, open_steps=3)
    r = store.columns["reward"].astype(float)
    returns = store.columns["returns"]
    assert returns[1] == pytest.approx(r[1] + GAMMA * r[2] + GAMMA**2 * r[3], abs=1e-5)
    assert returns[8] == pytest.approx(r[8] + GAMMA * r[9] + GAMMA**2 * tail, abs=1e-5)
    assert np.isnan(returns[10:13]).all()
    batch = store.sample(300, 2, np.random.default_rng(0), closed=True)
    assert set(batch.index.tolist()) == set(range(10))
    with pytest.raises(ValueError, match="finished"):
        filled([], [], open_steps=3).sample(1, 1, np.random.default_rng(0), closed=True)


def test_all_failure_return_is_the_geometric_limit():
    store = ReplayBuffer(20, 1, 1, gamma=GAMMA, tail=-1 / (1 - GAMMA))
    for t in range(10):
        last = np.array([t == 9])
        one = np.ones((1, 1), np.float32)
        store.add(Transition(one, one, -np.ones(1), ~last & last, last, one, *(np.zeros(1, int),) * 3))
    np.testing.assert_allclose(store.columns["returns"][:10], -1 / (1 - GAMMA), rtol=1e-6)


def test_a_store_continues_from_its_state():
    a = filled([7, 5], ["terminated", "truncated"], 2, 9, open_steps=2)
    b = ReplayBuffer(9, 3, 1, 2, GAMMA)
    b.load_state_dict({k: v.clone() for k, v in a.state_dict().items()})
    left, right = (s.sample(50, 3, np.random.default_rng(3)) for s in (a, b))
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("lengths", [[4, 3], [7, 5]])  # the second has gone round
@pytest.mark.parametrize("capacity", [20, 5])
def test_a_store_of_another_capacity_keeps_the_newest_steps_in_order(lengths, capacity):
    small = filled(lengths, ["terminated", "truncated"], 2, 9, open_steps=1)
    other = ReplayBuffer(capacity, 3, 1, 2, GAMMA)
    other.load_state_dict(small.state_dict())
    again = ReplayBuffer(capacity, 3, 1, 2, GAMMA)
    again.load_state_dict(other.state_dict())
    one = small.at(int(small.rows()[-1]))
    end = Transition(*(np.repeat(column, 2, 0) for column in one[:-1]))._replace(terminated=np.ones(2, bool))
    for store in (small, other, again):
        store.add(end)  # ends the open episode, which begins where it did
        assert store.total == 2 * (sum(lengths) + 2)
    for slot in range(2):
        rows = small.rows(slot)[-capacity:]
        for kept in (other, again):
            own = kept.rows(slot)[-len(rows) :]
            for name, column in small.columns.items():
                np.testing.assert_array_equal(kept.columns[name][own], column[rows])
    assert len(other) == min(2 * capacity, 2 * (sum(lengths) + 2), 2 * (9 + 1))
    drawn = other.sample(200, 2, np.random.default_rng(0)).index.tolist()
    assert set(drawn) == {*other.rows(0).tolist(), *other.rows(1).tolist()}


def test_a_store_of_other_environments_is_refused():
    with pytest.raises(UserError, match="of 2 environments, not of 1"):
        ReplayBuffer(20, 3, 1, 1, GAMMA).load_state_dict(filled([4], ["terminated"], 2).state_dict())
