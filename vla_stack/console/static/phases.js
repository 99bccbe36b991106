// What each phase is called, what to do in it, and which commands it takes. Pure.

const ENDED = ["end_auto_success", "end_auto_fail", "end_intervened", "end_demo", "end_discarded"];

const NAMES = {
  offline: "Offline", reset: "Ready", auto: "Policy drives", hold: "Holding", recovery: "Recovery", correction: "Correction",
  teleop: "You drive", estop: "Stopped", end_auto_success: "Success", end_auto_fail: "Failed", end_intervened: "Recorded",
  end_demo: "Recorded", end_discarded: "Discarded",
};

// What to do; in parentheses what keys say it, which is left out for fingers.
const RESUME = {
  teleop: "Hold the dead-man (Space) and steer (arrows; Q A up and down; E D gripper).",
  auto: "Hold the dead-man (Space) to let the policy go on.",
  recovery: "Hold the dead-man (Space) and steer, or hold Rewind (R).", correction: "Hold the dead-man (Space) and steer.",
};
const HINTS = {
  reset: () => "Start (Enter) begins an episode.",
  auto: () => "Watch. Take over (T) as soon as it goes wrong.",
  teleop: () => "Success (S) when it is done, Fail (F), or Discard (X).",
  recovery: () => "Go back to where demonstrations were, then Recovered (G).",
  correction: () => "Finish this sub-task (C) or the whole task (S), or say that it slipped (L).",
  estop: () => "Re-arm (Enter) lets the robot go on; until then it stands still.",
};

export const isEnded = (phase) => ENDED.includes(phase);

/** What is interrupted while the robot holds: "teleop", "auto", "recovery" or "correction". */
const underneath = (state) => state.resumes;

export function title(state) {
  if (state.phase === "hold" && underneath(state) === "teleop") return "Ready to drive";
  return NAMES[state.phase] ?? state.phase;
}

/** One sentence; `fingers` where there may be no keyboard. */
export const hint = (state, fingers) => (fingers ? sentence(state).replace(/ \([^)]*\)/g, "") : sentence(state));

function sentence(state) {
  if (isEnded(state.phase)) return "Start (Enter) begins the next episode.";
  if (state.phase === "hold") {
    const why = state.why ? `${state.why[0].toUpperCase()}${state.why.slice(1)}. ` : "";
    return why + RESUME[underneath(state)];
  }
  if (state.run === "stop") return `Stopped: ${state.why || "no reason is given"}.`;
  return HINTS[state.phase]?.() ?? "";
}

/** Commands that the gateway would not refuse now, as a set of names. */
export function allowed(state, mode) {
  const { phase } = state;
  const names = new Set(["estop"]);
  const add = (...more) => more.forEach((name) => names.add(name));
  if (phase === "reset" || isEnded(phase)) add("start");
  if (state.pending) add("keep", "discard");
  if (state.pending && !state.pending.kept) add("undo");
  if (phase === "estop") add("rearm");
  if (phase === "estop" && !["reset", "end_discarded"].includes(underneath(state))) add("discard");
  const active = phase === "hold" ? underneath(state) : phase;
  if (active === "auto") add("takeover", "success", "fail", "discard");
  if (active === "teleop") add("success", "fail", "discard");
  if (active === "recovery") add("recovered", "rewind", "discard");
  if (active === "correction") add("slip", "subtask_done", "success", "discard");
  if (active === "recovery" && mode === "hg_dagger") add("success");
  if (phase === "hold" && active === "recovery") add("cancel");
  if (mode === "hg_dagger" && (active === "recovery" || active === "correction")) add("hand_back");
  return names;
}

/** Buttons of the command bar, in their fixed places. */
export function bar(mode) {
  if (mode === "teleop") return ["start", "success", "fail", "discard"];
  const interventions = ["takeover", "rewind", "recovered", "slip", "subtask_done", "cancel"];
  return ["start", ...interventions, ...(mode === "hg_dagger" ? ["hand_back"] : []), "success", "fail", "discard"];
}
