"""GRAPE's likelihood, loss and score against aiming-lab/GRAPE."""

import numpy as np
import pytest
import torch

from vla_stack.evaluation.constraints.score import Weights, judge
from vla_stack.evaluation.constraints.spec import Cost, Spec, Stage
from vla_stack.evaluation.constraints.trace import Trace
from vla_stack.methods.grape.loss import tpo
from vla_stack.policies import heads

PAPER, GROUPS = "GRAPE", ("collision", "grasp", "path")


@pytest.fixture(scope="module")
def theirs(oracle):
    return oracle("grape")


def test_likelihood_of_tokens(theirs, agrees, monkeypatch):
    bins = theirs["logits"].shape[-1]
    monkeypatch.setattr(heads, "BINS", bins)
    tokens = theirs["labels"].shape[-1] - 1
    head = heads.BinsHead(tokens * bins, tokens, limit=1.0)
    head.weight.data[:], head.bias.data[:] = torch.eye(tokens * bins), 0.0
    states = theirs["logits"].float()[..., :-1, :].flatten(-2)  # a token's logits are those of the one before
    actions = head.centre(theirs["labels"][..., 1:].long())
    ours = torch.stack([head.log_prob(states[i], actions[i % 2]).sum(-1) for i in range(4)])
    agrees(PAPER, "log-likelihood of a decision's tokens", ours, theirs["log_prob"])


def test_loss_of_a_window_and_of_single_steps(theirs, agrees):
    log_prob = theirs["log_prob"]
    ratio = (log_prob[:2] - log_prob[2:]).transpose(0, 1)  # [pair, winner and loser, decision]
    mask = torch.ones_like(ratio, dtype=torch.bool)
    agrees(
        PAPER,
        "trajectory-wise loss, a window of 8",
        tpo(ratio, mask, 0.1, "window", 8)["tpo"],
        theirs["window_loss"].mean(),
    )
    agrees(PAPER, "trajectory-wise loss, whole trajectory", tpo(ratio, mask, 0.1)["tpo"], theirs["window_loss"].mean())
    agrees(PAPER, "step-wise loss", tpo(ratio, mask, 0.1, "window", 1)["tpo"], theirs["step_loss"].mean())


def episode(cost):
    """Three stages of two ticks; the tool's distance from a group's point is half of what the stage costs."""
    n = 6
    points = {"ee": np.zeros((n, 3)), "clock": np.arange(n)[:, None] * np.array([1.0, 0.0, 0.0])}
    points |= {f"stage{i}": np.full((n, 3), [2.0 * i + 1.0, 0.0, 0.0]) for i in range(3)}
    for group, by_stage in zip(GROUPS, cost, strict=True):
        points[group] = np.repeat(by_stage / 2.0, 2)[:, None] * np.array([0.0, 1.0, 0.0])
    nothing = np.zeros((n, 7))
    return Trace(
        np.arange(n) * 0.1, points, {}, np.zeros(n, bool), nothing, nothing, np.zeros((7, 2)), nothing[:, :6], nothing
    )


def test_score(theirs, agrees):
    tau, weight = theirs["threshold"].numpy(), theirs["beta"].tolist()
    stages = tuple(
        Stage(
            f"stage{i}",
            done={"near": ("clock", f"stage{i}", 0.1)},
            costs=tuple(
                Cost("distance", {"a": "ee", "b": group}, tau=float(tau[i, j]), weight=weight[j])
                for j, group in enumerate(GROUPS)
            ),
            enter={},
        )
        for i in range(3)
    )
    found = [
        judge(Spec("success", stages), episode(cost), bool(success), log_p, Weights(0.01, 1.0, 5.0))
        for cost, success, log_p in zip(theirs["cost"].numpy(), theirs["success"], theirs["self"].tolist(), strict=True)
    ]
    assert all(stage.reached and stage.ticks == 2 for j in found for stage in j.stages)
    agrees(PAPER, "R_ext, three stages of three costs", [j.external for j in found], theirs["external"])
    agrees(PAPER, "score, their weights 0.01, 1 and 5", [j.score for j in found], theirs["score"])


def test_their_other_external_score_may_be_negative(theirs):
    assert theirs["external_linear"].min() < 0 < theirs["external"].min()
