"""Make an environment for a policy, and say in one line where the two do not fit."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.from_vector import FromVector
from vla_stack.envs.vector import LocalEnvs, VectorEnv
from vla_stack.errors import UserError
from vla_stack.registry import ENVIRONMENTS
from vla_stack.schema import Observation, PolicySpec, RobotSpec

IMAGINED = "imagined:"  # of an environment's id, followed by the directory of the world model that imagines it


def make(
    env_id: str, num_envs: int = 1, policy: PolicySpec | None = None, options: dict[str, Any] | None = None
) -> VectorEnv:
    """Rows of an environment, which show a policy what it was trained on.

    A task of ``sim`` or of a benchmark takes the policy's cameras, image size, control mode and rate. Any other
    environment is taken as it is and compared.

    Args:
        env_id: A task (``sim/pick-v0``, or ``module:Class`` of one that is not registered), a benchmark's (see
            :mod:`sim.external`), a world model (``imagined:<run>``), a task whose success a world model judges
            (``judged:<run>@<id>``), or any gymnasium id, optionally ``module:id``.
        num_envs: Rows.
        policy: What the policy consumes; None takes the environment as its options make it.
        options: Further keyword arguments of the environment, e.g. ``randomisation``.

    Raises:
        UserError: There is no such environment, or it does not fit the policy.
    """
    options = dict(options or {}) if policy is None else options_for(env_id, policy, options)
    provider, colon, rest = env_id.partition(":")
    if colon and provider in ENVIRONMENTS.names():
        provide = ENVIRONMENTS.get(provider)
        try:
            inspect.signature(provide).bind(rest, num_envs, **options)
        except TypeError as e:
            raise UserError(f"{env_id} does not take these options: {e}") from None
        made: VectorEnv = provide(rest, num_envs, **options)
    else:
        made = LocalEnvs([_checked(env_id, policy, options) for _ in range(num_envs)])
    if policy is not None:
        try:
            check_fit(made.robot or policy.robot, policy.robot, env_id)
        except UserError:
            made.close()
            raise
    return made


def _checked(env_id: str, policy: PolicySpec | None, options: dict[str, Any]) -> gym.Env:
    """One environment; raises :class:`UserError` where there is none, or it observes in another form."""
    try:
        env = construct(env_id, **options)
    except gym.error.UnregisteredEnv as e:
        raise UserError(f"there is no environment '{env_id}'", _suggest(env_id)) from e
    except ModuleNotFoundError as e:
        raise UserError(f"{env_id}: {e}", "an environment of another package is named module:id") from e
    except TypeError as e:
        raise UserError(f"{env_id} does not take these options: {e}") from e
    space = env.observation_space
    wanted = {"agent_pos"} | ({"pixels"} if policy is not None and policy.robot.cameras else set())
    if not isinstance(space, gym.spaces.Dict) or not wanted <= set(space):
        env.close()
        missing = " and ".join(map(repr, sorted(wanted, reverse=True)))
        raise UserError(f"{env_id} gives no {missing}", "wrap it to observe as LeRobot's environments do")
    return env


def check_id(env_id: str) -> None:
    """Refuse an id that stands for nothing before anything heavy is done for it.

    Raises:
        UserError: There is no such task and no such environment of gymnasium's; ids with a colon are looked up later.
    """
    if ":" in env_id or is_benchmark(env_id):
        return
    try:
        is_task(env_id)  # registers ours
        gym.spec(env_id)
    except gym.error.UnregisteredEnv as e:
        raise UserError(f"there is no environment '{env_id}'", _suggest(env_id)) from e


def construct(env_id: str, **options: Any) -> gym.Env:
    """``gym.make`` for our tasks, a benchmark's, and whatever is registered with gymnasium."""
    goalless = options.pop("goalless", False)  # of `FromVector`; the others report success
    if is_benchmark(env_id):
        from sim import external

        return external.make(env_id, **options)
    is_task(env_id)  # registers it
    env = gym.make(env_id, disable_env_checker=True, **options)
    vector = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
    return FromVector(env, env_id, goalless) if vector else env


def is_benchmark(env_id: str) -> bool:
    """Whether an id is one of :mod:`sim.external`, e.g. ``metaworld/push-v3``."""
    from sim import external  # on demand: it loads the simulator

    return external.is_external(env_id)


def is_task(env_id: str) -> bool:
    """Whether an id is one of a task of ours, ``sim/<name>-v0`` or ``module:Class``."""
    import sim  # on demand: it loads the simulator

    return env_id.partition(":")[0] not in ENVIRONMENTS.names() and sim.is_task(env_id)


