"""``vla doctor``: try what the stack needs on this machine, and say what to do where it does not work.

Every check does the thing instead of looking for a flag: it renders a frame, encodes and decodes a film, sends a
message. What can crash or is chosen once per process (OpenGL, torch) runs in a process of its own. The module needs
the standard library alone, so that it also runs where the installation is what is broken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vla_stack.verbs.probes import RENDER, TORCH, Probe, last_line

HELP = "Check this machine: rendering, video, network, versions; each problem comes with its remedy."
EXAMPLES = ["vla doctor", "vla doctor --json > doctor.json"]

Status = Literal["ok", "absent", "warn", "fail"]
APT = "apt-get install -y --no-install-recommends"
PYTHONS = (3, 12), (3, 13)
POLICY_PORT = 5555  # of the default endpoint of `vla serve`
# Packages that break with a MuJoCo newer than the one they were written for (measured; see docs).
MUJOCO_BOUND = ("gym-aloha", "gym-hil", "metaworld", "gymnasium-robotics", "hf-libero")


@dataclass(frozen=True)
class Check:
    """Outcome of one check; ``absent`` is an optional part that is not installed, which is no fault."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    checks = run_checks()
    failed = any(c.status == "fail" for c in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}, indent=1))
    else:
        print(table(checks, colour=sys.stdout.isatty()))
    return int(failed)


def run_checks() -> list[Check]:
    """All checks, in the order in which a person would mend things."""
    with Probe(RENDER) as render, Probe(TORCH) as torch:  # both start now and work while the rest is checked
        checks = [check_python(), *check_packages(), *check_conflicts(), check_cpu(), check_threads()]
        checks += [check_disk(), check_shared_memory(), check_zmq(), check_port(POLICY_PORT)]
        checks += [check_rendering(render), *check_video()]
        checks += check_torch(torch)
    return checks


def table(checks: list[Check], colour: bool = False) -> str:
    """Aligned lines: mark, name, detail; a remedy below what needs one."""
    marks = {"ok": ("ok", 32), "absent": ("-", 90), "warn": ("warn", 33), "fail": ("FAIL", 31)}
    width = max(len(c.name) for c in checks)
    lines = []
    for c in checks:
        text, code = marks[c.status]
        mark = f"\033[{code}m{text:<5}\033[0m" if colour else f"{text:<5}"
        lines.append(f"{mark} {c.name:<{width}}  {c.detail}")
        if c.remedy:
            lines.append(f"{'':<6}{'':<{width}}  -> {c.remedy}")
    count = {s: sum(c.status == s for c in checks) for s in ("fail", "warn")}
    lines.append(f"\n{count['fail']} failed, {count['warn']} warnings, {len(checks)} checks")
    return "\n".join(lines)


# --- Python and packages ----------------------------------------------------------------------------------------------


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return Check("python", "ok", detail)
    return Check("python", "fail", detail, "make the environment with Python 3.12 or 3.13: PYTHON=... tools/bootstrap")


def check_packages(distribution: str = "vla-stack") -> Iterator[Check]:
    """Installed versions against those that this project declares, one check per extra."""
    try:
        declared = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("packages", "fail", f"{distribution} is not installed", "run tools/bootstrap")
        return
    seen = {distribution}  # an extra that includes another repeats its packages
    for extra in ("", "robot", "train", "sim-extra"):
        names = [split_requirement(r) for r in declared if extra_of(r) == extra]
        found = [(name, spec, installed(name)) for name, spec in names if name not in seen]
        seen |= {name for name, _ in names}
        missing = [name for name, _, version in found if version is None]
        wrong = [f"{n} {v} (wants {s})" for n, s, v in found if v is not None and not satisfies(v, s)]
        title, want = (f"packages [{extra}]", f"vla-stack[{extra}]") if extra else ("packages", "vla-stack")
        remedy = f'pip install "{want}", or in a clone tools/bootstrap'
        if wrong:
            yield Check(title, "fail", ", ".join(wrong), remedy)
        elif missing:
            status: Status = "absent" if extra else "fail"
            yield Check(title, status, f"not installed: {', '.join(missing)}", remedy)
        else:
            yield Check(title, "ok", ", ".join(f"{n} {v}" for n, _, v in found))


