"""LeRobot's SO-101 driver behind ours, on a spoilt bus: no answer is ever taken for another request's."""

import numpy as np
import pytest

from robot_drivers import make_driver
from robot_drivers.so101_emulator import Emulator

READINGS = 150


@pytest.mark.timeout(300)
def test_spoilt_statuses_never_shift_readings_or_raise_alarms(tmp_path):
    with Emulator(tmp_path / "arm", image_size=0) as arm:
        driver = make_driver("lerobot", robot_type="so101_follower", rate_hz=30.0, **arm.device())
        driver.connect()
        rest = np.array(arm.status()["angles"]["follower"])
        arm.inject("corruption", 0.05)
        arm.inject("loss", 0.005)
        for _ in range(READINGS):
            state = driver.read().state
            assert np.abs(state[:5] - rest[:5]).max() < 0.01
            assert driver.fault is None or driver.fault.kind == "bus"
        counters = arm.status()["bus"]["follower"]
        arm.mend()
        driver.disconnect()
    assert counters["corrupted"] > READINGS * 0.05
