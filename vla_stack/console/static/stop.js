// The e-stop's own connection, to a process that does nothing else: any message stops the robot. Reconnects by itself.

const RETRY_MS = 1000;

export class StopLine {
  /** @param on {stopped}: called with the answer to a stop: why the robot did not confirm it, or an empty text. */
  constructor(on) {
    this.on = on;
    this.port = null;
    this.socket = null;
  }

  /** Connect to a port of the console's computer, where that is not done yet. */
  connect(port) {
    if (this.port === port) return;
    this.port = port;
    this.socket?.close();
    this.dial();
  }

  dial() {
    const url = new URL("/stop", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.port = this.port;
    const socket = new WebSocket(url);
    socket.onmessage = ({ data }) => this.on.stopped(JSON.parse(data).error);
    socket.onclose = () => this.socket === socket && setTimeout(() => this.dial(), RETRY_MS);
    this.socket = socket;
  }

  get open() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  /** Whether there is a connection that takes it. */
  stop() {
    if (this.open) this.socket.send("stop");
    return this.open;
  }
}
