"""How much noise a policy bears: as large as costs a quarter of its success, found on rollouts before training.

Noise that is tuned on one policy ruins another: on poses 0.15 ... 0.4 is well, from pictures the same takes rollouts
from half to a fifth, and what succeeds by luck alone teaches little.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from vla_stack.methods.advantages import Experience
from vla_stack.methods.reinflow.loss import Learner

NONE = 1e-4  # a standard deviation that moves nothing
LADDER = (0.03, 0.045, 0.07, 0.1, 0.15, 0.22, 0.33, 0.5)  # in normalised action units, half as much again each
KEPT = 0.75  # share of the success without noise that has to be left


def fit_noise(learner: Learner, practise: Callable[[], Experience]) -> tuple[float, float]:
    """Bounds of the noise, in the proportion of those given, whose geometric mean, where training begins, is the
    largest of :data:`LADDER` that leaves :data:`KEPT` of the success; the least one where none does. Prints what it
    tries.

    Args:
        learner: The learner, whose bounds are moved.
        practise: Rolls the same episodes out with the noise of now.
    """
    spread = math.sqrt(learner.config.sigma_high / learner.config.sigma_low)

    def success(sigma: float) -> float:
        learner.set_noise(sigma, sigma)
        rate = float(practise().success.float().mean())
        print(f"noise {sigma:.3g}: {rate:.0%} of the rollouts succeed", flush=True)
        return rate

    without, fitted = success(NONE), LADDER[0]
    for sigma in LADDER:
        if success(sigma) < KEPT * without:
            break
        fitted = sigma
    print(f"noise of {fitted / spread:.3g} ... {fitted * spread:.3g} from here on", flush=True)
    return fitted / spread, fitted * spread
