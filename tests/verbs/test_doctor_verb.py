"""``vla doctor``: what it says where something is broken."""

import importlib.util
import json
import os
import socket
import sys

import pytest

from vla_stack.cli import main
from vla_stack.verbs import doctor
from vla_stack.verbs.doctor import Check
from vla_stack.verbs.probes import Probe

FINE = 'print(\'{"torch": "2.11.0", "cuda": [], "mps": false, "torchcodec": "ok", "plugin": true}\')'


def failing(message):
    return f"import sys; sys.exit({message!r})"


def find_all_but(*absent):
    def find_spec(name, package=None):
        return None if name in absent else importlib.machinery.PathFinder.find_spec(name)

    return find_spec


@pytest.mark.parametrize(
    ("error", "backend", "remedy"),
    [
        (
            "AttributeError: 'NoneType' object has no attribute 'eglQueryString'",
            "egl",
            "libegl1 libgl1 libgl1-mesa-dri",
        ),
        ("AttributeError: 'NoneType' object has no attribute 'glGetError'", "egl", "libgl1 libgl1-mesa-dri"),
        ("AttributeError: 'NoneType' object has no attribute 'glGetError'", "osmesa", "libosmesa6"),
        (
            "mujoco.FatalError: an OpenGL platform library has not been loaded into this process, this most likely ...",
            "",
            "export MUJOCO_GL=egl",
        ),
        ("ImportError: Cannot initialize a EGL device display.", "egl", "libgl1-mesa-dri"),
        ("ImportError: libgthread-2.0.so.0: cannot open shared object file", "egl", "libglib2.0-0"),
    ],
)
def test_each_rendering_error_has_its_own_remedy(monkeypatch, error, backend, remedy):
    monkeypatch.setenv("MUJOCO_GL", backend)
    with Probe(failing("Traceback ...\n" + error)) as probe:
        check = doctor.check_rendering(probe)
    assert check.status == "fail" and error[:40] in check.detail
    assert remedy in check.remedy
    assert "apt-get install" in check.remedy


def test_this_machine_renders_and_a_black_picture_is_noticed():
    with Probe(doctor.RENDER) as probe:
        assert doctor.check_rendering(probe).status == "ok"
    black = {"red": 0, "ms": 1.0, "by": "llvmpipe", "version": "3.8.1"}
    with Probe(f"import json; print(json.dumps({black}))") as probe:
        check = doctor.check_rendering(probe)
    assert check.status == "fail" and "black" in check.detail


def test_a_probe_that_hangs_or_dies_is_a_failure_not_a_wait():
    with Probe("import signal; signal.pause()", timeout_s=0.2) as probe:
        found, error = probe.result()
    assert found is None and "no answer" in error
    with Probe("import os; os.abort()") as probe:
        found, error = probe.result()
    assert found is None and error


@pytest.mark.parametrize(
    ("version", "spec", "fits"),
    [
        ("0.6.1", "==0.6.1", True),
        ("0.6.2", "==0.6.1", False),
        ("2.11.0+cu130", "<2.12,>=2.11", True),
        ("2.12.0", "<2.12,>=2.11", False),
        ("4.13.0.92", "<4.14,>=4.9", True),
        ("6.0.3", "<7,>=6", True),
        ("27.3.0", "", True),
        ("10.0", ">=9.9", True),
    ],
)
def test_versions_are_compared_as_numbers(version, spec, fits):
    assert doctor.satisfies(version, spec) is fits


def test_requirements_are_taken_apart():
    text = "lerobot[dataset,training]==0.6.1; extra == 'train'"
    assert doctor.split_requirement(text) == ("lerobot", "==0.6.1") and doctor.extra_of(text) == "train"
    assert doctor.split_requirement("numpy<2.3,>=2.0") == ("numpy", "<2.3,>=2.0") and doctor.extra_of("numpy") == ""


def test_packages_that_are_old_missing_or_optional(monkeypatch):
    declared = ["numpy>=2", "mujoco>=3.3; extra == 'robot'", "torch>=2.11; extra == 'train'"]
    declared.append("metaworld==3.0.0; extra == 'sim-extra'")
    have = {"numpy": "1.26.4", "mujoco": "3.8.1"}
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: declared)
    monkeypatch.setattr(doctor, "installed", have.get)
    base, robot, train, benchmarks = doctor.check_packages()
    assert base.status == "fail" and "numpy 1.26.4 (wants >=2)" in base.detail
    assert robot.status == "ok"
    assert train.status == "absent" and 'pip install "vla-stack[train]"' in train.remedy
    assert benchmarks.status == "absent" and 'pip install "vla-stack[sim-extra]"' in benchmarks.remedy
    del have["numpy"]
    assert next(iter(doctor.check_packages())).status == "fail"