def check_conflicts() -> Iterator[Check]:
    """Combinations that pip accepts and that break at run time."""
    mujoco = installed("mujoco")
    bound = [n for n in MUJOCO_BOUND if installed(n)]
    if mujoco and bound and not satisfies(mujoco, "<3.9"):
        detail = f"mujoco {mujoco} beside {', '.join(bound)}, which need an older one"
        yield Check("mujoco", "warn", detail, "pip install mujoco==3.8.1")
    both = [n for n in ("opencv-python", "opencv-python-headless") if installed(n)]
    if len(both) == 2:
        yield Check("cv2", "warn", "two packages own cv2: " + " and ".join(both), "pip uninstall opencv-python")


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def extra_of(requirement: str) -> str:
    """``robot`` of ``mujoco<5,>=3.3; extra == 'robot'``; empty without an extra."""
    found = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
    return found.group(1) if found else ""


def split_requirement(requirement: str) -> tuple[str, str]:
    """``('lerobot', '==0.6.1')`` of ``lerobot[dataset]==0.6.1; extra == 'train'``."""
    found = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)", requirement)
    assert found is not None, requirement
    return found.group(1), found.group(2).strip()


def satisfies(version: str, spec: str) -> bool:
    """Whether a release lies in ``>=a,<b,==c``. Compares release numbers, which is all that this project declares."""

    def release(text: str) -> tuple[int, ...]:
        numbers = [int(n) for n in re.findall(r"\d+", text.split("+")[0])[:4]]
        return tuple(numbers + [0] * (4 - len(numbers)))

    compare: dict[str, Callable[[Any, Any], bool]] = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    clauses = re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.+]+)", spec)
    return all(compare[op](release(version), release(bound)) for op, bound in clauses)


# --- machine ----------------------------------------------------------------------------------------------------------


def check_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        text = cpuinfo.read_text()
    except OSError:
        return Check("cpu", "ok", f"{cores} cores, {platform.machine()}")
    model = re.search(r"model name\s*:\s*(.+)", text)
    flags = re.search(r"(?:flags|Features)\s*:\s*(.+)", text)
    has = set(flags.group(1).split()) if flags else set()
    bf16 = sorted(has & {"amx_bf16", "avx512_bf16", "bf16"})
    detail = f"{cores} cores, {model.group(1).strip() if model else platform.machine()}"
    detail += f", bf16 by {' and '.join(bf16)}" if bf16 else ", no bf16: train and infer in float32 on this CPU"
    if platform.machine() in ("x86_64", "AMD64") and flags and "avx2" not in has:
        return Check("cpu", "warn", detail + "; no AVX2", "policies will be slow here; serve them from another machine")
    return Check("cpu", "ok", detail)


def check_threads(environ: Any = os.environ, cores: int | None = None) -> Check:
    cores = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    value = environ.get("OMP_NUM_THREADS", "")
    if value.isdigit() and int(value) <= cores:
        return Check("threads", "ok", f"OMP_NUM_THREADS={value} on {cores} cores")
    detail = f"OMP_NUM_THREADS={value or '(unset)'} on {cores} cores: processes will spin against each other"
    return Check("threads", "warn", detail, "export OMP_NUM_THREADS=1 (`vla train` raises it where it is alone)")


def check_disk(folder: Path = Path(), wanted_gb: float = 5.0) -> Check:
    free = shutil.disk_usage(folder).free / 1e9
    detail = f"{free:.0f} GB free in {folder.resolve()}"
    if free >= wanted_gb:
        return Check("disk", "ok", detail)
    status: Status = "warn" if free >= 1 else "fail"
    return Check("disk", status, detail, f"free some space: datasets and checkpoints want {wanted_gb:.0f} GB")


