// The console: devices -> mapper -> gateway, and gateway -> view.

import { Devices, tapped } from "./devices.js";
import { HELP_KEY } from "/keys.js";
import { HeatMap } from "./heat.js";
import { GatewayLink } from "./link.js";
import { COMMANDS, hasArm, hasBase, intent, velocity } from "./mapper.js";
import { allowed } from "./phases.js";
import { StopLine } from "./stop.js";
import { alarmed, Cameras, draw, drawMeters, driveControls, layOut, offline, STALE_MS, toast } from "./view.js";

const TICK_MS = 25; // between teleop messages
const STOP_MS = 1000; // for the answer to a STOP
const $ = (id) => document.getElementById(id);
const settings = { speed: 0.15, facing: true, ...JSON.parse(localStorage.getItem("console") ?? "{}") };

let hello = null;
let state = null;
let cameras = new Cameras([], () => Infinity);
let seq = 0;
let sentAt = [];
let saidError = ""; // of the recording; every state message repeats it
let unanswered = null; // timer of the first STOP that has no answer yet: pressing again puts nothing off
const heat = new HeatMap($("heat"), $("heat-text"));

const link = new GatewayLink({
  hello(message) {
    hello = message;
    document.title = `${hello.robot.name} – console ${hello.you}`;
    document.body.dataset.console = hello.you;
    cameras = new Cameras(hello.robot.cameras.map((c) => c.name), () => link.now());
    stopLine.connect(hello.stop_port);
    layOut(hello, command);
    driveControls(hello.robot.action, devices);
    $("wheels-label").hidden = !(hasArm(hello.robot.action) && hasBase(hello.robot.action));
    const rewind = document.querySelector('[data-command="rewind"]');
    if (rewind) devices.hold(rewind, () => (devices.touch.rewind = true), () => (devices.touch.rewind = false));
    heat.load();
  },
  state(message) {
    if (state?.pending && message.recording.pending?.episode !== state.pending.episode) heat.load();
    state = { ...message, pending: message.recording.pending };
    const { error } = state.recording;
    if (error === saidError || (error && alarmed())) return;
    saidError = error;
    if (error) toast(error);
  },
  picture: (header, blob) => cameras.show(header, blob),
  stopped,
  closed(why) {
    state = null;
    offline(why);
  },
});

const stopLine = new StopLine({ stopped });

/** Stop the robot, and say so where that may not have reached it. */
function stop() {
  const sent = [stopLine.stop(), link.send({ type: "estop" })]; // what is said twice is done once
  if (!sent.some(Boolean)) notStopped();
  else unanswered ??= setTimeout(notStopped, STOP_MS); // a connection may take what arrives nowhere
}

/** The answer to a STOP. */
function stopped(error) {
  clearTimeout(unanswered);
  unanswered = null;
  if (error) notStopped();
  else toast("Stopped");
}

function notStopped() {
  unanswered = null;
  toast("STOP IS NOT CONFIRMED: use the power switch", "alarm");
}

/** Give a command by its name; what is refused is said. */
async function command(name) {
  if (name === "estop") {
    stop();
    return;
  }
  if (!state) return;
  if (state.lease === "other") {
    toast(`Console ${state.holder} has control.`);
    return;
  }
  const args = name === "rearm" ? { stops: state.stops } : {}; // a stop that is not shown yet stays
  const { ok, error } = await link.command(name, args);
  if (!ok) toast(error);
}

/** A key or a gamepad's button: of all commands that it stands for, the one that is possible now. */
function pressed(input) {
  if (input === HELP_KEY) $("help").show();
  const names = Object.keys(COMMANDS).filter((n) => COMMANDS[n][0] === input || COMMANDS[n][1] === input);
  const may = state ? allowed(state, hello.mode) : new Set();
  const name = names.find((n) => may.has(n)) ?? names[0];
  if (name) command(name);
}

const devices = new Devices(pressed, teleop);

/** Say where the hand is. Engaged only with focus, with control, and with pictures that are new. */
function teleop() {
  const raw = devices.raw(); // first: a gamepad is looked at there, and its STOP has a line of its own
  if (!hello || !state) return;
  const { axes, engaged, rewind } = intent(raw);
  const wanted = devices.focused && (engaged || rewind);
  if (wanted && state.lease === "free") link.send({ type: "lease", want: "acquire" });
  if (state.lease !== "you") return;
  const fresh = cameras.age() <= STALE_MS;
  const may = devices.focused && fresh;
  link.send({
    type: "teleop", seq: ++seq, t: performance.now(), engaged: may && engaged, rewind: may && rewind,
    velocity: may && engaged ? velocity(axes, hello.robot.action, { ...settings, wheels: $("wheels").checked }) : null,
  });
  const now = performance.now();
  sentAt = [...sentAt.filter((t) => now - t < 1000), now];
}
setInterval(teleop, TICK_MS);

function paint() {
  requestAnimationFrame(paint);
  cameras.refresh();
  $("focus").hidden = devices.focused;
  if (!state || !hello) return;
  draw(state, hello);
  drawMeters(state, link.rtt, cameras.age(), sentAt.length, stopLine.open);
  const x = hello.robot.state.findIndex((d) => d.name.startsWith("tcp_x"));
  heat.draw(x < 0 || !state.state ? null : state.state.slice(x, x + 2), settings.facing);
}
requestAnimationFrame(paint);

// Everything on the page that can be pressed ----------------------------------------------------------------------

devices.hold($("deadman"), () => (devices.touch.held = true), () => (devices.touch.held = false));
tapped($("stop"), () => command("estop"), "pointerdown");
$("help-button").addEventListener("click", () => $("help").show()); // not modal: nothing may cover STOP
$("more").addEventListener("click", () => {
  const open = document.body.classList.toggle("more");
  $("more").setAttribute("aria-expanded", open);
  $("more").textContent = open ? "Close" : "More";
  devices.release(); // the panel covers the dead-man
});
for (const button of document.querySelectorAll("#pending [data-command]"))
  tapped(button, () => command(button.dataset.command));
$("lease").addEventListener("click", () => {
  if (!state) return;
  link.send({ type: "lease", want: state.lease !== "you" ? "acquire" : state.asked ? "hand_over" : "release" });
});
const asked = (start) => async () => {
  try {
    await start();
  } catch (e) {
    toast(e.message);
  }
};
$("phone").addEventListener("click", asked(async () => {
  await devices.usePhone();
  toast("Hold the dead-man and tilt.", "calm");
}));
$("mouse").addEventListener("click", asked(() => devices.useSpacemouse()));
$("invite").addEventListener("click", asked(async () => {
  const answer = await fetch("/invite", { method: "POST" });
  toast(`Once, on another screen: ${(await answer.json()).address}`, "calm");
}));
$("speed").value = settings.speed;
$("facing").checked = settings.facing;
for (const id of ["speed", "facing"]) $(id).addEventListener("input", changeSettings);
$("wheels").addEventListener("input", () => devices.release()); // what is held was meant for the other one
function changeSettings() {
  settings.speed = Number($("speed").value);
  settings.facing = $("facing").checked;
  $("speed-text").textContent = `${settings.speed.toFixed(2)} m/s`;
  localStorage.setItem("console", JSON.stringify(settings));
}
changeSettings();
addEventListener("keydown", (e) => e.target.tagName === "INPUT" && e.target.blur(), true);
for (const button of document.querySelectorAll("kbd")) button.setAttribute("aria-hidden", "true");
// A button that keeps the focus would be pressed again by the dead-man (Space).
addEventListener("click", (e) => e.target.closest("button")?.blur());
