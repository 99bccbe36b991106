"""The library: every thing can be taken hold of, and a scene of things is written, replayed and looked at exactly."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import sim
from sim import library, objects, slots
from sim.slots import GEOMS, Thing, grasp_of, slot_name

CUBES = (Thing("cube", "red"),) * 3
TABLETOP = "pick_any"


def make(**kwargs):
    return gym.make(sim.TASKS[TABLETOP].id, **{"cameras": (), **kwargs}).unwrapped


@pytest.fixture(scope="module")
def env():
    return make()


def show(env, thing, yaw=0.3):
    """The thing alone on the table, at rest."""
    env.reset(seed=0)
    env._slots.fill((thing, *CUBES))
    for i in range(env.count):
        objects.lay(env, slot_name(i), (0.46, 0.0) if i == 0 else (0.1, 0.4 + 0.1 * i), 0.0, yaw)
    mujoco.mj_forward(env.model, env.data)
    for _ in range(100):
        mujoco.mj_step(env.model, env.data)


def test_there_are_enough_things_and_some_are_held_out():
    assert len(library.SEEN) >= 30 and len(library.HELD_OUT) >= 6 and len(library.PALETTE) >= 8
    assert {k.category for k in library.KINDS.values()} == set(library.CATEGORIES)
    for kind in library.KINDS:
        out = [colour for colour in library.PALETTE if library.held_out_pair(kind, colour)]
        assert len(out) == 1
    pairs = [(k, c) for k in library.KINDS for c in library.PALETTE if library.held_out_pair(k, c)]
    assert {c for _, c in pairs} == set(library.PALETTE)


def test_colours_are_far_apart():
    rgb = np.array(list(library.PALETTE.values()))
    apart = np.linalg.norm(rgb[:, None] - rgb, axis=-1) + np.eye(len(rgb))
    assert apart.min() > 0.35


@pytest.mark.parametrize("kind", list(library.KINDS))
@pytest.mark.parametrize("scale", [1.0, 0.8])
def test_a_thing_stands_where_it_is_put(env, kind, scale):
    show(env, Thing(kind, "blue", scale=scale))
    body = env.data.body(slot_name(0))
    assert abs(body.xpos[2]) < 1e-3 and body.xmat[8] > 0.999
    assert np.hypot(*(body.xpos[:2] - (0.46, 0.0))) < 2e-3


@pytest.mark.parametrize("kind", list(library.KINDS))
def test_a_grasp_is_within_reach_of_the_gripper_and_turns_with_the_thing(env, kind):
    thing = Thing(kind, "blue")
    grips = []
    for yaw in (0.2, 0.2 + np.pi):
        show(env, thing, yaw)
        grips.append(grasp_of(env, slot_name(0), thing))
        grip, reach = grips[-1], env.arm.tool_range
        assert slots.LOWEST <= grip.position[2] and abs(grip.yaw) <= np.pi / 2 + 1e-9
        assert library.KINDS[kind].width / 1000 < 2 * env.arm.opened * grip.gripper
        assert thing.height - grip.position[2] < 0.049  # the palm
        assert (grip.position >= reach[0, :3]).all() and (grip.position <= reach[1, :3]).all()
    # After half a turn the same grasp serves, at the place that turned with the thing.
    assert abs(grips[0].yaw - grips[1].yaw) < 0.02
    if library.KINDS[kind].symmetry == 360:
        middle = np.array([0.46, 0.0])
        assert np.abs((grips[0].position[:2] - middle) + (grips[1].position[:2] - middle)).max() < 2e-3


def test_a_slot_is_the_thing_that_the_library_compiles(env):
    """Physics of a slot: mass, inertia and shape are those of a model that was compiled with the thing."""
    for kind in library.KINDS.values():
        env._slots.fill((Thing(kind.name, "red"), *CUBES))
        m, stock = env.model, slots._stock()
        slot, source = m.body(slot_name(0)).id, stock.body(kind.name).id
        assert m.body_mass[slot] == pytest.approx(kind.mass)
        ratio = m.body_mass[slot] / stock.body_mass[source]
        np.testing.assert_allclose(m.body_inertia[slot], stock.body_inertia[source] * ratio)
        np.testing.assert_allclose(m.body_subtreemass[slot], kind.mass)
        first, n = m.body_geomadr[slot], len(kind.parts)
        visible = np.arange(first, first + GEOMS)[m.geom_group[first : first + GEOMS] == 0]
        assert len(visible) == n and (m.geom_contype[first + n : first + GEOMS] == 0).all()


def test_small_things_are_small(env):
    env._slots.fill((Thing("mug", "red", scale=0.5), Thing("mug", "red"), *CUBES[:2]))
    m = env.model
    small, large = (m.body_geomadr[m.body(slot_name(i)).id] for i in (0, 1))
    np.testing.assert_allclose(m.geom_size[small] * 2, m.geom_size[large])
    masses = [m.body_mass[m.body(slot_name(i)).id] for i in (0, 1)]
    assert masses[0] * 8 == pytest.approx(masses[1])


def test_filling_leaves_no_trace_of_what_was_there_before():
    fresh, used = make(), make()
    for seed in range(5):
        used.reset(seed=seed)
    fresh.reset(seed=9), used.reset(seed=9)
    for name in (
        *("geom_type", "geom_size", "geom_pos", "geom_quat", "geom_rgba", "geom_matid", "geom_group", "geom_rbound"),
        *("geom_contype", "geom_conaffinity", "body_mass", "body_inertia", "body_ipos", "body_iquat", "bvh_aabb"),
        *("body_invweight0", "dof_invweight0"),
    ):
        rows = getattr(fresh.model, name), getattr(used.model, name)
        if name.startswith("geom_") and name not in ("geom_group", "geom_contype", "geom_conaffinity"):
            shown = fresh.model.geom_group != slots._HIDDEN
            rows = rows[0][shown], rows[1][shown]
        assert (rows[0] == rows[1]).all(), name


def test_every_thing_looks_unlike_every_other_at_64_px():
    env = make(cameras=("front",))
    pictures = []
    for kind in library.KINDS:
        show(env, Thing(kind, "red"))
        pictures.append(env._eyes.render(env.data, "front").astype(int))
    for i, one in enumerate(pictures):
        assert all((np.abs(one - other).max(axis=-1) > 25).sum() >= 4 for other in pictures[:i]), i


def test_the_expert_lifts_every_thing():
    """20 starts of each are counted by ``tools/bench/short_tasks.py``; here one of each."""
    env = gym.make(sim.TASKS[TABLETOP].id, cameras=())
    new = gym.make(sim.TASKS[TABLETOP].id, cameras=(), split="unseen-objects")
    failed = []
    for i, kind in enumerate(library.KINDS):
        one = new if library.KINDS[kind].held_out else env
        one.reset(seed=100 + i, options={"variant": {"object": kind}})
        expert, done = sim.make_expert(one), False
        while not done:
            _, _, terminated, truncated, info = one.step(expert.act())
            done = terminated or truncated
        failed += [] if info["is_success"] else [kind]
    assert failed == []
