"""Kill -9 recordings and trainings at random moments: nothing committed is lost, and everything continues.

python tools/bench/crash.py [kills of each kind]
"""

from __future__ import annotations

import sys

from crash_recording import recording
from crash_training import training

from results import write


def main(kills: int) -> None:
    recording_checks, recording_data = recording(kills)
    training_checks, training_data = training(kills)
    data = {"recording": recording_data, "training": training_data}
    write("crash", [*recording_checks, *training_checks], data, seeds=[0])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
