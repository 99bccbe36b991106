"""Scripts that ``vla doctor`` runs in processes of their own, because what they try can crash or is chosen once.

Each prints one JSON object as its last line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

RENDER = """
import json, time
import mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom type='sphere' size='.3' rgba='1 0 0 1'/></worldbody></mujoco>")
model.vis.quality.offsamples = 0
model.light_castshadow[:] = 0
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 64, 64) as r:
    r.update_scene(data); frame = r.render()
    t = time.perf_counter()
    for _ in range(20):
        r.update_scene(data); frame = r.render()
    ms = (time.perf_counter() - t) * 50
    try:
        from OpenGL.GL import GLRENDERER, glGetString
        by = glGetString(GLRENDERER).decode()
    except Exception:
        by = "unknown renderer"
    print(json.dumps({"red": int(frame[..., 0].max()), "ms": round(ms, 2), "by": by, "version": mujoco.__version__}))
"""

TORCH = """
import json, tempfile, os
found = {}
import torch
found["torch"] = torch.__version__
found["cuda"] = [
    {"name": p.name, "gb": round(p.total_memory / 1e9, 1), "bf16": torch.cuda.is_bf16_supported()}
    for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
]
found["mps"] = torch.backends.mps.is_available()
try:
    import torchcodec.decoders
    found["torchcodec"] = "ok"
except Exception as e:
    found["torchcodec"] = str(e).strip()[:300]
try:
    from vla_stack.lerobot_core import PreTrainedConfig
    from lerobot.utils.import_utils import register_third_party_plugins
    register_third_party_plugins()
    found["plugin"] = "vla" in PreTrainedConfig.get_known_choices()
except Exception as e:
    found["plugin"] = f"{type(e).__name__}: {e}"
print(json.dumps(found))
"""


class Probe:
    """A script in a process of its own that prints one JSON object; started at once, read later."""

    def __init__(self, script: str, timeout_s: float = 300) -> None:
        self._timeout = timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def result(self) -> tuple[dict[str, Any] | None, str]:
        """What the script printed, or None and what it said on its way out."""
        try:
            out, error = self._process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            return None, f"no answer within {self._timeout:.0f} s"
        if self._process.returncode == 0:
            return json.loads(out.strip().splitlines()[-1]), ""
        return None, error or f"the process ended with code {self._process.returncode}"


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
