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


def test_a_page_that_has_got_control_asks_for_it_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_stack.runtime.lease.LEASE_S", 1e6)  # who drives stays it, however busy the computer is

    async def wish(page, want):
        await page.send_str(json.dumps({"type": "lease", "want": want}))

    async def scenario():
        for taken_by in ("lease", "event"):
            async with Rig(tmp_path / taken_by) as rig:
                first, second = await rig.page(), await rig.page()
                you = (await heard(second, "hello"))["you"]
                await told(first, lambda s: s["lease"] == "free")
                await wish(first, "acquire")
                await told(first, lambda s: s["lease"] == "you")
                await wish(second, "acquire")
                await told(second, lambda s, you=you: s["asked"] == you)
                await first.close()
                await told(second, lambda s: s["lease"] == "free")
                if taken_by == "lease":
                    await wish(second, "acquire")
                else:
                    await second.send_str(json.dumps({"type": "event", "id": 1, "name": "start", "args": {}}))
                    assert (await heard(second, "ack"))["ok"]
                assert (await told(second, lambda s: s["lease"] == "you"))["asked"] is None
                await wish(second, "release")
                await told(second, lambda s: s["lease"] == "free")

    for name in ("lease", "event"):
        (tmp_path / name).mkdir()
    asyncio.run(scenario())
