"""What every trainable policy offers to methods, samplers and rollouts.

Sampling, real-time chunking, preference losses and reinforcement learning are functions of ``encode`` and
``velocity`` alone, so each works unchanged for the native VLA and for adapters of other flow-matching VLAs. What a
policy can do is a field of the contract that it derives from; nobody looks for attributes by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from vla_stack.schema import OBS_STATE

if TYPE_CHECKING:
    from vla_stack.policies.heads import OneStepHead

STATE_LIMIT = 5.0  # of a normalised state, for critics
# One time a sample, or one an action token.
Time = Float[Tensor, " b"] | Float[Tensor, "b h"]


class Context(Protocol):
    """The vision-language prefix of a batch of observations; opaque to everyone but the policy that made it."""

    def repeat(self, n: int) -> Context:
        """Each observation ``n`` times, row ``b`` becoming rows ``b * n ... b * n + n - 1``; shares gradients."""
        ...


class NoisePolicy(ABC):
    """A policy whose chunk is a function of the noise that it is given, row by row: ``predict_action_chunk(batch,
    noise=[b, h, noise_dim])``.

    Attributes:
        noise_dim: Entries of the noise of one action.
        noise_scale: Standard deviation of the noise that sampling starts from; training always uses 1.
        max_delay: Steps at a chunk's start that may be given as clean actions (``prefix=``); 0: it takes none.
        pads: Whether it fits any cameras and, by padding, any state and action, as LeRobot's VLAs do.
    """

    noise_dim: int
    noise_scale: float = 1.0
    max_delay: int = 0
    pads: bool = False

    @property
    def frame(self) -> tuple[int, int] | None:
        """Height and width that it shrinks larger pictures to touch from within, bilinearly, before anything else;
        None: it reads them as they are, or by a filter of its own."""
        return None


class FlowPolicy[C: Context](NoisePolicy):
    """A policy whose action chunk is the end point of a learnt flow. Actions here are normalised, as the network
    sees them; the policy's processors map from and to commands. List it last among a class's bases. C is the
    type of its contexts.

    Attributes:
        horizon: Actions per chunk, h.
        action_dim: Entries of one action, a.
        noise_dim: Entries of the noise that its flow starts from, at least ``action_dim``. LeRobot's VLAs pad actions
            with zeros to a fixed size and carry noise in the padding too; points without it are accepted.
        state_width: Width of an action token's final state, d of ``action_states``.
        causal_actions: Whether an action token reads only the ones before it; then chunks of any length agree on their
            common steps, and a mixture of horizons has nothing to mix.
        head: What predicts a chunk in one step, in place of a flow; None: the chunk is the end of a flow.
        one_step: Whether there is no velocity: there is a ``head``, or a mixture of such predictions.
    """

    horizon: int
    action_dim: int
    state_width: int
    causal_actions: bool = False
    head: OneStepHead | None = None
    one_step: bool = False

    @property
    @abstractmethod
    def inference_steps(self) -> int:
        """Euler steps of a sampled chunk."""

    @abstractmethod
    def encode(self, batch: dict[str, Any]) -> C:
        """Encode a preprocessed batch of b observations once, with gradients."""

    @abstractmethod
    def velocity(self, context: C, x: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
        """Velocity of the flow at x; ``t`` is ``[b]``, or ``[b, h]`` with 0 on tokens that hold clean actions."""

    def action_states(
        self,
        context: C,
        x: Float[Tensor, "b n a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Final states of the action tokens, which ``action_head`` maps to velocities.

        ``velocity(context, x, t) == action_head(action_states(context, x, t))[..., :x.shape[-1]]``. Heads of several
        kinds and mixtures of horizons are built on them.

        Args:
            context: The prefix.
            x: Points on the flow; one chunk, or several chunks end to end.
            t: Flow time, ``[b]`` or ``[b, n]``.
            blocks: Lengths of the chunks that ``x`` holds end to end, of one encoded observation: each starts at step 0
                and its tokens read the prefix and their own chunk alone. None: ``x`` is one chunk.
            valid: Action tokens that may be read, as keys; what comes out at the others is meaningless. None: all.
        """
        raise NotImplementedError(f"{type(self).__name__} has no states of action tokens")

    def action_head(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n p"]:
        """Velocities of final action-token states, ``noise_dim`` wide; affine in the states."""
        raise NotImplementedError(f"{type(self).__name__} has no states of action tokens")

    @abstractmethod
    def features(self, context: C) -> Float[Tensor, "b d"]:
        """One vector an observation, for critics and reward heads."""

    @torch.no_grad()
    def observed(self, context: C, batch: dict[str, Any]) -> Float[Tensor, "b f"]:
        """What values and small actors beside the policy read: its features, each row normed, and the state.

        Rounded to float16, so that what a replay buffer keeps in half the memory is what is computed, bit for bit.
        """
        features, state = self.features(context).float(), batch[OBS_STATE].float().clamp(-STATE_LIMIT, STATE_LIMIT)
        return torch.cat((F.layer_norm(features, features.shape[-1:]), state), -1).half().float()

    def image_tokens(self, batch: dict[str, Any]) -> Float[Tensor, "b n d"]:
        """What a policy with a history keeps of an observation."""
        raise NotImplementedError(f"{type(self).__name__} has no history")

    def renewed(self, context: C, state: Float[Tensor, "b s"]) -> C:
        """A stored context as the policy would make it now, given the normalised states of its observations.

        Where the prefix has a part that training moves, that part is made anew, with gradients.
        """
        return context

    def for_inference(self) -> None:
        """Give up what only training needs; the policy can be neither trained nor saved any more."""
