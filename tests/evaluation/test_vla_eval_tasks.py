"""Our tasks under the unmodified vla-eval harness, with a policy that `vla serve` would serve it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from vla_eval.orchestrator import Orchestrator

from vla_stack.errors import UserError
from vla_stack.evaluation.vla_eval import Tasks
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.runtime.executor import default_execute
from vla_stack.serving.vla_eval import VlaEval
from vla_stack.serving.websocket_server import WebsocketServer

WAIT_S = 120.0


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    ready = threading.Event()
    server = WebsocketServer(
        lambda: load_policy("shipped", frozen=True),
        VlaEval({}, default_execute),
        "ws://127.0.0.1:*",
        on_ready=lambda _: ready.set(),
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(WAIT_S)
    yield server.endpoint
    server.stop()
    thread.join(WAIT_S)


def run(endpoint: str, folder, **entry) -> dict:
    config = {
        "server": {"url": endpoint, "timeout": WAIT_S},
        "output_dir": str(folder),
        "benchmarks": [{"benchmark": "vla_stack.evaluation.vla_eval:Tasks", **entry}],
    }
    (result,) = asyncio.run(Orchestrator(config).run())
    return result


@pytest.mark.slow
def test_the_harness_runs_our_tasks_with_our_server(endpoint, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "vla_eval"):
        result = run(
            endpoint, tmp_path, episodes_per_task=1, params={"tasks": ["sim/pick-v0", "sim/place-v0"], "seed": 3}
        )
    assert "Spec validation passed" in caplog.text and "Spec mismatch" not in caplog.text
    assert result["mean_success"] == 1.0
    assert len(result["tasks"]) == 2


@pytest.mark.slow
def test_the_harness_says_where_conventions_differ(endpoint, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "vla_eval"), pytest.raises(UserError, match="the policy was trained on"):
        run(endpoint, tmp_path, params={"tasks": ["sim/pick-v0"], "seed": 0, "options": {"control_mode": "joint_abs"}})


def test_without_a_description_the_environment_is_what_its_options_make_it():
    tasks = Tasks(["sim/pick-v0"], options={"cameras": ("front",), "image_size": 32})
    try:
        seen = tasks.make_obs(tasks.reset({"name": "sim/pick-v0", "episode_idx": 2}), {})
        assert seen["images"]["front"].shape == (32, 32, 3) and "cube" in seen["task_description"]
        assert tasks.get_action_spec()["action"].dims == 5
        with pytest.raises(UserError, match="a command of 3 numbers"):
            tasks.step({"actions": np.zeros(3)})
    finally:
        tasks.cleanup()


def test_holding_is_where_it_is_then_what_was_last_told():
    tasks = Tasks(["sim/pick-v0"], options={"cameras": ()})
    try:
        first = tasks.reset({"name": "sim/pick-v0"})
        tasks._last_result = tasks._last_result.__class__(first, 0.0, False, {})
        hold = tasks.get_hold_action(None)["actions"]
        np.testing.assert_allclose(hold, first.observation["agent_pos"][: len(hold)], atol=1e-6)
        told = {"actions": np.ones(5)}
        assert tasks.get_hold_action(told) is not None and tasks.get_hold_action(told)["actions"] is told["actions"]
    finally:
        tasks.cleanup()
