// From what the operator's hands do to a velocity for every action dimension. Pure functions: no page, no time, no state.
//
// Each device reports raw values; `intent` merges all of them into one set of axes in [-1, 1] as the operator sees
// them: right, away (from the operator), up, turn (counter-clockwise seen from above), pitch, grip (positive opens).
// `velocity` turns the axes into SI units per second in the order of the robot's action.

import { COMMAND_KEYS, DEADMAN_KEY, FINE_KEY, MOTIONS, NAMES, REWIND_KEY } from "/keys.js"; // vla_stack/key_map.py

export const AXES = ["right", "away", "up", "turn", "pitch", "roll", "grip"];
const DEAD = 0.12; // of a stick's way, around its middle
const TILT = 25; // degrees of a phone for full speed

/** What is printed on a key. */
export const keyName = (key) => NAMES[key] ?? key.toUpperCase();

// Buttons of a standard gamepad.
const COMMAND_BUTTONS = {
  start: 9, takeover: 1, recovered: 2, subtask_done: 0, hand_back: 12, success: 15, fail: 14, discard: 13, rearm: 9, estop: 8,
};
/** Commands: name -> [key, button of a standard gamepad (or null), label]. */
export const COMMANDS = Object.fromEntries(
  Object.entries(COMMAND_KEYS).map(([name, [key, label]]) => [name, [key, COMMAND_BUTTONS[name] ?? null, label]]));
export const GAMEPAD = { deadman: 4, rewind: 3, fine: 5, open: 7, close: 6 };
export const SPACEMOUSE_DEADMAN = 1; // bit of the left button

const clamp = (x, low = -1, high = 1) => Math.min(high, Math.max(low, x));

/** A stick's position with its middle made quiet and small motions made fine. */
export function shape(x) {
  const beyond = Math.max(0, Math.abs(x) - DEAD) / (1 - DEAD);
  return Math.sign(x) * clamp(beyond, 0, 1) ** 1.6;
}

const none = () => Object.fromEntries(AXES.map((name) => [name, 0]));

function keyboard({ keys = [] }) {
  const axes = none();
  for (const key of keys) if (MOTIONS[key]) axes[MOTIONS[key][0]] += MOTIONS[key][1];
  const has = (key) => keys.includes(key);
  return { axes, engaged: has(DEADMAN_KEY), rewind: has(REWIND_KEY), fine: has(FINE_KEY) };
}

function gamepad({ axes: sticks = [], buttons = [] }) {
  const at = (i) => buttons[i] || 0;
  const [x = 0, y = 0, turn = 0, up = 0] = sticks.map(shape);
  const axes = { ...none(), right: x, away: -y, up: -up, turn: -turn, grip: at(GAMEPAD.open) - at(GAMEPAD.close) };
  return { axes, engaged: at(GAMEPAD.deadman) > 0.5, rewind: at(GAMEPAD.rewind) > 0.5, fine: at(GAMEPAD.fine) > 0.5 };
}

/** `tilt`: degrees since the dead-man was pressed: front edge down, right edge down, turned counter-clockwise. */
function phone({ held = false, tilt = [0, 0, 0] }) {
  const [front, right, turn] = tilt.map((degrees) => shape(degrees / TILT));
  return { axes: { ...none(), away: front, right, turn }, engaged: held, rewind: false, fine: false };
}

/** `move`, `turn`: the six numbers of a space mouse, about -350 to 350: x right, y towards, z down; pitch, roll, yaw. */
function spacemouse({ move = [0, 0, 0], turn = [0, 0, 0], buttons = 0 }) {
  const [right, towards, down] = move.map((v) => shape(v / 350));
  const [pitch, , yaw] = turn.map((v) => shape(v / 350));
  const axes = { ...none(), right, away: -towards, up: -down, pitch, turn: -yaw };
  return { axes, engaged: Boolean(buttons & SPACEMOUSE_DEADMAN), rewind: false, fine: false };
}

/** Fingers on the page: `axes` by pads and buttons, `held` the dead-man. */
function touch({ axes = {}, held = false, rewind = false }) {
  const shaped = Object.fromEntries(Object.entries(axes).map(([name, value]) => [name, shape(value)]));
  return { axes: { ...none(), ...shaped }, engaged: held, rewind, fine: false };
}

/** What all devices together ask for: {axes, engaged, rewind}. A device that is absent is left out of `raw`. */
export function intent(raw) {
  const read = { keyboard, gamepad, phone, spacemouse, touch };
  const parts = Object.entries(raw).filter(([name]) => read[name]).map(([name, value]) => read[name](value));
  const scale = parts.some((p) => p.fine) ? 0.3 : 1;
  const axes = none();
  for (const part of parts) for (const name of AXES) axes[name] = clamp(axes[name] + part.axes[name]);
  for (const name of AXES) if (name !== "grip") axes[name] *= scale;
  return { axes, engaged: parts.some((p) => p.engaged), rewind: parts.some((p) => p.rewind) };
}

/** Whether a dimension is a joint, as those of an arm without a tool's dimensions are driven. */
export const isJoint = (dim) => dim.kind !== "gripper" && dim.unit === "rad" && dim.name.endsWith(".pos");

export const hasArm = (dims) => dims.some((d) => d.name.startsWith("tcp_x") || isJoint(d));
export const hasBase = (dims) => dims.some((d) => ["x.vel", "y.vel", "theta.vel"].includes(d.name));

/**
 * Velocity of every action dimension, in its unit per second.
 *
 * A dimension `tcp_x`, `tcp_y`, `tcp_z`, `tcp_yaw` (world frame, x away from the robot's base, z up) moves the tool; the
 * joints of an arm without them are driven in order by right, away, up, pitch, turn, roll. A base (`x.vel`, `y.vel`,
 * `theta.vel`) below an arm is driven in place of the arm, never with it: the same key would move both. Every other
 * dimension is left alone.
 *
 * @param axes from `intent`.
 * @param dims the robot's action: [{name, unit, max_rate, kind}].
 * @param settings {speed: m/s, facing: whether the operator faces the robot, rather than standing behind it, wheels:
 *   whether the base is driven where there is an arm, too}.
 */
export function velocity(axes, dims, { speed, facing, wheels }) {
  const side = facing ? -1 : 1;
  const tool = {
    tcp_x: axes.away * side, tcp_y: -axes.right * side, tcp_z: axes.up, tcp_yaw: axes.turn,
    tcp_pitch: axes.pitch, tcp_roll: axes.roll,
  };
  const base = { "x.vel": tool.tcp_x, "y.vel": tool.tcp_y, "theta.vel": tool.tcp_yaw };
  const cartesian = dims.some((d) => d.name.startsWith("tcp_x"));
  const joints = [axes.right * side * -1, axes.away, axes.up, axes.pitch, axes.turn, axes.roll];
  const arm = hasArm(dims) && !(wheels && hasBase(dims));
  let joint = 0;
  return dims.map((dim) => {
    if (dim.kind === "gripper") return limit(axes.grip * 2.5, dim);
    const value = !arm ? base[dim.name] : cartesian ? tool[dim.name.split(".")[0]] : isJoint(dim) ? joints[joint++] : 0;
    const full = { m: speed, "m/s": speed, rad: speed * 6, "rad/s": speed * 6 }[dim.unit] ?? 1;
    return limit((value ?? 0) * full, dim);
  });
}

const limit = (v, dim) => {
  const bound = dim.max_rate ?? Infinity;
  return clamp(v, -bound, bound) + 0; // + 0: no negative zero
};
