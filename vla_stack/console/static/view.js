// Draws what the gateway says. Knows nothing of how to drive.

import { DEADMAN_KEY, FINE_KEY, HELP_KEY, MOTIONS, REWIND_KEY } from "/keys.js";
import { tapped } from "./devices.js";
import { COMMANDS, isJoint, keyName } from "./mapper.js";
import { allowed, bar, hint, title } from "./phases.js";

const $ = (id) => document.getElementById(id);
const SLOW_MS = 150;
const FINGERS = matchMedia("(pointer: coarse)");
export const STALE_MS = 300;
function element(tag, attributes = {}, ...children) {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...children);
  return node;
}

/** Pictures of all cameras; each knows how old its newest picture is. */
export class Cameras {
  /** @param now the time of the clock that pictures are stamped by, ms; infinite where that is not known yet. */
  constructor(names, now) {
    this.now = now;
    this.views = new Map();
    $("cameras").replaceChildren(
      ...names.map((name) => {
        const canvas = element("canvas", { width: 1, height: 1 });
        const age = element("span", { className: "age number" });
        const box = element("div", { className: "camera" }, element("span", { className: "name", textContent: name }), age, canvas);
        box.dataset.camera = name;
        this.views.set(name, { box, canvas, age, captured: -Infinity, frames: 0 });
        return box;
      }));
  }

  /** @param header {camera, frame, captured_ms}; resolves when it is drawn. */
  async show(header, blob) {
    const view = this.views.get(header.camera);
    if (!view) return;
    const picture = await createImageBitmap(blob);
    if (view.canvas.width !== picture.width) {
      [view.canvas.width, view.canvas.height] = [picture.width, picture.height];
      view.box.style.flexGrow = picture.width / picture.height;
    }
    view.canvas.getContext("2d").drawImage(picture, 0, 0);
    picture.close();
    view.captured = header.captured_ms;
    view.frames += 1;
    view.box.dataset.frames = view.frames;
    view.box.dataset.frame = header.frame;
  }

  /** Age in ms of the oldest of the newest pictures; infinite before the first, 0 without cameras. */
  age() {
    return Math.max(0, ...[...this.views.values()].map((v) => this.now() - v.captured));
  }

