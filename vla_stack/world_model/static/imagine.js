// One request at a time: the model is as fast as it is, and a held key counts for every control step.
import { DEADMAN_KEY, HELP_KEY, IMAGINE, MOTIONS, NAMES, UNSHIFTED } from "/keys.js"; // vla_stack/key_map.py

// Axis of the key map -> that of the tool and its direction: the camera faces the robot, as the person does.
const TOOL = { away: ["x", -1], right: ["y", 1], up: ["z", 1], turn: ["yaw", 1] };
const held = new Map(); // place on the keyboard -> key; a key may come up under another name
const orders = [];
let grip = 1, seed = 0;
const at = (id) => document.getElementById(id);

async function ask(path, body) {
  const reply = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

function show(news) {
  seed = news.seed;
  at("task").textContent = news.task;
  for (const name of ["imagined", "simulated"]) {
    at(name).src = news.pictures[name];
    at(`${name}-success`).textContent = news.success[name] ? "— done" : news.over[name] ? "— over" : "";
  }
  const doubts = news.guards.length ? `not to be believed: ${news.guards.join(", ")}` : "";
  at("status").textContent = `scene ${news.seed}, step ${news.step} ${doubts}`;
  at("status").className = doubts ? "warn" : "";
}

const names = (key) => NAMES[key] ?? key.toUpperCase();
const does = { start: () => ["/reset", () => ({ seed: seed + 1 })], success: () => verdict(true), fail: () => verdict(false) };
const verdict = (success) => ["/verdict", () => ({ success })];
const commandOf = Object.fromEntries(Object.entries(IMAGINE).map(([name, [key]]) => [key, does[name]]));

addEventListener("keydown", (event) => {
  const named = event.key.toLowerCase();
  const means = (key) => key === DEADMAN_KEY || key === HELP_KEY || key in MOTIONS || key in commandOf;
  const key = event.shiftKey && !means(named) ? UNSHIFTED[event.code] : named;
  if (event.ctrlKey || event.metaKey || event.altKey) {
    held.clear(); // what is held may come up unheard, as on a Mac while Cmd is down
    return;
  }
  if (!means(key)) return;
  event.preventDefault();
  if (event.repeat) return;
  if (key === HELP_KEY) at("keys").hidden = !at("keys").hidden;
  else if (key in commandOf) orders.push(commandOf[key]());
  else held.set(event.code || key, key);
});
addEventListener("keyup", (event) => held.delete(event.code || event.key.toLowerCase()));
addEventListener("blur", () => held.clear());
document.addEventListener("visibilitychange", () => held.clear());

/** What the held keys ask for; null where the dead-man is not held or nothing is asked. */
function asked() {
  const pressed = new Set(held.values()); // once each, though two places may give it
  if (!pressed.has(DEADMAN_KEY)) return null;
  const keys = { x: 0, y: 0, z: 0, yaw: 0, grip };
  let any = false;
  for (const [axis, sign] of [...pressed].map((key) => MOTIONS[key] ?? [])) {
    if (axis === "grip") keys.grip = grip = sign > 0 ? 1 : 0;
    else if (axis in TOOL) keys[TOOL[axis][0]] += TOOL[axis][1] * sign;
    else continue;
    any = true;
  }
  return any ? keys : null;
}

function showKeys() {
  const key = (name) => Object.assign(document.createElement("kbd"), { textContent: names(name) });
  const lines = [[DEADMAN_KEY, "hold it to drive"]];
  for (const [name, [axis, , text]] of Object.entries(MOTIONS)) if (axis in TOOL || axis === "grip") lines.push([name, text]);
  lines.push(...Object.values(IMAGINE), [HELP_KEY, "these keys"]);
  at("keys").replaceChildren(...lines.flatMap(([name, text]) => [key(name), ` ${text} \u00b7 `]));
}
showKeys();

async function run() {
  show(await ask("/reset", {})); // the scene that the command names
  for (;;) {
    const began = performance.now();
    const keys = asked();
    try {
      if (orders.length) {
        const [path, body] = orders.shift();
        const news = await ask(path, body());
        if (path === "/reset") { grip = 1; show(news); }
        else at("status").textContent = `noted: ${news.success ? "it succeeded" : "it did not"}`;
      } else if (keys) show(await ask("/act", keys));
    } catch (error) {
      at("status").textContent = `${error.message}`;
      at("status").className = "warn";
    }
    await new Promise((done) => setTimeout(done, Math.max(10, 100 - (performance.now() - began))));
  }
}
run();
