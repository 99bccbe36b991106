"""Pictures of the things of the library and of the tasks among them, for docs/suite.md.

python tools/suite_picture.py docs/things.webp docs/suite.webp
"""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import sim
from results import parser
from sim import library, objects, registry
from sim.rendering import Renderer
from sim.slots import Thing, slot_name
from sim.tabletop import Tabletop
from vla_stack import registry as names

TILE, LABEL, COLUMNS = 128, 16, 10
SHOT = 288  # px, of a task
NEAR, FIELD = (1.06, 0.0, 0.478), 11.0  # m and degrees, of the camera that looks at one thing
AWAY = 3.0  # m, where what is not to be seen lies
FOLDED = (0.0, -1.2, 0.0, -2.5, 0.0, 1.5, 0.8)  # rad, the arm out of the picture


def sheet(pictures: list[tuple[str, NDArray[np.uint8]]], columns: int) -> Image.Image:
    """Labelled pictures in rows."""
    side = pictures[0][1].shape[0]
    rows = -(-len(pictures) // columns)
    page = Image.new("RGB", (columns * side, rows * (side + LABEL)), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(11)
    for i, (label, picture) in enumerate(pictures):
        x, y = i % columns * side, i // columns * (side + LABEL)
        page.paste(Image.fromarray(picture), (x, y + LABEL))
        draw.text((x + 3, y + 2), label, "black", font)
    return page


def things() -> list[tuple[str, NDArray[np.uint8]]]:
    """Each kind of the library from near by, in turns of colour and pattern."""
    env = gym.make(registry.task_id("pick_any"), cameras=(), visuals="pretty").unwrapped
    model, data, colours = env.model, env.data, list(library.PALETTE)
    camera = model.camera("front").id
    eye, pictures = Renderer(model, TILE, TILE), []
    for i, kind in enumerate(library.KINDS):
        env.reset(seed=0)
        model.cam_pos[camera], model.cam_fovy[camera] = NEAR, FIELD
        pattern = library.PATTERNS[1 + i // 4 % 3] if i % 4 == 3 else "plain"
        env._slots.fill(
            (Thing(kind, colours[3 * i % len(colours)], pattern), *(Thing("cube", "red"),) * (env.count - 1))
        )
        for k in range(env.count):
            objects.lay(env, slot_name(k), (0.5, 0.0) if k == 0 else (0.0, AWAY + k), yaw=0.5)
        data.qpos[: len(FOLDED)] = FOLDED
        mujoco.mj_forward(model, data)
        pictures.append((kind + (" *" if library.KINDS[kind].held_out else ""), eye.render(data, "front")))
    return pictures


def tasks() -> list[tuple[str, NDArray[np.uint8]]]:
    """The beginning and the end of an expert's episode of each task among things."""
    pictures = []
    for name in sim.TASKS:
        if not issubclass(names.TASKS.get(name), Tabletop):
            continue
        shot = {"render_mode": "rgb_array", "render_size": (SHOT, SHOT), "visuals": "pretty"}
        env = gym.make(registry.task_id(name), cameras=(), **shot)
        env.reset(seed=1)
        pictures.append((name, env.render()))
        text, expert, done = env.unwrapped.task, sim.make_expert(env), False
        while not done:
            _, _, terminated, truncated, _ = env.step(expert.act())
            done = terminated or truncated
        pictures.append((text[:52], env.render()))
    return pictures


def main() -> int:
    p = parser(__doc__)
    p.add_argument("things", type=Path, help="picture of the library to write")
    p.add_argument("tasks", type=Path, help="picture of the tasks to write")
    args = p.parse_args()
    for path, pictures, columns in ((args.things, things(), COLUMNS), (args.tasks, tasks(), 4)):
        sheet(pictures, columns).save(path, quality=72, method=6)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
