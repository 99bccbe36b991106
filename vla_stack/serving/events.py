"""What was served to whom: one JSON object a line, for audits and for machines that read logs.

Every line has ``t`` (UTC, for people), ``mono_ns`` (this computer's monotonic clock, for differences) and ``event``;
lines about a robot have the first eight characters of its session's id, which is a secret as a whole. A ``chunk`` line
names the weights that moved the robot.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError

MAX_BYTES, KEPT_FILES = 64 << 20, 4  # of one file; older ones are renamed .1 to .4, then deleted


class EventLog:
    """Appends events to a file. Safe from any thread; a full disk costs lines, not the service.

    Args:
        path: JSON lines; None writes nothing.

    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._logger: logging.Logger | None = None
        if path is None:
            return
        try:
            handler = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
        except OSError as e:
            raise UserError(f"cannot write the log {path}: {e.strerror}", "choose another file with --log") from None
        self._logger = logging.Logger("events")  # of its own: nobody's configuration of logging reaches it
        self._logger.addHandler(handler)

    def write(self, event: str, session: str = "", **fields: Any) -> None:
        """Append one line; values must be JSON."""
        if self._logger is None:
            return
        line: dict[str, Any] = {"t": datetime.now(UTC).isoformat(), "mono_ns": time.monotonic_ns(), "event": event}
        if session:
            line["session"] = session[:8]
        self._logger.info(json.dumps(line | fields))

    def close(self) -> None:
        """Close the file; later events are lost."""
        if self._logger is not None:
            for handler in self._logger.handlers:
                handler.close()
            self._logger = None
