"""The wheel alone, in a new environment and another directory: what `pip install "vla-stack[train]"` gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("method.steps=3", "method.log_every=1", "eval.every=0", "method.batch_size=2", "threads=1")


class Installed:
    """A virtual environment with the wheel; the packages that it needs are those of this one."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        for command in (
            (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT),
            (sys.executable, "-m", "venv", "--without-pip", folder / "venv"),
        ):
            subprocess.run([*map(str, command)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = folder / "venv" / "lib" / version / "site-packages"
        (wheel,) = folder.glob("vla_stack-*.whl")
        # Without --ignore-installed pip would first remove this project from the environment that it runs in.
        options = ("--no-deps", "--no-index", "--ignore-installed", "--prefix", folder / "venv")
        subprocess.run([*map(str, (sys.executable, "-m", "pip", "install", "-q", *options, wheel))], check=True)
        # After the wheel's own folder; what is installed there in place (this tree) is not followed.
        (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(self, name: str | Path, *args: object, cwd: Path) -> str:
        """What a script of the environment prints, ``-c`` with code included; it must not fail."""
        script = [] if name == "-c" else [str(self.bin / name)]
        command = [str(self.bin / "python"), *script, *(["-c"] if name == "-c" else []), *map(str, args)]
        done = subprocess.run(command, cwd=cwd, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_it_is_the_wheel_that_runs(installed: Installed, tmp_path: Path) -> None:
    code = "import vla_stack, importlib.metadata as m; print(vla_stack.__file__, m.distribution('lerobot_policy_vla')"
    code += ".locate_file(''))"
    said = installed.run("-c", code, cwd=tmp_path).split()
    assert len(said) == 2 and all(path.startswith(str(installed.bin.parent)) for path in said)
    assert installed.run("vla", "recipes", cwd=tmp_path).count("\n") >= 20
    assert "method:" in installed.run("vla", "recipes", "pick", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_train_and_eval_anywhere(installed: Installed, tmp_path: Path) -> None:
    def vla(*args: object) -> str:
        return installed.run("vla", *args, cwd=tmp_path)

    said = vla("demo", "--demonstrations", 2, "--steps", 3, "--episodes", 1, "--out", "demo")
    assert "asynchronous episodes succeeded" in said and (tmp_path / "demo" / "report.html").is_file()
    vla("train", "pick", "data.root=demo/data", "output_dir=run", *SHORT)
    vla("eval", "--policy", "run", "--episodes", 1, "--max-steps", 5, "--workers", 0, "--videos", 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lerobots_tools_know_our_environment_and_policy(installed: Installed, tmp_path: Path) -> None:
    find = "from vla_stack.policies.directory import resolve_policy; print(resolve_policy('shipped'))"
    policy = installed.run("-c", find, cwd=tmp_path).strip()
    installed.run(
        Path(sys.executable).parent / "lerobot-eval",
        *(f"--policy.path={policy}", "--policy.device=cpu", "--env.type=vla_sim", "--env.task=pick"),
        *("--env.episode_length=5", "--eval.n_episodes=1", "--eval.batch_size=1", "--output_dir=out"),
        cwd=tmp_path,
    )
    assert json.loads((tmp_path / "out" / "eval_info.json").read_text())
