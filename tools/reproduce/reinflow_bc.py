"""The baseline of ``reinflow.py`` that imitates its own successful episodes, by flow matching."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vla_stack.methods.advantages import Experience
from vla_stack.methods.reinflow.loop import ReinFlowLoop
from vla_stack.methods.reinflow.loss import minibatches
from vla_stack.policies import flow
from vla_stack.policies.transformer import PrefixContext


class ImitationLoop(ReinFlowLoop):
    """Rolls out as its policy is deployed, but for a trace of noise, and regresses on all successes so far."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._contexts: list[PrefixContext] = []
        self._chunks: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []

    def update(self, data: Experience, generator: torch.Generator) -> dict[str, float]:
        """As many optimiser steps as the method makes on the same episodes."""
        c, learner = self.method, self.learner
        rows = data.succeeded.nonzero()[:, 0]
        if len(rows):
            self._contexts = [PrefixContext.joined([*self._contexts, data.context.rows(rows)])]
            self._chunks.append(data.chain[rows, -1])
            self._counted.append(learner.counted(data, rows))
        if not self._chunks:
            return {}
        (context,), chunks, counted = self._contexts, torch.cat(self._chunks), torch.cat(self._counted)
        losses, steps = [], c.epochs * max(1, round(len(data.executed) / c.minibatch))
        while len(losses) < steps:
            for rows in minibatches(len(chunks), c.minibatch, generator):
                noise = flow.sample_noise(tuple(chunks[rows].shape), generator, chunks.device)
                t = flow.sample_time(len(rows), generator, chunks.device)
                error = flow.squared_error(learner.policy, context.rows(rows), chunks[rows], noise, t)
                loss = flow.mean_error(error, counted[rows])
                learner.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(learner.actor, c.clip_norm)
                learner.optimizer.step()
                losses.append(float(loss))
        return {"flow_loss": sum(losses) / len(losses), "pool": len(chunks)}
