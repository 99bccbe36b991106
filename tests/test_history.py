"""What is recalled of an episode: the first observation, then the newest that are old enough, each once."""

import numpy as np
import pytest

from vla_stack.data.past import sampled
from vla_stack.history import FIRST, History, history_ages, recalled
from vla_stack.schema import Observation


def observation(step: int) -> Observation:
    return Observation(np.zeros(1, np.float32), {"front": np.full((2, 2, 3), step % 256, np.uint8)}, "wait", step)


def test_ages_double():
    assert history_ages(0, 4) == () and history_ages(1, 4) == (FIRST,)
    assert history_ages(5, 4) == (FIRST, 4, 8, 16, 32)


def test_recalled_is_the_first_and_the_newest_of_each_age():
    ages = history_ages(4, 4)
    assert recalled([], 0, ages) == [None] * 4
    assert recalled([0], 0, ages) == [None] * 4  # the present is no past
    assert recalled([0], 4, ages) == [0, None, None, None]
    assert recalled([0, 4, 8], 12, ages) == [0, 2, 1, None]
    assert recalled(list(range(0, 40, 4)), 40, ages) == [0, 9, 8, 6]
    assert recalled([0, 3, 9], 11, ages) == [0, 1, None, None]  # of age 2 alone is too young


@pytest.mark.parametrize("apart", [1, 3, 4, 7])
def test_a_history_recalls_as_if_it_kept_everything(apart):
    ages = history_ages(5, 4)
    history, kept = History(ages), []
    for step in range(0, 200, apart):
        shown = history.beside(observation(step))
        expected = [i for i in recalled(kept, step, ages) if i is not None]
        assert [o.step for o in shown.past] == [kept[i] for i in expected]
        assert all((o.images["front"] == o.step % 256).all() for o in shown.past)
        if not kept or step - kept[-1] >= 2:
            kept.append(step)
    assert len(history._kept) <= 2 + ages[-1] // 2


def test_no_history_remembers_nothing():
    seen = observation(3)
    assert History(()).beside(seen) is seen


def test_pictures_are_copied():
    history, first = History(history_ages(1, 4)), observation(0)
    history.beside(first)
    first.images["front"][:] = 99  # a robot writes the next picture to the same place
    assert (history.beside(observation(4)).past[0].images["front"] == 0).all()


def test_training_samples_what_is_recalled():
    """For every sample there is a series of decisions, as far apart as they may be, under which the rule gives this."""
    ages, stride = history_ages(5, 4), 4
    frames = np.repeat(np.arange(80), 20)
    back = sampled(frames, ages, np.random.default_rng(0))
    whole = 0
    for t, row in zip(frames.tolist(), back.tolist(), strict=True):
        assert all(0 <= b <= t for b in row)
        options = []
        for apart in range(stride // 2, 2 * stride + 1):
            grid = list(range(t % apart, t, apart))
            for start in range(len(grid) + 1):  # whatever a lost session forgot
                options.append([grid[start:], False])
            options.append([sorted({0, *grid}) if t else [], True])
        matching = []
        for steps, is_whole in options:
            chosen = recalled(steps, t, ages)
            if [0 if i is None else t - steps[i] for i in chosen] == row:
                matching.append(is_whole)
        assert matching, (t, row)
        whole += any(matching)
    assert 0.85 < whole / len(frames) < 1.0
    again = sampled(frames, ages, np.random.default_rng(0))
    assert np.array_equal(back, again)
