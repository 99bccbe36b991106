"""A figure is stale exactly when what it was made of has changed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Measured before results had to be of a revision, and not measured again yet: this may only become shorter.
DIRTY = {
    *("base_gpu", "expo", "external", "horizons_layout", "mixture_of_horizons", "rac"),
    *("rac_images", "world_gpu", "world_model", "wsrl"),
}
REGISTRY = """
BUILT_IN: dict[str, dict[str, str]] = {
    "policies": {"vla": "vla_stack.policies.vla:Vla", "flow": "vla_stack.policies.flow:Flow"},
    "tasks": {"pick": "sim.pick:Pick", "push": "sim.push:Push"},
    "robots": {"arm": "vla_stack.robots.arm:Arm"},
    "costs": {name: f"vla_stack.costs:{name}" for name in ("a", "b")},
}
"""
FILES = {
    "vla_stack/__init__.py": "__all__ = ['drive']\n\ndef __getattr__(name):\n    from vla_stack import api\n",
    "vla_stack/api.py": "",
    "vla_stack/registry.py": REGISTRY,
    "vla_stack/policies/__init__.py": "",
    "vla_stack/policies/vla.py": "from . import blocks\n",
    "vla_stack/policies/flow.py": "X = 1\n",
    "vla_stack/policies/blocks.py": "X = 1\n",
    "vla_stack/policies/loading.py": "from vla_stack.registry import POLICIES\n",
    "vla_stack/costs.py": "",
    "vla_stack/robots/__init__.py": "from vla_stack.registry import ROBOTS\n\ndef make_robot(): ...\n",
    "vla_stack/robots/service.py": "X = 1\n",
    "vla_stack/robots/arm.py": "X = 1\n",
    "vla_stack/evaluate.py": "def f():\n    import vla_stack.policies.loading\n    from .registry import TASKS\n",
    "vla_stack/shipped.py": "NAME = 'shipped_one'\n",
    "vla_stack/assets/policies/shipped_one/config.json": '{"type": "vla"}',
    "vla_stack/assets/policies/shipped_one/model.safetensors": "weights",
    "sim/__init__.py": "",
    "sim/pick.py": "XML = 'arm.xml'\n",
    "sim/push.py": "",
    "sim/arm.xml": "<mujoco/>",
    "tools/results.py": "",
    "tools/bench/helper.py": "",
    "tools/bench/shipped.py": (
        "import helper\nfrom vla_stack.evaluate import f\nfrom vla_stack import shipped\nTASK = 'sim/pick-v0'\n"
    ),
    "tools/bench/pushing.py": "from vla_stack.evaluate import f\nA = ('flow', 'push')\n",
    "tools/bench/any.py": "from vla_stack.policies import loading\n",
    "tools/bench/whole.py": "import vla_stack as vla\n",
    "tools/bench/serving.py": "from vla_stack.robots import service\nfrom vla_stack.robots.service import X\n",
    "tools/bench/moving.py": "from vla_stack.robots import make_robot\n",
    "tools/bench/driving.py": "from vla_stack import drive\n",
    "tools/bench/costing.py": "from vla_stack import costs\nfrom results import write\n",
}


def run(root, *arguments):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True)


@pytest.fixture
def freshness(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import freshness

    return freshness


@pytest.fixture
def tree(tmp_path, freshness):
    """A small project with a result file of each script."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    run(tmp_path, "init", "-q")
    run(tmp_path, "add", "-A")
    run(tmp_path, "commit", "-qm", "all")
    results = tmp_path / "results"
    results.mkdir()
    for script in tmp_path.glob("tools/bench/*.py"):
        if script.stem != "helper":
            measure(freshness, tmp_path, script.stem)
    return tmp_path


