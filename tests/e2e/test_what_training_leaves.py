"""What every method leaves is a policy directory: served, run on a robot, exported, and evaluated by LeRobot."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from lerobot.scripts import lerobot_eval
from recipe_walk import files_handed_the_recipe
from safetensors.torch import load_file

import sim.lerobot_env  # noqa: F401  registers `vla_sim` with LeRobot
from vla_stack import envs
from vla_stack.cli import main
from vla_stack.envs.making import observe, sim_options
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.server import PolicyServer
from vla_stack.verbs.serve import load_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first to need it trains what others start from
LIMIT = 6  # control steps of an episode
EPISODES, SEED = 4, 31  # of an evaluation in off-policy learning
CONSTRAINTS = Path(__file__).parents[2] / "vla_stack/configs/constraints/pick.yaml"
VLA = (
    "{chunk_size: 4, n_action_steps: 2, num_inference_steps: 2, width: 16, expert_width: 16, depth: 1, heads: 2, "
    "head_dim: 8, vision_channels: [4, 8], max_tokens: 16, vocabulary: 320}"
)
BRIEF = ("method.steps=2", "method.batch_size=4", "threads=1", "device=cpu")
PICK = f"task={{id: sim/pick-v0, options: {{max_episode_steps: {LIMIT}}}}}"
OFF_POLICY = (
    *(PICK, "device=cpu", "method.offline={episodes: 2, noise: [0.3]}", "method.horizon=2", "method.steps=6"),
    "method.sac={actor: [16], critic: [16], num_critics: 3, batch: 8, utd: 2, layer_norm: true}",
    *("eval.every=6", f"eval.episodes={EPISODES}", f"eval.seed={SEED}", "eval.num_envs=3"),
)
WSRL = (*OFF_POLICY, "method.offline_steps=2", "method.warmup=3", "method.cal_ql={draws: 2}")
ON_FLOW = (
    *("policy={start}", PICK, "data.root={data}", "device=cpu", "method.iterations=1", "method.episodes=2"),
    "method.warmup=1",
    "method.sac={actor: [16], critic: [16], num_critics: 3, batch: 8, utd: 2, layer_norm: true, log_std: [-5, 0]}",
    *(f"eval.episodes={EPISODES}", f"eval.seed={SEED}", "eval.num_envs=3", "eval.every=1"),
)
RECIPES: dict[str, tuple[str, ...]] = {  # {data} and {start} stand for demonstrations and a run of imitation
    "imitation": ("imitation", f"policy={{type: vla, options: {VLA}}}", "data.root={data}", *BRIEF),
    "mixture_of_horizons": (
        *("mixture_of_horizons", f"policy={{type: moh, options: {{horizons: [2, 4], base: {VLA[:-1]}, type: vla}}}}}}"),
        *("data.root={data}", *BRIEF),
    ),
    "grape": (
        *("grape_success", "policy={start}", PICK, f"method.constraints={CONSTRAINTS}", "method.calibration=2"),
        *("method.starts=2", "method.rollouts_per_start=2", "method.num_envs=4", "method.films=0"),
        *("method.pairs.winner_succeeds=false", "eval.episodes=1", *BRIEF),
    ),
    "rac": (
        *("rac_stack", f"policy={{type: vla, options: {VLA}}}", "method.iterations=1", "method.demos=1"),
        *("method.human_frames=5", "method.num_envs=1", "eval.episodes=1", *BRIEF),
    ),
    "reinflow": (
        *("rl_reinflow", "policy={start}", PICK, "method.iterations=1", "method.episodes=2", "method.num_envs=2"),
        *("method.epochs=1", "method.minibatch=4", "method.critic_warmup=0", "method.denoising_steps=2"),
        *("eval.episodes=1", "device=cpu"),
    ),
    "wsrl": ("wsrl", *WSRL),
    "rlpd": ("wsrl", *WSRL, "method.arm=rlpd"),
    "cal_ql": ("wsrl", *WSRL, "method.arm=cal_ql"),
    "expo": ("expo", *OFF_POLICY, "method.base=[16]", "method.base_steps=5", "method.samples=3", "method.edits=2"),
    "expo_vla": ("rl_vla", *ON_FLOW, "method.samples=3", "method.edits=2", "method.beta=0.1"),
    "dsrl": ("rl_vla", *ON_FLOW, "method=dsrl"),
    "dsrl_na": ("rl_vla", *ON_FLOW, "method=dsrl_na"),
    "rlpd_vla": ("rl_vla", *ON_FLOW, "method=rlpd_vla"),
}

EXPORTED_AS = {"grape": "imitation", "rlpd": "wsrl", "cal_ql": "wsrl"}  # the same policy, with other weights
WALKS = {"reinflow": (12, 5), "wsrl": (16, 6), "expo": (16, 6)}  # at most so many files, in at most so many rooms


class Left(NamedTuple):
    """A run, and where its policy acts."""

    run: Path
    task: str
    endpoint: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of runs; each is trained when it is asked for."""
    root = tmp_path_factory.mktemp("runs")
    collect = "--task pick --episodes 1 --workers 1 --image-size 32 --image-mode image --cameras front"
    assert main(["collect", *collect.split(), "--root", str(root / "data")]) == 0
    return root


