"""EXPO: an expressive policy that imitates, a small one that edits, and the better of what they offer.

Dong et al., "EXPO: Stable Reinforcement Learning with Expressive Policies" (arXiv:2507.07986). No value gradient
reaches the expressive *base*. A Gaussian *edit* policy moves a base action by at most beta in each dimension, and the
*on-the-fly* policy is the best by the critics of N base samples and the edits of some of them, both where it acts and
in the target

    y = R + gamma^k Q'(o', OTF(o')).

The base is a flow here, the paper's a denoising diffusion. Edited actions are clipped to [-1, 1] wherever they are
made. The entropy target counts the edit's own [-1, 1] range, which is the reference code's with its correction by log
beta.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.methods.off_policy.recipe import OffPolicy
from vla_stack.methods.replay_buffer import Batch, ReplayBuffer, Source, mix
from vla_stack.methods.sac import Sac, SacRecipe, step
from vla_stack.policies.critics import best, polyak
from vla_stack.policies.state_flow import StateFlow
from vla_stack.training.recipe_tree import Count, Natural, NotNegative, Share

if TYPE_CHECKING:
    from vla_stack.methods.off_policy.deployed import Seen
    from vla_stack.policies.modeling_expo import ExpoPolicy

ALONE = {"samples": 1, "edits": 0, "unedited": True}  # candidates where the base acts as it is


@dataclass(frozen=True)
class Expo(OffPolicy):
    """A flow policy that imitates, an edit policy, and the best of what they offer: EXPO (arXiv:2507.07986).

    The baselines are settings of it.

    Attributes:
        sac: Networks and rates of critics and edit policy.
        base: Hidden widths of the base.
        euler_steps: Steps of a base sample.
        lr_base: Learning rate of the base, cosine in the imitation, constant online.
        base_steps: Imitation steps before the critics' first.
        base_ema: Step of the base's moving average for each executed chunk. The average acts, targets use the base
            itself; with 0.01 it is some 100 chunks behind.
        samples: N, base samples that are chosen from.
        edits: How many of them are edited as well; 0 is best-of-N.
        beta: Largest edit, in normalised action units.
        unedited: Whether base samples themselves may be chosen; without them, and with N = 1, only edits act.
        successes: Whether the base imitates, online, chunks of successful episodes alone, as EXPO-FT
            (arXiv:2605.25477) may; without, those of the critics' batches, whatever came of them.
        learn: Whether anything is learnt online; without, the base acts as it is.
        warmup: Control steps before the first update.
    """

    name: Literal["expo"] = "expo"
    sac: SacRecipe = field(
        default_factory=lambda: SacRecipe(
            actor=(256, 256, 256), critic=(256, 256, 256), num_critics=10, layer_norm=True, target_entropy=-0.5,
            entropy_backup=False, actor_q="mean", utd=20, actor_rows="last",
        )
    )  # fmt: skip
    base: tuple[int, ...] = (256, 256, 256)
    euler_steps: Count = 4
    lr_base: float = 3e-4
    base_steps: Natural = 2000
    base_ema: Share = 0.01
    samples: Count = 8
    edits: Natural = 8
    beta: NotNegative = 0.1
    unedited: bool = True
    successes: bool = False
    learn: bool = True
    warmup: Natural = 0

    def check(self) -> None:
        """Options go together; raises :class:`UserError`."""
        if self.edits > self.samples:
            raise UserError(
                f"'method.edits' is {self.edits}, there are {self.samples} samples to edit, 'method.samples'",
                f"set method.edits={self.samples} or less",
            )
        if not self.edits and not self.unedited:
            raise UserError(
                "'method.edits' is 0 and 'method.unedited' is false: there is nothing to choose",
                "set method.unedited=true",
            )
        if self.successes and self.reward == "task":
            raise UserError(
                "'method.successes' is true, and reward=task knows no success",
                "set method.successes=false or method.reward=step",
            )

    def learner(self, offline: ReplayBuffer, store: ReplayBuffer, seed: int, device: str = "cpu") -> ExpoLearner:
        return ExpoLearner(self, offline, store, seed, device)


class Editing:
    """What learners of edits share: candidates, their values, and the edit policy's loss.

    Attributes:
        method: Options.
        agent: Critics, the edit policy as its actor, and their optimisers.
        width: Entries of a chunk that are edited and judged, d.
        limit: Bound of a normalised action.
    """

    method: Any
    agent: Sac
    width: int
    limit: float = 1.0

    def edit(self, obs: Tensor, actions: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
        """Edited chunks clip(a + beta y) and the log-density of beta y, for chunks ``[b, h * a]``."""
        y, log_y = self.agent.actor.sample(torch.cat([obs, actions], -1), g)
        beta = self.method.beta
        edited = (actions + beta * y).clamp(-self.limit, self.limit)
        return edited, log_y - self.width * float(np.log(beta)) if beta else log_y

    def offered(self, obs: Tensor, drawn: Tensor, g: torch.Generator) -> Tensor:
        """What may be chosen for each observation ``[b, n, d]``: chunks ``drawn`` [b, N, d] of the base, and edits."""
        r, b = self.method, len(obs)
        groups = [drawn] if r.unedited else []
        if r.edits:
            first = drawn[:, : r.edits].reshape(-1, self.width)
            groups.append(self.edit(obs.repeat_interleave(r.edits, 0), first, g)[0].view(b, r.edits, self.width))
        return torch.cat(groups, 1)

    def values(self, obs: Tensor, offered: Tensor, g: torch.Generator) -> Tensor:
        """Target values of candidates ``[b, n, h * a]``: ``[b, n]``."""
        return self.agent.target.judge(obs, offered, self.agent.draw(g)).amin(0)

    def edit_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """E[alpha log p - Q(o, clip(a + beta y))] of edits of the batch's own actions, and log p of y, [b]."""
        edited, log_p = self.edit(batch.obs, batch.actions, self.agent.generator)
        q = self.agent.critic(torch.cat([batch.obs, edited], -1))
        value = q.mean(0) if self.method.sac.actor_q == "mean" else q.amin(0)
        loss = (self.agent.temperature.detach() * log_p - value).mean()
        own = log_p + self.width * float(np.log(self.method.beta)) if self.method.beta else log_p
        return loss, own.detach()

    def edit_step(self, batch: Batch) -> dict[str, Tensor]:
        """One step of the edit policy and of the temperature."""
        loss, log_y = self.edit_loss(batch)
        self.agent.log_temperature.grad = -(log_y.mean() + self.agent.target_entropy)
        step(self.agent.actor_optimizer, loss, [*self.agent.actor.parameters()])
        return {"entropy": -log_y.mean(), "temperature": self.agent.temperature.detach()}


