"""A small trace of two points, and constraints for it."""

import numpy as np

from vla_stack.evaluation.constraints.spec import Spec, parse
from vla_stack.evaluation.constraints.trace import Trace

ENTITIES = ("ee", "obj.target", "goal.target", "obstacle.wall")


def make_trace(ee_x, held=(), contact=(), dt: float = 0.1) -> Trace:
    """The tool moves along x; target at x = 0.2, goal at x = 0.6, wall at x = 0.4."""
    n = len(ee_x)
    ee = np.stack([np.asarray(ee_x, float), np.zeros(n), np.full(n, 0.1)], 1)
    grip = np.zeros(n, bool)
    grip[list(held)] = True
    at = {"ee": ee, "obj.target": np.tile([0.2, 0, 0.1], (n, 1)), "goal.target": np.tile([0.6, 0, 0.1], (n, 1))}
    at["obj.target"] = np.where(grip[:, None], ee, at["obj.target"])
    touched = np.zeros(n, bool)
    touched[list(contact)] = True
    down = np.tile([0.0, 1.0, 0.0, 0.0], (n, 1))
    return Trace(
        time=(np.arange(n) + 1) * dt,
        points=at | {"obstacle.wall": np.tile([0.4, 0, 0.1], (n, 1))},
        held={"obj.target": grip},
        contact=touched,
        ee=np.concatenate([ee, down], 1),
        q=np.zeros((n, 2)),
        joint_range=np.array([[-1.0, 1.0], [-0.05, 2.0]]),
        wrench=np.zeros((n, 6)),
        action=np.zeros((n, 5)),
    )


TEXT = """
version: 1
objective: success
stages:
 - name: reach
   done: {near: [ee, obj.target, 0.05]}
   costs:
   - {type: path_length, tau: 0.15, weight: 2, scale: 0.1}
 - name: carry
   enter: {grasped: obj.target}
   done: {near: [obj.target, goal.target, 0.04]}
   unreached_penalty: 3
   costs:
   - {type: clearance, a: ee, b: "obstacle.*", dmin: 0.05, group: collision, tau: 0.01, weight: 5, scale: 0.1}
   - {type: contact_count, group: collision, tau: 0, weight: 1, scale: 4}
"""


def make_spec() -> Spec:
    return parse(TEXT, ENTITIES)