def train(root: Path, name: str) -> Path:
    """A run of a recipe, trained if it is not yet; what a training that failed has left is no run."""
    done = root / f"{name}.done"
    if not done.exists():
        shutil.rmtree(root / name, ignore_errors=True)
        recipe = RECIPES[name]
        if "policy={start}" in recipe:
            recipe = tuple(text.replace("{start}", str(train(root, "imitation"))) for text in recipe)
        recipe = tuple(text.replace("{data}", str(root / "data")) for text in recipe)
        command = ["train", *recipe, f"output_dir={root / name}"]
        codes: list[int] = []
        if name in WALKS:
            walked = files_handed_the_recipe(lambda: codes.append(main(command)))
        else:
            walked = set()
            codes.append(main(command))
        assert codes == [0]
        done.write_text("\n".join(sorted(walked)))
    return root / name


@pytest.fixture(scope="module", params=RECIPES)
def left(request: pytest.FixtureRequest, trained: Path) -> Iterator[Left]:
    run = train(trained, request.param)
    ready = threading.Event()
    policy = partial(load_directory, resolve_policy(run), "cpu", 1)
    server = PolicyServer(policy, "tcp://127.0.0.1:*", on_ready=lambda _: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(60)  # torch cannot trace an export in one thread while another one computes
        yield Left(run, "stack" if request.param == "rac" else "pick", server.endpoint)
    finally:
        server.stop()
        thread.join()


@pytest.mark.parametrize("name", WALKS)
def test_a_recipe_passes_through_few_files(trained: Path, name: str) -> None:
    """From `vla train` to the directory that is saved; whoever changes what a recipe means has these to read."""
    train(trained, name)
    files = (trained / f"{name}.done").read_text().split()
    assert {"vla_stack/training/recipe_tree.py", "vla_stack/training/run_dir.py"} < set(files)
    rooms = {file.split("/")[1] for file in files}
    most_files, most_rooms = WALKS[name]
    assert len(files) <= most_files and len(rooms) <= most_rooms, files


@pytest.mark.parametrize("left", ["wsrl", "rlpd", "cal_ql", "expo"], indirect=True)
@pytest.mark.parametrize("num_envs", [1, 4])
def test_vla_eval_prints_what_training_logged(left: Left, tmp_path: Path, num_envs: int) -> None:
    logged = json.loads((left.run / "metrics.jsonl").read_text().splitlines()[-1])
    flags = f"--policy {left.run} --env sim/pick-v0 --mode sync --seed {SEED} --episodes {EPISODES}"
    where = f"--max-steps {LIMIT} --num-envs {num_envs} --workers 0 --videos 0 --out {tmp_path}"
    assert main(["eval", *flags.split(), *where.split()]) == 0
    episodes = json.loads((tmp_path / "report.json").read_text())["results"][0]["episodes"]
    assert np.mean([e["success"] for e in episodes]) == logged["eval/success"]
    assert np.mean([e["success"] - e["steps"] for e in episodes]) == logged["eval/return"]


@pytest.mark.parametrize("left", ["expo_vla", "dsrl", "dsrl_na", "rlpd_vla"], indirect=True)
def test_vla_eval_prints_the_successes_that_training_logged(left: Left, tmp_path: Path) -> None:
    logged = json.loads((left.run / "metrics.jsonl").read_text().splitlines()[-1])
    flags = f"--policy {left.run} --env sim/pick-v0 --mode sync --seed {SEED} --episodes {EPISODES}"
    assert main(["eval", *flags.split(), *f"--max-steps {LIMIT} --workers 0 --videos 0 --out {tmp_path}".split()]) == 0
    episodes = json.loads((tmp_path / "report.json").read_text())["results"][0]["episodes"]
    assert [e["success"] for e in episodes] == logged["eval_success"]


def test_it_is_served(left: Left) -> None:
    policy = load_policy(left.run)
    rows = envs.make(f"sim/{left.task}-v0", 1, policy.spec)
    first = rows.reset([0], [0])[0]
    rows.close()
    client = PolicyClient(left.endpoint)
    assert rows.robot is not None and client.hello(rows.robot).model_version == policy.spec.model_version
    observation = observe(first.observation, rows.robot, first.info["task"], 0)
    assert client.request(observation, rid=1, epoch=0, origin=0, seed=7)
    answers: list = []
    while not answers:
        answers = client.poll(timeout_ms=1000)
    client.close()
    np.testing.assert_allclose(answers[0].actions, policy.infer([observation], [7]).actions[0], atol=1e-6)


def test_it_drives_a_robot(left: Left, tmp_path: Path) -> None:
    what = f"--server {left.endpoint} --task {left.task} --mode sync --seconds 1 --out {tmp_path}"
    assert main(["run", *what.split()]) == 0
    (episode,) = json.loads((tmp_path / "records.json").read_text())["episodes"]
    assert episode["ticks"]["run"] > 0 and episode["instruction"]


@pytest.mark.parametrize("left", [name for name in RECIPES if name not in EXPORTED_AS], indirect=True)
def test_it_is_exported(left: Left, tmp_path: Path) -> None:
    assert main(["export", "--policy", str(left.run), "--out", str(tmp_path)]) == 0
    how = {"executor": ExecutorConfig("sync"), "num_envs": 1, "env_options": {"max_episode_steps": LIMIT}}
    original, exported = (
        evaluate(load_policy(path), f"sim/{left.task}-v0", 1, 3, **how).episodes[0] for path in (left.run, tmp_path)
    )
    assert len(original.actions) == LIMIT
    np.testing.assert_allclose(exported.actions, original.actions, atol=1e-4)


@pytest.mark.parametrize(("name", "other"), EXPORTED_AS.items())
def test_it_is_exported_as_another_is(trained: Path, name: str, other: str) -> None:
    directories = [resolve_policy(train(trained, run)) for run in (name, other)]
    ours, theirs = (json.loads((directory / "config.json").read_text())["type"] for directory in directories)
    assert ours == theirs
    ours, theirs = (load_file(directory / "model.safetensors").keys() for directory in directories)
    assert ours == theirs


def test_lerobot_eval_runs_it(left: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = resolve_policy(left.run)
    options = sim_options(load_policy(directory).spec.robot)
    options |= {"fps": round(options.pop("control_hz")), "cameras": json.dumps(options["cameras"])}
    arguments = [
        *(f"--policy.path={directory}", "--policy.device=cpu", "--env.type=vla_sim", f"--env.task={left.task}"),
        *(f"--env.{name}={str(value).lower()}" for name, value in options.items()),
        *(f"--env.episode_length={LIMIT}", "--eval.n_episodes=1", "--eval.batch_size=1"),
        *("--eval.use_async_envs=false", f"--output_dir={tmp_path}"),
    ]
    monkeypatch.setattr(sys, "argv", ["lerobot-eval", *arguments])
    lerobot_eval.main()
    assert json.loads((tmp_path / "eval_info.json").read_text())["overall"]["n_episodes"] == 1
