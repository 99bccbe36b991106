// Where the gripper was in demonstrations, seen from above as the operator sees the table; and where it is now.

const TRAIL = 60; // points

export class HeatMap {
  constructor(canvas, text) {
    this.canvas = canvas;
    this.text = text;
    this.map = null;
    this.trail = [];
  }

  async load() {
    const answer = await fetch("/heat");
    this.map = answer.ok ? await answer.json() : null;
    this.text.textContent = this.map?.frames ? `${this.map.frames} frames` : "none yet";
  }

  /** @param tool [x, y] in metres, null where that is not known; `facing` as in the mapper. */
  draw(tool, facing) {
    const { canvas, map } = this;
    const g = canvas.getContext("2d");
    const { width: w, height: h } = canvas;
    g.clearRect(0, 0, w, h);
    if (!map?.x) return;
    // Operator's right is +y and away is -x when facing the robot; the other way round from behind it.
    const part = (v, [low, high], turn) => (turn ? 1 - (v - low) / (high - low) : (v - low) / (high - low));
    const place = ([x, y]) => [part(y, map.y, !facing) * w, part(x, map.x, !facing) * h];
    const [nx, ny] = [map.counts.length, map.counts[0].length];
    const most = Math.max(1, ...map.counts.flat());
    map.counts.forEach((row, i) =>
      row.forEach((count, j) => {
        if (!count) return;
        const heat = Math.log1p(count) / Math.log1p(most);
        const [px, py] = place([map.x[0] + ((i + 0.5) / nx) * (map.x[1] - map.x[0]), map.y[0] + ((j + 0.5) / ny) * (map.y[1] - map.y[0])]);
        g.fillStyle = `hsl(${250 - 200 * heat} 75% ${18 + 42 * heat}%)`;
        g.fillRect(px - w / ny / 2, py - h / nx / 2, w / ny + 0.6, h / nx + 0.6);
      }));
    if (!tool || tool.includes(null)) return;
    this.trail.push(place(tool));
    if (this.trail.length > TRAIL) this.trail.shift();
    g.strokeStyle = "#ffffff66";
    g.lineWidth = 3;
    g.beginPath();
    for (const [px, py] of this.trail) g.lineTo(px, py);
    g.stroke();
    const [px, py] = place(tool);
    g.fillStyle = "#fff";
    g.beginPath();
    g.arc(px, py, 10, 0, 7);
    g.fill();
  }
}
