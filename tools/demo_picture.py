"""The README's moving picture, from the films of a robot run.

python tools/demo_picture.py outputs/demo/run docs/demo.webp
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import av
from PIL import Image, ImageDraw, ImageFont

from results import parser

COLUMNS, CLIPS, LABEL = 3, 6, 26


def main() -> int:
    p = parser(__doc__)
    p.add_argument("run", type=Path, help="directory of a run with films")
    p.add_argument("target", type=Path, help="picture to write")
    args = p.parse_args()
    run, target = args.run, args.target
    episodes = [e for e in json.loads(Path(run, "records.json").read_text())["episodes"] if e.get("video")]
    clips, labels = [], []
    for e in episodes[:CLIPS]:
        with av.open(str(Path(run, e["video"]))) as film:
            clips.append([f.to_image() for f in film.decode(video=0)])
        labels.append(e["instruction"] + ("" if e["success"] else "  (failed)"))
    w, h = clips[0][0].size
    rows = -(-len(clips) // COLUMNS)
    length = max(map(len, clips)) + 4  # every clip rests on its last frame
    font = ImageFont.load_default(15)
    frames = []
    for k in range(length):
        sheet = Image.new("RGB", (COLUMNS * w, rows * (h + LABEL)), "white")
        draw = ImageDraw.Draw(sheet)
        for i, (clip, label) in enumerate(zip(clips, labels, strict=True)):
            x, y = (i % COLUMNS) * w, (i // COLUMNS) * (h + LABEL)
            draw.text((x + 6, y + 4), label, "black", font)
            sheet.paste(clip[min(k, len(clip) - 1)], (x, y + LABEL))
        frames.append(sheet.resize((sheet.width * 2 // 3, sheet.height * 2 // 3)))
    frames[0].save(target, save_all=True, append_images=frames[1:], duration=100, loop=0, quality=70, method=6)
    print(f"{target}: {Path(target).stat().st_size / 1e3:.0f} kB, {length} frames")
    return 0


if __name__ == "__main__":
    sys.exit(main())
