"""The public interface, from outside: lazy, typed, and the figure that the README prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import vla_stack as vla

OTHERS = ",".join(f"{name}.*" for name in ("torch", "lerobot", "transformers", "diffusers", "datasets", "mujoco"))
OUTSIDE = """
from pathlib import Path

import vla_stack as vla
from vla_stack.errors import UserError


def measure(name: str) -> tuple[float, tuple[float, float]]:
    policy = vla.load_policy(name)
    env = vla.make_env("sim/pick-v0", num_envs=2, policy=policy)
    env.close()
    done: vla.Rollouts = vla.rollout(policy, "sim/pick-v0", 20)
    return done.success, done.interval


def learn(root: Path) -> Path:
    data = vla.collect("pick", 2, root)
    assert vla.open_dataset(root).info == data.info
    try:
        return vla.train("pick", [f"data.root={root}"])
    except UserError as e:
        print(e.message, e.remedy)
        raise


def offer(run: Path) -> None:
    vla.serve(run, endpoint="tcp://127.0.0.1:*")
"""


def test_importing_it_imports_nothing() -> None:
    code = "import sys, vla_stack; print([m for m in sys.modules if m.startswith(('numpy', 'torch', 'vla_stack.api'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(vla.__all__) <= set(dir(vla))


def test_the_figure_of_the_readme(tmp_path: Path) -> None:
    assert vla.rollout(vla.load_policy("shipped"), "sim/pick-v0", episodes=4).success == 1.0
    data = vla.collect("pick", 1, tmp_path / "data", image_size=16)
    assert data.info["total_episodes"] == 1


def test_a_script_outside_passes_strict_mypy(tmp_path: Path) -> None:
    script = tmp_path / "outside.py"
    script.write_text(OUTSIDE)
    settings = tmp_path / "settings.ini"  # what others wrote is not read: a third of the time
    settings.write_text(f"[mypy]\n[mypy-{OTHERS}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--config-file={settings}"]
    command += [str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
