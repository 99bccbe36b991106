"""Teach a policy's encoders of pictures and words what is where before it learns to move, from moments of many scenes.

    python tools/ground.py outputs/start outputs/grounded --minutes 40
    vla train multitask policy=outputs/grounded data.root=data/multitask

A demonstration takes a good part of a second, a reset some milliseconds, and some steps of an expert that nobody looks
at not many more: the encoders see a hundred times as many scenes so. Two heads are learnt beside the policy's prefix
and thrown away: *what* reads the image encoders' features where a thing is in the picture, and says its kind and
colour; *where* reads the prefix, and says where the sentence's things are on the table and which pose the tool is to
take now. Pointers, where the policy has some (``vision_pointers``), are taught where these things are in the
pictures. Their labels are the simulator's and exist in training alone. The pictures are augmented as in imitation.
Every two minutes the policy is saved and a line says, for scenes that are not trained on, how far off *where* is by
task, and how often *what* is right; give the policy that was saved as the one to begin with to go on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

import sim
from results import parser
from tasks import TASKS
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.directory import WEIGHTS, resolve_policy, write_manifest
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.prefix import module_name
from vla_stack.policies.reading import read_config, read_processors
from vla_stack.schema import OBS_IMAGES, OBS_STATE
from vla_stack.training.augmentation import augmented
from vla_stack.training.build import preprocessed
from vla_stack.training.recipe import Augmentation

RING = 60_000  # newest scenes, of which batches are drawn
FIRST = 2_000  # scenes before the first step
WORDS = 0.3  # of an instruction's, made up or beside one that is: twice as many as in imitation, for scenes are many
BATCH, LR, WARMUP, DECAY = 64, 1.5e-3, 100, 0.3  # the learning rate falls in the last so much of the time
WHAT, AIM, EXACT = 0.3, 0.3, 0.3  # weights of the losses of *what* and of pointers beside that of *where*
LATER = 0.4  # share of scenes in which an expert has acted; the others are as they were reset
RANDOMISED = 0.33  # share of scenes with other light, camera, colours, textures and distractors
HELD, HELD_SEED, SEED = 100, 90_000_000, 10_000_000  # scenes of a task for the test; the first seeds of both kinds
EVERY_MIN = 2.0
TEXT = 120  # bytes of a sentence


def row_type(cameras: list[str], size: int, state: int) -> np.dtype:
    """A scene in the ring."""
    from sim.stills import MOST

    pictures = [(camera, "u1", (size, size, 3)) for camera in cameras]
    told = [
        ("places", "f4", (3, 2)),
        ("pose", "f4", 3),
        ("aims", "f4", (len(cameras), 2, 2)),
        ("pixels", "f4", (len(cameras), MOST, 2)),
        ("kinds", "i8", MOST),
    ]
    rest = [("colours", "i8", MOST), ("state", "f4", state), ("task", "i8"), ("sentence", f"S{TEXT}")]
    return np.dtype([*pictures, *told, *rest])  # type: ignore[list-item]


def make(task: str, size: int, randomisation: int = 0) -> Any:
    import gymnasium as gym

    return gym.make(f"sim/{task}-v0", image_size=size, randomisation=randomisation).unwrapped


def write_row(
    row: NDArray[Any], env: Any, number: int, seed: int, rng: np.random.Generator, anywhere: float, later: float
) -> None:
    from sim.stills import still

    seen = still(env, seed, rng, anywhere, later)
    for camera, picture in seen.observation["pixels"].items():
        row[camera] = picture
    for name in ("places", "pose", "aims", "pixels", "kinds", "colours"):
        row[name] = getattr(seen, name)
    row["state"], row["task"], row["sentence"] = seen.observation["agent_pos"], number, seen.sentence.encode()[:TEXT]


def draw(
    name: str, kind: np.dtype, tasks: list[str], size: int, later: float, first: int, step: int, counts: Any
) -> None:
    """Main function of a process that fills the ring, every ``step``-th row from ``first`` on."""
    os.nice(10)  # whoever learns goes first
    memory = shared_memory.SharedMemory(name)
    ring: NDArray[Any] = np.ndarray(RING, kind, memory.buf)
    envs = [[make(task, size), make(task, size, 3)] for task in tasks]
    rng = np.random.default_rng(SEED + first)
    number, parent = first, os.getppid()
    while os.getppid() == parent:  # nothing tells it that the other process was killed
        task = int(rng.integers(len(tasks)))
        env = envs[task][int(rng.random() < RANDOMISED)]
        write_row(ring[number % RING : number % RING + 1][0], env, task, SEED + number, rng, 0.7, later)
        number += step
        counts[first] += 1


@contextmanager
def scenes(
    kind: np.dtype, tasks: list[str], size: int, later: float, workers: int
) -> Iterator[tuple[NDArray[Any], Callable[[], int]]]:
    """The ring, once there are :data:`FIRST` scenes in it, and how many have been written by now; processes go on."""
    context = mp.get_context("spawn")
    memory = shared_memory.SharedMemory(create=True, size=RING * kind.itemsize)
    counts = context.Array("q", workers)
    processes = [
        context.Process(target=draw, args=(memory.name, kind, tasks, size, later, i, workers, counts), daemon=True)
        for i in range(workers)
    ]

    def filled() -> int:
        return min(counts[:]) * workers

    try:
        for process in processes:
            process.start()
        while filled() < FIRST:
            time.sleep(0.2)
        yield np.ndarray(RING, kind, memory.buf), filled
    finally:
        for process in processes:
            process.kill()
            process.join()
        memory.unlink()  # closing it is left to the end of the process: the ring still looks at it


class Heads(nn.Module):
    """*what* and *where*, beside a prefix; and *exact*, beside pointers: a cell of the features is some centimetres
    wide, so that a pointer to the right one knows too little to take what is there. What it makes of its place and of
    what is around has to say where in the cell the thing is.

    Args:
        policy: Whose prefix it is.
        kinds: Kinds and colours that there are.
        labels: Of *where* as they are drawn [n, 9], see :func:`labels_of`, for their mean and spread.
    """

    def __init__(self, policy: VlaPolicy, kinds: tuple[int, int], labels: Tensor) -> None:
        super().__init__()
        config = policy.config
        self.cameras = [module_name(key) for key in config.camera_keys]
        self.kinds, self.tokens = kinds, len(self.cameras) * (config.tokens_per_camera + config.vision_pointers)
        wide = (self.tokens + 1) * config.width
        self.where = nn.Sequential(nn.Linear(wide, 256), nn.GELU(), nn.Linear(256, labels.shape[1]))
        self.what = nn.ModuleDict({c: nn.Linear(config.vision_channels[-1], sum(kinds) + 1) for c in self.cameras})
        pointing = [c for c in self.cameras if policy.prefix.vision[c].pointers is not None]
        self.exact = nn.ModuleDict({c: nn.Linear(config.width, 2) for c in pointing})
        self.register_buffer("mean", labels.mean(0))
        self.register_buffer("spread", labels.std(0).clamp(min=0.02))
        self.seen: dict[str, Tensor] = {}
        for camera in self.cameras:
            encoder = policy.prefix.vision[camera]
            encoder.maps.register_forward_pre_hook(lambda _, x, c=camera: self.seen.__setitem__(c, x[0]))
            if encoder.pointers is not None:
                encoder.pointers.match.register_forward_hook(
                    lambda _, __, x, c=camera: self.seen.__setitem__(f"{c} match", x)
                )
                encoder.pointers.register_forward_hook(
                    lambda _, __, x, c=camera: self.seen.__setitem__(f"{c} pointers", x)
                )
        policy.prefix.transformer.last_norm.register_forward_hook(lambda *x: self.seen.__setitem__("tokens", x[2]))

    def point(self, policy: VlaPolicy, batch: dict[str, Any]) -> Tensor:
        """Normalised labels of *where* [b, 9]; features for :meth:`name` are those of this batch from now on."""
        summary = policy.encode(batch).summary
        known = torch.cat((summary, self.seen["tokens"][:, : self.tokens].flatten(1)), 1)
        return self.where(known.float())

    def name(self, rows: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Loss of *what* for the batch that was pointed in, and which kinds were right [n]."""
        losses, right = [], []
        for n, camera in enumerate(self.cameras):
            features = self.seen[camera].float()
            height, width = features.shape[1:3]
            pixels = torch.from_numpy(rows["pixels"][:, n].copy())
            scene, thing = (~pixels[..., 0].isnan()).nonzero(as_tuple=True)
            if not len(scene):
                continue
            x, y = (pixels[scene, thing] * torch.tensor([width, height])).long().unbind(1)
            said = self.what[camera](features[scene, y, x])
            kind = torch.from_numpy(rows["kinds"].copy())[scene, thing]
            colour = torch.from_numpy(rows["colours"].copy())[scene, thing]
            somewhere = (
                torch.randint(len(rows), scene.shape),
                *(torch.randint(s, scene.shape) for s in (height, width)),
            )
            kinds, colours, there = said.split((*self.kinds, 1), dim=1)
            elsewhere = self.what[camera](features[somewhere])[:, -1]  # hardly ever is a thing there
            losses += [F.cross_entropy(kinds, kind), F.cross_entropy(colours, colour)]
            losses.append(0.5 * (F.softplus(-there).mean() + F.softplus(elsewhere).mean()))
            right.append(kinds.argmax(1) == kind)
        if not losses:
            return torch.zeros(()), torch.zeros(0, dtype=torch.bool)
        return torch.stack(losses).sum(), torch.cat(right)

    def aim(self, rows: NDArray[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of the first two pointers of each camera for the batch that was pointed in, towards what is moved and
        where to; which of these are within a cell of it [n]; and how far off *exact* is [n], in widths of a picture.
        Nothing where there are no pointers."""
        losses, right, off = [], [], []
        for n, camera in enumerate(self.cameras):
            if camera not in self.exact:
                continue
            logits = self.seen[f"{camera} match"][:, :2].float()
            height, width = self.seen[camera].shape[1:3]
            aims = torch.from_numpy(rows["aims"][:, n].copy())
            scene, which = (~aims[..., 0].isnan()).nonzero(as_tuple=True)
            cells = aims[scene, which] * torch.tensor([width, height])
            x, y = cells.long().unbind(1)
            said = logits[scene, which]
            losses.append(AIM * F.cross_entropy(said, y * width + x))
            best = said.argmax(1)
            right.append(((best % width - x).abs() <= 1) & ((best // width - y).abs() <= 1))
            exact = self.exact[camera](self.seen[f"{camera} pointers"][:, :2].float())[scene, which]
            wrong = (0.5 + 0.5 * exact) * torch.tensor([width, height]) - cells  # in cells
            losses.append(EXACT * F.smooth_l1_loss(wrong, torch.zeros_like(wrong)))
            off.append(wrong.detach().norm(dim=-1) / width)
        if not losses:
            return torch.zeros(()), torch.zeros(0, dtype=torch.bool), torch.zeros(0)
        return torch.stack(losses).sum(), torch.cat(right), torch.cat(off)


def batch_of(rows: NDArray[Any], cameras: list[str]) -> dict[str, Any]:
    """Rows as a batch of training data, not yet preprocessed."""
    pictures = {f"{OBS_IMAGES}.{camera}": torch.from_numpy(rows[camera].copy()) for camera in cameras}
    sentences = [sentence.decode(errors="ignore") for sentence in rows["sentence"]]
    return {**pictures, OBS_STATE: torch.from_numpy(rows["state"].copy()), "task": sentences}


def labels_of(rows: NDArray[Any]) -> Tensor:
    """What *where* is to say [b, 9]: x and y of three places (m); of the pose that the tool is to take, height (m) and
    sine and cosine of the yaw."""
    return torch.from_numpy(np.concatenate((rows["places"].reshape(len(rows), 6), rows["pose"]), 1))


class Told(NamedTuple):
    """What a batch of scenes says of a policy.

    Attributes:
        where: Loss of *where*.
        rest: Loss of *what* and of pointers.
        far: How far off its places are [b, 3], metres.
        turned: How far off its yaw is [b], degrees.
        known: Which kinds were right [n].
        aimed: Which pointers were right [m].
        away: How far off *exact* is [m], widths of a picture.
    """

    where: Tensor
    rest: Tensor
    far: Tensor
    turned: Tensor
    known: Tensor
    aimed: Tensor
    away: Tensor


class Lesson:
    """A policy that is taught, with its heads and its test.

    Args:
        policy: The policy; its preprocessor beside it.
        pre: The preprocessor.
        tasks: Whose scenes.
        seed: Of what is random.
        later: Share of the test's scenes in which an expert has acted.
    """

    def __init__(self, policy: VlaPolicy, pre: Any, tasks: list[str], seed: int, later: float) -> None:
        from sim.stills import COLOURS, NAMES

        self.policy, self.pre, self.tasks, self.rng = policy, pre, tasks, np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        config = policy.config
        self.cameras = [key.removeprefix(f"{OBS_IMAGES}.") for key in config.camera_keys]
        self.size = config.input_features[config.camera_keys[0]].shape[-1]
        self.kind = row_type(self.cameras, self.size, config.robot_state_feature.shape[0])
        self.held = np.zeros(HELD * len(tasks), self.kind)
        for n, task in enumerate(tasks):
            env = make(task, self.size)
            for k in range(HELD):
                write_row(self.held[n * HELD + k], env, n, HELD_SEED + k, self.rng, 0.0, later)
        self.heads = Heads(policy, (len(NAMES), len(COLOURS)), labels_of(self.held))

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)

    def losses(self, rows: NDArray[Any], augment: bool) -> Told:
        """What scenes say of the policy; with changed pictures and instructions where they are ``augment``-ed."""
        batch = batch_of(rows, self.cameras)
        if augment:
            batch = augmented(batch, Augmentation(words=WORDS), self.generator)
            batch["index"] = torch.randint(
                1 << 30, (len(rows),), generator=self.generator
            )  # some words in small pieces
        batch = preprocessed(batch, self.pre)
        with torch.autocast("cpu", torch.bfloat16):
            said = self.heads.point(self.policy, batch)
        error = said.float() - (labels_of(rows) - self.heads.mean) / self.heads.spread
        (what, right), (aim, hit, away) = self.heads.name(rows), self.heads.aim(rows)
        off = (error * self.heads.spread).detach()
        far = off[:, :6].unflatten(1, (3, 2)).norm(dim=-1)
        yaw = torch.from_numpy(np.arctan2(*rows["pose"][:, 1:].T))
        turned = torch.atan2(*(off + labels_of(rows))[:, 7:].unbind(1)) - yaw
        turned = torch.rad2deg(torch.atan2(turned.sin(), turned.cos()).abs())
        return Told(error.square().mean(), WHAT * what + aim, far, turned, right, hit, away)

    def loss(self, ring: NDArray[Any], size: int) -> Tensor:
        """Of ``size`` scenes of the ring, augmented."""
        told = self.losses(ring[self.rng.integers(len(ring), size=size)], True)
        return told.where + told.rest

    @torch.no_grad()
    def test(self) -> dict[str, Any]:
        """By task, how far off *where* is on average, cm for the three places and degrees for the yaw; the shares of
        kinds known and of pointers that are right; and how far off *exact* is, in pixels."""
        found: dict[str, Any] = {}
        every = [self.losses(self.held[n * HELD : (n + 1) * HELD], False) for n in range(len(self.tasks))]
        for task, told in zip(self.tasks, every, strict=True):
            found[task] = [*(round(100 * float(f), 1) for f in told.far.mean(0)), round(float(told.turned.mean()), 1)]
        first = float(np.mean([far[0] for far in found.values()]))
        kinds, aimed, away = (torch.cat([getattr(told, name) for told in every]) for name in ("known", "aimed", "away"))
        means = {"kinds": kinds.float(), "aimed": aimed.float(), "exact_px": away * self.size}
        known = {name: round(float(x.mean()), 3) for name, x in means.items() if len(x)}
        return {"first_cm": round(first, 2), **known, **found}


def widened(path: Path, config: VlaConfig, **more: int) -> VlaPolicy:
    """The policy in ``path``; pointers and a history that it lacks and that are asked for say nothing yet, so that it
    is what it was."""
    for name, count in more.items():
        setattr(config, name, getattr(config, name) or count)
    policy = VlaPolicy(config)
    lacking, unknown = policy.load_state_dict(load_file(path / WEIGHTS), strict=False)
    assert not unknown and all(".pointers." in name or ".past." in name for name in lacking)
    if any(".pointers." in name for name in lacking):
        for encoder in policy.prefix.vision.values():
            nn.init.zeros_(encoder.pointers.token.weight)
            nn.init.zeros_(encoder.pointers.token.bias)
    return policy


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    path = resolve_policy(args.start)
    config = read_config(path, "cpu")
    pre, post = read_processors(path, config, "cpu")
    policy = widened(path, config, vision_pointers=args.pointers).train()
    lesson = Lesson(policy, pre, args.tasks, args.seed, args.later)
    learnt = [*policy.prefix.parameters(), *lesson.heads.parameters()]
    optimizer = lesson.optimizer(learnt)

    def save() -> None:
        for part in (policy, pre, post):
            part.save_pretrained(args.out)
        write_manifest(args.out)

    with scenes(lesson.kind, args.tasks, lesson.size, args.later, args.workers) as (ring, filled):
        begun, said, steps, losses = time.monotonic(), 0.0, 0, []
        while (minutes := (time.monotonic() - begun) / 60) < args.minutes:
            steps += 1
            rate = LR * min(1.0, steps / WARMUP) * min(1.0, max(0.02, (1.0 - minutes / args.minutes) / DECAY))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = lesson.loss(ring[: min(RING, filled())], BATCH)
            loss.backward()
            nn.utils.clip_grad_norm_(learnt, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if minutes - said > EVERY_MIN or steps == 1:
                said, mean = minutes, round(float(np.mean(losses)), 4)
                line = {"minutes": round(minutes, 1), "steps": steps, "scenes": filled(), "loss": mean}
                print(json.dumps(line | lesson.test()), flush=True)
                save()
                losses.clear()
        print(json.dumps({"minutes": args.minutes, "steps": steps, "scenes": filled()} | lesson.test()))
    save()
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("start", help="native policy: a directory, or the name of a shipped one")
    p.add_argument("out", type=Path, help="new policy directory")
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=sorted(sim.TASKS), help="the generalist's")
    p.add_argument("--pointers", type=int, default=0, help="give the policy so many where it has none (%(default)s)")
    p.add_argument(
        "--later", type=float, default=LATER, help="share of scenes after some steps of an expert (%(default)s)"
    )
    p.add_argument("--minutes", type=float, default=40.0, help="of training (%(default)g)")
    p.add_argument("--workers", type=int, default=1, help="processes that make scenes, one core each (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    sys.exit(main(p.parse_args()))
