"""The memory proof of ``world_model.py``: the colour of a cube that is out of sight.

The front camera is covered and the wrist camera leaves the cube for more than two chunks. When it returns, the cube's
hue (one of six, dealt to each episode) is in no input but the history.
"""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from world_hues import HUES, hue
from world_training import Settings, data, trained

from vla_stack.world_model.clips import Recording, open_recording
from vla_stack.world_model.memory import Memory, history_chunks
from vla_stack.world_model.model import End, WorldModel
from vla_stack.world_model.quality import chunk_noise, decode

AWAY = 16  # a frame out of sight: 9 control steps over the cube, 9 away, then back
VIVID = 128  # saturation of 255, of a cube alone
BACK = 2  # chunks from out of sight to there; what is remembered reaches back to frame 8 until then


def hue_of(pictures: np.ndarray) -> np.ndarray:
    """Hue class int [B] of the most saturated pixels of pictures uint8 [B, H, W, 3]; -1 where nothing has a colour."""
    out = np.full(len(pictures), -1)
    for i, picture in enumerate(pictures.reshape(len(pictures), -1, 3) / 255.0):
        spread = picture.max(1) - picture.min(1)
        vivid = picture[spread >= max(0.2, np.sort(spread)[-20])]
        if len(vivid):
            hue = colorsys.rgb_to_hsv(*vivid.mean(0))[0]
            out[i] = round(hue * HUES) % HUES
    return out


def memory(settings: Settings, out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Hue accuracy of an arm at the second look, with its own history, another one, and shuffled history poses.

    *Swapped* is another episode's history under the own poses, in which its cube is at another place. *Recoloured* is
    the own history with the cube in the next hue: nothing else differs, so that who looks at places can be tested too.
    """
    model = trained(out, "memory", arm, seed)[-1]
    recording = open_recording(data(settings, out, hue=True))
    starts = np.unique(recording.start[recording.held_out])
    truth = np.array([hue(int(e)) for e in np.unique(recording.start).searchsorted(starts)])
    now, again = (starts + (AWAY // model.horizon + c) * model.horizon for c in (0, BACK))
    wrist = list(recording.pictures).index("wrist")
    visible = hue_of(recording.stacked(again)[:, wrist])
    hidden = hue_of(recording.stacked(now)[:, wrist]) == -1
    usable = hidden & (visible != -1)  # the cube is out of sight, and is back in it
    result: dict[str, Any] = {"episodes": len(starts), "n": int(usable.sum()), "right": {}}
    result["classifier"] = float((visible == truth)[usable].mean()) if usable.any() else 0.0
    if usable.sum() > 1:
        starts, truth = starts[usable], truth[usable]
    followed = {"swapped": np.roll(truth, 1), "recoloured": (truth + 1) % HUES}
    for name in ("own", "swapped", "recoloured", "shuffled_poses"):
        seen = hue_of(second_look(model, recording, starts, name, seed))
        result["right"][name] = (seen == truth).tolist()
        result[name] = float((seen == truth).mean())
        if name in followed:
            result[f"follows_{name}"] = float((seen == followed[name]).mean())
    return result


@torch.no_grad()
def second_look(model: WorldModel, recording: Recording, starts: np.ndarray, change: str, seed: int) -> np.ndarray:
    """Wrist pictures uint8 [B, H, W, 3] imagined at the second look, from recorded history and a current frame that
    sees nothing of the cube."""
    h, device = model.horizon, model.bank.device
    chunks = AWAY // h + 1
    now = starts + AWAY // h * h
    sources = np.roll(starts, 1) if change == "swapped" else starts
    memories = []
    for row, start in enumerate(sources):
        frames = start + h * np.arange(chunks)
        pictures = recording.stacked(frames)
        if change == "recoloured":
            pictures = recoloured(pictures)
        latents = model.vae.encode(torch_of(pictures, device))
        poses = torch_of(recording.poses[starts[row] + h * np.arange(chunks)].copy(), device)
        if change == "shuffled_poses":
            remembered = sorted(set(history_chunks(chunks - 1, model.config.dynamics.history)))
            poses[remembered] = poses[remembered[1:] + remembered[:1]]
        latents[-1] = model.vae.encode(torch_of(recording.stacked(now[row : row + 1]), device))[0]
        memory: Memory[End] = Memory(End(latents[0], poses[0]), model.config.dynamics.history)
        for z, p in zip(latents[1:], poses[1:], strict=True):
            memory.push(End(z, p))
        memories.append(memory)
    for c in range(BACK):
        ahead = torch_of(recording.poses[now[:, None] + 1 + c * h + np.arange(h)], device)
        latents, _ = model.chunk(memories, ahead, chunk_noise(model, [seed * 7919 + int(s) for s in starts], c))
        for row, memory in enumerate(memories):
            memory.push(End(latents[row, -1], ahead[row, -1]))
    return decode(model, latents[:, -1])[:, model.cameras.index("wrist")]


def recoloured(pictures: np.ndarray) -> np.ndarray:
    """Pictures uint8 [..., H, W, 3] with everything of strong colour in the next hue."""
    hsv = cv2.cvtColor(pictures.reshape(-1, pictures.shape[-2], 3), cv2.COLOR_RGB2HSV)  # hue in half degrees
    strong = hsv[..., 1] > VIVID
    hsv[..., 0] = np.where(strong, (hsv[..., 0].astype(int) + 180 // HUES) % 180, hsv[..., 0])
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).reshape(pictures.shape)


def torch_of(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
