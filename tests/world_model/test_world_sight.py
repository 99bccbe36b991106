"""What a camera on the tool would see of what was seen before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from test_world_dynamics import SMALL, inputs
from torch.nn import functional as F
from world_toys import ROBOT

import sim
from vla_stack.errors import UserError
from vla_stack.world_model import sight
from vla_stack.world_model.dynamics import Dynamics, DynamicsConfig, Remembered
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.model import WorldConfig, WorldModel
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.sight import Calibration, Sight, View, look
from vla_stack.world_model.vae import VaeConfig

CAMERAS = ("front", "wrist")
DOWN = (0.0, 1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0)  # the camera's right is -y, its up is x; z points back


def test_from_where_a_picture_was_taken_it_looks_as_it_is() -> None:
    pictures = torch.randint(0, 256, (3, 2, 2, 16, 16, 3), dtype=torch.uint8)
    poses = torch.tensor([0.45, 0.0, 0.2, 0.3, 1.0]) + torch.rand(3, 2, 5) * 0.1
    seen = look(sight.simulated(ROBOT), pictures, poses, poses)
    assert seen.shape == (3, 2, 1, 4, 4, 8, 8)  # two moments of two cameras each, for the one on the tool
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(look(sight.simulated(ROBOT), pictures, poses, poses), seen)
    colours = pictures.movedim(-1, -3).float() / 127.5 - 1
    for moment in range(2):
        own = seen[:, moment, 0, 2 * moment + 1]
        there = own[:, 3] == 1  # all that is not beyond the horizon
        assert there.float().mean() > 0.9
        expected = F.avg_pool2d(colours[:, moment, 1], 2)
        assert torch.where(there[:, None], own[:, :3] - expected, 0).abs().max() < 1e-2


def test_a_camera_above_sees_where_it_is_moved_and_turned_to() -> None:
    above = View("tool", (0.0, 0.0, 0.1), DOWN, np.pi / 2)
    calibration = Calibration((above,), height=0.0)
    pictures = torch.zeros(1, 1, 1, 16, 16, 3, dtype=torch.uint8)
    pictures[..., :4, 6:10, 0] = 255  # red at the far end: towards x
    at = torch.tensor([[[0.0, 0.0, 0.3, 0.0, 1.0]]])  # sees 40 cm to each side
    to = torch.tensor([[[0.0, 0.0, 0.3, np.pi / 2, 1.0], [0.3, 0.0, 0.3, 0.0, 1.0], [0.0, 0.0, -0.5, 0.0, 1.0]]])
    turned, ahead, below = look(calibration, pictures, at, to)[0, :, 0, 0]
    assert turned[0, 3:5, -2:].min() > 0.9 and turned[0, :, :5].max() < -0.9  # the tool turned left: x is to its right
    assert ahead[0, 3:5, 3:5].min() > 0.9 and (ahead[3, :2] == 0).all()  # it is right below; beyond, nothing was seen
    assert (below == 0).all()  # from under the surface there is none


@pytest.mark.parametrize("conditioning, history", [("per_frame", 2), ("mean", 2), ("mean", 0), ("none", 2)])
def test_arms_look_by_what_they_are_told(conditioning: Any, history: int) -> None:
    dynamics = DynamicsConfig(**SMALL | {"conditioning": conditioning, "history": history})
    config = WorldConfig(
        "", ("",), PoseScale((0.2, -0.3, 0.0), (0.7, 0.3, 0.3)), VaeConfig(4, 2, (8,)), dynamics, HeadsConfig(8, 1)
    )
    model = WorldModel(replace(config, calibration=sight.simulated(ROBOT)), ROBOT)
    assert WorldModel(config, ROBOT).look(torch.zeros(0), torch.zeros(0)) is None  # nobody knows where cameras are
    moments = 1 + bool(history)
    sources = torch.randint(0, 256, (1, moments, 2, 16, 16, 3), dtype=torch.uint8)
    poses = torch.tensor([0.45, 0.0, 0.2, 0.3, 1.0]) + torch.rand(1, history + 4, 5) * 0.1
    seen, other = (model.look(sources, p) for p in (poses, torch.cat([poses[:, :-2], poses[:, -2:].flip(1)], 1)))
    if seen is None or other is None:
        assert conditioning == "none"
        return
    assert seen.seen is not None and other.seen is not None
    assert seen.seen.shape == (1, 3, 1, 2 * moments, 4, 8, 8) and seen.tool.shape[:-1] == (1, 3, 2, 8, 8)
    for one, two in ((seen.seen, other.seen), (seen.tool, other.tool)):  # whose pose is whose
        assert torch.allclose(one, two, atol=1e-3) is (conditioning == "mean")


def test_each_position_of_each_view_is_told_where_the_tool_is() -> None:
    calibration = sight.simulated(ROBOT)
    poses = torch.tensor([[0.45, 0.1, 0.1, 0.7, 1.0], [0.5, -0.1, 0.2, -1.0, 0.0]])[None]
    told = sight.toward(calibration, poses, 8)[0]  # [T, V, h, w, TOOL]
    ways = told[..., : 2 * len(sight.POINTS)].unflatten(-1, (-1, 2))
    middle = (torch.arange(8) + 0.5) / 4 - 1
    where = ways[..., 0, :] + torch.stack(torch.meshgrid(middle, middle, indexing="ij")[::-1], -1)
    torch.testing.assert_close(where, where[:, :, :1, :1].expand_as(where))  # all positions mean the same place
    assert where[0, 0, 0, 0, 0] * where[1, 0, 0, 0, 0] < 0  # left and right of the front camera
    torch.testing.assert_close(where[0, 1], where[1, 1], atol=1e-4, rtol=0)  # the wrist's is fixed to the tool


def test_cameras_that_all_stand_still_are_told_of_the_tool_alone() -> None:
    front = sight.simulated(ROBOT).views[0]
    config = WorldConfig(
        "",
        ("",),
        PoseScale((0.2, -0.3, 0.0), (0.7, 0.3, 0.3)),
        VaeConfig(4, 2, (8,)),
        DynamicsConfig(**SMALL),
        HeadsConfig(8, 1),
        calibration=Calibration((front, front)),
    )
    model = WorldModel(config, ROBOT)
    poses = torch.tensor([0.45, 0.0, 0.2, 0.3, 1.0]).expand(1, 6, 5)
    seen = model.look(None, poses)
    assert seen is not None and seen.seen is None and seen.tool.shape[:3] == (1, 3, 2)
    pictures = np.zeros((1, 2, 16, 16, 3), np.uint8)
    for p in model.dynamics.parameters():
        torch.nn.init.normal_(p, std=0.3)
    noise, ahead = torch.randn(1, *model.noise_shape()), poses[:, :2].clone()
    one, other = (model.chunk(model.begin(pictures, poses[:, 0].numpy()), ahead + far, noise)[0] for far in (0.0, 0.05))
    assert not torch.allclose(one, other)


@pytest.mark.slow
def test_things_are_where_the_simulators_wrist_camera_shows_them() -> None:
    env: Any = gym.make(sim.TASKS["pick"].id, image_size=64, cameras=CAMERAS, control_hz=10.0)
    distances = []
    for seed in range(6):
        raw, _ = env.reset(seed=seed)
        sources = torch.from_numpy(np.stack([raw["pixels"][c] for c in CAMERAS]))[None, None]
        pose = torch.from_numpy(raw["agent_pos"][None, None, :5])
        seen = look(sight.simulated(ROBOT), sources, pose, pose)[0, 0, 0]
        for colour in range(3):
            own, others = (seen[1 - view, colour] - seen[1 - view, :3].sum(0) / 3 for view in (0, 1))
            centres = [torch.stack([a.float().mean() for a in (m > 0.4).nonzero(as_tuple=True)]) for m in (own, others)]
            if all((m > 0.4).sum() > 12 for m in (own, others)):
                distances.append(float((centres[0] - centres[1]).norm()))
    env.close()
    assert len(distances) >= 5 and np.median(distances) < 2.5  # of 32 pixels: things are no part of the surface


def test_what_should_be_seen_can_be_copied_by_position_and_is_told_with_the_poses() -> None:
    torch.manual_seed(0)
    model = Dynamics(DynamicsConfig(**SMALL), views=2, channels=3, size=4, moving=(1,))  # as built, outputs are zero
    x, remembered, tokens, sigma = inputs(model)
    looked, tool = torch.randn(2, 3, 1, 4, 4, 16, 16), torch.randn(2, 3, 2, 4, 4, sight.TOOL)
    remembered = Remembered.clean(remembered.history, remembered.anchor, Sight(tool, looked))
    with torch.no_grad():
        seen = torch.zeros(2, 3, 2, 3, 4, 4)  # of the last source, by the camera on the tool
        seen[:, :, 1] = model.glance(looked[:, :, 0, 3].flatten(0, 1)).unflatten(0, (2, 3))
        which = torch.eye(2)[:, None, None].expand(2, 3, -1, 4, 4, -1)
        drawn = model.drawn(model.draw(torch.cat([tool, which], -1))).movedim(-1, 3)
        for source, shows in ((0, drawn), (4, seen)):
            model.project.bias.zero_()  # its outputs: members, channels, what is copied as it is, and these sources
            model.project.bias[(2 * 3 + 2 + 1 + source) * 4] = 1.0  # the corner of a patch
            told, untold = (model(x, remembered, tokens, sigma, torch.full((2,), t)) for t in (True, False))
            expected = torch.zeros_like(told)
            expected[:, :, 3:, ..., ::2, ::2] = shows[:, None, ..., ::2, ::2]  # in future frames
            torch.testing.assert_close(told, expected)
            assert not untold.any()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    with torch.no_grad():
        one, other = (
            model(x, Remembered.clean(remembered.history, remembered.anchor, s), tokens, sigma, torch.ones(2) > 0)
            for s in (Sight(tool, looked), Sight(tool, looked + 1))
        )
    assert ((one - other)[:, :, 3:, 0].flatten(3).abs().amax(-1) > 1e-3).all()  # the other camera hears of it as well


def test_a_calibration_that_cannot_be_is_refused(tmp_path: Path) -> None:
    known = sight.simulated(ROBOT)
    views = {
        c: {"mount": v.mount, "position": [*v.position], "rotation": [*v.rotation], "fov": v.fov}
        for c, v in zip(CAMERAS, known.views, strict=True)
    }
    path = tmp_path / "cameras.yaml"

    def written(**changes: Any) -> str:
        path.write_text(yaml.safe_dump({"height": 0.02, "views": views | changes}))
        return str(path)

    assert sight.read(written(), ROBOT) == known and known.moving == [1]
    blocks = (Path(__file__).parents[2] / "docs" / "world_model.md").read_text().split("```")
    path.write_text(next(b.removeprefix("yaml") for b in blocks if "mount:" in b))
    for told, is_ in zip(sight.read(str(path), ROBOT).views, known.views, strict=True):
        assert told.mount == is_.mount and abs(told.fov - is_.fov) < 1e-3
        np.testing.assert_allclose([*told.position, *told.rotation], [*is_.position, *is_.rotation], atol=1e-3)
    for changes, said in (
        ({"wrist": views["wrist"] | {"rotation": [1.0] * 9}}, "rotation of 'wrist'"),
        ({"wrist": views["wrist"] | {"fov": 80.0}}, "radians"),
        ({"wrist": views["wrist"] | {"mount": "hand"}}, "mount"),
    ):
        with pytest.raises(UserError, match=said):
            sight.read(written(**changes), ROBOT)
    path.write_text(yaml.safe_dump({"views": {"front": views["front"]}}))
    with pytest.raises(UserError, match="no camera 'wrist'"):
        sight.read(str(path), ROBOT)
    path.write_text("not: [a")
    with pytest.raises(UserError, match="is no calibration"):
        sight.read(str(path), ROBOT)
