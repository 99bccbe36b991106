"""The one registry: what a name of a task, robot, policy, method, ... stands for, inside this project and outside.

A name stands for ``module:attribute`` (or a module), and comes from one of three places:

- :data:`BUILT_IN`, the table of what this project offers;
- an entry point of the group ``vla_stack.<kind>`` of any installed package: ``docs/extend/`` has a page for each kind;
- the name itself, where it is written ``module:attribute``: a person may name what is not registered.

Nothing is imported before it is asked for, and no other module imports this project's modules by string.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from vla_stack.errors import UserError, first_line

PACKAGE = "vla-stack"
PLUGIN = "lerobot_policy_vla"  # brings ours to LeRobot's tools, which here are there already
_log = logging.getLogger(__name__)
BUILT_IN: dict[str, dict[str, str]] = {
    "verbs": {
        "doctor": "vla_stack.verbs.doctor",
        "collect": "vla_stack.verbs.collect",
        "data": "vla_stack.verbs.data",
        "recipes": "vla_stack.verbs.recipes",
        "train": "vla_stack.verbs.train",
        "policy": "vla_stack.verbs.policy",
        "eval": "vla_stack.verbs.eval",
        "compare": "vla_stack.verbs.compare",
        "monitor": "vla_stack.verbs.monitor",
        "constraints": "vla_stack.verbs.constraints",
        "imagine": "vla_stack.verbs.imagine",
        "export": "vla_stack.verbs.export",
        "serve": "vla_stack.verbs.serve",
        "keys": "vla_stack.verbs.keys",
        "run": "vla_stack.verbs.run",
        "robot": "vla_stack.verbs.robot",
        "teleop": "vla_stack.verbs.teleop",
        "emulate": "vla_stack.verbs.emulate",
        "console": "vla_stack.verbs.console",
        "report": "vla_stack.verbs.report",
        "demo": "vla_stack.verbs.demo",
    },
    "methods": {  # dataclasses of options: see `vla_stack.training.recipe.Method`
        "imitation": "vla_stack.methods.imitation.recipe:Imitation",
        "mixture_of_horizons": "vla_stack.methods.mixture_of_horizons.recipe:MixtureOfHorizons",
        "own_loss": "vla_stack.methods.own_loss.recipe:OwnLoss",
        "grape": "vla_stack.methods.grape.recipe:Grape",
        "rac": "vla_stack.methods.rac.recipe:Rac",
        "reinflow": "vla_stack.methods.reinflow.recipe:ReinFlow",
        "wsrl": "vla_stack.methods.wsrl:Wsrl",
        "expo": "vla_stack.methods.expo:Expo",
        "expo_vla": "vla_stack.methods.expo_vla:ExpoVla",
        "dsrl": "vla_stack.methods.dsrl:Dsrl",
        "dsrl_na": "vla_stack.methods.dsrl_na:DsrlNa",
        "rlpd_vla": "vla_stack.methods.rlpd_vla:RlpdVla",
        "progress": "vla_stack.methods.progress.recipe:Progress",
        "world_model": "vla_stack.world_model.recipe:World",
    },
    "policies": {  # classes of policy types; all others are LeRobot's own
        "vla": "vla_stack.policies.modeling_vla:VlaPolicy",
        "moh": "vla_stack.policies.modeling_moh:MohPolicy",
        "state_gaussian": "vla_stack.policies.modeling_state:StateGaussianPolicy",
        "state_flow": "vla_stack.policies.modeling_state:StateFlowPolicy",
        "expo": "vla_stack.policies.modeling_expo:ExpoPolicy",
        "steered": "vla_stack.policies.modeling_steered:SteeredPolicy",
        "smolvla": "vla_stack.policies.adapters.smolvla:SmolVLA",
        "pi0": "vla_stack.policies.adapters.pi:Pi0",
        "pi05": "vla_stack.policies.adapters.pi:Pi05",
        "diffusion": "vla_stack.policies.adapters.diffusion:Diffusion",
    },
    "environments": {  # `make(rest, num_envs, **options) -> envs.VectorEnv`, for ids `<name>:<rest>`
        "imagined": "vla_stack.world_model.world_backend:make",
        "judged": "vla_stack.world_model.success:make",
        "steered": "vla_stack.world_model.steered:make",
    },
    "benchmarks": {  # `sim.external.Benchmark`s, modules, for ids `<name>/<task>`
        "metaworld": "sim.external.metaworld",
        "aloha": "sim.external.aloha",
        "libero": "sim.external.libero",
    },
    "tasks": {  # `sim.env.ArmEnv`s, under the gymnasium id sim/<name>-v0
        "pick": "sim.tasks.pick:Pick",
        "place": "sim.tasks.place:Place",
        "push": "sim.tasks.push:Push",
        "stack": "sim.tasks.stack:Stack",
        "insert": "sim.tasks.insert:Insert",
        "drawer": "sim.tasks.drawer:Drawer",
        "obstacle": "sim.tasks.obstacle:Obstacle",
        "conveyor": "sim.tasks.conveyor:Conveyor",
        "open_put_close": "sim.tasks.open_put_close:OpenPutClose",
        "covers": "sim.tasks.covers:Covers",
        "repeat": "sim.tasks.repeat:Repeat",
        "set_table": "sim.tasks.set_table:SetTable",
        "sort": "sim.tasks.sort:Sort",
        "regrasp_insert": "sim.tasks.regrasp_insert:RegraspInsert",
        "jam": "sim.tasks.jam:Jam",
        "so101_pick": "sim.tasks.so101_pick:So101Pick",
        "pick_any": "sim.tasks.pick_any:PickAny",
        "place_relation": "sim.tasks.place_relation:PlaceRelation",
        "press": "sim.tasks.press:Press",
        "shelf": "sim.tasks.shelf:Shelf",
        "slot": "sim.tasks.slot:Slot",
        "sort_one": "sim.tasks.sort_one:SortOne",
    },
    "robots": {
        "sim": "robot_drivers.simulated:SimulatedRobot",  # a MuJoCo task in real time
        "lerobot": "robot_drivers.lerobot_robot:LeRobotRobot",  # any robot that LeRobot knows
        "remote": "robot_drivers.remote:RemoteRobot",  # a robot on another computer, which runs `vla robot serve`
        "replay": "robot_drivers.replay:ReplayRobot",  # a recorded episode, open loop
        "ros2": "robot_drivers.zenoh_robot:ZenohRobot",  # a ROS 2 robot, over Zenoh
    },
    "teleoperators": {
        "keyboard": "robot_drivers.teleop_keyboard:Keyboard",
        "gamepad": "robot_drivers.teleop_gamepad:Gamepad",
        "lerobot": "robot_drivers.teleop_lerobot:LeRobotLeader",  # any teleoperator of LeRobot's, such as so101_leader
        "replay": "robot_drivers.teleop_replay:Replay",  # the commands of a recorded episode
    },
    "costs": {  # `cost(trace, **parameters) -> [T]`
        name: f"vla_stack.evaluation.constraints.costs:{name}"
        for name in (
            *("distance", "steps_to", "above", "align_xy", "clearance", "grasped", "at_rest", "path_length"),
            *("duration", "contact_count", "force_max", "speed_max", "jerk", "tilt", "joint_margin"),
            *("keepout_box", "height_range"),
        )
    },
}


@dataclass(frozen=True)
class Entry:
    """A name and what it stands for.

    Attributes:
        name: Under which it is asked for.
        target: ``module:attribute``, or a module.
        package: Distribution that registers it; empty where a person wrote the target.
    """

    name: str
    target: str
    package: str = ""


class Registry:
    """The names of one kind.

    Args:
        kind: In the plural, as in the entry-point group ``vla_stack.<kind>``.
        noun: In the singular, for messages.
        hint: What else a person may have meant by a name that is not there; ``{name}`` is that name.
        literal: Whether ``module:attribute`` is a name, too. Not where names stand in files that others write.
    """

    def __init__(
        self, kind: str, noun: str, hint: str = "; one of your own is module:attribute", literal: bool = True
    ) -> None:
        self.kind, self.noun, self.hint, self.literal = kind, noun, hint, literal

    @property
    def group(self) -> str:
        """The group under which other packages register."""
        return f"vla_stack.{self.kind}"

    def built_in(self) -> dict[str, str]:
        """What this project registers; other packages are not looked at."""
        return BUILT_IN.get(self.kind, {})

    def entries(self) -> dict[str, Entry]:
        """All that is registered: this project's first, then other packages' by name. Imports nothing.

        Raises:
            UserError: Two packages register the same name.
        """
        found = {name: Entry(name, target, PACKAGE) for name, target in self.built_in().items()}
        for point in sorted(metadata.entry_points(group=self.group)):
            package = point.dist.name if point.dist else "an unknown package"
            if (other := found.get(point.name)) is not None:
                raise UserError(
                    f"{self.noun} '{point.name}' is registered by {other.package} and by {package}",
                    f"uninstall {package}, or rename its entry point in {self.group}",
                )
            found[point.name] = Entry(point.name, point.value, package)
        return found

    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return tuple(self.entries())

    def entry(self, name: str) -> Entry:
        """What a name stands for.

        Raises:
            UserError: Nothing of that name is registered, and it is no ``module:attribute``.
        """
        if target := self.built_in().get(name):
            return Entry(name, target, PACKAGE)
        if found := self.entries().get(name):
            return found
        if self.literal and ":" in name:
            return Entry(name, name)
        names = self.names()
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean '{near[0]}'? " if near else ""
        remedy += f"the {self.kind} are {', '.join(names)}"
        raise UserError(f"there is no {self.noun} '{name}'", remedy + self.hint.format(name=name))

    def get(self, name: str) -> Any:
        """The object behind a name, imported now.

        Raises:
            UserError: There is no such name, or another package's cannot be imported.
            ImportError: An optional package that a built-in entry needs is not installed.
        """
        found = self.entry(name)
        module, _, attribute = found.target.partition(":")
        try:
            loaded: Any = import_module(module)
            for part in filter(None, attribute.split(".")):
                loaded = getattr(loaded, part)
        except Exception as e:  # another package may raise what it likes
            if found.package == PACKAGE:
                raise
            whose = f" of the package {found.package}" if found.package else ""
            remedy = f"mend or uninstall {found.package}" if found.package else "is it installed, and spelt so?"
            raise UserError(f"{self.noun} '{name}'{whose} cannot be loaded: {first_line(e)}", remedy) from e
        return loaded


def import_lerobot_plugins(*kinds: str) -> list[str]:
    """Import the installed packages that extend LeRobot, which registers what they bring with LeRobot.

    LeRobot's own discovery imports plug-ins of every kind, which takes seconds that a robot or a policy does not need.

    Args:
        kinds: Of plug-ins: ``policy``, ``robot``, ``teleoperator``, ``camera``, ``env``.

    Returns:
        The names of the modules that could be imported. One that could not is a warning in one line, as what is asked
        for may have nothing to do with it.
    """
    imported = []
    for name in sorted({(d.name or "").replace("-", "_") for d in metadata.distributions()}):
        if name != PLUGIN and name.startswith(tuple(f"lerobot_{kind}_" for kind in kinds)):
            try:
                import_module(name)
                imported.append(name)
            except Exception as e:  # other people's code may raise what it likes
                _log.warning("LeRobot's plug-in %s cannot be imported: %s", name, first_line(e))
    return imported


VERBS = Registry("verbs", "verb")
METHODS = Registry("methods", "method")
POLICIES = Registry("policies", "policy type", "", literal=False)  # names stand in files of others, here and below
ENVIRONMENTS = Registry("environments", "environment")
BENCHMARKS = Registry("benchmarks", "benchmark")
TASKS = Registry("tasks", "task")
ROBOTS = Registry("robots", "robot", "; one of LeRobot's is --robot.type={name}, one of your own module:Class")
TELEOPERATORS = Registry(
    "teleoperators", "teleoperator", "; one of LeRobot's is --teleop.type={name}, one of your own module:Class"
)
COSTS = Registry("costs", "cost type", "", literal=False)
ALL = (VERBS, METHODS, POLICIES, ENVIRONMENTS, BENCHMARKS, TASKS, ROBOTS, TELEOPERATORS, COSTS)
