"""Imitation with grounding beside it: encoders that learn to move go on learning what is where.

    python tools/co_train.py multitask policy.pretrained=outputs/grounded data.root=data/multitask

As `vla train`, for imitation; beside each batch of demonstrations there is one of moments of many scenes, and what
``tools/ground.py`` teaches by them is added to the loss. Demonstrations are few beside the things that can be named,
and an encoder that sees them alone forgets. It trains on the CPU, and the scenes take a part of another core.

It is not free: pointers went on getting better for 13,000 steps, and actions worse, in scenes that were trained on and
in others alike. What comes of it is to begin with, for imitation that lets the encoders move little.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from torch import Tensor, nn

import ground
from results import parser
from tasks import TASKS
from vla_stack.policies.directory import resolve_source
from vla_stack.policies.reading import read_config, read_processors
from vla_stack.training.recipe import make
from vla_stack.training.recipes import find_recipe
from vla_stack.training.run_dir import begun, default_dir
from vla_stack.training.train import train

SCENES, WEIGHT = 32, 0.5  # a step, and of their loss
RAMP = 500  # steps in which the weight rises to that: heads that know nothing yet would spoil what encoders know
TOLD = 500  # steps between tests of what the encoders know


class Beside:
    """The loss of demonstrations and of scenes; the scenes' heads are learnt here, by the same backward pass."""

    def __init__(self, imitation: Any, start: str, tasks: list[str], stack: ExitStack) -> None:
        self.imitation, self.start, self.tasks, self.stack = imitation, start, tasks, stack
        self.lesson: ground.Lesson | None = None
        self.steps = 0

    def begin(self, policy: Any) -> ground.Lesson:
        path = Path(resolve_source(self.start))
        pre, _ = read_processors(path, read_config(path, "cpu"), "cpu")
        lesson = ground.Lesson(policy, pre, self.tasks, 0, ground.LATER)
        self.optimizer = lesson.optimizer(list(lesson.heads.parameters()))
        scenes = ground.scenes(lesson.kind, self.tasks, lesson.size, ground.LATER, 1)
        self.ring, self.filled = self.stack.enter_context(scenes)
        return lesson

    def __call__(self, policy: Any, batch: Any, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.imitation(policy, batch, generator)
        if not policy.training:  # validation
            return loss, metrics
        if self.lesson is None:
            self.lesson = self.begin(policy)
        if self.steps:  # of the step before
            nn.utils.clip_grad_norm_(self.lesson.heads.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.steps % TOLD == 0:
            print(f"\nstep {self.steps}: {self.lesson.test()}", flush=True)
        self.steps += 1
        weight = WEIGHT * min(1.0, self.steps / RAMP)
        beside = self.lesson.loss(self.ring[: min(ground.RING, self.filled())], SCENES)
        return loss + weight * beside, metrics | {"grounding": beside.detach()}


def main(arguments: list[str], tasks: list[str]) -> int:
    tree, source = find_recipe(arguments[0], arguments[1:])
    recipe = replace(make(tree, source), device="cpu")  # where the scenes are
    run_dir = default_dir(recipe)
    with begun(recipe, run_dir, resume=(run_dir / "checkpoints").exists()), ExitStack() as stack:
        loss = Beside(recipe.method.loss(), recipe.policy.pretrained, tasks, stack)
        train(recipe, loss, run_dir)
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("recipe", help="as of `vla train`")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="likewise")
    p.add_argument("--tasks", nargs="+", default=list(TASKS), help="whose scenes (the generalist's)")
    args = p.parse_args()
    sys.exit(main([args.recipe, *args.overrides], args.tasks))
