"""What touches what in a simulated world."""

from __future__ import annotations

from collections.abc import Iterable

import mujoco


def touching(model: mujoco.MjModel, data: mujoco.MjData, name: str, others: Iterable[int]) -> set[int]:
    """Which of the geoms ``others`` touch a body now, or a geom that is named unlike any body."""
    try:
        body = model.body(name)
        own = set(range(int(body.geomadr[0]), int(body.geomadr[0] + body.geomnum[0])))
    except KeyError:
        own = {int(model.geom(name).id)}
    hit: set[int] = set()
    for one, two in data.contact.geom.tolist():
        if one in own:
            hit.add(two)
        if two in own:
            hit.add(one)
    return hit & set(others)
