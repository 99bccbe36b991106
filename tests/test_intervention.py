"""Invariants of the intervention machine over random event sequences: exact tests 1 to 3 of the protocol."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_stack.intervention import EVENTS, MODES, Control, Intervention, Phase, Refused

HUMAN = (Phase.RECOVERY, Phase.CORRECTION)
sequences = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), max_size=80)


def play(mode, events, per_event=None):
    """Apply events, each followed by some ticks; returns the machine, the frames' labels and the phases seen."""
    machine, frames, phases = Intervention(mode), [], [Phase.RESET]
    for tick, (event, ticks) in enumerate([("start", 1), *events]):
        before = (machine.phase, machine.resumes, machine.segment_index, machine.control_source, machine.intervened)
        try:
            machine.apply(event, tick)
        except Refused:
            after = (machine.phase, machine.resumes, machine.segment_index, machine.control_source, machine.intervened)
            assert before == after
        phases.append(machine.phase)
        if per_event:
            per_event(machine)
        frames += [machine.labels(tick) for _ in range(ticks) if machine.recording]
    return machine, frames, phases


def types(frames):
    return "".join(str(f["segment_type"]) for f in frames)


@given(sequences)
def test_in_rac_the_policy_never_acts_again_after_the_first_human_motion(events):
    def check(machine):
        assert not (machine.intervened and (machine.policy_may_act or machine.resumes is Phase.AUTO))

    play("rac", events, check)


def test_hg_dagger_has_one_edge_more():
    for mode, allowed in (("rac", False), ("hg_dagger", True)):
        for phase_events in (["takeover", "engage"], ["takeover", "engage", "recovered"]):
            machine, _, _ = play(mode, [(e, 1) for e in phase_events])
            if allowed:
                assert machine.apply("hand_back", 9) is Phase.AUTO and machine.policy_may_act
            else:
                with pytest.raises(Refused, match="rule 2"):
                    machine.apply("hand_back", 9)


@given(sequences)
def test_an_intervened_episode_reads_policy_then_recovery_and_correction(events):
    machine, frames, _ = play("rac", events)
    if machine.phase is Phase.END_INTERVENED:
        assert re.fullmatch("1*(2+3+)+", types(frames)), types(frames)
        assert frames[-1]["segment_type"] == 3 and not machine.recording
        assert machine.recoveries == machine.corrections == len(re.findall("2+3+", types(frames)))


@given(st.sampled_from(MODES), sequences)
def test_labels_agree_with_each_other(mode, events):
    machine, frames, _ = play(mode, events)
    for one, other in zip(frames, frames[1:], strict=False):
        assert other["segment_index"] >= one["segment_index"]
        assert (other["segment_index"] > one["segment_index"]) or other["segment_type"] == one["segment_type"]
    for frame in frames:
        assert frame["intervention"] == (frame["segment_type"] in (2, 3))
        assert (frame["control_source"] == Control.POLICY) == (frame["segment_type"] == 1)
        assert (frame["segment_type"] == 0) == (mode == "teleop")


@given(st.sampled_from(MODES), sequences)
def test_nobody_acts_while_held_or_stopped(mode, events):
    def check(machine):
        assert machine.policy_may_act + machine.human_may_act == machine.recording
        if machine.phase in (Phase.HOLD, Phase.ESTOP, Phase.RESET) or machine.phase.ended:
            assert not machine.recording
            with pytest.raises(ValueError, match="not recorded"):
                machine.labels(0)

    play(mode, events, check)


def test_a_takeover_can_be_cancelled_only_before_any_motion():
    machine, _, _ = play("rac", [("takeover", 1)])
    assert machine.phase is Phase.HOLD and machine.apply("cancel", 2) is Phase.AUTO and not machine.intervened
    machine, _, _ = play("rac", [("takeover", 1), ("engage", 1), ("lost", 1)])
    with pytest.raises(Refused, match="before any motion"):
        machine.apply("cancel", 3)


def test_who_finishes_the_task_by_hand_says_so():
    by_hand = [("takeover", 1), ("engage", 1)]
    corrected = [*by_hand, ("recovered", 1)]
    for mode, events in (("rac", corrected), ("hg_dagger", corrected), ("hg_dagger", by_hand)):
        machine, _, _ = play(mode, events)
        assert machine.apply("success", 9) is Phase.END_INTERVENED
    machine, _, _ = play("rac", by_hand)  # rule 1: a recovery is followed by a correction
    with pytest.raises(Refused, match="subtask_done, success or discard"):
        machine.apply("success", 9)
    machine, _, _ = play("rac", [*by_hand, ("recovered", 0)])
    with pytest.raises(Refused, match="nothing of the intervention is recorded"):
        machine.apply("success", 9)


def test_a_lost_hand_resumes_the_same_phase():
    for events, phase in (
        (["takeover", "engage"], Phase.RECOVERY),
        (["takeover", "engage", "recovered"], Phase.CORRECTION),
        ([], Phase.AUTO),
    ):
        machine, _, _ = play("rac", [(e, 1) for e in events])
        assert machine.apply("lost", 5) is Phase.HOLD
        assert machine.apply("estop", 5) is Phase.ESTOP
        with pytest.raises(Refused, match="rearm first"):
            machine.apply("engage", 6)
        assert machine.apply("rearm", 6) is Phase.HOLD and machine.apply("engage", 7) is phase


def test_teleoperation_holds_until_somebody_engages():
    machine, frames, phases = play("teleop", [("engage", 3), ("lost", 2), ("success", 1)])
    assert phases == [Phase.RESET, Phase.HOLD, Phase.TELEOP, Phase.HOLD, Phase.END_DEMO]
    assert types(frames) == "000" and not machine.intervened


def test_a_stopped_episode_can_be_discarded_and_stays_stopped():
    machine, _, _ = play("rac", [("estop", 0), ("discard", 0)])
    assert machine.phase is Phase.ESTOP and machine.apply("rearm", 3) is Phase.END_DISCARDED