def test_known_bad_combinations_are_reported(monkeypatch):
    have = {"mujoco": "4.0.0", "metaworld": "3.0.0", "opencv-python": "4.9", "opencv-python-headless": "4.9"}
    monkeypatch.setattr(doctor, "installed", have.get)
    assert [c.name for c in doctor.check_conflicts()] == ["mujoco", "cv2"]
    have.update(mujoco="3.8.1")
    assert [c.name for c in doctor.check_conflicts()] == ["cv2"]


def test_a_robot_computer_without_torch_and_video_is_healthy(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", find_all_but("torch", "av"))
    with Probe("raise SystemExit(1)") as probe:
        checks = [*doctor.check_torch(probe), *doctor.check_video()]
    assert {c.status for c in checks} == {"absent"}


def test_torch_probe_is_read(monkeypatch):
    bad = {
        "torch": "2.11",
        "cuda": [{"name": "H200", "gb": 141.0, "bf16": True}],
        "mps": False,
        "torchcodec": "Could not load libtorchcodec.\nlibavutil.so.59 missing",
        "plugin": False,
    }
    with Probe(f"import json; print(json.dumps(json.loads({json.dumps(json.dumps(bad))})))") as probe:
        checks = {c.name: c for c in doctor.check_torch(probe)}
    assert "H200, 141.0 GB" in checks["gpu"].detail
    assert "ffmpeg" in checks["video decoder"].remedy and checks["video decoder"].status == "warn"
    assert "--force-reinstall --no-deps vla-stack" in checks["lerobot plug-in"].remedy
    with Probe(failing("OSError: libcudart.so.13: cannot open shared object file")) as probe:
        (check,) = doctor.check_torch(probe)
    assert check.status == "fail" and "libcudart" in check.detail


def test_encoders_are_opened_not_looked_up(monkeypatch):
    scheduler = getattr(os, "sched_getscheduler", lambda _: None)  # Linux has it
    before = scheduler(0)
    (check,) = doctor.check_video()
    assert check.status == "ok" and "libx264" in check.detail
    assert scheduler(0) == before  # an encoder as root takes the highest priority that there is

    def broken(codec):
        raise ValueError("cannot open encoder")

    monkeypatch.setattr(doctor, "_encode_decode", broken)
    (check,) = doctor.check_video()
    assert check.status == "fail" and "cannot open encoder" in check.detail


def test_a_port_in_use_is_named():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        check = doctor.check_port(port)
    assert check.status == "warn" and f"{port} cannot be bound" in check.detail


def test_machine_checks(tmp_path):
    (tmp_path / "cpuinfo").write_text("model name\t: Old CPU\nflags\t\t: fpu sse2\n")
    old = doctor.check_cpu(tmp_path / "cpuinfo")
    assert "Old CPU" in old.detail and "no bf16" in old.detail
    (tmp_path / "cpuinfo").write_text("model name\t: New CPU\nflags\t\t: avx2 avx512_bf16\n")
    assert "bf16 by avx512_bf16" in doctor.check_cpu(tmp_path / "cpuinfo").detail
    assert doctor.check_threads({"OMP_NUM_THREADS": "1"}, cores=2).status == "ok"
    assert doctor.check_threads({}, cores=2).status == "warn"
    assert doctor.check_threads({"OMP_NUM_THREADS": "64"}, cores=2).status == "warn"
    assert doctor.check_disk(tmp_path, wanted_gb=1e9).status == "warn"
    assert doctor.check_python((3, 11)).status == "fail" and doctor.check_python((3, 12)).status == "ok"
    assert doctor.check_zmq().status == "ok"


def test_the_table_and_the_exit_code_say_what_failed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "TORCH", FINE)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "rendering" in out and "0 failed" in out

    monkeypatch.setattr(doctor, "check_zmq", lambda: Check("zeromq", "fail", "no loopback", "allow it"))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {"name": "zeromq", "status": "fail", "detail": "no loopback", "remedy": "allow it"} in report["checks"]


def test_doctor_starts_without_numpy_or_torch():
    heavy = "('numpy', 'torch', 'zmq', 'mujoco')"
    code = f"import sys, vla_stack.verbs.doctor; print([m for m in {heavy} if m in sys.modules])"
    done = doctor.subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]", done.stderr