  refresh() {
    for (const { box, age, captured } of this.views.values()) {
      const ms = Math.max(0, this.now() - captured);
      age.textContent = Number.isFinite(ms) ? (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`) : "no picture";
      age.className = `age number${ms > STALE_MS ? " stale" : ms > SLOW_MS ? " slow" : ""}`;
      box.classList.toggle("stale", ms > STALE_MS);
    }
  }
}

/** Build what does not change during a session. */
export function layOut(hello, command) {
  $("stages").replaceChildren(...hello.stages.map((name) => element("li", { textContent: name })));
  $("stages-panel").hidden = !hello.stages.length;
  $("rac-panel").hidden = hello.mode === "teleop";
  $("commands").replaceChildren(
    ...bar(hello.mode).map((name) => {
      const [key, , label] = name === "rewind" ? [REWIND_KEY, null, "Rewind"] : COMMANDS[name];
      const button = element("button", { type: "button" }, label, element("kbd", { textContent: keyName(key) }));
      button.dataset.command = name;
      if (name !== "rewind") tapped(button, () => command(name));
      return button;
    }));
  $("joints").replaceChildren(
    ...hello.robot.state.flatMap((dim) => [
      element("span", { textContent: dim.name.replace(/\.pos$/, "") }),
      element("div", { className: "track" }, element("i"), element("b")),
      element("span"),
    ]));
  hello.robot.state.forEach((dim, i) => ($("joints").children[3 * i + 2].dataset.dim = dim.name));
  $("help-body").innerHTML = helpText(hello.mode);
}

function helpText(mode) {
  const row = (keys, text) => `<tr><td>${keys.map((k) => `<kbd>${keyName(k)}</kbd>`).join("")}</td><td>${text}</td></tr>`;
  const moves = Object.entries(MOTIONS).map(([key, [, , text]]) => row([key], text));
  const commands = bar(mode).map((name) => (name === "rewind" ? row([REWIND_KEY], "Rewind, while held") : row([COMMANDS[name][0]], COMMANDS[name][2])));
  return `<p>The robot moves only while the dead-man is held and this page has the focus.</p><div class="columns"><table>
    ${row([DEADMAN_KEY], "dead-man: hold it to drive")}${row([FINE_KEY], "slowly")}${moves.join("")}</table><table>
    ${commands.join("")}${row([COMMANDS.keep[0]], "Keep the episode now")}${row([COMMANDS.undo[0]], "Undo")}
    ${row([COMMANDS.estop[0]], "STOP; any console may")}${row([HELP_KEY], "These keys")}</table></div>
    <p class="small">Touch: hold the dead-man with one finger and push a pad with another. Gamepad: left shoulder button is
    the dead-man, sticks move, triggers work the gripper, B takes over, X is recovered, Y rewinds, A is done, Start begins,
    Back stops. A button on a page is no certified emergency stop: have a real one at hand.</p>`;
}

/** Draw one state message. */
export function draw(state, hello) {
  const shown = state.run === "stop" && state.phase !== "estop" ? "stop" : state.phase;
  document.body.dataset.phase = shown;
  document.body.dataset.lease = state.lease;
  $("phase").textContent = title(state);
  $("hint").textContent = hint(state, FINGERS.matches);
  $("instruction").textContent = state.instruction ?? "";
  $("clock").textContent = state.tick >= 0 ? `${(state.tick / hello.robot.rate_hz).toFixed(1)} s` : "";
  drawLease(state);
  const may = allowed(state, hello.mode);
  for (const button of document.querySelectorAll("[data-command]")) {
    const name = button.dataset.command === "start" && may.has("rearm") ? "rearm" : button.dataset.command;
    button.disabled = !may.has(name) || state.lease === "other";
    if (button.dataset.command === "start") button.firstChild.textContent = COMMANDS[name][2];
  }
  [...$("stages").children].forEach((item, i) => {
    item.className = i < state.stage ? "done" : i === state.stage ? "now" : "";
  });
  drawRecording(state.recording);
  drawScore(state.in_dist_score);
  drawJoints(state, hello.robot);
}

function drawLease(state) {
  const text = { you: "You have control", other: `Console ${state.holder} has control`, free: "Take control" }[state.lease];
  const lease = $("lease");
  lease.textContent = state.lease === "you" && state.asked ? `Hand over to console ${state.asked}` :
    state.lease === "other" && state.asked === state.you ? "Control is asked for…" : state.lease === "other" ? `${text} – ask for it` : text;
  lease.className = state.lease === "you" ? (state.asked ? "asked" : "mine") : "";
}

function drawRecording(r) {
  $("episodes").textContent = r.episodes;
  $("successes").textContent = r.successes;
  $("human").textContent = r.human_frames;
  $("recording-error").hidden = !r.error;
  $("recording-error").textContent = r.error;
  const both = r.recovery_frames + r.correction_frames;
  const [left, right] = $("ratio").children;
  left.style.width = both ? `${(100 * r.recovery_frames) / both}%` : "0";
  right.style.width = both ? `${(100 * r.correction_frames) / both}%` : "0";
  const ratio = r.recovery_frames ? (r.correction_frames / r.recovery_frames).toFixed(1) : null;
  $("ratio-text").textContent = ratio === null ? "No intervention yet." : `1 : ${ratio} (aim at 1:1 to 1:2)`;
  $("quota").parentElement.hidden = !r.quota;
  if (r.quota) {
    $("quota").firstChild.style.width = `${Math.min(100, (100 * r.human_frames) / r.quota)}%`;
    $("quota-text").textContent = `${r.human_frames} of ${r.quota} human frames of this round`;
  }
  const p = r.pending;
  $("pending").hidden = !p;
  if (p) {
    $("pending-what").textContent = `Episode ${p.episode}: ${p.outcome}, ${p.frames} frames.`;
    $("pending-text").textContent = `${p.kept ? "Kept" : "Thrown away"} in ${Math.ceil(p.left_s)} s.`;
    $("pending").dataset.kept = p.kept;
    $("pending-bar").style.width = `${(100 * p.left_s) / p.window_s}%`;
  }
}

function drawScore(score) {
  const known = score !== undefined && score !== null;
  const gauge = $("familiar");
  gauge.className = `bar${!known || score <= 1 ? "" : score <= 1.5 ? " warn" : " bad"}`;
  gauge.firstChild.style.width = known ? `${100 * Math.min(1, 1 / Math.max(score, 0.01))}%` : "0";
  $("familiar-text").textContent = !known ? "No score is given." : score <= 1 ? "As in demonstrations" : `${score.toFixed(1)} × the usual distance`;
}

function drawJoints({ state: values = [], action }, robot) {
  const cells = $("joints").children;
  robot.state.forEach((dim, i) => {
    const [low, high] = [dim.low ?? -Math.PI, dim.high ?? Math.PI];
    const at = (v) => `${Math.min(100, Math.max(0, (100 * (v - low)) / (high - low)))}%`;
    const missing = (v) => v === undefined || v === null; // null: it is not finite
    const [value, target] = [values[i], action?.[i]];
    const [measured, commanded] = cells[3 * i + 1].children;
    [measured.hidden, commanded.hidden] = [missing(value), missing(target)];
    measured.style.left = at(value ?? low);
    commanded.style.left = at(target ?? low);
    const text = () => (dim.unit === "ratio" ? `${Math.round(100 * value)} %` : `${value.toFixed(3)} ${dim.unit}`);
    cells[3 * i + 2].textContent = missing(value) ? "–" : text();
  });
}

export function drawMeters(state, rtt, video_ms, rate, ownStop) {
  const set = (id, text, level = "") => Object.assign($(id), { textContent: text, className: `number ${level}` });
  const ms = (value, slow, bad) => [value === null || !Number.isFinite(value) ? "–" : `${Math.round(value)} ms`, value > bad ? "bad" : value > slow ? "warn" : ""];
  set("m-rtt", ...ms(rtt, 60, 150));
  set("m-age", ...ms(state.cmd_age_ms ?? null, 100, 200));
  set("m-video", ...ms(video_ms, SLOW_MS, STALE_MS));
  set("m-rate", rate ? `${Math.round(rate)} / s` : "–");
  const drops = (state.drops ?? 0) + (state.recording.lost_frames ?? 0);
  set("m-drops", drops, drops ? "warn" : "");
  const gb = state.recording.disk_free / 1e9;
  set("m-disk", gb ? `${gb.toFixed(1)} GB` : "–", gb < 1 ? "bad" : gb < 5 ? "warn" : "");
  set("m-consoles", state.consoles);
  set("m-stop", ownStop ? "own line" : "shared line", ownStop ? "" : "warn");
}

let hideToast;
/** Say something; `kind` "calm" is no fault, "alarm" has to be acted on: both stay for longer. */
export function toast(text, kind = "") {
  $("toast").textContent = text;
  $("toast").className = `on ${kind}`.trim();
  clearTimeout(hideToast);
  hideToast = setTimeout(() => $("toast").classList.remove("on"), kind ? 20000 : 3500);
}

/** Whether something is shown that has to be acted on: what can wait waits. */
export const alarmed = () => $("toast").className === "on alarm";

export function offline(why) {
  document.body.dataset.phase = "offline";
  $("phase").textContent = "Offline";
  $("hint").textContent = `${why} Trying again…`;
}

const PADS = { "pad-left": ["right", "away"], "pad-right": ["turn", "up"] };
const PAD_SIGNS = { right: ["←", "→"], away: ["↓", "↑"], turn: ["⟲", "⟳"], up: ["Down", "Up"] };

/** What fingers drive with: two pads, and buttons for the gripper and for axes that few robots have. */
export function driveControls(dims, devices) {
  const cartesian = dims.some((d) => d.name.startsWith("tcp_x"));
  const joints = dims.filter(isJoint).length; // driven by right, away, up, pitch, turn, roll
  const has = (axis) => (cartesian ? dims.some((d) => d.name.startsWith(`tcp_${axis}`)) : joints > { pitch: 3, roll: 5 }[axis]);
  for (const [id, [across, along]] of Object.entries(PADS)) {
    const pad = $(id);
    const says = (axis) => Object.values(MOTIONS).filter(([name]) => name === axis).map(([, , text]) => text);
    pad.setAttribute("aria-label", `Pad: ${[...says(across), ...says(along)].join(", ")}`);
    const mark = (where, text) => element("span", { className: where, textContent: text });
    const [[left, right], [down, up]] = [PAD_SIGNS[across], PAD_SIGNS[along]];
    pad.replaceChildren(mark("up", up), mark("left", left), element("i"), mark("right", right), mark("down", down));
    if (!pad.dataset.ready) devices.pad(pad, [across, along]);
    pad.dataset.ready = "yes";
  }
  const buttons = (axis, labels) => [1, -1].map((sign, i) => {
    const [key] = Object.entries(MOTIONS).find(([, [name, s]]) => name === axis && s === sign);
    const button = element("button", { type: "button" }, labels[i], element("kbd", { textContent: keyName(key) }));
    devices.hold(button, () => (devices.touch.axes[axis] = sign), () => delete devices.touch.axes[axis]);
    return button;
  });
  $("grip").replaceChildren(
    ...buttons("grip", ["Open", "Close"]),
    ...(has("pitch") ? buttons("pitch", ["Pitch +", "Pitch −"]) : []), ...(has("roll") ? buttons("roll", ["Roll +", "Roll −"]) : []));
}
