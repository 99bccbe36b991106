"""``native/so101``: an arm of the size and kinematics of the SO-101, whose joints turn about the middle of their range.

Angles agree with what LeRobot's driver reports of a calibrated SO-101 in degrees: zero in the middle of the range, the
gripper as a ratio of its own. So a policy trained here may drive that arm, and the other way round.
"""

from __future__ import annotations

from importlib.resources import files

from sim.arm import Arm
from vla_stack.schema import Dim

SO101 = Arm(
    name="native/so101",
    xml=str(files("sim") / "assets" / "so101.xml"),
    joints=("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll"),
    joint_kind="angle",
    max_joint_rate=2.0,
    posture=(0.0, 0.10, 0.20, 1.27, 0.0),
    tool=(
        Dim("tcp_x.pos", "m", 0.10, 0.30, 0.22),
        Dim("tcp_y.pos", "m", -0.22, 0.22, 0.22),
        Dim("tcp_z.pos", "m", 0.008, 0.22, 0.22),
        Dim("tcp_yaw.pos", "rad", -1.5, 1.5, 1.6, "angle"),
    ),
    fingers=1,
    closed=-0.6,
    opened=0.6,  # rad, the moving jaw
    control_mode="joint_abs",
    measures_tool=False,
    interpolates=False,
)
