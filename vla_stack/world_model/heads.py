"""Small networks around the world model: where commands lead, what pose a picture shows, whether a task is done.

Probe and judges look at *decoded* frames, real and imagined alike, so that their own error on real frames can be told
from the world model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stack.world_model.config import HeadsConfig
from vla_stack.world_model.poses import Adapter, turned

SHARP = 3.0  # scale of an encoder's maps in their softmax


class Encoder(nn.Module):
    """Features [N, W] of a frame: uint8 pictures of all views [N, V, H, W, 3], side by side as channels.

    The softmax of a learned map is where something is seen, to a fraction of a pixel (Levine et al. 2016,
    arXiv:1504.00702, section 5.1); where the tool is and whether a thing is in it follows from such points sooner than
    from the maps themselves.
    """

    def __init__(self, views: int, width: int, points: int = 64) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            nn.Conv2d(3 * views, 16, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, points, 1),
        )
        self.out = nn.Sequential(nn.Linear(3 * points, width), nn.SiLU())

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.maps(pictures.movedim(-1, -3).flatten(1, 2).float().div(127.5).sub(1))  # [N, points, h, w]
        seen = (SHARP * maps).flatten(2).softmax(-1).unflatten(-1, maps.shape[2:])
        down, across = (torch.linspace(-1, 1, n, device=maps.device) for n in maps.shape[2:])
        points = [(seen.sum(2) * across).sum(-1), (seen.sum(3) * down).sum(-1), (seen * maps).sum((2, 3))]
        return self.out(torch.cat(points, 1))


class Probe(nn.Module):
    """The tool's pose in a frame."""

    def __init__(self, views: int, width: int) -> None:
        super().__init__()
        self.eye, self.out = Encoder(views, width), nn.Linear(width, 6)

    def forward(self, pictures: Tensor) -> Tensor:
        """Poses [N, 5] (m, rad, measured opening) of uint8 [N, V, H, W, 3]."""
        raw = self.out(self.eye(pictures))
        return torch.cat([raw[:, :3] / 10, torch.atan2(raw[:, 4], raw[:, 3])[:, None], raw[:, 5:]], 1)

    def loss(self, pictures: Tensor, poses: Tensor) -> Tensor:
        """Square error of positions in decimetres, of direction and of opening; poses [N, 5] are the measured ones."""
        raw, yaw = self.out(self.eye(pictures)), poses[:, 3]
        target = torch.cat([poses[:, :3] * 10, yaw.cos()[:, None], yaw.sin()[:, None], poses[:, 4:]], 1)
        return F.mse_loss(raw, target)


class Judge(nn.Module):
    """Whether the instruction is fulfilled, frame after frame: an encoder, and a GRU that remembers what it saw."""

    def __init__(self, views: int, width: int, tasks: int) -> None:
        super().__init__()
        self.eye, self.task = Encoder(views, width), nn.Embedding(tasks, width)
        self.gru, self.out = nn.GRU(width, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, pictures: Tensor, task: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, T] of uint8 [B, T, V, H, W, 3] for tasks int [B]; and the state to go on with, [1, B, width]."""
        seen = self.eye(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
        hidden, state = self.gru(seen + self.task(task)[:, None], state)
        return self.out(hidden)[..., 0], state


class Heads(nn.Module):
    """All of them, trained together.

    Args:
        config: Sizes.
        views: Cameras.
        tasks: Number of instructions.
        horizon: Frames of a chunk.
    """

    def __init__(self, config: HeadsConfig, views: int, tasks: int, horizon: int) -> None:
        super().__init__()
        self.adapter, self.probe = Adapter(horizon), Probe(views, config.width)
        self.judges = nn.ModuleList(Judge(views, config.width, tasks) for _ in range(config.judges))
        self.register_buffer("temperature", torch.ones(()))  # of the judges' logits, and what is added to
        self.register_buffer("offset", torch.zeros(()))  # them then; both set by `calibrate`

    def success(
        self, pictures: Tensor, task: Tensor, states: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Calibrated success probability [B, T], the mean over judges, and their states; arguments as a judge's."""
        logits, after = zip(
            *(j(pictures, task, states[i] if states else None) for i, j in enumerate(self.judges)), strict=True
        )
        return self.probability(torch.stack(logits)), list(after)

    def probability(self, logits: Tensor) -> Tensor:
        """Calibrated success probability [*], the mean over judges, of their logits [judges, *]."""
        return (logits / self.temperature + self.offset).sigmoid().mean(0)

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses.

        Args:
            batch: For the judges ``pictures`` uint8 [B, T, V, H, W, 3], ``task`` [B], ``success`` bool [B, T]; for the
                probe ``frames`` uint8 [N, V, H, W, 3] of recorded moments and ``measured`` [N, 5]; for the adapter
                ``pose`` and ``before`` [M, 5], ``commands`` and ``reached`` [M, n, 5].
        """
        labels = batch["success"].float()
        # Success is rare: both outcomes weigh the same.
        share = labels.mean().clamp(0.05, 0.95)
        weights = labels * (0.5 / share) + (1 - labels) * (0.5 / (1 - share))
        judged = [j(batch["pictures"], batch["task"])[0] for j in self.judges]
        judge = torch.stack([F.binary_cross_entropy_with_logits(x, labels, weights) for x in judged]).sum()
        probe = self.probe.loss(batch["frames"], batch["measured"])
        reached = self.adapter(batch["pose"], batch["before"], batch["commands"])
        missed = (reached - batch["reached"])[..., :4]
        adapter = (torch.cat([missed[..., :3], turned(missed[..., 3:])], -1) * 20).square().mean()
        right = torch.stack([((x > 0) == batch["success"]).float().mean() for x in judged]).mean()
        metrics = {"judge": judge, "probe": probe, "adapter": adapter, "judged_right": right}
        return judge + probe + adapter, {k: v.detach() for k, v in metrics.items()}

    @torch.no_grad()
    def calibrate(self, logits: Tensor, labels: Tensor) -> None:
        """Set the scale and offset (Platt 1999) that minimise the cross entropy of logits [judges, N], labels [N].

        A temperature alone (Guo et al. 2017) would not do: judges learn with both outcomes weighing the same, which
        shifts their logits by the log odds of success.
        """
        targets = labels.float().expand_as(logits)
        temperatures, offsets = torch.logspace(-1, 1.5, 40), torch.linspace(-6, 6, 61)
        losses = torch.stack(
            [
                torch.stack([F.binary_cross_entropy_with_logits(logits / t + b, targets) for b in offsets])
                for t in temperatures
            ]
        )
        best = int(losses.argmin())
        self.temperature.copy_(temperatures[best // len(offsets)])
        self.offset.copy_(offsets[best % len(offsets)])


def strict_threshold(probability: Tensor, labels: Tensor, false: float = 0.02) -> float:
    """The smallest threshold of 0.5 and above that at most a share ``false`` of failed rollouts exceed.

    A judge that pays has to be right where it says yes. (The threshold of largest balanced accuracy may be anywhere
    between the failures and the successes of few rollouts, and was at a probability of 0.08.)

    Args:
        probability: The largest of each rollout, [N].
        labels: Whether it succeeded, bool [N].
        false: Share.
    """
    failed = probability[~labels].sort(descending=True).values
    return max(0.5, float(failed[int(false * len(failed))])) if len(failed) else 0.5
