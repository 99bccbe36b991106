"""``vla constraints``: check constraints against episodes, have a model propose them, see what an episode cost."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.costs import load_costs
from vla_stack.evaluation.constraints.spec import OBJECTIVES, Spec, load_spec
from vla_stack.verbs.arguments import count, positive

if TYPE_CHECKING:
    from vla_stack.evaluation.constraints.trace import Trace

HELP = "Constraints between the stages of a task (YAML): check them, have a model propose them, explain an episode."
EXAMPLES = (
    "vla constraints check obstacle     # schema, then a dry run on episodes in simulation",
    "vla constraints explain obstacle --out costs.svg   # which tick of an episode cost what",
    "vla constraints explain obstacle --rollout runs/grape/iteration-001/rollouts/X",
    "vla constraints propose --task obstacle --objective safety --base-url http://127.0.0.1:8000/v1 --model qwen2.5-vl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    a = parser.add_argument
    a("what", choices=VERBS)
    a("spec", type=Path, nargs="?", help="YAML file (check, explain)")
    a("--task", help="task of sim to try them on (default: the file's name)")
    a("--objective", choices=OBJECTIVES, help="weights and thresholds of another objective than the file's")
    a("--episodes", type=count, default=4, help="episodes of the dry run (default: %(default)s)")
    a("--rollout", type=Path, help="explain: a recorded rollout (.safetensors) instead of the scripted expert's")
    a("--costs", type=Path, help="Python file of your own with @register_cost functions; it is run")
    a("--out", type=Path, help="explain: picture (.svg); propose: YAML file")
    a("--base-url", default="http://127.0.0.1:8000/v1", help="propose: endpoint (default: %(default)s)")
    a("--model", default="default", help="propose: its name there")
    a("--timeout", type=positive, default=60.0, help="propose: seconds for an answer (default: %(default)s)")
    a("--image", type=Path, help="propose: PNG or JPEG of the scene (default: the simulation's first picture)")
    a("--instruction", help="propose: what the robot is told (default: the task's)")
    a(
        "--cache",
        type=Path,
        default=Path("outputs/constraints"),
        help="propose: folder of answers (default: %(default)s)",
    )
    a("--yes", action="store_true", help="propose: write the file without asking")


def main(args: argparse.Namespace) -> int:
    if args.costs:
        load_costs(args.costs)
    return VERBS[args.what](args)


def _check(args: argparse.Namespace) -> int:
    from vla_stack.evaluation.constraints.dry_run import problems

    spec = _spec(args)
    traces, success = _episodes(args)
    print(f"{args.spec}: {len(spec.stages)} stages, {sum(len(s.costs) for s in spec.stages)} costs, {spec.objective}")
    found = problems(spec, traces, success)
    for line in found:
        print(f"  {line}")
    print(f"dry run on {len(traces)} episodes, {sum(success)} successful: {len(found) or 'no'} problems")
    if not found:
        print(f"Next: vla constraints explain {args.spec} --out costs.svg")
    return 1 if found else 0


def _explain(args: argparse.Namespace) -> int:
    from vla_stack.evaluation.constraints.picture import explain, save

    spec = _spec(args)
    if args.rollout:
        from vla_stack.data.preferences import read_rollout
        from vla_stack.evaluation.constraints.trace import Trace

        trace: Trace = Trace.from_arrays(read_rollout(args.rollout).trace)
    else:
        trace = _episodes(args)[0][0]
    print(explain(spec, trace))
    if args.out:
        save(spec, trace, args.out, f"{args.spec.stem}, {spec.objective}")
        print(f"-> {args.out}")
    return 0


def _propose(args: argparse.Namespace) -> int:
    from vla_stack.evaluation.constraints.dry_run import problems
    from vla_stack.evaluation.constraints.propose import Endpoint, Request, propose

    task = _task(args)
    traces, success = _episodes(args)
    image, instruction = (args.image.read_bytes(), _instruction(task)) if args.image else _scene(task)
    objective = args.objective or "success"
    request = Request(args.instruction or instruction, objective, tuple(traces[0].points), image)
    endpoint = Endpoint(args.base_url, args.model, args.timeout)
    proposal = propose(endpoint, request, lambda spec: problems(spec, traces, success), args.cache)
    for line in proposal.problems:
        print(f"  refused: {line}")
    out = args.out or Path(f"{task}_{objective}.yaml")
    if proposal.spec is None:
        print(f"no usable answer; the constraints that ship are vla_stack/configs/constraints/{task}.yaml")
        return 1
    print(proposal.spec.to_yaml())
    if not args.yes and input(f"Write this to {out}? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing written")
        return 1
    out.write_text(proposal.spec.to_yaml())
    print(f"-> {out}. Next: vla constraints explain {out} --task {task} --out costs.svg")
    return 0


VERBS = {"check": _check, "explain": _explain, "propose": _propose}


def _spec(args: argparse.Namespace) -> Spec:
    if args.spec is None:
        raise UserError(f"`vla constraints {args.what}` needs a file", "a file, or a task's name for those that ship")
    spec = load_spec(args.spec)
    return spec.with_objective(args.objective) if args.objective else spec


def _task(args: argparse.Namespace) -> str:
    import sim

    task = args.task or (args.spec.stem if args.spec else "")
    sim.TASKS[task]
    return task


def _episodes(args: argparse.Namespace) -> tuple[list[Trace], list[bool]]:
    from vla_stack.evaluation.constraints.dry_run import expert_episodes

    return expert_episodes(_task(args), args.episodes)


def _instruction(task: str) -> str:
    import sim

    return sim.TASKS[task].instructions[0]


def _scene(task: str) -> tuple[bytes, str]:
    """First picture of a task's front camera as PNG, and its instruction."""
    import cv2
    import gymnasium as gym

    import sim

    env = gym.make(sim.TASKS[task].id, cameras=("front",), image_size=256, disable_env_checker=True)
    raw, info = env.reset(seed=0)
    env.close()
    return cv2.imencode(".png", raw["pixels"]["front"][..., ::-1])[1].tobytes(), str(info["task"])
