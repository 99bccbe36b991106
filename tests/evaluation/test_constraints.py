"""The constraint language: what is refused, how stages are told apart, what they cost, and that ours fit our tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from constraint_fakes import ENTITIES, TEXT, make_spec, make_trace

from vla_stack.errors import UserError
from vla_stack.evaluation.constraints import costs
from vla_stack.evaluation.constraints.dry_run import problems
from vla_stack.evaluation.constraints.picture import draw, explain
from vla_stack.evaluation.constraints.score import Weights, external, judge, segment, stage_costs
from vla_stack.evaluation.constraints.spec import PRESETS, Spec, load_spec, parse, schema
from vla_stack.evaluation.constraints.trace import Trace

CONFIGS = Path(__file__).parents[2] / "vla_stack" / "configs" / "constraints"
GOOD = make_trace(np.linspace(0.0, 0.6, 13), held=range(4, 13))


def test_stages_follow_each_other_and_never_go_back():
    spec = make_spec()
    at = segment(spec, GOOD)
    assert at.tolist() == [0, 0, 0, 0, *[1] * 8, 2] and (np.diff(at) >= 0).all()
    back = make_trace([0.0, 0.2, 0.0, 0.2, 0.0], held=[3])
    assert segment(spec, back).tolist() == [0, 0, 0, 1, 1]  # near at tick 1, but not held before tick 3
    both = make_trace([0.0, 0.6], held=[1])
    both.points["obj.target"][1] = [0.6, 0, 0.1]
    assert segment(spec, both).tolist() == [0, 2]  # two stages in one tick


def test_costs_are_the_excess_over_tau_by_weight_and_scale():
    reach, carry = stage_costs(make_spec(), GOOD)
    assert reach.cost == pytest.approx(2 * (0.2 - 0.15) / 0.1) and reach.ticks == 5
    near = np.abs(np.linspace(0.0, 0.6, 13)[5:] - 0.4)
    assert carry.cost == pytest.approx(5 * (np.maximum(0, 0.05 - near).sum() - 0.01) / 0.1)
    touching = stage_costs(make_spec(), make_trace(np.linspace(0.0, 0.6, 13), range(4, 13), [6, 7, 2]))
    assert touching[1].parts[1] == pytest.approx(2 / 4)  # tick 2 belongs to the first stage, which does not count them


def test_external_score_is_the_exponential_of_the_costs():
    """Test 10 of the specification, section 6."""
    spec = make_spec()
    found = stage_costs(spec, GOOD)
    assert external(found) == pytest.approx(np.exp(-sum(s.cost for s in found))) and 0 < external(found) <= 1
    free = Spec("success", tuple(type(s)(s.name, s.done, (), s.enter, s.unreached_penalty) for s in spec.stages))
    assert external(stage_costs(free, GOOD)) == 1.0
    more = [
        external(stage_costs(spec, make_trace(np.linspace(0, 0.6, 13), range(4, 13), range(5, 5 + n))))
        for n in range(6)
    ]
    assert all(a > b for a, b in zip(more, more[1:], strict=False))
    short = make_trace([0.0, 0.05], ())
    assert [s.reached for s in stage_costs(spec, short)] == [True, False]
    assert external(stage_costs(free, short)) == pytest.approx(np.exp(-3))
    assert external(stage_costs(free, short)) < external(stage_costs(free, GOOD))


def test_score_has_three_terms():
    j = judge(make_spec(), GOOD, True, -2.0, Weights(0.1, 3.0, 2.0))
    assert j.score == pytest.approx(0.1 * -2.0 + 3.0 * j.external + 2.0) and j.self == -2.0


def test_objectives_move_weights_and_thresholds_of_their_group():
    spec = make_spec()
    safe = spec.with_objective("safety")
    clearance, path = safe.stages[1].costs[0], safe.stages[0].costs[0]
    factor = PRESETS["safety"]
    assert clearance.weight == 5 * factor["collision"][0] and clearance.tau == 0.01 * factor["collision"][1]
    assert path.weight == pytest.approx(2 * factor["path"][0])
    hit = make_trace(np.linspace(0, 0.6, 13), range(4, 13), [6])
    lost = [stage_costs(s, hit)[1].cost - stage_costs(s, GOOD)[1].cost for s in (spec, safe)]
    assert lost[1] > lost[0]
    assert parse(safe.to_yaml(), ENTITIES) == safe
    with pytest.raises(UserError, match="no objective"):
        spec.with_objective("speed")


def test_an_objective_is_applied_once_and_can_be_taken_back():
    spec = make_spec()
    for objective in PRESETS:
        moved = spec.with_objective(objective)
        assert moved.with_objective(objective) == moved
    back = spec.with_objective("safety").with_objective("success")
    for stage, same in zip(spec.stages, back.stages, strict=True):
        for cost, again in zip(stage.costs, same.costs, strict=True):
            assert (again.tau, again.weight) == pytest.approx((cost.tau, cost.weight))
    with pytest.raises(UserError, match="thresholds of group 'path' are 0"):
        spec.with_objective("efficiency").with_objective("success")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: is 2"),
        ({"extra": 1}, 'unknown key "extra"'),
        ({"stages": []}, "list of 1 to 8"),
        ({"stages.0.costs.0.type": "__import__('os').system('x')"}, "costs.0..type"),
        ({"stages.0.costs.0.weight": float("nan")}, "weight: is NaN"),
        ({"stages.0.costs.0.weight": float("inf")}, "weight: is Infinity"),
        ({"stages.0.costs.0.weight": -1}, "weight: is -1"),
        ({"stages.0.costs.0.weight": True}, "weight: is true"),
        ({"stages.0.costs.0.weight": 1e9}, "to 10000"),
        ({"stages.0.costs.0.scale": 0}, "scale: is 0"),
        ({"stages.0.costs.0.a": "obj.bowl"}, "no entity 'obj.bowl'"),
        ({"stages.0.costs.0.a": "obj.*"}, "is a pattern"),
        ({"stages.1.costs.0.b": "wall.*"}, "no entity 'wall.*'"),
        ({"stages.0.costs.0.python": "exec('x')"}, 'unknown key "python"'),
        ({"stages.0.done": {"near": ["ee", "obj.target"]}}, "takes 3 values"),
        ({"stages.0.done": {}}, "names no condition"),
        ({"stages.0.name": "a b; rm"}, "name is letters"),
        ({"stages.1.name": "reach"}, "one name"),
        ({"objective": "harm"}, "choose one of"),
        ({"stages.0.costs": [{"type": "distance", "a": "ee"}]}, "'b' is missing"),
        ({"stages.0.costs": [{"type": "duration"} for _ in range(9)]}, "list of 1 to 8"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_with_its_place(change, message):
    tree = yaml.safe_load(TEXT)
    for path, value in change.items():
        *parents, leaf = path.split(".")
        node = tree
        for p in parents:
            node = node[int(p) if p.isdigit() else p]
        node[leaf] = value
    with pytest.raises(UserError, match=message):
        parse(yaml.safe_dump(tree), ENTITIES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: &x [1]\nb: *x", "anchors"),
        ("[" * 30_000, "nested"),
        ("- " * 15_000, "nested"),
        ("? " * 15_000, "nested"),
        ("x" * 40_000, "larger than"),
        ("just words", "expected keys"),
        ("stages: {", "not valid YAML"),
    ],
)
def test_hostile_text_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_the_dry_run_names_what_is_wrong():
    lost = make_trace(np.zeros(8) + 0.01 * np.arange(8))
    assert problems(make_spec(), [GOOD, lost], [True, False]) == []
    assert problems(make_spec(), [lost, GOOD], [False, False]) == [
        "no recorded episode succeeds, so nothing can be said about the stages"
    ]
    assert problems(make_spec(), [lost, GOOD], [True, False])[0] == "stage 'carry': no successful episode reaches it"
    hit = make_trace(np.linspace(0, 0.6, 13), range(4, 13), range(5, 9))
    assert "failures score more" in problems(make_spec(), [hit, GOOD], [True, False])[0]
    flat = parse(TEXT.replace("type: path_length", "type: grasped, obj: goal.target"), ENTITIES)
    with pytest.raises(UserError, match="does not have it"):
        problems(flat, [GOOD], [True])
    still = parse(TEXT.replace("type: path_length", "type: tilt"), ENTITIES)
    assert "ranks nothing" in problems(still, [GOOD], [True])[0]


def test_costs_of_ticks_have_their_units():
    t = make_trace([0.0, 0.1, 0.3, 0.6], contact=[1])
    assert costs.path_length(t).tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert costs.speed_max(t).max() == pytest.approx(3.0) and costs.duration(t).sum() == pytest.approx(0.4)
    assert costs.steps_to(t, "ee", "goal.target", 0.25).tolist() == [2, 2, 1, 0]
    assert costs.clearance(t, "ee", "obstacle.*", 0.15).tolist() == pytest.approx([0, 0, 0.05, 0])
    assert costs.tilt(t).max() == pytest.approx(0.0) and costs.joint_margin(t, 0.1).tolist() == pytest.approx(
        [0.05] * 4
    )
    box = dict(x0=0.05, x1=0.35, y0=-1, y1=1, z0=0, z1=1)
    assert costs.keepout_box(t, "ee", **box).tolist() == pytest.approx([0, 0.05, 0.05, 0])
    assert costs.height_range(t, "ee", 0.15, 1.0).tolist() == pytest.approx([0.05] * 4)
    assert costs.jerk(t)[3] == pytest.approx(0.0, abs=1e-9) and costs.contact_count(t).tolist() == [0, 1, 0, 0]


def test_a_person_s_own_costs_come_from_a_file_that_they_name(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from vla_stack.evaluation.constraints.costs import Entity, register_cost\n"
        "@register_cost\ndef own_height(trace, a: 'Entity', least: 'float' = 0.0):\n"
        "    return trace.points[a][:, 2] - least\n"
    )
    costs.load_costs(file)
    try:
        spec = parse(TEXT.replace("type: path_length", "type: own_height, a: ee, least: 0.05, reduce: max"), ENTITIES)
        assert stage_costs(spec, GOOD)[0].parts == (0.0,)
    finally:
        del costs.cost_types()["own_height"]


def test_traces_are_arrays_and_back():
    again = Trace.from_arrays(GOOD.to_arrays())
    assert again.points.keys() == GOOD.points.keys() and np.array_equal(
        again.held["obj.target"], GOOD.held["obj.target"]
    )
    assert stage_costs(make_spec(), again) == stage_costs(make_spec(), GOOD)


def test_an_explanation_shows_every_cost():
    spec = make_spec()
    text, svg = explain(spec, GOOD), draw(spec, GOOD, "title")
    assert "clearance(ee, obstacle.*, 0.05)" in text and "R_ext" in text
    assert svg.startswith("<?xml") and svg.count('<g id="axes_') == 3


def test_the_schema_for_models_names_types_and_entities():
    s = schema(ENTITIES)
    kinds = s["properties"]["stages"]["items"]["properties"]["costs"]["items"]["anyOf"]
    assert {k["properties"]["type"]["const"] for k in kinds} == set(costs.cost_types())
    assert all(k["additionalProperties"] is False for k in kinds)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_constraints_are_valid_under_every_objective(path):
    spec = load_spec(path)
    for objective in PRESETS:
        assert parse(spec.with_objective(objective).to_yaml()).stages[0].name