def measure(freshness, root, name, *flags):
    path = root / f"results/{name}.json"
    script = f"tools/bench/{name}.py"
    of = freshness.sources(script, path, bool(flags), root=root)
    record = {"command": f"python {script}", "revision": freshness.revision(of, root), "sources": of}
    path.write_text(json.dumps(record))
    return record


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("vla_stack/policies/vla.py", {"shipped", "any"}),
        ("vla_stack/policies/blocks.py", {"shipped", "any"}),  # by a relative import of a policy found by name
        ("vla_stack/policies/flow.py", {"pushing", "any"}),
        ("vla_stack/assets/policies/shipped_one/model.safetensors", {"shipped"}),
        ("sim/pick.py", {"shipped"}),
        ("sim/arm.xml", {"shipped"}),
        ("sim/push.py", {"pushing"}),
        ("vla_stack/costs.py", {"costing"}),
        ("vla_stack/robots/arm.py", {"moving"}),  # a module of the package is no robot that the package may make
        ("vla_stack/api.py", {"whole", "driving"}),  # imported where it is asked for, not with the package
        ("tools/bench/helper.py", {"shipped"}),
        ("vla_stack/registry.py", set()),  # a table, whose entries are counted where they are used
        ("tools/results.py", set()),  # writes figures down, computes none
        ("vla_stack/__init__.py", {"shipped", "pushing", "any", "costing", "whole", "driving", "serving", "moving"}),
    ],
)
def test_a_changed_line_makes_exactly_its_figures_stale(tree, freshness, changed, stale):
    assert freshness.stale(tree / "results", tree) == {}
    line = "print()\n" if changed.endswith(".py") else "\n"
    (tree / changed).write_text((tree / changed).read_text() + line)
    found = freshness.stale(tree / "results", tree)
    assert set(found) == stale and all(why == [changed] for why in found.values())


LIBRARY = """
from functools import cache
from os.path import join as put

LIMIT = 3
UNUSED = 4

def used(a: int) -> int:
    '''Text.'''
    return helper(a) + LIMIT

def helper(a):
    return put(a)

def unused():
    return helper(UNUSED)

@cache
class Found:
    size: int = 0

    def called(self):
        return other()

def other(): ...

@table("name")
def entered(): ...
"""


@pytest.mark.parametrize(
    ("before", "after", "matters"),
    [
        ("'''Text.'''", "'''Other text.'''", False),
        ("LIMIT = 3", "# why\nLIMIT = 3", False),
        ("a: int", "a: float", False),
        ("LIMIT = 3", "LIMIT = 4", True),
        ("UNUSED = 4", "UNUSED = 5", False),
        ("helper(UNUSED)", "used(UNUSED)", False),
        ("return put(a)", "return put(a, a)", True),  # of what is called by what is called
        ("join as put", "split as put", True),
        ("import cache", "import lru_cache as cache", True),
        ("size: int", "size: float", True),  # its fields are read by their annotations
        ("return other()", "return None", True),  # found by a word of a string; others may call all its methods
        ("def other(): ...", "", True),
        ("def other(): ...", "def other(): ...\n\ndef new(): ...", False),
        ("def entered(): ...", "def entered(): pass", True),
        ("def unused", "print()\n\ndef unused", True),  # runs with the import
    ],
)
def test_only_what_the_script_may_come_to_counts(tree, freshness, before, after, matters):
    library = tree / "vla_stack/library.py"
    library.write_text(LIBRARY)
    (tree / "tools/bench/calling.py").write_text("from vla_stack.library import used\nused(getattr(1, 'Found'))\n")
    run(tree, "add", "-A")
    run(tree, "commit", "-qm", "a library")
    measure(freshness, tree, "calling")
    assert before in LIBRARY and freshness.stale(tree / "results", tree) == {}
    library.write_text(LIBRARY.replace(before, after))
    assert freshness.stale(tree / "results", tree) == ({"calling": ["vla_stack/library.py"]} if matters else {})


def test_a_content_that_no_revision_has_counts_as_changed(tree, freshness):
    (tree / "sim/pick.py").write_text("XML = 'other.xml'\n")
    measure(freshness, tree, "shipped")
    (tree / "sim/pick.py").write_text("XML = 'other.xml'  # a comment\n")
    assert freshness.changed(
        json.loads((tree / "results/shipped.json").read_text()) | {"revision": "a"}, freshness.Tree(tree)
    ) == ["sim/pick.py"]