def options_for(env_id: str, policy: PolicySpec, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments of an environment: those that follow from the policy, then the given ones."""
    follow: dict[str, Any] = {}
    env_id = env_id.rpartition("@")[2]  # of what a world model judges
    if is_task(env_id):
        follow = sim_options(policy.robot)
    elif is_benchmark(env_id):
        follow = _benchmark_options(env_id, policy.robot)
    return follow | (options or {})


def check_fit(env: RobotSpec, policy: RobotSpec, env_id: str) -> None:
    """Compare what an environment, or a dataset, offers with what a policy was trained on.

    Raises:
        UserError: Naming the first difference in actions, state (names, order, units), rate or cameras.
    """
    for field, offers, needs in (("action", env.action, policy.action), ("state", env.state, policy.state)):
        has, wants = [d.name for d in offers], [d.name for d in needs]
        if len(has) != len(wants) or (has != wants and not nameless(policy)):
            raise UserError(
                f"{env_id} has {field} [{' '.join(has)}], the policy was trained on [{' '.join(wants)}]",
                "evaluate on what has the policy's embodiment and control mode",
            )
        for one, other in zip(offers, needs, strict=True):
            if (one.unit, one.kind) != (other.unit, other.kind) and not nameless(policy):
                raise UserError(
                    f"{field} '{one.name}' of {env_id} is a {one.kind} in {one.unit}, the policy was trained on a "
                    f"{other.kind} in {other.unit}",
                    "convert where it is recorded or simulated",
                )
    if env.action_kind != policy.action_kind:
        raise UserError(f"{env_id} takes {env.action_kind} actions, the policy gives {policy.action_kind} ones")
    if not np.isclose(env.rate_hz, policy.rate_hz) and not nameless(policy):
        raise UserError(
            f"{env_id} runs at {env.rate_hz:g} Hz, the policy was trained at {policy.rate_hz:g} Hz",
            "make it at the policy's rate",
        )
    offered = {c.name: (c.height, c.width) for c in env.cameras}
    for camera in policy.cameras:
        if camera.name not in offered:
            raise UserError(f"the policy needs camera '{camera.name}', {env_id} has {', '.join(sorted(offered))}")
        if offered[camera.name] != (camera.height, camera.width):
            h, w = offered[camera.name]
            raise UserError(
                f"camera '{camera.name}' of {env_id} is {h}x{w}, the policy was trained at "
                f"{camera.height}x{camera.width}",
                "make it with the policy's image size",
            )


def nameless(policy: RobotSpec) -> bool:
    """Whether a policy of another project left no description of its robot: then only sizes can be compared."""
    return policy.name.startswith("lerobot/")


def observe(raw: dict[str, Any], policy: RobotSpec, task: str, step: int) -> Observation:
    """An environment's observation in the project's terms, reduced to the policy's cameras.

    Virtual time: the capture of step k happened at exactly k control periods.
    """
    images = {c.name: np.asarray(raw["pixels"][c.name], np.uint8) for c in policy.cameras}
    state: NDArray[np.float32] = np.asarray(raw["agent_pos"], np.float32)
    return Observation(state, images, task, step, round(step * policy.dt * 1e9))


def sim_options(robot: RobotSpec) -> dict[str, Any]:
    """Keyword arguments with which a task of ``sim`` becomes the embodiment that a policy was trained for.

    Raises:
        UserError: Its pictures are not squares of one size.
    """
    sizes = {(c.height, c.width) for c in robot.cameras}
    if len(sizes) > 1 or any(height != width for height, width in sizes):
        shapes = ", ".join(f"{c.name} {c.height}x{c.width}" for c in robot.cameras)
        raise UserError(f"the tasks of sim render square images of one size, the policy wants {shapes}")
    joints = len(robot.action) != 5 if nameless(robot) else not robot.action[0].name.startswith("tcp_")
    absolute = "joint_abs" if joints else "ee_abs"
    measured = {d.name for d in robot.state}
    return {
        "cameras": tuple(c.name for c in robot.cameras),
        **({"image_size": robot.cameras[0].height} if robot.cameras else {}),
        "control_mode": absolute if robot.action_kind == "absolute" else "ee_delta",
        "control_hz": robot.rate_hz,
        "privileged": "object_dx" in measured,  # of sim.privileged.DIMS
        "tool_target": "target_dx" in measured,  # of sim.privileged.TARGET_DIMS
    }


def _benchmark_options(env_id: str, robot: RobotSpec) -> dict[str, Any]:
    """Keyword arguments with which a benchmark's task becomes what a policy was trained on.

    A policy that left no description of its robot gets the benchmark's own rate and actions.
    """
    sizes = {(c.height, c.width) for c in robot.cameras}
    if len(sizes) > 1:
        raise UserError(f"{env_id} renders pictures of one size, the policy wants {sorted(sizes)}")
    options: dict[str, Any] = {"cameras": tuple(c.name for c in robot.cameras)}
    if sizes:
        options["image_size"] = sizes.pop()
    from sim import external

    return options | external.benchmark(env_id).options_like(None if nameless(robot) else robot)


def _suggest(env_id: str) -> str:
    import sim  # noqa: F401  registers its tasks

    known = sorted(k for k in gym.registry if k.startswith("sim/"))
    close = difflib.get_close_matches(env_id, known, n=1, cutoff=0.5)
    others = "metaworld/<task>, aloha/transfer_cube, aloha/insertion, libero/<suite>/<index>"
    return (f"did you mean {close[0]}? " if close else "") + f"known: {', '.join(known)}; {others}"