class ExpoLearner(Editing):
    """The learner.

    Args:
        method: Options.
        offline: Demonstrations.
        store: The online buffer, empty.
        seed: Of weights, noise and batches.
        device: Where the networks are.
    """

    def __init__(
        self, method: Expo, offline: ReplayBuffer, store: ReplayBuffer, seed: int, device: str = "cpu"
    ) -> None:
        self.method, self.horizon, self.offline, self.store = method, method.horizon, offline, store
        obs, self.action_dim = (offline.columns[name].shape[1] for name in ("obs", "action"))
        self.width = self.horizon * self.action_dim
        self.agent = Sac(method.sac, obs, self.width, seed, actor_inputs=obs + self.width, device=device)
        g = self.agent.generator
        shape = (obs, self.horizon, self.action_dim, method.base, method.euler_steps)
        self.base, self.average = (StateFlow(*shape, generator=g).to(device) for _ in range(2))
        self.average.load_state_dict(self.base.state_dict())
        self.base_optimizer = torch.optim.AdamW(self.base.parameters(), lr=method.lr_base, fused=True)
        self.rng = np.random.default_rng(seed)
        self.pretrained = 0  # imitation steps done
        self.modules: dict[str, nn.Module] = {"agent": self.agent, "base": self.base, "average": self.average}
        self.acting: dict[str, nn.Module] = {
            "edit": self.agent.actor, "target": self.agent.target, "average": self.average
        }  # fmt: skip
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "edit": self.agent.actor_optimizer, "critic": self.agent.critic_optimizer, "base": self.base_optimizer
        }  # fmt: skip

    # Actions --------------------------------------------------------------------------------------------------------

    def candidates(self, obs: Tensor, base: StateFlow, g: torch.Generator) -> Tensor:
        """What may be chosen for each observation, ``[b, n, h * a]``."""
        r, b = self.method, len(obs)
        drawn = base.sample(obs.repeat_interleave(r.samples, 0), g).view(b, r.samples, self.width)
        return self.offered(obs, drawn, g)

    @torch.no_grad()
    def on_the_fly(self, obs: Tensor, base: StateFlow, g: torch.Generator) -> Tensor:
        """The candidate of the largest target value, by a drawn subset of the critics, ``[b, h * a]``."""
        offered = self.candidates(obs, base, g)
        return best(offered, self.values(obs, offered, g))

    # The learner ----------------------------------------------------------------------------------------------------

    @property
    def pretrain_steps(self) -> int:
        return self.method.base_steps

    @property
    def source(self) -> Source:
        return Source.WARMUP if self._waiting else Source.ONLINE

    def pretrain(self) -> dict[str, Tensor]:
        """One imitation step of the base on demonstrations."""
        rate = 0.5 * (1.0 + np.cos(np.pi * self.pretrained / max(1, self.pretrain_steps)))
        self.base_optimizer.param_groups[0]["lr"] = self.method.lr_base * max(0.02, float(rate))
        self.pretrained += 1
        batch = self.offline.sample(self.method.sac.batch, self.horizon, self.rng)
        metrics = self.imitate(batch.to(self.agent.device))
        if self.pretrained == self.pretrain_steps:
            self.average.load_state_dict(self.base.state_dict())
        return metrics

    def random_in(self, source: Source) -> bool:
        """Never: the base is there from the start."""
        return False

    def network(self, seen: Seen, source: Source | None = None) -> ExpoPolicy:
        """The policy, whose weights are the learner's: the on-the-fly policy, or, as long as it does not act, the base.

        It has no mode: what it gives is drawn, for transitions of any source as in an evaluation.
        """
        from vla_stack.policies.configuration_expo import ExpoConfig  # on demand: LeRobot is heavy, and this module is
        from vla_stack.policies.configuration_state import StateFlowConfig  # read for its recipe as well
        from vla_stack.policies.modeling_expo import ExpoPolicy
        from vla_stack.policies.modeling_state import StateFlowPolicy

        r, fields = self.method, seen.fields(self.agent.device)
        waiting = self._waiting if source is None else source is Source.WARMUP
        chooses = r.learn and not waiting
        shape: dict[str, Any] = {"chunk_size": self.horizon, "n_action_steps": self.horizon}
        base = StateFlowConfig(**fields, **shape, hidden=r.base, num_inference_steps=r.euler_steps)
        offered: dict[str, Any] = {"samples": r.samples, "edits": r.edits, "unedited": r.unedited} if chooses else ALONE
        config = ExpoConfig(
            **{key: fields[key] for key in ("device", "push_to_hub", "robot")},
            base=base,
            **offered,
            feature_dim=base.obs_dim,
            beta=r.beta,
            edit_hidden=r.sac.actor,
            critic_hidden=r.sac.critic,
            num_critics=r.sac.num_critics,
            subset=r.sac.subset,
            layer_norm=r.sac.layer_norm,
            norm_eps=r.sac.norm_eps,
            log_std=r.sac.log_std,
            n_action_steps=self.horizon,
        )
        return ExpoPolicy(
            config, StateFlowPolicy(base, self.average, seen.encoder), self.agent.actor, self.agent.target
        )

    def update(self) -> dict[str, Tensor]:
        """The updates of one executed chunk: ``utd`` critic steps, then one each of base, edit and temperature."""
        sac = self.method.sac
        rows = sac.batch * sac.utd // 2
        if not self.method.learn or self._waiting:
            return {}
        try:
            own = self.store.sample(rows, self.horizon, self.rng)
        except ValueError:  # no chunk has been executed yet
            return {}
        batch = mix(own, self.offline.sample(rows, self.horizon, self.rng)).to(self.agent.device)
        for i in range(sac.utd):
            part = Batch(*(x[i * sac.batch : (i + 1) * sac.batch] for x in batch))
            metrics = self.agent.critic_step(part, self.target(part))
        self.base_optimizer.param_groups[0]["lr"] = self.method.lr_base
        metrics |= self.imitate(self._to_imitate() if self.method.successes else part)
        return metrics | self.edit_step(part) if self.method.edits else metrics

    def _to_imitate(self) -> Batch:
        """Chunks of episodes that succeeded, half of them demonstrations; these alone, until an episode has."""
        n = self.method.sac.batch // 2
        try:
            own = self.store.sample(n, self.horizon, self.rng, succeeded=True)
        except ValueError:
            return self.offline.sample(2 * n, self.horizon, self.rng).to(self.agent.device)
        return mix(own, self.offline.sample(n, self.horizon, self.rng)).to(self.agent.device)

    @torch.no_grad()
    def target(self, batch: Batch) -> Tensor:
        """y [b]; the subset that evaluates is drawn anew after the one that chose. No entropy."""
        actions = self.on_the_fly(batch.next_obs, self.base, self.agent.generator)
        return batch.reward + batch.discount * self.agent.target_value(batch.next_obs, actions)

    def imitate(self, batch: Batch) -> dict[str, Tensor]:
        """One flow-matching step of the base, and of its average."""
        actions = batch.actions.view(-1, self.horizon, self.action_dim)
        loss = self.base.imitation_loss(batch.obs, actions, self.agent.generator)
        step(self.base_optimizer, loss, [*self.base.parameters()])
        polyak(self.average, self.base, self.method.base_ema)
        return {"base": loss.detach()}

    @property
    def _waiting(self) -> bool:
        return self.store.total < self.method.warmup
