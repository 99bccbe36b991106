"""What imitation is given: the recipe of the method ``imitation``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vla_stack.errors import UserError
from vla_stack.training.recipe import PolicyRecipe, Recipe, Training
from vla_stack.training.recipe_tree import Count

if TYPE_CHECKING:
    from vla_stack.lerobot_core import PreTrainedConfig
    from vla_stack.training.build import Loss


@dataclass(frozen=True)
class Imitation(Training):
    """Imitate demonstrations by the loss of the policy's head: flow matching, or another head's.

    Attributes:
        draws: (noise, time) pairs an observation; the expert is cheap beside the vision encoder that they share.
        emphasis: Horizons whose mixture weighs early steps more; the weights alone are used here.
        reweight: Where a chunk's first steps are given, steps that the policy gets wrong count more.
    """

    name: Literal["imitation"] = "imitation"
    draws: Count = 2
    emphasis: tuple[int, ...] = ()
    reweight: bool = False

    def check_recipe(self, recipe: Recipe) -> None:
        """There are demonstrations, and something to evaluate on; raises :class:`UserError`."""
        check_supervised(recipe)

    def fits(self, config: PreTrainedConfig, policy: PolicyRecipe) -> None:
        """The policy is a flow policy; raises :class:`UserError`."""
        check_flow(config, self.name)

    def loss(self) -> Loss:
        """The loss, with these options."""
        from vla_stack.methods.imitation.loss import loss

        return partial(loss, draws=self.draws, emphasis=self.emphasis, reweight=self.reweight)  # type: ignore[return-value]

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Train on the recipe's demonstrations."""
        from vla_stack.training.train import train

        train(recipe, self.loss(), run_dir, self.fits)


def check_supervised(recipe: Recipe) -> None:
    """Refuse a recipe without demonstrations, or that evaluates nowhere; raises :class:`UserError`."""
    if not (recipe.data.root or recipe.data.sources):
        raise UserError("'data.root' is missing", "give data.root=DIR, a dataset of `vla collect`")
    if recipe.eval.every and not recipe.eval_envs:
        raise UserError("'eval.every' is set and 'eval.envs' is empty", "for example eval.envs=[sim/pick-v0]")


def check_flow(config: PreTrainedConfig, method: str) -> None:
    """Refuse policies that are no flow policies; raises :class:`UserError`."""
    from vla_stack.policies.contract import FlowPolicy
    from vla_stack.policies.registry import policy_class

    if not issubclass(policy_class(config.type), FlowPolicy):
        remedy = "set method=own_loss, which trains it by LeRobot's loss"
        raise UserError(f"method '{method}' needs a flow policy, '{config.type}' is none", remedy)
