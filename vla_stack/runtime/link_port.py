"""The control loop's port over a pipe and shared memory to the node; the forms in which requests and chunks pass."""

from __future__ import annotations

import numpy as np

from vla_stack.runtime.dispatch import Help, Request, State
from vla_stack.runtime.episode_log import Row
from vla_stack.runtime.link import Link, Message, ObservationSlots
from vla_stack.schema import ActionChunk, Observation

ROW_ARRAYS = ("state", "action", "joint_command")


class LinkPort:
    """A :class:`Port` over a :class:`~vla_stack.runtime.link.Link` to the node.

    Args:
        link: To the node.
        slots: The node's, for observations.
    """

    def __init__(self, link: Link, slots: ObservationSlots) -> None:
        self._link, self._slots = link, slots
        self.film = False  # whether observations without a request are passed on too
        self.recording = False  # whether rows are
        self._offered, self._gap = -1, 0  # the last step that the node has; rows lost since the last one that it has

    def offer(self, obs: Observation, request: Request | None) -> None:
        if request is None and not (self.film and self._slots.spare > 1):  # the last slot is for requests
            return
        plan = request.continuation if request else None
        obs = obs.expecting(request.state) if request else obs
        if (note := self._slots.put(obs, plan.actions if plan else None)) is None:
            return  # the node is busy; an executor asks again
        if self._link.post("observation", **note, request=request and request_fields(request)):
            self._offered = obs.step
        else:
            self._slots.free(note["slot"])

    def record(self, row: Row) -> None:
        if not self.recording:
            return
        fields = {name: None if (a := getattr(row, name)) is None else a.tobytes() for name in ROW_ARRAYS}
        labels = {**row.labels, "gap": self._gap}
        sent = self._offered == row.step and self._link.post(
            "frame", step=row.step, t_ns=row.t_ns, labels=labels, **fields
        )
        self._gap = 0 if sent else self._gap + 1

    def receive(self, timeout_s: float = 0.0) -> list[ActionChunk | Help | str]:
        items: list[ActionChunk | Help | str] = []
        for message in self._link.receive(timeout_s):
            if message["kind"] == "free":
                self._slots.free(message["slot"])
            elif message["kind"] == "help":
                items.append(Help(message["why"]))
            else:
                items.append(read_chunk(message) if message["kind"] == "chunk" else message["kind"])
        return items

    def announce(self, k: int, state: State, why: str) -> None:
        self._link.post("state", tick=k, state=state.value, why=why)


def request_fields(request: Request) -> Message:
    """A request as a message; its plan and its state travel with the observation."""
    fields = {name: getattr(request, name) for name in ("rid", "epoch", "origin", "seed")}
    fields["patience"] = request.deadline - request.k_obs
    if (c := request.continuation) is None:
        return {**fields, "continuation": None}
    return {
        **fields,
        "continuation": {"mode": c.mode, "length": len(c.actions), "delay": c.delay, "execute": c.execute},
    }


def chunk_fields(chunk: ActionChunk) -> Message:
    """A chunk as a message's fields."""
    names = ("origin", "k_obs", "rid", "epoch", "d_cond", "model_version", "execute")
    fields = {name: getattr(chunk, name) for name in names}
    return {**fields, "actions": chunk.actions.tobytes(), "shape": list(chunk.actions.shape)}


def read_chunk(message: Message) -> ActionChunk:
    """Inverse of :func:`chunk_fields`."""
    fields = {k: v for k, v in message.items() if k not in ("kind", "shape")}
    actions = np.frombuffer(fields.pop("actions"), np.float32).reshape(message["shape"])
    return ActionChunk(actions, **fields)