def check_shared_memory(folder: Path = Path("/dev/shm"), wanted_mb: float = 256) -> Check:
    if not folder.is_dir():
        return Check("shared memory", "ok", "provided by the system")
    free = shutil.disk_usage(folder).free / 1e6
    if free >= wanted_mb:
        return Check("shared memory", "ok", f"{free:.0f} MB free in {folder}")
    remedy = "start the container with --shm-size=1g"
    return Check("shared memory", "warn", f"{free:.0f} MB free in {folder}: camera buffers may not fit", remedy)


# --- network ----------------------------------------------------------------------------------------------------------


def check_zmq() -> Check:
    """One request and reply over loopback TCP with the sockets that server and robot use."""
    try:
        import zmq
    except ImportError:
        return Check("zeromq", "fail", "pyzmq is not installed", "pip install vla-stack")
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for s in (router, dealer):
            s.setsockopt(zmq.LINGER, 0)
            s.setsockopt(zmq.RCVTIMEO, 2000)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"ping")
        router.send_multipart([router.recv_multipart()[0], b"pong"])
        answer = dealer.recv()
    except zmq.ZMQError as e:
        return Check("zeromq", "fail", f"no round trip over 127.0.0.1: {e}", "allow TCP on the loopback interface")
    finally:
        context.destroy(linger=0)
    assert answer == b"pong"
    detail = f"libzmq {zmq.zmq_version()}, loopback round trip"
    if zmq.has("curve"):
        return Check("zeromq", "ok", detail + ", CURVE encryption")
    remedy = "pip install --force-reinstall pyzmq (its wheels have it)"
    return Check("zeromq", "warn", detail + ", no CURVE: loopback only", remedy)


def check_port(port: int) -> Check:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as e:
            detail = f"{port} cannot be bound: {e.strerror}"
            return Check("port", "warn", detail, f"stop what listens there, or give `vla serve` another than {port}")
    return Check("port", "ok", f"{port} is free")


# --- rendering --------------------------------------------------------------------------------------------------------


def check_rendering(probe: Probe) -> Check:
    if importlib.util.find_spec("mujoco") is None:
        return Check("rendering", "absent", "mujoco is not installed", 'pip install "vla-stack[robot]"')
    backend = os.environ.get("MUJOCO_GL", "")
    found, error = probe.result()
    if found is None:
        return Check(
            "rendering", "fail", f"MUJOCO_GL={backend or '(unset)'}: {last_line(error)}", gl_remedy(error, backend)
        )
    detail = f"MUJOCO_GL={backend}, mujoco {found['version']}, {found['by']}, {found['ms']} ms for a 64 px frame"
    if found["red"] < 50:
        return Check("rendering", "fail", detail + ": the picture is black", f"{APT} libgl1-mesa-dri")
    return Check("rendering", "ok", detail)


def gl_remedy(error: str, backend: str) -> str:
    """What mends an OpenGL error, by the texts that MuJoCo and PyOpenGL raise where a library is missing."""
    if "libgthread" in error or "libglib" in error:
        return f"{APT} libglib2.0-0"
    if "eglQueryString" in error:
        return f"{APT} libegl1 libgl1 libgl1-mesa-dri"
    if "glGetError" in error:
        return f"{APT} " + ("libosmesa6" if backend == "osmesa" else "libgl1 libgl1-mesa-dri")
    if "OpenGL platform library has not been loaded" in error or "DISPLAY" in error or backend in ("", "glfw"):
        return f"export MUJOCO_GL=egl (and {APT} libegl1 libgl1 libgl1-mesa-dri)"
    if "EGL" in error:
        return f"{APT} libgl1-mesa-dri, or install the GPU driver's EGL library"
    return "see the last line of the error; `export MUJOCO_GL=egl` is what is tested"


# --- video ------------------------------------------------------------------------------------------------------------


