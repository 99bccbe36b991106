"""Every example of every verb's help, and every row of the README, is a command: its arguments, and what they name."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from robot_drivers import driver_type
from vla_stack import registry
from vla_stack.cli import LOADING_VERBS, ROBOT_VERBS, VERBS
from vla_stack.envs.making import check_id, is_benchmark
from vla_stack.errors import UserError
from vla_stack.evaluation.suite import SUITES, splits_of
from vla_stack.policies.directory import resolve_policy
from vla_stack.training.recipe import make
from vla_stack.training.recipes import find_recipe, find_shipped
from vla_stack.verbs.robot_arguments import key_values, translate_flags

LEROBOTS = ("so101_follower", "so101_leader")  # of LeRobot's robots and teleoperators, those that we show
README = Path(__file__).resolve().parents[2] / "README.md"
SHOWN = [(verb, line) for verb in VERBS for line in registry.VERBS.get(verb).EXAMPLES]


def commands(line: str) -> list[list[str]]:
    """The commands of ours in a line of shell, each without ``vla``."""
    line = line.replace("\\\n", " ").partition("#")[0]
    found = [shlex.split(part.partition(">")[0]) for part in re.split(r"&&|\|", line)]
    for words in found:
        if words[:1] == ["torchrun"]:
            words[: words.index("vla_stack.cli") + 1] = ["vla"]
    return [words[1:] for words in found if words[:1] == ["vla"] and words[1:2] != ["--list"]]


def parsed(verb: str, rest: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    registry.VERBS.get(verb).add_arguments(parser)
    if verb in LOADING_VERBS:
        parser.add_argument("--trust", action="append")
    return parser.parse_args(translate_flags(rest) if verb in ROBOT_VERBS else rest)


def check_names(verb: str, args: argparse.Namespace) -> None:
    """Raise where an argument names what there is not. A path is made by another command, so any will do."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    simulated = verb not in (*ROBOT_VERBS, "data")  # elsewhere a task is an instruction
    if verb in ROBOT_VERBS and (robot := given.get("robot")):
        simulated = driver_type(robot).capabilities.simulated
        if robot == "lerobot":
            assert key_values(args.robot_arg)["robot_type"] in LEROBOTS
    if given.get("teleop"):
        registry.TELEOPERATORS.get(args.teleop)
        if args.teleop == "lerobot":
            assert key_values(args.teleop_arg)["teleop_type"] in LEROBOTS
    if "task" in given and simulated:
        for task in [args.task] if isinstance(args.task, str) else args.task:
            registry.TASKS.get(task)
    envs = given.get("env", ())
    for env_id in [envs] if isinstance(envs, str) else envs:
        check_id(env_id)
        if not is_benchmark(env_id) and ":" in env_id:
            registry.ENVIRONMENTS.get(env_id.partition(":")[0])
        if given.get("suite"):
            splits_of(env_id, args.splits or SUITES[args.suite], own=not args.splits)
    if verb == "train" and not (args.list or args.resume):
        recipe = find_recipe(args.recipe, args.overrides)
        if not args.explain:
            make(*recipe)
    if verb == "recipes" and args.name:
        find_shipped(args.name)
    if verb == "constraints" and args.spec:
        registry.TASKS.get(args.task or args.spec.stem)
    policies = given.get("policies", [given["policy"]] if "policy" in given else [])
    for policy in policies:
        if "/" not in str(policy) and not Path(str(policy)).suffix:
            resolve_policy(policy)


@pytest.fixture
def named_files(tmp_path, monkeypatch):
    """A folder with the files that are looked for while arguments are read."""
    monkeypatch.chdir(tmp_path)
    for file in ("cert.pem", "key.pem"):
        Path(file).touch()


def test_every_example_is_a_command_and_names_what_there_is(named_files, load_tool):
    rows = [("README", line) for line in load_tool("readme.py").rows(README.read_text())]
    checked = 0
    for where, line in [*SHOWN, *rows]:
        for verb, *rest in commands(line):
            try:
                check_names(verb, parsed(verb, rest))
            except (argparse.ArgumentError, AssertionError, UserError) as e:
                raise AssertionError(f"{where}: {line}: {e}") from e
            checked += 1
    assert checked >= 105


def test_every_example_is_run_or_says_what_it_needs(load_tool, monkeypatch):
    monkeypatch.syspath_prepend(README.parent / "tools")  # as for a script
    tool = load_tool("examples.py")
    rows = {step.command for step in tool.readme.STEPS}
    run = [step.command for step in tool.STEPS if step.row]
    assert sorted({*run, *tool.left_out()} | rows & {*tool.examples()}) == sorted({*tool.examples()})
    assert len(run) == len({*run}) >= 60 and not {*run} & {*tool.left_out()}
    assert all(any(part in line for line in tool.examples()) for part in tool.NOT_HERE)
    assert {*tool.FIRST} <= rows


@pytest.mark.parametrize(
    "line",
    [
        "vla eval --env sim/pikc-v0",
        "vla eval --suite shifts --splits nonsense --env sim/pick-v0",
        "vla eval --policy nonsense",
        "vla train pick method.nonsense=1",
        "vla train nonsense",
        "vla collect --task nonsense --root data/x",
        "vla run --robot nonsense",
        "vla run --robot sim --task nonsense",
        "vla run --robot.type=nonsense --robot.port=x",
        "vla teleop --teleop nonsense",
        "vla recipes nonsense",
        "vla constraints check nonsense",
        "vla run --nonsense",
    ],
)
def test_a_name_that_there_is_not_is_found_out(line):
    ((verb, *rest),) = commands(line)
    with pytest.raises((argparse.ArgumentError, AssertionError, UserError, SystemExit)):
        check_names(verb, parsed(verb, rest))
