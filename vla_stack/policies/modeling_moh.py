"""A mixture of horizons as a LeRobot policy around another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.policies import flow
from vla_stack.policies.action_queue import ActionQueue
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.contract import Context, FlowPolicy, Time
from vla_stack.policies.mixture_of_horizons import (
    Gate,
    Horizons,
    Mixture,
    consensus_steps,
    fusion_weights,
    load_balance,
    packed_states,
    vote_steps,
)
from vla_stack.policies.past import Recollection
from vla_stack.policies.reading import read_config, read_policy
from vla_stack.policies.registry import blank_policy, policy_class
from vla_stack.policies.weights import parameter_groups
from vla_stack.schema import ACTION, ACTION_DIM_IS_PAD, OBS_STATE


class Sample(NamedTuple):
    """A sampled chunk.

    Attributes:
        chunk: float [b, h, a], normalised.
        disagreement: float [b, h], distance of the branches from the fused velocity, integrated over the flow; 0 on
            given steps. Where branches vote: [b, n, h], each one's own.
    """

    chunk: Tensor
    disagreement: Tensor


class Prediction(NamedTuple):
    """What a loss compares.

    Attributes:
        mixture: Predictions of the branches.
        target: float [b, h, a], what they should be.
        distance: The error that training minimises, entry by entry, of differences.
        given: bool [b, h], steps that the policy was given as clean actions; they do not count.
    """

    mixture: Mixture
    target: Tensor
    distance: Callable[[Tensor], Tensor]
    given: Tensor


class MeasuredVelocity:
    """The fused velocity of encoded observations, which adds up on its way how much the branches disagree.

    The disagreement is that of velocities, as the paper's code has it: branches are never integrated on their own.

    Args:
        policy: The mixture.
        context: The encoded observations.
        lacking: Dimensions that a sample's embodiment does not have; they do not count.
        given: Steps that are given as clean actions, where no loss holds a velocity to anything; likewise.

    Attributes:
        disagreement: float [b, h], of the calls so far, each worth one Euler step; normalised units.
    """

    def __init__(
        self,
        policy: MohPolicy,
        context: Context,
        lacking: Bool[Tensor, "b a"] | None = None,
        given: Bool[Tensor, "b h"] | None = None,
    ) -> None:
        self._policy, self._context, self._lacking, self._given = policy, context, lacking, given
        self.disagreement: Any = 0.0

    def __call__(self, x: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
        mixture = self._policy.mix(self._context, x, t)
        distance = mixture.cut(self._policy.action_dim, self._lacking).disagreement.detach()
        if self._given is not None:
            distance = distance.masked_fill(self._given, 0.0)
        self.disagreement = self.disagreement + distance / self._policy.inference_steps
        return mixture.velocity


class MohPolicy(PreTrainedPolicy, FlowPolicy[Any]):
    """Mixture of horizons over any flow policy; itself one.

    Its velocity is the fused one, so samplers and methods work on it as on its base. Over a native base with
    ``head=regression`` (the paper's pi_reg) branches predict actions instead of velocities, in one step: what is called
    velocity of a :class:`Mixture` are then actions.

    Args:
        config: Configuration with features filled in.
        dataset_meta: LeRobot's metadata of the training data, passed on to the base.
        blank: All weights are about to be replaced, so the base reads none.
        trained_alpha: ``lora_alpha`` of a native base's weights that replace them, where it may be another one.

    Raises:
        UserError: The base is neither, or its action attention is causal.
    """

    config_class = MohConfig
    name = "moh"

    def __init__(
        self,
        config: MohConfig,
        dataset_meta: Any = None,
        blank: bool = False,
        trained_alpha: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        config.share()
        self.config = config
        self.base = _make_base(config, dataset_meta, blank)
        if trained_alpha is not None:
            self.base.prefix.trained_alpha = trained_alpha
        self.one_step = self.base.head is not None
        self.horizon, self.action_dim = config.horizons[-1], self.base.action_dim
        self.noise_dim, self.state_width = self.base.noise_dim, self.base.state_width
        self.max_delay, self.noise_scale = self.base.max_delay, self.base.noise_scale
        self.gate = Gate(self.state_width)
        self.horizons = Horizons(config.horizons)
        self._queue, self._past = ActionQueue(), Recollection(getattr(config.base, "history_ages", ()))

    # --- FlowPolicy -----------------------------------------------------------------------------------------------

    @property
    def frame(self) -> tuple[int, int] | None:
        return self.base.frame

    def encode(self, batch: dict[str, Any]) -> Context:
        """The base's prefix."""
        return self.base.encode(batch)

    def image_tokens(self, batch: dict[str, Any]) -> Float[Tensor, "b n d"]:
        return self.base.image_tokens(batch)

    def mix(
        self, context: Context, x: Float[Tensor, "b h a"], t: Time, generator: torch.Generator | None = None
    ) -> Mixture:
        """All branches at one point of the flow, and their weights.

        Args:
            context: The prefix.
            x: Points on the flow, of full length; of one-step predictions no more than the shape.
            t: Flow time, ``[b]`` or ``[b, h]``; 0 for one-step predictions.
            generator: Source of the gate's noise; None, as in inference, adds none. One-step predictions have none.
        """
        states = packed_states(self.base, self.horizons, context, x, t)
        branches = self.action_head(states)[..., : x.shape[-1]]
        return Mixture(self.horizons.unpack(branches), self._weights(states, generator))

    def _weights(self, states: Float[Tensor, "b m d"], generator: torch.Generator | None) -> Float[Tensor, "b n h"]:
        noise = generator if self.config.gate_noise and not self.one_step else None
        scores = self.gate(states, noise)
        return fusion_weights(self.horizons.unpack(scores), self.horizons.valid, self.config.fusion)

    def velocity(self, context: Context, x: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
        """The fused velocity.

        Raises:
            UserError: The base predicts actions in one step.
        """
        if self.one_step:
            raise UserError("a mixture of one-step predictions has no velocity", "train one with base.head=flow")
        return self.mix(context, x, t).velocity

    def action_states(
        self,
        context: Context,
        x: Float[Tensor, "b h a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b h"] | None = None,
    ) -> Float[Tensor, "b h d"]:
        """States of the branches, mixed: the head is affine and the weights sum to 1, so it gives the fused velocity.

        Raises:
            ValueError: ``blocks`` or ``valid`` are given; the mixture itself uses them.
        """
        if blocks is not None or valid is not None:
            raise ValueError("a mixture of horizons takes one whole chunk, without blocks or masked tokens")
        states = packed_states(self.base, self.horizons, context, x, t)
        return (self._weights(states, None)[..., None] * self.horizons.unpack(states)).sum(1)

    def action_head(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n p"]:
        """The base's, in at least float32, also under autocast: small differences of branches are what is mixed."""
        with torch.autocast(states.device.type, enabled=False):
            return self.base.action_head(states.to(torch.promote_types(states.dtype, torch.float32)))

    def features(self, context: Context) -> Float[Tensor, "b d"]:
        return self.base.features(context)

    def observed(self, context: Context, batch: dict[str, Any]) -> Float[Tensor, "b f"]:
        return self.base.observed(context, batch)

    @property
    def inference_steps(self) -> int:
        return self.base.inference_steps

    def language_loss(self, images: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The base's."""
        return self.base.language_loss(images, input_ids, labels)

    def for_inference(self) -> None:
        """As the base has it."""
        self.base.for_inference()

    def renewed(self, context: Any, state: Float[Tensor, "b s"]) -> Any:
        """As the base has it."""
        return self.base.renewed(context, state)

    # --- Sampling -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self, batch: dict[str, Any], noise: Tensor | None = None, prefix: flow.ActionPrefix | None = None
    ) -> Sample:
        """Integrate the fused velocity from ``noise`` [b, h, p], or noise of the configured scale."""
        if self.training:
            self.eval()
        context, steps = self.encode(batch), self.inference_steps
        if noise is None:
            state = batch[OBS_STATE]
            noise = torch.randn(len(state), self.horizon, self.noise_dim, dtype=state.dtype, device=state.device)
            noise *= self.noise_scale
        if self.one_step:
            mixture = self.mix(context, noise, noise.new_zeros(len(noise)))
            real = mixture.cut(self.action_dim, batch.get(ACTION_DIM_IS_PAD))
            return Sample(
                mixture.velocity, real.distance if self.config.consensus_rule == "votes" else real.disagreement
            )
        velocity = self.measured_velocity(context, batch, given=None if prefix is None else prefix.mask)
        chunk = flow.euler(velocity, noise, steps, prefix)[..., : self.action_dim]
        return Sample(chunk, velocity.disagreement)

    def measured_velocity(
        self, context: Context, batch: dict[str, Any], repeats: int = 1, given: Bool[Tensor, "b h"] | None = None
    ) -> MeasuredVelocity:
        """The velocity for a sampler; ``context`` has each of the batch's observations ``repeats`` times."""
        lacking = batch.get(ACTION_DIM_IS_PAD)
        lacking = None if lacking is None else lacking.repeat_interleave(repeats, 0)
        return MeasuredVelocity(self, context, lacking, given)

    def execute_steps(
        self, disagreement: Float[Tensor, "b *n h"], given: Bool[Tensor, "b h"] | None = None
    ) -> Int[Tensor, " b"] | None:
        """Actions of each chunk to execute before the next one, ``given`` ones at its start included.

        None without dynamic inference.
        """
        c = self.config
        if c.consensus_ratio is None:
            return None
        n, m, most = c.consensus_min_steps, c.consensus_min_active, c.consensus_max_steps or self.horizon
        if c.consensus_rule == "votes":
            return vote_steps(disagreement, c.horizons, c.consensus_ratio, n, most)
        steps = consensus_steps(disagreement, c.horizons, c.consensus_ratio, n, m, c.consensus_rule, given)
        return steps.clamp(max=most)

    def predict(self, context: Context, actions: Float[Tensor, "b h a"], generator: torch.Generator) -> Prediction:
        """Predictions at a random point of the flow, what they should be, and what training minimises.

        All branches share noise and time, and the given first steps where the base has ``max_delay``. One-step
        predictions are of the actions themselves, by absolute error.
        """
        given = torch.zeros(actions.shape[:2], dtype=torch.bool, device=actions.device)
        if self.one_step:
            return Prediction(self.mix(context, actions, actions.new_zeros(len(actions))), actions, torch.abs, given)
        noise = flow.sample_noise((*actions.shape[:2], self.noise_dim), generator, actions.device)
        t = flow.sample_time(len(actions), generator, actions.device)
        if self.max_delay:
            given = flow.sample_prefix(len(actions), self.horizon, self.max_delay, generator, actions.device)
            t = torch.where(given, 0.0, t[:, None])
        mixture = self.mix(context, flow.interpolate(actions, noise, t), t, generator)
        return Prediction(mixture.cut(self.action_dim), flow.target(actions, noise), torch.square, given)

    # --- LeRobot --------------------------------------------------------------------------------------------------

    def forward(
        self, batch: dict[str, Any], reduction: Literal["mean", "none"] = "mean"
    ) -> tuple[Tensor, dict[str, float]]:
        """The paper's loss on torch's global generator, for LeRobot's training loop.

        Ours, with its terms spelt out, is methods/mixture_of_horizons.
        """
        horizons = self.config.horizons
        mixture, target, distance, given = self.predict(self.encode(batch), batch[ACTION], torch.default_generator)
        valid = flow.valid_entries(batch) & ~given[..., None]
        loss = flow.masked_mean(distance(mixture.velocity - target), valid)
        for n, h in enumerate(horizons):
            loss = loss + flow.masked_mean(distance(mixture.branches[:, n, :h] - target[:, :h]), valid[:, :h])
        loss = loss + 1e-3 * load_balance(mixture.weights, horizons, valid.any(2))
        return (loss if reduction == "none" else loss.mean()), {"moh_loss": loss.mean().item()}

    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, prefix: flow.ActionPrefix | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """Sample one normalised chunk an observation."""
        return self.sample(batch, noise, prefix).chunk

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue, refilled after ``n_action_steps`` calls, or as dynamic inference says.

        A batch is one queue: it is refilled when the first of its samples wants to be. Each refill is remembered where
        the base has a history.
        """

        def refill() -> Tensor:
            past = self._past.beside(self.image_tokens(batch)) if getattr(self.config.base, "history", 0) else {}
            chunk, disagreement = self.sample({**batch, **past}, noise)
            steps = self.execute_steps(disagreement)
            return chunk[:, : self.config.n_action_steps if steps is None else int(steps.min())]

        origin = batch[ACTION][:, 0] if ACTION in batch else torch.zeros((), device=batch[OBS_STATE].device)
        action = self._queue.next(origin, refill)
        self._past.step += 1
        return action

    def reset(self) -> None:
        """Forget the queued actions and the episode."""
        self._queue.clear()
        self._past.clear()

    def get_optim_params(self) -> list[dict[str, Any]]:
        """Parameter groups for LeRobot's training loop."""
        return parameter_groups(self)

    @classmethod
    def from_pretrained(cls, pretrained_name_or_path: str | Path, **kwargs: Any) -> MohPolicy:
        """Load a policy directory; unlike LeRobot's default, every weight must be there."""
        if (config := kwargs.get("config")) is not None and getattr(config.base, "backbone", None):
            kwargs["trained_alpha"] = read_config(pretrained_name_or_path, "cpu").base.lora_alpha
        return super().from_pretrained(pretrained_name_or_path, **{**kwargs, "strict": True, "blank": True})


def _make_base(config: MohConfig, dataset_meta: Any, blank: bool) -> PreTrainedPolicy:
    base: Any = config.base
    kind: Any = policy_class(base.type)
    if not issubclass(kind, FlowPolicy):
        raise UserError(
            f"policy '{base.type}' cannot be the base of a mixture of horizons", "it has no flow of actions"
        )
    if base.pretrained_path:
        policy = read_policy(base.pretrained_path, base, dataset_meta=dataset_meta)
        config.started_from = base.pretrained_path
        base.pretrained_path = None  # from here on the weights are part of this policy's own
    elif blank:
        policy = blank_policy(base)
    else:
        policy = kind(base, dataset_meta=dataset_meta)
    if policy.head is not None and base.head != "regression":
        remedy = "set base.head to flow or regression"
        raise UserError(f"a mixture of horizons cannot mix predictions of the head '{base.head}'", remedy)
    if getattr(base, "prefix_attention", "full") == "lambda":
        raise UserError(
            "the Λ-mask is causal, so all horizons would predict the same", "set base.prefix_attention=full"
        )
    if policy.causal_actions and not config.bidirectional:
        raise UserError(
            f"action attention of policy '{base.type}' is causal, so all horizons would predict the same",
            "set bidirectional=true and train it",
        )
    policy.causal_actions = False
    if config.padded_positions:
        from vla_stack.policies.adapters.pi import PiAdapter

        if not isinstance(policy, PiAdapter):
            remedy = "set padded_positions=false; it is for the authors' checkpoints of pi0 and pi05"
            raise UserError(f"policy '{base.type}' has no padded positions", remedy)
        policy.padded_positions = True
    if config.consensus_rule == "votes" and policy.head is None:
        raise UserError(
            "branches vote on actions, those of a flow give velocities",
            "set consensus_rule=code, or base.head=regression and train it",
        )
    return policy
