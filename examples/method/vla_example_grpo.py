"""GRPO (Shao et al. 2024, arXiv:2402.03300) on a flow policy: of several rollouts of one start, those that do better
than their group become more likely. The likelihood is that of the noisy Euler chain (``vla_stack.policies.chain``)."""

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from vla_stack.errors import UserError
from vla_stack.policies.chain import chain_log_prob, sample_chain, standard_noise
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import Engine
from vla_stack.rollout.plan import Plan, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks
from vla_stack.training.recipe_tree import Count, Positive


@dataclass(frozen=True)
class Grpo:
    """GRPO on a flow policy: a rollout's return less the mean of its group takes the place of a critic.

    Attributes:
        name: Of the method.
        iterations: Iterations of rollouts and update.
        starts: Starts an iteration.
        group: Rollouts of each.
        sigma: Noise of each step of the chain, in normalised action units.
        clip: Clip range of the ratio, epsilon.
        lr: Learning rate.
        epochs: Passes over an iteration's decisions.
    """

    name: Literal["grpo"] = "grpo"
    iterations: Count = 20
    starts: Count = 8
    group: Count = 8
    sigma: Positive = 0.1
    clip: Positive = 0.1
    lr: Positive = 1e-4
    epochs: Count = 4

    def check_recipe(self, recipe):
        if not (recipe.policy.pretrained and recipe.task.id):
            raise UserError("grpo starts from a flow policy and practises a task", "give policy=DIR task=ID")

    def run(self, recipe, run_dir):
        policy = load_policy(recipe.policy.pretrained, recipe.device)
        explorer, optimizer = Explorer(policy, self.sigma), torch.optim.Adam(policy.policy.parameters(), self.lr)
        plan = Plan(recipe.task.id, recipe.task.options, policy.spec, PolicyAgent, executor=ExecutorConfig("sync"))
        with Engine(plan, self.starts) as engine, (run_dir / "metrics.jsonl").open("w") as log:
            for iteration in range(self.iterations):
                first = recipe.seed + iteration * self.starts
                starts = [Start(first + s, number) for s in range(self.starts) for number in range(self.group)]
                records = sorted(engine.run(explorer, starts), key=lambda r: (r.seed, r.number))
                returns = np.array([r.rewards.sum() for r in records]).reshape(self.starts, self.group)
                advantages = (returns - returns.mean(1, keepdims=True)) / (returns.std(1, keepdims=True) + 1e-6)
                self.update(explorer, optimizer, records, advantages.ravel())
                success = float(np.mean([r.success for r in records]))
                row = {"step": iteration + 1, "return": float(returns.mean()), "success": success}
                print(json.dumps(row), file=log, flush=True)
        for part in (policy.policy, policy.preprocessor, policy.postprocessor):
            part.save_pretrained(run_dir / "pretrained_model")

    def update(self, explorer, optimizer, records, advantages):
        decisions = [
            (seed, a) for r, a in zip(records, advantages, strict=True) for seed in np.unique(r.noise[r.noise != 0])
        ]
        observations, chains = zip(*(explorer.seen[int(seed)] for seed, _ in decisions), strict=True)
        chains, weights = torch.stack(chains), torch.tensor([a for _, a in decisions]).to(chains[0])
        old = explorer.log_prob(observations, chains).detach()
        for _ in range(self.epochs):
            ratio = (explorer.log_prob(observations, chains) - old).exp()
            loss = -torch.minimum(ratio * weights, ratio.clamp(1 - self.clip, 1 + self.clip) * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        explorer.seen.clear()


class Explorer:
    """The policy as the engine asks it, with the chain's noise; remembers each decision by the seed of its noise."""

    def __init__(self, policy, sigma):
        self.policy, self.spec, self.seen = policy, policy.spec, {}
        self.std = torch.full((1, policy.policy.inference_steps, 1, 1), sigma, device=policy.policy.config.device)

    @torch.no_grad()
    def infer(self, observations, seeds, continuations=()):
        network, sources = self.policy.policy, [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = standard_noise(torch.empty(len(seeds), network.horizon, network.noise_dim), sources)
        context = network.encode(self.policy.preprocess(observations))
        chain = sample_chain(network, context, noise.to(self.std.device), self.std, sources)
        self.seen |= dict(zip(seeds, zip(observations, chain, strict=True), strict=True))
        return Chunks(self.policy.postprocessor(chain[:, -1, :, : network.action_dim]).float().numpy())

    def log_prob(self, observations, chains):
        network = self.policy.policy
        context = network.encode(self.policy.preprocess(observations))
        return chain_log_prob(network, context, chains, self.std)[:, 1:].mean((1, 2, 3))  # an entry of the chain
