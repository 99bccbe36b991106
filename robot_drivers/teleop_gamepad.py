"""A gamepad as a teleoperator, through SDL (pygame): no window, no display."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from robot_drivers.teleop import Axes
from vla_stack.errors import UserError

DEADZONE = 0.12
# SDL's standard layout (an Xbox controller)
LEFT_X, LEFT_Y, RIGHT_X, RIGHT_Y, LEFT_TRIGGER, RIGHT_TRIGGER = 0, 1, 3, 4, 2, 5
BUTTON_A, BUTTON_B, BUTTON_LEFT, BUTTON_START = 0, 1, 4, 7


class Gamepad:
    """The first, or ``index``-th, gamepad.

    Args:
        index: Which.
    """

    HELP = (
        "hold LB to move: left stick forward/left, right stick up and yaw, hat pitch and roll, triggers close/open; "
        "A success, B discards, Start end"
    )

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._pygame: Any = None
        self._pad: Any = None
        self._down: set[int] = set()

    def connect(self) -> None:
        """Open it.

        Raises:
            UserError: pygame or the gamepad is not there.
        """
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
        try:
            import pygame
        except ImportError as e:
            raise UserError("the gamepad needs the package 'pygame'", 'pip install "vla-stack[hardware]"') from e
        pygame.display.init()
        pygame.joystick.init()
        if self._index >= pygame.joystick.get_count():
            raise UserError(
                f"there is no gamepad {self._index}, {pygame.joystick.get_count()} are connected",
                "plug it in; on Linux your user must be able to read /dev/input/event*",
            )
        self._pygame, self._pad = pygame, pygame.joystick.Joystick(self._index)

    def axes(self) -> Axes:
        self._pygame.event.pump()
        pad = self._pad

        def stick(i: int) -> float:
            x = float(pad.get_axis(i))
            return 0.0 if abs(x) < DEADZONE else (x - np.sign(x) * DEADZONE) / (1 - DEADZONE)

        roll, pitch = pad.get_hat(0) if pad.get_numhats() else (0, 0)
        tool = np.array([-stick(LEFT_Y), -stick(LEFT_X), -stick(RIGHT_Y), roll, pitch, -stick(RIGHT_X)], np.float64)
        gripper = (float(pad.get_axis(LEFT_TRIGGER)) - float(pad.get_axis(RIGHT_TRIGGER))) / 2  # each -1 at rest
        pressed = {b for b in (BUTTON_A, BUTTON_B, BUTTON_START) if pad.get_button(b)}
        new, self._down = pressed - self._down, pressed
        names = {BUTTON_A: "success", BUTTON_B: "discard", BUTTON_START: "end"}
        event = next((names[b] for b in sorted(new)), "")
        return Axes(bool(pad.get_button(BUTTON_LEFT)), tool, gripper, event)

    def disconnect(self) -> None:
        if self._pygame is not None:
            self._pygame.joystick.quit()
            self._pygame = None
