// The connection to the gateway: commands with acknowledgement, teleop, state, pictures. Reconnects by itself.
//
// What the gateway shows is acknowledged when it is drawn; only then comes the next. For a picture the gateway answers how
// old it was by its own stamp when it heard of that: this gives its clock, never behind by more than the way there takes.

const PING_MS = 500;
const CLOCKS = 50; // answers that are remembered, of which the quickest counts

export class GatewayLink {
  /** @param on {hello, state, picture, stopped, closed}: called with what arrives; `picture` resolves when drawn. */
  constructor(on) {
    this.on = on;
    this.waiting = new Map(); // id -> resolve
    this.id = 0;
    this.rtt = null; // ms, smoothed
    this.drawn = new Map(); // number of a picture -> {captured, at}: by the gateway's clock, and by this page's
    this.clocks = []; // ms of the gateway's clock minus this page's, by the last answers
    this.connect();
    setInterval(() => this.send({ type: "ping", t: performance.now() }), PING_MS);
  }

  connect() {
    const url = new URL("/ws", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    this.socket = new WebSocket(url);
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = ({ data }) => this.receive(data);
    this.socket.onclose = ({ code, reason }) => {
      for (const resolve of this.waiting.values()) resolve({ ok: false, error: "the connection was lost" });
      this.waiting.clear();
      this.rtt = null;
      this.on.closed(reason || (code === 1006 ? "The console does not answer." : ""));
      setTimeout(() => this.connect(), 1000);
    };
  }

  get open() {
    return this.socket.readyState === WebSocket.OPEN;
  }

  /** Whether there is a connection that takes it. */
  send(message) {
    if (this.open) this.socket.send(JSON.stringify(message));
    return this.open;
  }

  /** Send a command; resolves to {ok, error, phase}. */
  command(name, args = {}) {
    if (!this.open) return Promise.resolve({ ok: false, error: "there is no connection" });
    const id = ++this.id;
    this.send({ type: "event", id, name, args });
    return new Promise((resolve) => this.waiting.set(id, resolve));
  }

  /** Time of the gateway's clock, ms; infinite before the first answer to a picture. */
  now() {
    return this.clocks.length ? performance.now() + Math.min(...this.clocks) : Infinity;
  }

  async draw(data) {
    const length = new DataView(data).getUint16(0);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 2, length)));
    try {
      await this.on.picture(header, new Blob([new Uint8Array(data, 2 + length)], { type: "image/jpeg" }));
    } finally {
      this.drawn.set(header.n, { captured: header.captured_ms, at: performance.now() });
      this.send({ type: "seen", n: header.n });
    }
  }

  receive(data) {
    if (data instanceof ArrayBuffer) {
      this.draw(data);
      return;
    }
    const message = JSON.parse(data);
    if (message.type === "hello") {
      this.clocks = [];
      this.drawn.clear();
      this.on.hello(message);
    } else if (message.type === "state") {
      this.send({ type: "seen", n: message.n });
      this.on.state(message);
    } else if (message.type === "shown") {
      const { captured, at } = this.drawn.get(message.n);
      this.drawn.delete(message.n);
      this.clocks = [...this.clocks.slice(1 - CLOCKS), captured + message.age_ms - at];
    } else if (message.type === "stopped") {
      this.on.stopped(message.error);
    } else if (message.type === "pong") {
      const rtt = performance.now() - message.t;
      this.rtt = this.rtt === null ? rtt : 0.7 * this.rtt + 0.3 * rtt;
    } else if (message.type === "ack") {
      this.waiting.get(message.id)?.(message);
      this.waiting.delete(message.id);
    }
  }
}
