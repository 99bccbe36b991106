"""An operator made of a script, for the control loop under the virtual clock."""

import numpy as np
from runtime_fakes import DT_NS, FakeDriver, FakePort, make_executor

from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.control import ControlLoop
from vla_stack.runtime.operator_lane import OperatorLane
from vla_stack.runtime.rewind import Rewinder
from vla_stack.runtime.safety import SafetyEnvelope


class ScriptedConsole:
    """``script(k)`` gives what arrives before tick k: names of events, and dicts, the hand (``age_s`` of it)."""

    def __init__(self, clock, script) -> None:
        self.clock, self.script, self.k = clock, script, -1
        self.replies: dict[str, dict] = {}
        self.states: list[dict] = []

    def receive(self):
        self.k += 1
        messages = []
        for item in self.script(self.k):
            if isinstance(item, dict):
                sent = self.clock.now_ns() - round(1e9 * item.get("age_s", 0.0))
                hand = {"engaged": False, "rewind": False, "velocity": None, "target": None, **item}
                messages.append({"kind": "teleop", "t_ns": sent, **hand})
            elif item in ("estop", "lost"):
                messages.append({"kind": item})
            else:
                stops = self.states[-1]["stops"] if self.states else 0
                messages.append({"kind": "event", "id": f"{item}@{self.k}", "name": item, "stops": stops})
        return messages

    def post(self, kind, **fields):
        if kind == "reply":
            self.replies[fields.pop("id")] = fields
        else:
            self.states.append(fields)
        return True

    def phases(self) -> list[str]:
        return [s["phase"] for s in self.states]


class Rig:
    """A control loop with an operator; ``run(mode, ticks)`` plays the script."""

    def __init__(self, script, driver=None, familiar=None, policy=True, **port) -> None:
        self.clock = VirtualClock(start_ns=7)
        self.driver = driver(self.clock) if driver else FakeDriver(self.clock)
        self.port = FakePort(self.clock, DT_NS // 2, **port)
        self.console = ScriptedConsole(self.clock, script)
        self.rewinder = Rewinder(self.driver.spec, familiar=familiar)
        self.lane = OperatorLane(self.driver.spec, self.console, self.rewinder)
        executor = make_executor() if policy else None
        envelope = SafetyEnvelope(self.driver.spec)
        self.loop = ControlLoop(self.driver, executor, envelope, self.clock, self.port, self.lane)

    def run(self, mode="rac", ticks=60, max_ticks=None):
        script = self.console.script
        self.console.script = lambda k: script(k) if k < ticks else []
        self.port.orders.append((ticks, "abort"))
        self.lane.begin(mode, max_ticks)
        log = self.loop.run(seed=0)
        self.sent = np.array(log.actions)
        return log


def hand(**fields):
    return {"engaged": True, "velocity": [1.0, 0.0], **fields}


RELEASED = {"engaged": False}