def test_verbs_count_where_the_command_line_is_run(tree, freshness):
    table = REGISTRY.replace(
        '"costs"', '"verbs": {"go": "vla_stack.go:VERB", "stay": "vla_stack.stay:VERB"},\n    "costs"'
    )
    for name, text in {
        "vla_stack/registry.py": table,
        "vla_stack/go.py": "from .registry import POLICIES\n",
        "vla_stack/stay.py": "",
        "vla_stack/cli.py": "from vla_stack.registry import VERBS\n",
        "tools/bench/calling.py": "import vla_stack.registry\nWORDS = 'python', '-m', 'vla_stack.cli', 'go'",
        "tools/bench/speaking.py": "from vla_stack.registry import POLICIES\nWORDS = 'go', 'vla'\n",
    }.items():
        (tree / name).write_text(text)
    calling, speaking = (
        freshness.closure(freshness.Tree(tree), f"tools/bench/{name}.py") for name in ("calling", "speaking")
    )
    assert "vla_stack/go.py" in calling and "vla_stack/stay.py" not in calling
    assert "vla_stack/go.py" not in speaking
    run(tree, "add", "-A")
    run(tree, "commit", "-qm", "verbs")
    measure(freshness, tree, "calling")
    (tree / "vla_stack/go.py").write_text("from .registry import POLICIES\n\ndef add_arguments(parser): ...\n")
    assert freshness.stale(tree / "results", tree)["calling"] == ["vla_stack/go.py"]  # nobody writes its names


def test_what_a_file_holds_is_taken_over_while_nothing_of_it_has_changed(tree, freshness, monkeypatch):
    path = tree / "results" / "shipped.json"
    record = json.loads(path.read_text()) | {"data": {"rows": [1]}}
    path.write_text(json.dumps(record))
    assert freshness.still_true(path, tree) == {"rows": [1]}
    assert freshness.still_true(tree / "results" / "none.json", tree) == {}
    monkeypatch.setenv(freshness.ANEW, "1")
    assert freshness.still_true(path, tree) == {}
    monkeypatch.delenv(freshness.ANEW)
    (tree / "sim" / "pick.py").write_text("print()\n")
    assert freshness.still_true(path, tree) == {}


def test_older_files_are_held_against_their_revision(tree, freshness):
    path = tree / "results/shipped.json"
    record = json.loads(path.read_text())
    del record["sources"]
    path.write_text(json.dumps(record))
    assert freshness.stale(tree / "results", tree) == {}
    (tree / "sim/pick.py").write_text("")
    run(tree, "commit", "-qam", "another arm")
    assert freshness.stale(tree / "results", tree)["shipped"] == ["sim/pick.py"]
    for revision, word in (("0123456789ab", "does not hold"), (f"{record['revision']}+", "uncommitted")):
        path.write_text(json.dumps(record | {"revision": revision}))
        assert word in freshness.stale(tree / "results", tree)["shipped"][0]


def test_a_revision_is_dirty_by_its_own_sources_alone(tree, freshness):
    (tree / "sim/push.py").write_text("X = 2\n")
    assert not measure(freshness, tree, "shipped")["revision"].endswith("+")
    assert measure(freshness, tree, "pushing")["revision"].endswith("+")
    assert freshness.dirty(tree / "results") == {"pushing"}


def test_a_report_of_what_was_measured_before_is_not_fresh(tree, freshness):
    (tree / "sim/pick.py").write_text("X = 2\n")
    (tree / "tools/bench/helper.py").write_text("X = 2\n")
    measure(freshness, tree, "shipped", "--report")
    assert freshness.stale(tree / "results", tree)["shipped"] == ["sim/pick.py"]
    path = tree / "results/shipped.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured": "0123456789ab+"}))
    assert freshness.dirty(tree / "results") >= {"shipped"}
    assert "uncommitted" in freshness.stale(tree / "results", tree)["shipped"][0]


