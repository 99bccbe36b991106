"""Kill -9 recordings and trainings at random moments: nothing committed is lost, and everything continues.

python tools/bench/crash.py [kills of each kind]
"""

from __future__ import annotations

from typing import Any

from crash_recording import recording
from crash_training import training

from results import Check, parser, write


def main(kills: int) -> None:
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for name, attack in (("recording", recording), ("training", training)):
        more, data[name] = attack(kills)
        checks += more
        write("crash", checks, data, seeds=[0])


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("kills", type=int, nargs="?", default=60, help="of each kind (default: %(default)s)")
    main(p.parse_args().kills)
