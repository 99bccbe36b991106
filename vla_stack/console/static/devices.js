// Raw values of keyboard, touch buttons, gamepad, phone and space mouse, for the mapper; and commands, as they are given.
// Nothing is read while the page is not focused: `release` lets go of everything.

import { DEADMAN_KEY, FINE_KEY, HELP_KEY, MOTIONS, REWIND_KEY, UNSHIFTED } from "/keys.js";
import { COMMANDS } from "./mapper.js";

const HELD = new Set([...Object.keys(MOTIONS), DEADMAN_KEY, REWIND_KEY, FINE_KEY]);
const MODIFIERS = ["Alt", "AltGraph", "Control", "Meta"]; // that mean nothing here
const SPACEMICE = [{ vendorId: 0x256f }, { vendorId: 0x046d, usagePage: 1, usage: 8 }];

const TAP_MS = 700; // after a finger's tap, in which a click is the same tap once more

/**
 * Call `act` when a button is pressed, by a second finger too: browsers make a click of the first finger's tap alone, and
 * that one holds the dead-man.
 *
 * @param event `pointerup` where it is let go on the button, or `pointerdown` for what cannot wait.
 */
export function tapped(button, act, event = "pointerup") {
  let at = -Infinity;
  button.addEventListener(event, (e) => {
    const { left, right, top, bottom } = button.getBoundingClientRect();
    const inside = e.clientX >= left && e.clientX <= right && e.clientY >= top && e.clientY <= bottom;
    if (button.disabled || !inside || (e.pointerType === "mouse" && event === "pointerup")) return;
    at = e.timeStamp;
    act();
  });
  button.addEventListener("click", (e) => e.timeStamp - at > TAP_MS && act());
}

export class Devices {
  /**
   * @param command called with the key or the gamepad's button number of a command.
   * @param changed called when something was pressed or let go.
   */
  constructor(command, changed) {
    this.command = command;
    this.changed = changed;
    this.keys = new Map(); // of held keys: place on the keyboard -> name; a key may come up under another name
    this.touch = { axes: {}, held: false, rewind: false };
    this.phone = null; // {held, tilt} once asked for
    this.spacemouse = null;
    this.buttons = []; // of the gamepad, when last looked at
    this.letGo = []; // of every pad: forget the finger that is on it
    this.keyCommands = new Set(Object.values(COMMANDS).map(([key]) => key));
    addEventListener("keydown", (e) => this.down(e));
    addEventListener("keyup", (e) => this.up(e));
    addEventListener("blur", () => this.release());
    addEventListener("pagehide", () => this.release());
    document.addEventListener("visibilitychange", () => document.hidden && this.release());
  }

  get focused() {
    return document.hasFocus() && !document.hidden;
  }

  /** Everything that is connected, as `mapper.intent` takes it. */
  raw() {
    const pad = this.focused ? this.gamepad() : null;
    return {
      keyboard: { keys: [...this.keys.values()] },
      touch: this.touch,
      ...(pad && { gamepad: pad }),
      ...(this.phone && { phone: { ...this.phone, held: this.phone.held && this.touch.held } }),
      ...(this.spacemouse && this.focused && { spacemouse: this.spacemouse }),
    };
  }

  release() {
    this.keys.clear();
    this.touch = { axes: {}, held: false, rewind: false };
    for (const forget of this.letGo) forget();
    if (this.spacemouse) this.spacemouse = { move: [0, 0, 0], turn: [0, 0, 0], buttons: 0 };
    this.changed();
  }

  down(event) {
    const named = event.key.toLowerCase();
    const means = (key) => HELD.has(key) || this.keyCommands.has(key) || key === HELP_KEY;
    const key = event.shiftKey && !means(named) ? UNSHIFTED[event.code] : named; // "<" is slowly to the left
    if (this.modified(event) && key !== "escape") return; // STOP counts with any of them
    if (event.target.closest("dialog") && key !== "escape") return;
    if (key === "enter" && event.target.matches("button:focus-visible")) return; // who got there by Tab means that button
    if (!means(key)) return;
    event.preventDefault();
    if (event.repeat) return;
    if (HELD.has(key)) this.keys.set(event.code || key, key);
    else this.command(key);
    this.changed();
  }

  up(event) {
    const key = event.key.toLowerCase();
    if (!this.modified(event)) this.keys.delete(event.code || key);
    if (HELD.has(key)) event.preventDefault();
    this.changed();
  }

  /**
   * Whether a modifier is held, pressed or let go. Every key is let go then: what is still held would come up under
   * another name or, as on a Mac while Cmd is down, unheard.
   */
  modified(event) {
    const found = MODIFIERS.some((name) => event.key === name || event.getModifierState(name));
    if (found && this.keys.size) {
      this.keys.clear();
      this.changed();
    }
    return found;
  }

