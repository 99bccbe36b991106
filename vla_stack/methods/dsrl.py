"""DSRL: reinforcement learning in the noise of a frozen flow policy.

Wagenmaker et al., "Steering Your Diffusion Policy with Latent Space Reinforcement Learning" (arXiv:2506.15799). A chunk
is a function of the noise w that it starts from. Soft actor-critic in the space of w never differentiates the policy
and never leaves what the policy would do:

    w = m tanh(u),  u ~ N(mu(o), sigma(o)),      y = R + gamma^k min Q'(o', w')

with the policy's features and the robot's state for o. This is the paper's plain form, DSRL-SAC, which it uses for
pi0; the form that distils a critic of actions (noise aliasing) is not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from vla_stack.methods.on_flow.decisions import Decisions, Drawn
from vla_stack.methods.on_flow.learner import FlowLearner
from vla_stack.methods.on_flow.recipe import OnFlow, small_sac
from vla_stack.methods.sac import SacRecipe
from vla_stack.training.recipe_tree import Positive


@dataclass(frozen=True)
class Dsrl(OnFlow):
    """An actor that chooses the noise of a frozen flow policy: DSRL (arXiv:2506.15799).

    Attributes:
        magnitude: m, the largest entry of the noise that is chosen.
    """

    remembers: ClassVar[bool] = False  # nobody knows the noise of a demonstration

    name: Literal["dsrl"] = "dsrl"
    sac: SacRecipe = field(default_factory=lambda: small_sac(0.1))
    magnitude: Positive = 1.5

    def learner(self, base: Any, seen: int, steps: int, offline: Decisions | None, seed: int) -> SteeringLearner:
        width = base.horizon * base.noise_dim
        return SteeringLearner(self.sac, base, seen, width, steps, None, seed, gives="noise", magnitude=self.magnitude)


class SteeringLearner(FlowLearner):
    """Soft actor-critic on what a :class:`SteeredPolicy` is given; see :class:`FlowLearner`.

    Args:
        sac: Sizes and rates.
        base: The frozen flow policy.
        seen: Width of what it observes.
        width: Entries of what is given.
        steps: Actions of a chunk that are executed.
        offline: Demonstrations, where what is given are actions.
        seed: Of weights, noise and batches.
        gives: What is given: ``noise`` or ``actions``.
        magnitude: Largest entry of noise.
    """

    def __init__(
        self,
        sac: SacRecipe,
        base: Any,
        seen: int,
        width: int,
        steps: int,
        offline: Decisions | None,
        seed: int,
        gives: Literal["noise", "actions"],
        magnitude: float,
    ) -> None:
        super().__init__(sac, base, seen, width, 0, offline, seed)
        self.steps, self.gives, self.magnitude = steps, gives, magnitude

    def target(self, drawn: Drawn) -> Tensor:
        return self.agent.sac_target(drawn.batch)

    def actor_step(self, drawn: Drawn) -> dict[str, Tensor]:
        return self.agent.actor_step(drawn.batch.obs)

    def network(self, learnt: bool, explores: bool = False) -> Any:
        from vla_stack.policies.configuration_steered import SteeredConfig  # on demand: LeRobot is heavy, and this
        from vla_stack.policies.modeling_steered import SteeredPolicy  # module is read for its recipe as well

        config = SteeredConfig(
            **self.shared(),
            gives=self.gives,
            alone=not (learnt or explores),
            magnitude=self.magnitude,
            noise_scale=float(explores),
            hidden=self.sac.actor,
            n_action_steps=self.steps,
        )
        return SteeredPolicy(config, self.base, self.agent.actor)
