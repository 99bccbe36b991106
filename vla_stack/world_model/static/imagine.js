"use strict";
// One request at a time: the model is as fast as it is, and a held key counts for every control step.
const AXES = { KeyW: ["x", 1], KeyS: ["x", -1], KeyA: ["y", 1], KeyD: ["y", -1], KeyR: ["z", 1], KeyF: ["z", -1], KeyQ: ["yaw", 1], KeyE: ["yaw", -1] };
const held = new Set();
const orders = [];
let grip = 1, seed = 0, moved = false;
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

addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.metaKey) return;
  if (event.code in AXES) held.add(event.code);
  else if (event.code === "Space") { grip = 1 - grip; moved = true; }
  else if (event.code === "KeyN") orders.push(["/reset", () => ({ seed: seed + 1 })]);
  else if (event.code === "KeyY" || event.code === "KeyX") orders.push(["/verdict", () => ({ success: event.code === "KeyY" })]);
  else return;
  event.preventDefault();
});
addEventListener("keyup", (event) => held.delete(event.code));
addEventListener("blur", () => held.clear());

async function run() {
  show(await ask("/reset", { seed }));
  for (;;) {
    const began = performance.now();
    try {
      if (orders.length) {
        const [path, body] = orders.shift();
        const news = await ask(path, body());
        if (path === "/reset") { grip = 1; show(news); }
        else at("status").textContent = `noted: ${news.success ? "it succeeded" : "it did not"}`;
      } else if (held.size || moved) {
        moved = false;
        const keys = { x: 0, y: 0, z: 0, yaw: 0, grip };
        for (const code of held) keys[AXES[code][0]] += AXES[code][1];
        show(await ask("/act", keys));
      }
    } catch (error) {
      at("status").textContent = `${error.message}`;
      at("status").className = "warn";
    }
    await new Promise((done) => setTimeout(done, Math.max(10, 100 - (performance.now() - began))));
  }
}
run();