def check_video() -> Iterator[Check]:
    """Write and read back a film with each encoder, by opening it: being compiled in says nothing (cf. nvenc)."""
    if importlib.util.find_spec("av") is None:
        yield Check(
            "video",
            "absent",
            "PyAV is not installed: episodes are recorded as images",
            'pip install "vla-stack[train]"',
        )
        return
    works: list[str] = []
    fails: list[str] = []
    for codec in ("libx264", "libsvtav1"):
        try:
            # SVT-AV1 gives the thread that opens it the highest real-time priority where it may (as root), for good.
            with ThreadPoolExecutor(1) as thread:
                error_mean = thread.submit(_encode_decode, codec).result()
        except Exception as e:
            fails.append(f"{codec} ({type(e).__name__}: {e})")
        else:
            (works if error_mean < 12 else fails).append(codec)
    if fails:
        detail = f"fails: {', '.join(fails)}" + (f"; works: {', '.join(works)}" if works else "")
        yield Check("video", "warn" if works else "fail", detail, "pip install --force-reinstall --no-cache-dir av")
    else:
        yield Check("video", "ok", f"encoded and decoded with {' and '.join(works)}")


def _encode_decode(codec: str) -> float:
    """Mean absolute error, in grey levels, of eight frames of a moving ramp after a round trip."""
    import av
    import numpy as np

    os.environ.setdefault("SVT_LOG", "1")  # errors only; its banner is twenty lines
    ramp = np.tile(np.arange(0, 192, 2, np.uint8), (64, 1))
    frames = [np.repeat(np.roll(ramp, 4 * i, axis=1)[..., None], 3, axis=2) for i in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "doctor.mp4")
        with av.open(path, "w") as out:
            stream: Any = out.add_stream(codec, rate=10)
            stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
            for frame in frames:
                out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            out.mux(stream.encode())
        with av.open(path) as film:
            back = [f.to_ndarray(format="rgb24") for f in film.decode(video=0)]
    if len(back) != len(frames):
        raise ValueError(f"{len(back)} of {len(frames)} frames came back")
    return float(np.abs(np.stack(back).astype(int) - np.stack(frames)).mean())


# --- torch, GPU, LeRobot ----------------------------------------------------------------------------------------------


def check_torch(probe: Probe) -> Iterator[Check]:
    """Torch, its view of the GPU, the fast video decoder and the LeRobot plug-in."""
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "absent", "not installed: this machine runs robots, it does not train or serve")
        return
    found, error = probe.result()
    if found is None:
        yield Check("torch", "fail", last_line(error), 'pip install --force-reinstall "vla-stack[train]"')
        return
    yield Check("torch", "ok", found["torch"])
    yield check_gpu(found["cuda"], found["mps"])
    if found["torchcodec"] == "ok":
        yield Check("video decoder", "ok", "torchcodec")
    else:
        remedy = f"{APT} ffmpeg (until then frames are decoded with PyAV, slower)"
        yield Check("video decoder", "warn", f"torchcodec does not load: {last_line(found['torchcodec'])}", remedy)
    if found["plugin"] is True:
        yield Check("lerobot plug-in", "ok", "lerobot-train and lerobot-eval know policy type 'vla'")
    else:
        detail = found["plugin"] or "LeRobot's tools do not find policy type 'vla'"
        yield Check("lerobot plug-in", "warn", str(detail), "pip install --force-reinstall --no-deps vla-stack")


def check_gpu(cuda: list[dict[str, Any]], mps: bool) -> Check:
    if cuda:
        cards = [f"{g['name']}, {g['gb']} GB" + ("" if g["bf16"] else ", no bf16") for g in cuda]
        return Check("gpu", "ok", "; ".join(cards))
    if mps:
        return Check("gpu", "ok", "Apple GPU")
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        if listed.returncode == 0 and "GPU" in listed.stdout:
            detail = f"torch does not see {listed.stdout.splitlines()[0]}"
            return Check("gpu", "fail", detail, "update the NVIDIA driver to the CUDA version of this torch build")
    return Check("gpu", "absent", "none; the native policy trains and runs on the CPU")
