"""A recipe's sources: which robots they are, what a policy of all of them looks like, and mistakes in naming them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.policies.factory import make_policy_config
from training_fakes import tiny_config

from vla_stack.data import digests
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.methods.imitation import loss as imitation
from vla_stack.policies.embodiment import Embodiment
from vla_stack.policies.registry import is_known
from vla_stack.schema import ACTION, OBS_STATE, Camera, Dim, Observation, RobotSpec
from vla_stack.training.build import build as make_parts
from vla_stack.training.build import to_device
from vla_stack.training.embodiments import add_embodiments, embodiment_stats, is_plain
from vla_stack.training.recipe import DataRecipe, SourceRecipe, make
from vla_stack.training.sources import open_sources, pooled, settle_relative


def record(root: Path, actions: int, cameras: dict[str, int], episodes: int = 2, offset: float = 0.0) -> Path:
    """Random motions of a robot of ``actions`` dimensions, with square cameras of the given sizes."""
    dims = tuple(Dim(f"j{i}.pos", "rad") for i in range(actions - 1)) + (Dim("gripper.pos", "ratio"),)
    views = tuple(Camera(name, size, size) for name, size in cameras.items())
    spec = RobotSpec("test/arm", (*dims, Dim("extra", "rad")), dims, views, rate_hz=10.0)
    rng = np.random.default_rng(actions)
    with EpisodeRecorder(root, spec, image_mode="image") as recorder:
        for _ in range(episodes):
            for step in range(8):
                state = rng.normal(offset, 1.0, actions + 1).astype(np.float32)
                images = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in views}
                action = state[:actions] + np.float32(0.5)
                recorder.add_frame(Observation(state, images, "do it", step, step * 10**8), action)
            recorder.save_episode(success=True)
    return root


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("sources")
    made = {
        "small": record(base / "small", 3, {"front": 16, "wrist": 16}),
        "more": record(base / "more", 3, {"front": 16, "wrist": 16}, episodes=4, offset=2.0),
        "large": record(base / "large", 5, {"top": 24}),
    }
    return {name: str(path) for name, path in made.items()}


def mixed(roots: dict[str, str], **large: object) -> DataRecipe:
    other = SourceRecipe(roots["large"], **{"embodiment": "large", "cameras": {"front": "top"}, **large})  # type: ignore[arg-type]
    return DataRecipe(sources=(SourceRecipe(roots["small"]), SourceRecipe(roots["more"]), other))


def new_config():
    return replace(tiny_config(), input_features={}, output_features={}, action_feature_names=None)


def test_a_policy_of_several_robots_holds_all_of_them(roots: dict[str, str]) -> None:
    config = new_config()
    sources = open_sources(mixed(roots), config)
    assert not is_plain(config, sources)
    new = add_embodiments(config, sources)
    assert [e.name for e in new] == ["test/arm", "large"]
    assert new[0].relative == (True, True, False) and new[1].cameras == {"front": "top"}
    features = {key.removeprefix("observation."): ft.shape for key, ft in config.input_features.items()}
    assert features == {"images.front": (3, 16, 16), "images.wrist": (3, 16, 16), "state": (6,)}
    assert config.output_features[ACTION].shape == (5,)
    assert new == [Embodiment.from_json(d) for d in config.embodiments]
    assert add_embodiments(config, sources, grow=False) == []


def test_statistics_are_an_embodiment_s_own(roots: dict[str, str]) -> None:
    stats = embodiment_stats(open_sources(mixed(roots), new_config()), horizon=1)
    assert stats["test/arm"][OBS_STATE]["mean"].shape == (4,) and stats["large"][OBS_STATE]["mean"].shape == (6,)
    assert stats["test/arm"][OBS_STATE]["mean"].mean() > 1.0 > abs(stats["large"][OBS_STATE]["mean"].mean())
    np.testing.assert_allclose(stats["large"][ACTION]["mean"][:-1], 0.5, atol=1e-5)  # relative to the state


def test_exclusions_are_a_source_s_own(roots: dict[str, str]) -> None:
    sources = open_sources(mixed(roots, relative_exclude_joints=("j",)), new_config())
    assert [s.embodiment.relative for s in sources[1:]] == [(True, True, False), (False,) * 4 + (True,)]


def test_datasets_of_one_robot_need_no_embodiments(roots: dict[str, str]) -> None:
    config = new_config()
    short = open_sources(DataRecipe(root=(roots["small"], roots["more"])), config)
    long = open_sources(DataRecipe(sources=(SourceRecipe(roots["small"]), SourceRecipe(roots["more"]))), config)
    assert [s.embodiment for s in short] == [s.embodiment for s in long] and is_plain(config, short)
    renamed = SourceRecipe(roots["small"], cameras={"top": "front"})
    assert not is_plain(config, open_sources(DataRecipe(sources=(renamed,)), config))


def test_roots_are_of_one_robot(roots: dict[str, str], tmp_path: Path) -> None:
    other = record(tmp_path / "other", 3, {"front": 16, "wrist": 16})
    robot = other / "meta/robot.json"
    robot.write_text(robot.read_text().replace("test/arm", "test/leg"))
    digests.seal(other)
    with pytest.raises(UserError, match=r"data.root\[0\] and data.root\[1\] are of different robots, 'test/arm' and "):
        open_sources(DataRecipe(root=(roots["small"], str(other))), new_config())
    both = DataRecipe(sources=(SourceRecipe(roots["small"]), SourceRecipe(str(other))))
    assert [s.embodiment.name for s in open_sources(both, new_config())] == ["test/arm", "test/leg"]


def test_a_robot_joins_a_policy_that_has_room(roots: dict[str, str]) -> None:
    config = new_config()
    config.max_action_dim, config.max_state_dim = 8, 8
    add_embodiments(config, open_sources(DataRecipe(sources=mixed(roots).sources[:1]), config))
    assert [e.name for e in add_embodiments(config, open_sources(mixed(roots), config))] == ["large"]
    assert config.output_features[ACTION].shape == (8,) and len(config.embodiments) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"embodiment": ""},
            r"data.sources\[0\] and data.sources\[2\] are both embodiment 'test/arm' and differ in ",
        ),
        ({"cameras": {"front": "side"}}, r"data.sources\[2\]: .*large has no camera 'side' -- it has top"),
    ],
)
def test_mistakes_name_the_source(roots: dict[str, str], change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_sources(mixed(roots, **change), new_config())


def test_a_robot_that_does_not_fit_a_checkpoint_is_refused(roots: dict[str, str]) -> None:
    config = new_config()
    first = DataRecipe(sources=mixed(roots).sources[:1])
    add_embodiments(config, open_sources(first, config))
    with pytest.raises(UserError, match="no embodiment 'large' -- it has test/arm"):
        add_embodiments(config, open_sources(mixed(roots), config), grow=False)
    with pytest.raises(UserError, match="6 state entries, the policy has room for 4 -- .*max_state_dim=6"):
        add_embodiments(config, open_sources(mixed(roots), config))
    config = new_config()
    config.max_action_dim, config.max_state_dim = 8, 8
    add_embodiments(config, open_sources(first, config))
    with pytest.raises(UserError, match="camera in slot 'top', the policy has front, wrist"):
        add_embodiments(config, open_sources(mixed(roots, cameras=None), config))


def renamed(root: Path, **names: object) -> None:
    """Make a dataset one of those that nobody described, with these names of its dimensions."""
    (root / "meta" / "robot.json").unlink()
    info = json.loads((root / "meta" / "info.json").read_text())
    for key, value in names.items():
        info["features"][{"state": OBS_STATE, "action": ACTION}[key]]["names"] = value
    (root / "meta" / "info.json").write_text(json.dumps(info))
    digests.seal(root)


@pytest.mark.parametrize(
    ("names", "sure"),
    [
        ({"state": {"motors": ["a", "b", "c", "d"]}, "action": {"motors": ["a", "b", "c"]}}, True),
        ({"state": ["state"], "action": ["actions"]}, False),
        ({"state": None, "action": None}, False),
        ({"state": ["x", "y", "z", "g"], "action": ["dx", "dy", "dz"]}, False),
    ],
)
def test_a_dataset_that_nobody_described_trains_or_is_asked_about(tmp_path: Path, names: dict, sure: bool) -> None:
    """Whatever form its names have; deltas are not made relative once more without anybody's word."""
    root = record(tmp_path / "data", 3, {"front": 16})
    renamed(root, **names)
    policy = {"options": {"chunk_size": 4, "n_action_steps": 2, "width": 16, "expert_width": 16, "depth": 1}}
    recipe = make({"policy": policy, "data": {"root": [str(root)]}, "method": {"batch_size": 2}}, "recipe")
    if not sure:
        with pytest.raises(UserError, match=r"does not say whether its actions are absolute.*use_relative_actions"):
            make_parts(recipe, imitation.loss, torch.device("cpu"))
        options = {**policy["options"], "use_relative_actions": False}
        recipe = replace(recipe, policy=replace(recipe.policy, options=options))
    parts = make_parts(recipe, imitation.loss, torch.device("cpu"))
    config = parts.policy.config
    assert config.action_feature_names == (
        ["a", "b", "c"] if sure else names["action"] if len(names["action"] or ()) == 3 else None
    )
    batch = parts.preprocess(to_device(next(iter(parts.loader)), torch.device("cpu")))
    assert torch.isfinite(parts.loss(parts.policy, batch, torch.Generator().manual_seed(0))[0])


