"""What training a mixture of horizons is given: the recipe of the method ``mixture_of_horizons``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vla_stack.errors import UserError
from vla_stack.methods.imitation.recipe import check_supervised
from vla_stack.training.recipe import PolicyRecipe, Recipe, Training
from vla_stack.training.recipe_tree import Count, NotNegative

if TYPE_CHECKING:
    from vla_stack.lerobot_core import PreTrainedConfig
    from vla_stack.training.build import Loss


@dataclass(frozen=True)
class MixtureOfHorizons(Training):
    """Imitate with a policy that predicts several chunk lengths at once (arXiv:2511.19433).

    Attributes:
        balance: Weight of the gate's load balance.
        draws: (noise, time) pairs an observation.
    """

    name: Literal["mixture_of_horizons"] = "mixture_of_horizons"
    balance: NotNegative = 1e-3
    draws: Count = 1

    def check_recipe(self, recipe: Recipe) -> None:
        """There are demonstrations, and something to evaluate on; raises :class:`UserError`."""
        check_supervised(recipe)

    def fits(self, config: PreTrainedConfig, policy: PolicyRecipe) -> None:
        """The policy is of type ``moh``; raises :class:`UserError`."""
        if config.type != "moh":
            start = policy.pretrained and f", policy.options.base.pretrained_path={policy.pretrained}"
            remedy = f"set policy.type=moh{start} and policy.options.horizons, as in `vla recipes pick_horizons`"
            raise UserError(f"method '{self.name}' trains policies of type 'moh', not '{config.type}'", remedy)

    def loss(self) -> Loss:
        """The loss, with these options."""
        from vla_stack.methods.mixture_of_horizons.loss import loss

        return partial(loss, draws=self.draws, balance=self.balance)  # type: ignore[return-value]

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Train on the recipe's demonstrations."""
        from vla_stack.training.train import train

        train(recipe, self.loss(), run_dir, self.fits)