  gamepad() {
    const pad = [...(navigator.getGamepads?.() ?? [])].find((p) => p?.connected);
    if (!pad) return null;
    const buttons = pad.buttons.map((b) => b.value);
    buttons.forEach((value, i) => value > 0.5 && !(this.buttons[i] > 0.5) && this.command(i));
    this.buttons = buttons;
    return { axes: [...pad.axes], buttons };
  }

  /** A button that is held for as long as a finger is on it. */
  hold(button, press, letGo) {
    const end = () => {
      button.classList.remove("on");
      letGo();
      this.changed();
    };
    button.addEventListener("pointerdown", (e) => {
      button.setPointerCapture(e.pointerId);
      button.classList.add("on");
      press();
      this.changed();
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(name, end);
    button.addEventListener("contextmenu", (e) => e.preventDefault());
  }

  /**
   * A pad that moves two axes: a finger's way from where it was put down, a third of the pad's width being all of it.
   *
   * It moves nothing by itself: the dead-man is another finger's. A pad that were its own dead-man would drive the arm
   * when it is brushed in passing; so it takes two deliberate acts here as with keys and sticks, and lifting either of
   * the two fingers is a stop.
   */
  pad(element, [across, along]) {
    let finger = null; // {id, x, y}: the first one on it; others are no concern of it
    const set = (x, y) => {
      if (across) this.touch.axes[across] = x;
      if (along) this.touch.axes[along] = -y;
      element.querySelector("i").style.transform = `translate(${x * 100}%, ${y * 100}%)`;
    };
    const end = () => {
      finger = null;
      element.classList.remove("on");
      set(0, 0);
    };
    this.letGo.push(end);
    element.addEventListener("pointerdown", (e) => {
      if (finger || e.button > 0) return;
      element.setPointerCapture(e.pointerId);
      element.classList.add("on");
      finger = { id: e.pointerId, x: e.clientX, y: e.clientY };
    });
    element.addEventListener("pointermove", (e) => {
      if (e.pointerId !== finger?.id) return;
      const full = element.clientWidth / 3;
      const way = (to, from) => Math.max(-1, Math.min(1, (to - from) / full));
      set(way(e.clientX, finger.x), way(e.clientY, finger.y));
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"])
      element.addEventListener(name, (e) => {
        if (e.pointerId !== finger?.id) return;
        end();
        this.changed();
      });
    element.addEventListener("contextmenu", (e) => e.preventDefault());
  }

  /** Ask for the phone's orientation; raises where there is none. The angles count from where the dead-man was pressed. */
  async usePhone() {
    if (!window.isSecureContext) throw new Error("A phone's orientation needs https: start the console with --host.");
    if (typeof DeviceOrientationEvent === "undefined") throw new Error("This device measures no orientation.");
    if (DeviceOrientationEvent.requestPermission && (await DeviceOrientationEvent.requestPermission()) !== "granted")
      throw new Error("The orientation was not allowed.");
    this.phone = { held: false, tilt: [0, 0, 0] };
    let zero = null;
    const turned = (a, b) => ((a - b + 540) % 360) - 180;
    addEventListener("deviceorientation", ({ alpha, beta, gamma }) => {
      if (beta === null) return;
      if (!this.touch.held) zero = null;
      else zero ??= [beta, gamma, alpha];
      this.phone.held = zero !== null;
      this.phone.tilt = zero ? [turned(zero[0], beta), turned(gamma, zero[1]), turned(alpha, zero[2])] : [0, 0, 0];
    });
  }

  /** Ask for a space mouse over WebHID; raises where the browser has none. */
  async useSpacemouse() {
    if (!navigator.hid) throw new Error("This browser has no WebHID; Chrome and Edge do.");
    const [device] = await navigator.hid.requestDevice({ filters: SPACEMICE });
    if (!device) return;
    if (!device.opened) await device.open();
    this.spacemouse = { move: [0, 0, 0], turn: [0, 0, 0], buttons: 0 };
    const three = (data, at) => [0, 2, 4].map((i) => data.getInt16(at + i, true));
    device.addEventListener("inputreport", ({ reportId, data }) => {
      if (!this.focused) return;
      if (reportId === 1) this.spacemouse.move = three(data, 0);
      if (reportId === 1 && data.byteLength >= 12) this.spacemouse.turn = three(data, 6);
      if (reportId === 2) this.spacemouse.turn = three(data, 0);
      if (reportId === 3) this.spacemouse.buttons = data.getUint8(0);
    });
    navigator.hid.addEventListener("disconnect", () => (this.spacemouse = null));
  }
}
