"""What a run of the loop ``off_policy`` is told, and what of it is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Literal

from vla_stack.envs.state_env import EnvRecipe
from vla_stack.errors import UserError
from vla_stack.methods.expo import ExpoRecipe
from vla_stack.methods.off_policy.scripted import OfflineRecipe
from vla_stack.methods.wsrl import ARMS, WsrlRecipe
from vla_stack.training.recipe_tree import plain


@dataclass(frozen=True)
class RayRecipe:
    """Rollout actors on Ray.

    Attributes:
        workers: Actors, of ``num_envs`` environments each.
        fragment: Control steps a request.
        max_lag: Published versions that a fragment may be behind.
    """

    workers: int = 2
    fragment: int = 20
    max_lag: int = 2


@dataclass(frozen=True)
class OffPolicyRecipe:
    """A run.

    Attributes:
        loop: ``off_policy``.
        name: Of the run.
        method: ``wsrl`` or ``expo``, with its baselines.
        env: Environment and reward.
        offline: Stored episodes.
        wsrl: Settings of that method.
        expo: Settings of that method.
        horizon: Steps of a chunk, which is one action to the critics, h.
        gamma: Discount of a control step.
        steps: Control steps online, of all environments together.
        num_envs: Environments side by side.
        scenes: Training scenes that are drawn by the variance of their success; 0 meets a new scene each episode.
        rollouts: ``local``: environments in this process; ``ray``: in actors.
        ray: Its settings.
        operator: Endpoint at which a person may intervene in the first environment, e.g. ``tcp://127.0.0.1:5560``.
        eval_every: Control steps between evaluations; each also saves a checkpoint, from which a stopped run goes on.
        eval_episodes: Episodes of an evaluation.
        eval_seed: Seed of the first of them, the same at every evaluation.
        eval_envs: Environments of an evaluation side by side.
        log_every: Offline steps between records of losses; online there is one at each evaluation.
        seed: Of networks, noise, batches and training scenes.
        device: Torch device of the networks, or ``auto``; stored experience stays in main memory.
        threads: CPU threads.
        wandb: Weights & Biases project; empty does not log there.
        output_dir: Run directory; empty makes ``outputs/rounds/<name>-<time>``.
    """

    loop: Literal["off_policy"] = "off_policy"
    name: str = "off_policy"
    method: Literal["wsrl", "expo"] = "wsrl"
    env: EnvRecipe = field(default_factory=EnvRecipe)
    offline: OfflineRecipe = field(default_factory=OfflineRecipe)
    wsrl: WsrlRecipe = field(default_factory=WsrlRecipe)
    expo: ExpoRecipe = field(default_factory=ExpoRecipe)
    horizon: int = 4
    gamma: float = 0.99
    steps: int = 20_000
    num_envs: int = 1
    scenes: int = 0
    rollouts: Literal["local", "ray"] = "local"
    ray: RayRecipe = field(default_factory=RayRecipe)
    operator: str = ""
    eval_every: int = 2000
    eval_episodes: int = 50
    eval_seed: int = 900_000_000
    eval_envs: int = 10
    log_every: int = 200
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    wandb: str = ""
    output_dir: str = ""

    @property
    def slots(self) -> int:
        """Environments that the learner hears of."""
        return self.num_envs * (self.ray.workers if self.rollouts == "ray" else 1)


def check(r: OffPolicyRecipe) -> None:
    """Refuse what would fail later, and only after minutes or never; raises :class:`UserError`."""
    sac = r.wsrl.sac if r.method == "wsrl" else r.expo.sac
    least: dict[str, tuple[float, float]] = {
        key: (getattr(r, key), 1)
        for key in ("horizon", "num_envs", "eval_every", "eval_episodes", "eval_envs", "log_every", "threads")
    }
    least |= {f"{r.method}.sac.{key}": (getattr(sac, key), 1) for key in ("num_critics", "subset", "utd")}
    least |= {f"{r.method}.sac.batch": (sac.batch, 2)}  # half of it may be of the stored episodes
    least |= {"steps": (r.steps, 0), "scenes": (r.scenes, 0), "offline.episodes": (r.offline.episodes, 0)}
    least |= {"seed": (r.seed, 0), "offline.seed": (r.offline.seed, 0)}
    if r.method == "expo":
        least |= {"expo.samples": (r.expo.samples, 1), "expo.edits": (r.expo.edits, 0)}
        least |= {"expo.euler_steps": (r.expo.euler_steps, 1), "expo.beta": (r.expo.beta, 0)}
    else:
        least |= {"wsrl.cal_ql.draws": (r.wsrl.cal_ql.draws, 2)}
    if r.rollouts == "ray":
        least |= {
            "ray.workers": (r.ray.workers, 1),
            "ray.fragment": (r.ray.fragment, 1),
            "ray.max_lag": (r.ray.max_lag, 0),
        }
    for key, (value, bound) in least.items():
        if value < bound:
            raise UserError(f"'{key}' is {value}, expected at least {bound}", f"set {key}={bound} or more")
    if not 0.0 <= r.gamma < 1.0:  # values are those of tasks that go on without end
        raise UserError(f"'gamma' is {r.gamma}, expected a discount in [0, 1)", "for example gamma=0.99")
    if not sac.temperature > 0.0:
        raise UserError(f"'{r.method}.sac.temperature' is {sac.temperature}, expected more than 0", "for example 0.01")
    if sac.subset > sac.num_critics:
        raise UserError(
            f"'{r.method}.sac.subset' is {sac.subset}, '{r.method}.sac.num_critics' is {sac.num_critics}",
            f"set {r.method}.sac.subset={sac.num_critics} or less",
        )
    if r.method == "expo":
        _check_expo(r.expo)
    _check_offline(r)
    if r.rollouts == "ray":
        _check_ray(r)


def _check_expo(r: ExpoRecipe) -> None:
    if r.edits > r.samples:
        raise UserError(
            f"'expo.edits' is {r.edits}, there are {r.samples} samples to edit, 'expo.samples'",
            f"set expo.edits={r.samples} or less",
        )
    if not r.edits and not r.unedited:
        raise UserError(
            "'expo.edits' is 0 and 'expo.unedited' is false: there is nothing to choose", "set expo.unedited=true"
        )


def _check_offline(r: OffPolicyRecipe) -> None:
    arm = ARMS[r.wsrl.arm]
    learns = r.method == "expo" or arm.retain or (arm.pretrain and r.wsrl.offline_steps > 0)
    if learns and not r.offline.episodes:
        what = "method=expo" if r.method == "expo" else f"wsrl.arm={r.wsrl.arm}"
        raise UserError(
            f"'offline.episodes' is 0, and {what} learns from stored episodes",
            "set offline.episodes=40, or method=wsrl wsrl.arm=sac",
        )
    if r.offline.episodes and not r.offline.noise and not r.offline.root:
        raise UserError(
            "'offline.noise' is empty, expected a noise for episodes to take in turns", "set offline.noise=0.3"
        )
    if r.method == "expo" and r.expo.successes and r.env.reward == "own":
        raise UserError(
            "'expo.successes' is true, and env.reward=own knows no success",
            "set expo.successes=false or env.reward=step",
        )
    if r.offline.episodes and not r.offline.failures and r.env.reward == "own":
        raise UserError(
            "'offline.failures' is false, and env.reward=own knows no success",
            "set offline.failures=true or env.reward=step",
        )


def _check_ray(r: OffPolicyRecipe) -> None:
    if r.scenes:
        raise UserError(f"'scenes' is {r.scenes}, which needs rollouts=local", "set scenes=0, or rollouts=local")
    if r.operator:
        raise UserError(
            f"'operator' is {r.operator}, which needs rollouts=local", "leave it empty, or set rollouts=local"
        )
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "'rollouts' is ray, and Ray is not installed", "in the clone: pip install -e '.[scale]'; or rollouts=local"
        )


def check_evaluations(r: OffPolicyRecipe, limit: int) -> None:
    """Refuse evaluations so close together that no episode between them would reach its limit.

    Raises:
        UserError: They are.
    """
    least = r.num_envs * limit
    if r.rollouts == "local" and r.eval_every < least:
        raise UserError(
            f"'eval_every' is {r.eval_every}, and an evaluation begins new episodes: in {r.num_envs} environments none "
            f"would reach its limit of {limit} steps",
            f"set eval_every={least} or more, or env.limit={max(1, r.eval_every // r.num_envs)} or less",
        )


def check_resumed(r: OffPolicyRecipe, before: dict[str, Any]) -> None:
    """Refuse to go on with a run whose stored experience is of something else.

    Args:
        r: The recipe now.
        before: That of the checkpoint.

    Raises:
        UserError: It is.
    """
    now = plain(dataclasses.asdict(r))
    for key in ("env", "offline", "horizon", "gamma", "num_envs", "seed"):
        if now[key] != before[key]:
            raise UserError(
                f"the run that is to go on has {key}={before[key]}, not {now[key]}",
                "start a new run, with an output_dir of its own",
            )
