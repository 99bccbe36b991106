// The one connection to the gateway: commands with acknowledgement, teleop, state, pictures. Reconnects by itself.

const PING_MS = 500;

export class GatewayLink {
  /** @param on {hello, state, picture, closed}: called with what arrives. */
  constructor(on) {
    this.on = on;
    this.waiting = new Map(); // id -> resolve
    this.id = 0;
    this.rtt = null; // ms, smoothed
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

  send(message) {
    if (this.open) this.socket.send(JSON.stringify(message));
  }

  /** Send a command; resolves to {ok, error, phase}. */
  command(name, args = {}) {
    if (!this.open) return Promise.resolve({ ok: false, error: "there is no connection" });
    const id = ++this.id;
    this.send({ type: "event", id, name, args });
    return new Promise((resolve) => this.waiting.set(id, resolve));
  }

  /** Stop the robot: by this connection and by one that nothing else waits on. */
  stop() {
    this.send({ type: "estop" });
    fetch("/estop", { method: "POST" });
  }

  receive(data) {
    if (data instanceof ArrayBuffer) {
      const length = new DataView(data).getUint16(0);
      const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 2, length)));
      this.on.picture(header, new Blob([new Uint8Array(data, 2 + length)], { type: "image/jpeg" }));
      return;
    }
    const message = JSON.parse(data);
    if (message.type === "hello") this.on.hello(message);
    else if (message.type === "state") this.on.state(message);
    else if (message.type === "pong") {
      const rtt = performance.now() - message.t;
      this.rtt = this.rtt === null ? rtt : 0.7 * this.rtt + 0.3 * rtt;
    } else if (message.type === "ack") {
      this.waiting.get(message.id)?.(message);
      this.waiting.delete(message.id);
    }
  }
}
