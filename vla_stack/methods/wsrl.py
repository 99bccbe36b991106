"""WSRL: offline reinforcement learning, a warm-up with the frozen policy, and then online learning without old data.

Zhou et al., "Efficient Online Reinforcement Learning Fine-Tuning Need Not Retain Offline Data" (arXiv:2412.07762):

1. offline: Cal-QL on stored episodes, with the ensemble that goes online later;
2. warm-up: K control steps of the pre-trained, *stochastic* policy fill an empty buffer; nothing is updated;
3. online: high update-to-data soft actor-critic on that buffer alone. Optimisers and targets go on as they were.

The baselines differ in switches alone (``ARMS``), so that all of them share networks, rates and budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor, nn

from vla_stack.methods import cal_ql
from vla_stack.methods.cal_ql import CalQlRecipe
from vla_stack.methods.off_policy.recipe import OffPolicy
from vla_stack.methods.replay_buffer import Batch, ReplayBuffer, Source, mix
from vla_stack.methods.sac import Sac, SacRecipe, step
from vla_stack.training.recipe_tree import Natural

if TYPE_CHECKING:
    from vla_stack.methods.off_policy.deployed import Seen
    from vla_stack.policies.modeling_state import StateGaussianPolicy


@dataclass(frozen=True)
class Arm:
    """What a method of this family does.

    Attributes:
        pretrain: Cal-QL on the stored episodes first.
        imitate: In place of Cal-QL the actor imitates them (:meth:`WsrlLearner.imitate`), and the critics begin online.
        warmup: Who acts in the first K steps, in which nothing is updated; ``none`` updates from the start.
        retain: Half of each online batch is of the stored episodes.
        conservative: Cal-QL's loss online as well.
    """

    pretrain: bool = True
    imitate: bool = False
    warmup: Literal["policy", "random", "none"] = "policy"
    retain: bool = False
    conservative: bool = False


ARMS = {
    "wsrl": Arm(),
    "no_warmup": Arm(warmup="none"),
    "random_warmup": Arm(warmup="random"),
    "cal_ql": Arm(warmup="none", retain=True, conservative=True),
    "rlpd": Arm(pretrain=False, warmup="random", retain=True),
    "sac": Arm(pretrain=False, warmup="random"),
    "bc": Arm(imitate=True),
}
ArmName = Literal["wsrl", "no_warmup", "random_warmup", "cal_ql", "rlpd", "sac", "bc"]


@dataclass(frozen=True)
class Wsrl(OffPolicy):
    """Offline reinforcement learning, a warm-up, and online learning without old data: WSRL (arXiv:2412.07762).

    Attributes:
        arm: WSRL, or one of its baselines.
        sac: Networks and rates, the same offline and online.
        cal_ql: The conservative loss.
        offline_steps: Steps of offline training.
        warmup: K, control steps of the frozen policy that begin the online buffer.
    """

    name: Literal["wsrl"] = "wsrl"
    arm: ArmName = "wsrl"
    sac: SacRecipe = field(
        default_factory=lambda: SacRecipe(
            num_critics=10, layer_norm=True, lr_actor=1e-4, lr_temperature=1e-4, entropy_backup=False, utd=4
        )
    )
    cal_ql: CalQlRecipe = field(default_factory=CalQlRecipe)
    offline_steps: Natural = 20_000
    warmup: Natural = 5000

    @property
    def learns_from_stored(self) -> str:
        arm = ARMS[self.arm]
        return f"method.arm={self.arm}" if arm.retain or (arm.pretrain and self.offline_steps > 0) else ""

    def learner(self, offline: ReplayBuffer, store: ReplayBuffer, seed: int, device: str = "cpu") -> WsrlLearner:
        return WsrlLearner(self, offline, store, seed, device)


class Phase(StrEnum):
    OFFLINE = "offline"
    WARMUP = "warmup"
    ONLINE = "online"


class WsrlLearner:
    """The learner.

    Args:
        method: Options.
        offline: Stored episodes.
        store: The online buffer, empty.
        seed: Of weights, noise and batches.
        device: Where the networks are.
    """

    def __init__(
        self, method: Wsrl, offline: ReplayBuffer, store: ReplayBuffer, seed: int, device: str = "cpu"
    ) -> None:
        self.method, self.arm, self.horizon = method, ARMS[method.arm], method.horizon
        self.offline, self.store = offline, store
        self.obs_dim, self.action_dim = (offline.columns[name].shape[1] for name in ("obs", "action"))
        self.agent = Sac(method.sac, self.obs_dim, self.horizon * self.action_dim, seed, device=device)
        self.rng = np.random.default_rng(seed)
        self.pretrained = 0  # offline steps done

        self.modules: dict[str, nn.Module] = {"agent": self.agent}
        self.acting: dict[str, nn.Module] = {"actor": self.agent.actor}
        self.optimizers = {"actor": self.agent.actor_optimizer, "critic": self.agent.critic_optimizer}

    @property
    def pretrain_steps(self) -> int:
        """Offline steps that this arm takes."""
        return self.method.offline_steps if self.arm.pretrain else 0

    @property
    def phase(self) -> Phase:
        if self.pretrained < self.pretrain_steps:
            return Phase.OFFLINE
        if self.arm.warmup != "none" and self.store.total < self.method.warmup:
            return Phase.WARMUP
        return Phase.ONLINE

    def pretrain(self) -> dict[str, Tensor]:
        """One offline step."""
        batch = self.offline.sample(self.method.sac.batch, self.horizon, self.rng, closed=True)
        batch = batch.to(self.agent.device)
        self.pretrained += 1
        if self.arm.imitate:
            return self.imitate(batch)
        return cal_ql.update(self.agent, batch, self.method.cal_ql)

    def imitate(self, batch: Batch) -> dict[str, Tensor]:
        """One step of the actor on -E[log pi(a|o)] of stored chunks; critics and temperature stand still."""
        nll, log_std = self.agent.actor.nll(batch.obs, batch.actions)
        loss = nll.mean()
        step(self.agent.actor_optimizer, loss, [*self.agent.actor.parameters()])
        return {"nll": loss.detach(), "log_std": log_std.detach().mean()}

    @property
    def source(self) -> Source:
        """What the transitions of now are."""
        return Source.WARMUP if self.phase is Phase.WARMUP else Source.ONLINE

    def random_in(self, source: Source) -> bool:
        """Whether transitions of a kind are anybody's: the warm-up ends by the learner's count, wherever actors are."""
        return source is Source.WARMUP and self.arm.warmup == "random"

    def network(self, seen: Seen, source: Source | None = None) -> StateGaussianPolicy:
        """The policy, whose weights are the actor's: its mode, or, for transitions of a source, its draws."""
        from vla_stack.policies.configuration_state import StateGaussianConfig  # on demand: LeRobot is heavy, and
        from vla_stack.policies.modeling_state import StateGaussianPolicy  # this module is read for its recipe as well

        sac = self.method.sac
        shape: dict[str, Any] = {"chunk_size": self.horizon, "n_action_steps": self.horizon, "hidden": sac.actor}
        shape |= {"layer_norm": sac.layer_norm, "norm_eps": sac.norm_eps, "log_std": sac.log_std}
        config = StateGaussianConfig(**seen.fields(self.agent.device), **shape)
        config.noise_scale = 0.0 if source is None else 1.0
        return StateGaussianPolicy(config, self.agent.actor, seen.encoder)

    def update(self) -> dict[str, Tensor]:
        """The updates of one executed chunk: none in the warm-up, then ``utd`` critic steps and one of the actor."""
        if self.phase is not Phase.ONLINE:
            return {}
        sac, conservative = self.method.sac, self.arm.conservative
        rows = sac.batch * sac.utd // (2 if self.arm.retain else 1)
        try:  # a chunk, or for Cal-QL an episode, has to end before there is anything to learn from
            batch = self.store.sample(rows, self.horizon, self.rng, closed=conservative)
        except ValueError:
            return {}
        if self.arm.retain:
            batch = mix(batch, self.offline.sample(rows, self.horizon, self.rng, closed=conservative))
        batch = batch.to(self.agent.device)
        if conservative:
            return cal_ql.update(self.agent, batch, self.method.cal_ql, sac.utd)
        return self.agent.update(batch, sac.utd)