@pytest.mark.parametrize("kind", ["vla", "pi05"])
def test_deltas_are_not_made_relative(tmp_path: Path, kind: str) -> None:
    root = record(tmp_path / "data", 3, {"front": 16})
    file = root / "meta" / "robot.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "action_kind": "delta"}))
    digests.seal(root)
    assert is_known(kind)  # loads LeRobot's type
    config = new_config() if kind == "vla" else make_policy_config(kind, use_relative_actions=True, device="cpu")
    sources = open_sources(DataRecipe(root=(str(root),)), config)
    settle_relative(config, sources, known=True)
    assert not config.use_relative_actions


def test_statistics_are_of_the_episodes_that_are_trained_on(roots: dict[str, str]) -> None:
    config = new_config()
    whole, first = (
        open_sources(DataRecipe(root=(roots["more"],), episodes=episodes), config)[0] for episodes in (None, (0,))
    )
    assert whole.counted is None and (whole.frames, first.frames) == (32, 8)
    states = first.dataset.columns[OBS_STATE][:8]
    stats = embodiment_stats([first], 4)[first.embodiment.name]
    np.testing.assert_allclose(stats[OBS_STATE]["mean"], states.mean(0), atol=1e-6)


def test_pooled_statistics_are_those_that_all_have() -> None:
    one = {"mean": np.zeros(1), "std": np.ones(1), "min": np.zeros(1), "max": np.ones(1)}
    full = {OBS_STATE: {**one, "q01": np.zeros(1)}, "observation.images.a": one}
    assert set(pooled([full, {OBS_STATE: one}], [1, 1])) == {OBS_STATE}
    assert "q01" not in pooled([full, {OBS_STATE: one}], [1, 1])[OBS_STATE]


def test_a_robot_without_a_name_is_asked_for(roots: dict[str, str], tmp_path: Path) -> None:
    root = record(tmp_path / "theirs", 3, {"front": 16})
    (root / "meta" / "robot.json").unlink()
    digests.seal(root)
    sources = (SourceRecipe(str(root)), SourceRecipe(roots["small"]))
    with pytest.raises(UserError, match=r"data.sources\[0\]: .* does not name its robot .* set data.sources\[0\]"):
        open_sources(DataRecipe(sources=sources), new_config())
    named = open_sources(DataRecipe(sources=(replace(sources[0], embodiment="theirs"),)), new_config())
    assert named[0].embodiment.robot.name == "lerobot/theirs" and len(named[0].embodiment.robot.action) == 3
    assert open_sources(DataRecipe(root=(str(root),)), new_config())[0].embodiment.name == "lerobot/robot"
