// The e-stop's own connection, to a process that does nothing else: any message stops the robot. Reconnects by itself.

const RETRY_MS = 1000;

export class StopLine {
  /** @param on {failed}: called with what went wrong where the robot did not confirm a stop. */
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
    socket.onmessage = ({ data }) => {
      const { error } = JSON.parse(data);
      if (error) this.on.failed(error);
    };
    socket.onclose = () => this.socket === socket && setTimeout(() => this.dial(), RETRY_MS);
    this.socket = socket;
  }

  get open() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  stop() {
    if (this.open) this.socket.send("stop");
  }
}
