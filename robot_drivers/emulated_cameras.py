"""Cameras of an emulated robot: rendered in a process of their own, served as LeRobot's ``zmq`` cameras read them.

A message is JSON with the pictures in base64, as LeRobot's image server sends it; they are PNG, so nothing is lost.
Each camera has a port of its own, so that one can be unplugged.
"""

from __future__ import annotations

import base64
import json
import os
from multiprocessing.connection import Connection
from typing import Any

import cv2
import numpy as np

from vla_stack.runtime.link import Link

_PNG = [cv2.IMWRITE_PNG_COMPRESSION, 1]


def serve_cameras(connection: Connection, task: str, image_size: int) -> None:
    """Main function of the cameras' process: render each state that comes, until the other side hangs up.

    Args:
        connection: Brings ``state`` (of the environment, with its monotonic time; answered by ``shown`` where it asks
            to ``confirm``), ``unplug`` and ``plug``.
        task: Name in ``sim.TASKS``.
        image_size: Height and width, pixels.
    """
    import gymnasium as gym
    import zmq

    import sim

    os.nice(5)  # pictures may be late
    from sim.rendering import Renderer

    link = Link(connection)
    env: Any = gym.make(sim.TASKS[task].id, cameras=()).unwrapped
    env.reset(seed=0)
    eyes = Renderer(env.model, image_size, image_size)
    context = zmq.Context()
    sockets = {camera: context.socket(zmq.PUB) for camera in sim.arm.CAMERAS}
    for socket in sockets.values():
        socket.setsockopt(zmq.SNDHWM, 10)  # of two, a busy computer drops the newest
        socket.setsockopt(zmq.LINGER, 0)
    ports = {camera: socket.bind_to_random_port("tcp://127.0.0.1") for camera, socket in sockets.items()}
    link.send("ports", ports=ports)
    unplugged: set[str] = set()
    try:
        while True:
            newest, confirm = None, False
            for message in link.receive(timeout_s=3600.0):
                if message["kind"] == "state":
                    newest, confirm = message, confirm or message.get("confirm", False)
                elif message["kind"] == "unplug":
                    unplugged.add(message["camera"])
                else:
                    unplugged.clear()
            if newest is None:
                continue
            env.set_state(np.frombuffer(newest["state"], np.float64))
            for camera, socket in sockets.items():
                if camera not in unplugged:
                    picture = cv2.imencode(".png", eyes.render(env.data, camera), _PNG)[1]
                    text = {"images": {camera: base64.b64encode(picture).decode()}}
                    text["timestamps"] = {camera: newest["t_ns"] * 1e-9}  # type: ignore[dict-item]
                    socket.send_string(json.dumps(text), zmq.NOBLOCK)
            if confirm:
                link.send("shown")
    except EOFError:
        pass
    finally:
        eyes.close()
        context.destroy(linger=0)
