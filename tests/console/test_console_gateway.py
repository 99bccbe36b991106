"""What the gateway tells pages, and which of them it speaks for."""

import asyncio
import json

from console_rig import PATIENCE_S, Rig, heard


async def told(page, condition):
    """The next state for which a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(state := await heard(page, "state")):
            pass
        return state


def test_a_robot_whose_reading_is_not_finite_is_shown_all_the_same(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            page = await rig.page()
            rig.control.send("state", tick=3, phase="estop", why="safety", state=[0.1, float("nan"), 0.0])
            assert (await told(page, lambda s: s["phase"] == "estop"))["state"] == [0.1, None, 0.0]

    asyncio.run(scenario())
