"""MuJoCo tasks for the native arm as gymnasium environments; importing this registers ``sim/<task>-v0``."""

import importlib
import os
import sys

# Both are read when MuJoCo and Mesa load. Without a display only EGL renders; Mesa's software rasteriser spends
# 15-25 % less CPU on small frames when it does not wake worker threads.
_CHOSEN_BY_DEFAULT = "mujoco" in sys.modules and not os.environ.get("MUJOCO_GL")
if sys.platform == "linux":
    os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"
    os.environ.setdefault("LP_NUM_THREADS", "0")

try:
    import mujoco as _mujoco

    if _CHOSEN_BY_DEFAULT:
        # Someone imported MuJoCo before us and it settled on a window system: let it choose again.
        importlib.reload(sys.modules[_mujoco.Renderer.__module__].gl_context)
except AttributeError as e:  # PyOpenGL without libEGL: 'NoneType' object has no attribute 'eglQueryString'
    from vla_stack.errors import UserError

    raise UserError(
        f"MuJoCo found no OpenGL library ({e})",
        "install it with `apt-get install -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri`",
    ) from e

from sim.expert import Expert, make_expert  # noqa: E402
from sim.registry import TASKS, TaskInfo, is_task  # noqa: E402

__all__ = ["TASKS", "Expert", "TaskInfo", "is_task", "make_expert"]
