"""A robot that is no longer driven holds, its torque on; letting it go is a person's wish, said twice."""

from __future__ import annotations

import argparse
import sys
import time

from vla_stack.runtime.driver import Releasing
from vla_stack.verbs.robot_arguments import capabilities, driver_maker

OFFER_S, COUNTDOWN_S = 5, 3


def leave_holding(args: argparse.Namespace, interrupted: bool) -> None:
    """Say that the robot holds; after a Ctrl-C offer to let it go: once more, and a countdown that a third one ends.

    Called when nothing drives the robot any more.
    """
    if not capabilities(args).releases:
        return
    print("the robot holds where it is, its torque on; `vla robot release` with the same arguments lets it go")
    if not (interrupted and sys.stdin is not None and sys.stdin.isatty()):
        return
    print(f"Ctrl-C within {OFFER_S} s lets it go now", flush=True)
    try:
        time.sleep(OFFER_S)
        return
    except KeyboardInterrupt:
        pass
    try:
        for left in range(COUNTDOWN_S, 0, -1):
            print(f"\ntorque off in {left} s: put a hand under it; Ctrl-C keeps it on", end="", flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        print("\nit keeps its torque")
        return
    driver = driver_maker(args)()
    if isinstance(driver, Releasing):
        driver.release()
        print("\nits torque is off")
