"""The one key map of ``vla console``, ``vla teleop`` and ``vla imagine``: which key moves what, and which says what.

The pages read it as the script :func:`as_script`; terminals and the docs print it (:func:`help_line`,
:func:`as_markdown`). A key is written as a browser names it (``KeyboardEvent.key``) in lower case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from vla_stack.schema import RobotSpec


class Motion(NamedTuple):
    """What a held key moves.

    Attributes:
        axis: ``right``, ``away`` (from the operator), ``up``, ``turn``, ``pitch``, ``roll`` or ``grip``.
        sign: Direction along it; a positive turn is counter-clockwise from above, a positive grip opens.
        text: For people.
    """

    axis: str
    sign: int
    text: str


DEAD_MAN = " "
FINE = "shift"
REWIND = "r"
HELP = "?"
MOTIONS = {
    "arrowup": Motion("away", 1, "away from you"),
    "arrowdown": Motion("away", -1, "towards you"),
    "arrowleft": Motion("right", -1, "left"),
    "arrowright": Motion("right", 1, "right"),
    "q": Motion("up", 1, "up"),
    "a": Motion("up", -1, "down"),
    ",": Motion("turn", 1, "turn left"),
    ".": Motion("turn", -1, "turn right"),
    "e": Motion("grip", 1, "open the gripper"),
    "d": Motion("grip", -1, "close the gripper"),
    "w": Motion("pitch", 1, "pitch up"),
    "z": Motion("pitch", -1, "pitch down"),
    "o": Motion("roll", 1, "roll right"),
    "p": Motion("roll", -1, "roll left"),
}
COMMANDS = {  # name -> key, what people read
    "start": ("enter", "Start"),
    "takeover": ("t", "Take over"),
    "cancel": ("backspace", "False alarm"),
    "recovered": ("g", "Recovered"),
    "slip": ("l", "Slipped"),
    "subtask_done": ("c", "Sub-task done"),
    "hand_back": ("h", "Hand back"),
    "success": ("s", "Success"),
    "fail": ("f", "Fail"),
    "keep": ("k", "Keep"),
    "discard": ("x", "Discard"),
    "undo": ("u", "Undo"),
    "rearm": ("enter", "Re-arm"),
    "estop": ("escape", "STOP"),
}
NAMES = {
    **{DEAD_MAN: "Space", "enter": "Enter", "escape": "Esc", "backspace": "⌫", "shift": "Shift"},
    **{"arrowleft": "←", "arrowright": "→", "arrowup": "↑", "arrowdown": "↓"},
}
UNSHIFTED = {"Comma": ",", "Period": "."}  # place on the keyboard (KeyboardEvent.code) -> key that Shift renames
_SHOWN = {  # by verb
    "console": tuple(COMMANDS),
    "teleop": ("rearm", "success", "fail", "discard", "estop"),
    "imagine": ("start", "success", "fail"),
}
_IMAGINE = {"start": "next scene", "success": "it succeeded", "fail": "it did not"}


def name(key: str) -> str:
    """What is printed on a key."""
    return NAMES.get(key, key.upper())


def commands(verb: str) -> dict[str, tuple[str, str]]:
    """Commands that a verb takes: name -> key, what it does there."""
    other = _IMAGINE if verb == "imagine" else {}
    return {command: (COMMANDS[command][0], other.get(command, COMMANDS[command][1])) for command in _SHOWN[verb]}


def help_line(verb: str, without: Iterable[str] = ()) -> str:
    """One line of keys for ``console``, ``teleop`` or ``imagine``, ``without`` some axes."""
    moves = [f"{name(key)} {m.text}" for key, m in MOTIONS.items() if m.axis not in set(without)]
    return f"hold {name(DEAD_MAN)} and steer: {', '.join(moves)}; {events_line(verb)}"


def left_out(robot: RobotSpec) -> str:
    """Which dimensions no axis drives, to be added to a line for people; empty where none are left out."""
    names = [d.name for d, rate in zip(robot.action, robot.rate_mask, strict=True) if rate]
    return f"; {', '.join(names)} are not driven by hand and stay at zero" if names else ""


def events_line(verb: str) -> str:
    """The commands of a verb alone, as in :func:`help_line`."""
    return ", ".join(f"{name(key)} {text}" for key, text in commands(verb).values())


def as_script() -> str:
    """The map as a JavaScript module, for pages."""
    tree = {
        "MOTIONS": {key: list(motion) for key, motion in MOTIONS.items()},
        "COMMAND_KEYS": {command: list(pair) for command, pair in COMMANDS.items()},
        "NAMES": NAMES,
        "UNSHIFTED": UNSHIFTED,
        **{"DEADMAN_KEY": DEAD_MAN, "REWIND_KEY": REWIND, "FINE_KEY": FINE, "HELP_KEY": HELP},
        "IMAGINE": {command: list(pair) for command, pair in commands("imagine").items()},
    }
    return "".join(f"export const {k} = {json.dumps(v, ensure_ascii=False)};\n" for k, v in tree.items())


def as_markdown() -> str:
    """The map as a table, as ``docs/console.md`` shows it."""
    verbs = ("console", "teleop", "imagine")
    rows = [(DEAD_MAN, "hold it to drive", verbs), (FINE, "slowly", ("console",))]
    rows += [(key, m.text, verbs if m.axis not in ("pitch", "roll") else verbs[:2]) for key, m in MOTIONS.items()]
    rows += [(REWIND, "back along the way it came, while held", ("console",))]
    said = {(key, text) for verb in verbs for key, text in commands(verb).values()}
    order = {key: i for i, (key, _) in enumerate(COMMANDS.values())}
    for key, text in sorted(said, key=lambda pair: (order[pair[0]], pair[1])):
        rows.append((key, text, tuple(v for v in verbs if (key, text) in commands(v).values())))
    rows.append((HELP, "these keys", ("console", "imagine")))
    head = "| key | what it does | console | teleop | imagine |\n|---|---|---|---|---|\n"
    marks = (" | ".join("yes" if verb in where else "" for verb in verbs) for _, _, where in rows)
    return head + "".join(f"| {name(k)} | {t} | {m} |\n" for (k, t, _), m in zip(rows, marks, strict=True))
