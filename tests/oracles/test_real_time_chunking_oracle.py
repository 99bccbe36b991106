"""Real-time chunking and bidirectional decoding against Physical-Intelligence/real-time-chunking-kinetix."""

from types import SimpleNamespace

import pytest
import torch

from vla_stack.policies import continuation, flow
from vla_stack.policies.guidance import SCHEDULES, Guide, guided_euler, soft_mask

PAPER = "Real-time chunking"
STEPS, DELAY, END, BETA = 5, 2, 5, 5.0


@pytest.fixture(scope="module")
def rtc(oracle):
    return oracle("real_time_chunking")


def field(rtc, name, rows=1):
    """Their toy field in our time, each observation ``rows`` times in a row."""
    p, look = rtc.part(f"{name}."), (rtc["obs"] @ rtc[f"{name}.look"]).repeat_interleave(rows, 0)[:, None]

    def velocity(x, t):
        tau = (1.0 - t)[:, None, None]
        return -torch.tanh(p["mix"] @ x @ p["reach"] + tau * p["drift"] + look)

    return velocity


def guide(rtc, schedule="exp"):
    horizon = rtc["plan"].shape[1]
    return Guide(rtc["plan"], soft_mask(horizon, DELAY, horizon - END, schedule).expand(len(rtc["plan"]), -1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights(rtc, agrees, schedule):
    horizon, cases = rtc["plan"].shape[1], rtc["weights.cases"].tolist()
    kept = [i for i, (start, end) in enumerate(cases) if start <= end]  # beyond, ours holds on to what will be over
    ours = torch.stack([soft_mask(horizon, cases[i][0], horizon - cases[i][1], schedule) for i in kept])
    agrees(PAPER, f"weights of the schedule `{schedule}`", ours, rtc[f"weights.{schedule}"][kept])


def test_plain_sampling(rtc, agrees):
    agrees(PAPER, "plain Euler chunk", flow.euler(field(rtc, "strong"), rtc["noise"], STEPS), rtc["plain"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_guided_chunk(rtc, agrees, schedule):
    ours = guided_euler(field(rtc, "strong"), rtc["noise"], guide(rtc, schedule), STEPS, BETA)
    agrees(PAPER, f"guided chunk, schedule `{schedule}`, β 5", ours, rtc[f"guided.{schedule}"])


@pytest.mark.parametrize("beta", [1.0, 10.0])
def test_guided_chunk_by_beta(rtc, agrees, beta):
    ours = guided_euler(field(rtc, "strong"), rtc["noise"], guide(rtc), STEPS, beta)
    agrees(PAPER, f"guided chunk, β {beta:g}", ours, rtc[f"guided.beta{beta:g}"])


def policy(rtc, name):
    """Their field as a policy that draws nothing: the noise is given."""
    return SimpleNamespace(
        encode=lambda batch: SimpleNamespace(repeat=lambda n: n),
        velocity=lambda rows, x, t: field(rtc, name, rows)(x, t),
        inference_steps=STEPS,
        action_dim=rtc["plan"].shape[2],
        noise_scale=1.0,
    )


@pytest.mark.parametrize("contrast", [False, True])
def test_bidirectional_decoding(rtc, agrees, monkeypatch, contrast):
    noise, drawn = rtc["bid.noise"], iter(rtc["bid.noise"][:, 1:])
    monkeypatch.setattr(continuation, "BID_SAMPLES", noise.shape[1])
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: next(drawn))
    weak = policy(rtc, "weak") if contrast else None
    ours = continuation.closest(policy(rtc, "strong"), {}, noise[:, 0], guide(rtc), range(len(noise)), weak, kept=2)
    name, what = ("contrast", "with forward contrast") if contrast else ("backward", "by backward coherence alone")
    agrees(PAPER, f"chunk that BID picks, {what}", ours.chunk, rtc[f"bid.{name}"])
