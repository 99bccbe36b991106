"""Off-screen pictures of a MuJoCo model, cheap enough for training on a CPU."""

from __future__ import annotations

import atexit
import weakref
from functools import cache
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError

Visuals = Literal["fast", "pretty"]

GL_REMEDY = (
    "install the software renderer with `apt-get install -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri` "
    "and set MUJOCO_GL=egl before Python starts"
)

_open: weakref.WeakSet[Renderer] = weakref.WeakSet()


def cheapen(model: mujoco.MjModel) -> None:
    """Turn off antialiasing, shadows and reflections in place: with software rendering they cost 2-50x a frame.

    Coarser capsules halve what is left.
    """
    model.vis.quality.offsamples = 0
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0.0
    model.vis.quality.numslices, model.vis.quality.numstacks = 16, 8


class Renderer:
    """Pictures of one size; the GL context is made at the first picture, so state-only users never need one."""

    def __init__(self, model: mujoco.MjModel, height: int, width: int) -> None:
        self._model, self._size = model, (height, width)
        self._renderer: mujoco.Renderer | None = None

    def render(self, data: mujoco.MjData, camera: str) -> NDArray[np.uint8]:
        """uint8 [height, width, 3] RGB seen by the named camera.

        Raises:
            UserError: The machine offers no OpenGL; the message names the packages.
        """
        if self._renderer is None:
            self._renderer = self._make()
            _open.add(self)
            _close_at_exit()
        self._renderer.update_scene(data, camera)
        return self._renderer.render()

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _make(self) -> mujoco.Renderer:
        # The off-screen buffer is cleared whole before every frame: make it no larger than the picture.
        self._model.vis.global_.offheight, self._model.vis.global_.offwidth = self._size
        try:
            return mujoco.Renderer(self._model, *self._size)
        # The bindings report a missing library in several ways, AttributeError on None among them.
        except (AttributeError, ImportError, RuntimeError, mujoco.FatalError) as e:
            raise UserError(f"MuJoCo cannot open an OpenGL context ({e})", GL_REMEDY) from e


def _close_all() -> None:
    for renderer in list(_open):
        renderer.close()


@cache
def _close_at_exit() -> None:
    # A context that outlives the display prints an EGLError traceback. MuJoCo registers the display's own end when
    # it makes the first context, and exit handlers run last in, first out: so this is registered after that.
    atexit.register(_close_all)