def test_a_figure_is_measured_again_by_its_own_command(tree, freshness):
    script = tree / "script.py"
    script.write_text("import os, sys; open('seen', 'w').write(' '.join(sys.argv[1:]) + os.environ['REPRODUCE_ANEW'])")
    record = tree / "one.json"
    record.write_text(json.dumps({"command": "python script.py --seeds 3 --report"}))
    assert freshness.rerun(record, tree) == 0
    assert (tree / "seen").read_text() == "--seeds 31"
    script.write_text(script.read_text() + "; print('--out')")  # its help
    assert freshness.rerun(record, tree) == 0  # not with what lies in its usual folder, which may be of other code
    assert re.fullmatch(r"--seeds 3 --out outputs/reproduce/one-[0-9a-f]{10}1", (tree / "seen").read_text())
    record.write_text(json.dumps({"command": "python script.py --stock …/elsewhere"}))
    assert freshness.rerun(record, tree) == 1


def test_nothing_to_report_leaves_what_was_published(tmp_path, monkeypatch, freshness):
    import results

    (tmp_path / "one.json").write_text("published")
    monkeypatch.setattr(sys, "argv", ["one.py", "--report"])
    with pytest.raises(SystemExit, match="nothing to report yet"):
        results.write("one", [], {}, seeds=[], path=tmp_path / "one.json")
    assert (tmp_path / "one.json").read_text() == "published"


def test_what_was_published_is_no_measurement_of_today(monkeypatch, freshness):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "reproduce"))
    import claims

    assert claims.published_before("rl_ray")[1]
    monkeypatch.setenv("REPRODUCE_ANEW", "1")
    assert claims.published_before("rl_ray") == (None, [])


def test_of_this_tree_a_figure_names_its_policy_task_and_weights(freshness):
    now = freshness.Tree()
    shipped = freshness.closure(now, "tools/reproduce/shipped.py")
    assert {"vla_stack/policies/modeling_vla.py", "sim/tasks/pick.py", "sim/assets/arm7.xml"} <= shipped.keys()
    assert any(path.endswith("native_multitask/model.safetensors") for path in shipped)
    assert not {"vla_stack/policies/modeling_expo.py", "sim/tasks/drawer.py"} & shipped.keys()
    envelope = freshness.closure(now, "tools/bench/envelope.py")
    assert "vla_stack/runtime/safety.py" in envelope and "vla_stack/policies/modeling_vla.py" not in envelope


def test_result_files_are_of_a_revision(freshness):
    assert freshness.dirty(ROOT / "docs/results") <= DIRTY


def test_an_interval_contains_its_figure():
    """Of result files that say what their intervals are over: those before that had some of another construction."""
    for path in (ROOT / "docs/results").glob("*.json"):
        for check in json.loads(path.read_text())["checks"]:
            if check.get("over") and check["interval"]:
                low, high = check["interval"]
                assert low <= check["value"] <= high, (path.name, check["name"])


def test_a_result_records_what_it_is_made_of(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import results
    from vla_stack.statistics import success_interval

    monkeypatch.setattr(sys, "argv", [str(ROOT / "tools/bench/envelope.py")])
    checks = [results.Check("success", 0.0, 0.5, "<=", success_interval(0, 40))]
    record = json.loads(results.write("one", checks, {}, path=tmp_path / "one.json").read_text())
    assert "vla_stack/runtime/safety.py" in record["sources"] and "tools/bench/envelope.py" in record["sources"]
    assert record["checks"][0]["over"] == "starts" and record["checks"][0]["interval"][0] == 0.0
    monkeypatch.setattr(sys, "argv", [str(ROOT / "tools/bench/envelope.py"), "--report"])
    for anew in ("", "1"):  # what is there is of before, but where nothing of before is taken over
        monkeypatch.setenv("REPRODUCE_ANEW", anew)
        again = json.loads(results.write("one", checks, {}, path=tmp_path / "one.json").read_text())
        assert ("measured" in again) is not bool(anew)
