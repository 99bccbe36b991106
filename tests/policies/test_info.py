"""``vla policy info`` on our policies and LeRobot's."""

import json

import pytest
from small_vla import make_config, make_policy, make_stats
from tiny_vlas import KINDS, make_vla, save_vla, tiny_pi

from vla_stack.cli import main
from vla_stack.policies.anatomy import parts
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors


def report(capsys, *arguments):
    assert main(["policy", "info", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_native_policy(saved, policy, capsys):
    r = report(capsys, saved, "--repeats", 2)
    assert r["type"] == "vla" and r["robot"]["name"] == "test/arm" and r["horizon"] == 8 and r["executed"] == 4
    assert r["euler_steps"] == 3 and r["relative_actions"]
    everything = sum(p.numel() for p in policy.parameters())
    assert r["parameters"]["total"] == r["parameters"]["trainable"] == everything
    assert sum(part["total"] for part in r["parameters"]["parts"]) == everything
    assert r["weights_bytes"] == {"float32": 4 * everything + 4 * sum(b.numel() for b in policy.buffers())}
    features = {f["key"]: f for f in (*r["inputs"], *r["outputs"])}
    assert features["observation.state"]["normalisation"] == "MEAN_STD"
    assert len(features["observation.state"]["statistics"]["mean"]) == 7
    assert features["observation.images.front"]["statistics"] == {}
    assert set(r["latency_ms"]) == {"chunk", "prefix", "velocity"} and min(r["latency_ms"].values()) > 0
    assert r["peak_bytes"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_lerobots_policies(kind, tmp_path, capsys):
    with tiny_pi(tmp_path):
        path = save_vla(make_vla(kind, tmp_path, train_expert_only=True), tmp_path / "policy")
        capsys.readouterr()
        r = report(capsys, path, "--repeats", 1)
    assert r["type"] == kind and r["horizon"] == 6 and r["euler_steps"] == 3
    assert 0 < r["parameters"]["trainable"] < r["parameters"]["total"]
    assert {"chunk", "prefix", "velocity"} == set(r["latency_ms"])
    by_part = {part["part"]: part for part in r["parameters"]["parts"]}
    assert any("expert" in name for name in by_part) and len(by_part) >= 4
    if kind == "pi05":
        assert set(r["outputs"][0]["statistics"]) == {"q01", "q99"}


@pytest.mark.parametrize(("head", "steps", "timed"), [("flow", 3, {"prefix", "velocity"}), ("regression", None, set())])
def test_mixture_of_horizons(head, steps, timed, tmp_path, capsys):
    policy = MohPolicy(MohConfig(base=make_config(head=head), horizons=(2, 8), device="cpu", push_to_hub=False))
    for part in (policy, *make_moh_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    capsys.readouterr()
    r = report(capsys, tmp_path, "--repeats", 1)
    assert r["type"] == "moh" and r["horizons"] == [2, 8] and r["euler_steps"] == steps
    assert set(r["latency_ms"]) == {"chunk"} | timed


def test_tables(saved, capsys):
    assert main(["policy", "info", str(saved), "--repeats", "0"]) == 0
    out = capsys.readouterr().out
    for text in (
        "test/arm, absolute actions at 10 Hz",
        "8 actions, 4 executed",
        "3 Euler steps",
        "MEAN_STD",
        "together",
    ):
        assert text in out
    assert "median" not in out


def test_mistakes_and_help(tmp_path, capsys):
    assert main(["policy", "info", str(tmp_path)]) == 1
    assert "holds no policy" in capsys.readouterr().err
    assert main(["policy", "info", "shipped", "--device", "cuda:77"]) == 1
    assert "vla policy: device 'cuda:77' is not available" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["policy", "--help"])
    assert "vla policy info shipped" in capsys.readouterr().out


def test_parts_are_disjoint():
    policy = make_policy()
    ids = [id(p) for _, part in parts(policy) for p in part.parameters()]
    assert len(ids) == len(set(ids))
