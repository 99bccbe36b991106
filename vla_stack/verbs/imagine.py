"""``vla imagine``: a person drives the imagined robot from a page, the simulated one beside it; or a film of both."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from vla_stack.console.access import Access
from vla_stack.console.gateway import HEADERS, keys_script
from vla_stack.errors import UserError
from vla_stack.key_map import help_line
from vla_stack.verbs.arguments import port, whole

HELP = "Drive the robot that a world model imagines with the keyboard, beside the simulated one; judge what it shows."
EXAMPLES = (
    "vla imagine                                     # opens a page on the shipped world model",
    "vla imagine --compare film.mp4 --seed 7         # no page: films the expert's actions in both",
    "vla imagine --model runs/world --compare film.mp4 --vlm http://127.0.0.1:8000/v1 --vlm-model NAME",
)
STATIC = Path(__file__).resolve().parents[1] / "world_model" / "static"
MOVE = 0.025  # m a control step, for a key that is held
TURN = 0.12  # rad


class Pair:
    """The same commands to the imagined robot and to the simulated one.

    Args:
        model: World model, as :func:`vla_stack.world_model.model.resolve` takes it.
        seed: Of the first scene.
    """

    def __init__(self, model: str, seed: int) -> None:
        from vla_stack.world_model.imagined_env import ImaginedEnv
        from vla_stack.world_model.model import load
        from vla_stack.world_model.oracle import Oracle
        from vla_stack.world_model.tool import check_commands_poses
        from vla_stack.world_model.world_backend import WorldBackend, max_steps_of, simulated

        world, self.model = load(model), model
        check_commands_poses(world.robot, "vla imagine")
        self.imagined = ImaginedEnv(WorldBackend(world, simulated(world), 1, max_steps_of(world)), "rgb_array")
        self.task, self.rate_hz = world.config.env, world.robot.rate_hz
        options = {"cameras": world.cameras, "image_size": world.robot.cameras[0].height, "control_hz": self.rate_hz}
        self.simulated = ImaginedEnv(Oracle(self.task, 1, **options), "rgb_array")
        self.low, self.high = world.robot.action_low, world.robot.action_high
        self.seed = seed
        self.reset(seed)

    def reset(self, seed: int) -> dict[str, Any]:
        """Begin a scene; what :meth:`act` returns."""
        self.seed, self.steps = seed, 0
        obs, _ = self.imagined.reset(seed=seed)
        self.simulated.reset(seed=seed)
        self.command: NDArray[np.float32] = obs["agent_pos"][:5].copy()
        self.succeeded, self._over = {"imagined": False, "simulated": False}, {"imagined": False, "simulated": False}
        self.guards: list[str] = []
        return self._report()

    def act(self, command: NDArray[np.float32]) -> dict[str, Any]:
        """One control step of both towards a tool target [5]; what there is to see. What is over stays over."""
        self.command, self.steps = np.clip(command, self.low, self.high).astype(np.float32), self.steps + 1
        for name in (n for n, over in self._over.items() if not over):
            _, _, terminated, truncated, info = getattr(self, name).step(self.command)
            self._over[name], self.succeeded[name] = terminated or truncated, bool(info["is_success"])
            self.guards += [g for g in info["guards"] if g not in self.guards]
        return self._report()

    def move(self, keys: dict[str, float]) -> dict[str, Any]:
        """:meth:`act` for held keys: ``x y z yaw`` from -1 to 1, ``grip`` 0 closed to 1 open.

        Raises:
            ValueError: A value is missing or not in that range.
        """
        held = np.array([float(keys[k]) for k in ("x", "y", "z", "yaw", "grip")])
        if not (np.abs(held) <= 1).all():
            raise ValueError(f"keys {keys}")
        return self.act(np.append(self.command[:4] + held[:4] * [MOVE, MOVE, MOVE, TURN], held[4]).astype(np.float32))

    def pictures(self) -> dict[str, NDArray[np.uint8]]:
        """What both see, uint8 [H, W, 3]."""
        return {name: getattr(self, name).render() for name in ("imagined", "simulated")}

    def close(self) -> None:
        self.imagined.close()
        self.simulated.close()

    def _report(self) -> dict[str, Any]:
        about = {"task": self.imagined.task, "seed": self.seed, "step": self.steps, "guards": list(self.guards)}
        return about | {"success": self.succeeded, "over": self._over, "pictures": _encoded(self.pictures())}


def _encoded(pictures: dict[str, NDArray[np.uint8]]) -> dict[str, str]:
    """Pictures as data addresses."""
    import cv2

    out = {}
    for name, picture in pictures.items():
        png = cv2.imencode(".png", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))[1].tobytes()
        out[name] = "data:image/png;base64," + base64.b64encode(png).decode()
    return out


class Page:
    """The page's server. One thread owns the two robots, as OpenGL wants it.

    Args:
        pair: The robots.
        thread: Where they were made.
        access: Who may open the page.
        verdicts: File to which a person's judgements are appended, one JSON line each.
    """

    def __init__(self, pair: Pair, thread: ThreadPoolExecutor, access: Access, verdicts: Path) -> None:
        self._pair, self._thread, self._access, self._verdicts = pair, thread, access, verdicts

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 12)
        app.router.add_get("/", self._index)
        app.router.add_get("/keys.js", keys_script)
        app.router.add_static("/static", STATIC)
        for name in ("act", "reset", "verdict"):
            app.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        access = self._access
        if not access.right_host(request.headers.get("Host")):
            raise web.HTTPForbidden(text="this page has another name")
        opening = request.path == "/" and "token" in request.query
        if not opening and not access.known(request.cookies.get(access.cookie, "")):
            raise web.HTTPForbidden(text="open the address that the terminal printed")
        if request.method == "POST" and not access.right_origin(request.headers.get("Origin")):
            raise web.HTTPForbidden(text="another page asks")
        response = await handler(request)
        policy = access.policy(request.headers["Host"])
        response.headers.update({**HEADERS, "Content-Security-Policy": policy})
        return response

    async def _index(self, request: web.Request) -> web.StreamResponse:
        if "token" not in request.query:
            return web.FileResponse(STATIC / "imagine.html")
        session = self._access.redeem(request.query["token"])
        if session is None:
            raise web.HTTPForbidden(text="this address has been used; the terminal prints a new one")
        # Not a redirect: the cookie is SameSite=Strict, and the next request has to come from this page.
        refresh = "<!doctype html><meta http-equiv=refresh content='0;url=/'><title>Imagined robot</title>"
        response = web.Response(text=refresh, content_type="text/html")
        response.set_cookie(self._access.cookie, session, httponly=True, samesite="Strict", path="/")
        return response

    async def _act(self, request: web.Request) -> web.Response:
        return web.json_response(await self._asked(request, self._pair.move))

    async def _reset(self, request: web.Request) -> web.Response:
        def begin(body: dict[str, Any]) -> dict[str, Any]:
            return self._pair.reset(int(body.get("seed", self._pair.seed)) % 2**31)

        return web.json_response(await self._asked(request, begin))

    async def _verdict(self, request: web.Request) -> web.Response:
        def write(body: dict[str, Any]) -> dict[str, Any]:
            pair = self._pair
            line = {
                "seed": pair.seed,
                "steps": pair.steps,
                "task": pair.imagined.task,
                "success": bool(body["success"]),
                "model": pair.model,
                "shown": pair.succeeded,
                "guards": pair.guards,
            }
            self._verdicts.parent.mkdir(parents=True, exist_ok=True)
            with self._verdicts.open("a") as file:
                file.write(json.dumps(line) + "\n")
            return line

        return web.json_response(await self._asked(request, write))

    async def _asked(self, request: web.Request, do: Any) -> dict[str, Any]:
        """What ``do`` makes of the request's JSON, in the thread of the robots."""
        try:
            body = await request.json()
            return await asyncio.get_running_loop().run_in_executor(self._thread, do, body)
        except (ValueError, KeyError, TypeError) as e:
            raise web.HTTPBadRequest(text=f"not understood: {e!r}") from None


def compare(pair: Pair, path: Path, steps: int = 40) -> list[dict[str, NDArray[np.uint8]]]:
    """Film the expert's actions, imagined to the left and simulated to the right; the pictures of both."""
    import gymnasium as gym

    import sim
    from vla_stack.evaluation.video import write_mp4

    env = gym.make(pair.task, cameras=(), control_hz=pair.rate_hz)
    env.reset(seed=pair.seed)
    expert = sim.make_expert(env)
    frames = []
    for _ in range(steps):
        frames.append(pair.pictures())
        action = expert.act()
        pair.act(action)
        if env.step(action)[2]:
            break
    frames.append(pair.pictures())
    env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mp4([np.concatenate(list(both.values()), 1) for both in frames], path, pair.rate_hz)
    return frames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="shipped",
        help="run directory of `vla train world_model_tiny`, or a shipped world model (%(default)s)",
    )
    parser.add_argument("--seed", type=whole, default=0, help="first scene (%(default)s)")
    parser.add_argument("--port", type=port, default=8081, help="of the page, on this computer alone (%(default)s)")
    parser.add_argument("--compare", type=Path, metavar="MP4", help="no page: film the expert's actions in both")
    parser.add_argument(
        "--verdicts", type=Path, default=Path("outputs/imagine/verdicts.jsonl"), help="file of judgements"
    )
    parser.add_argument(
        "--vlm", metavar="URL", help="with --compare: an OpenAI-compatible endpoint that judges the films"
    )
    parser.add_argument("--vlm-model", default="", help="name of the model there")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")


def main(args: argparse.Namespace) -> int:
    if (args.vlm or args.vlm_model) and not args.compare:
        raise UserError("--vlm judges films", "give --compare FILE.mp4 as well")
    with ThreadPoolExecutor(1) as thread:
        pair = thread.submit(Pair, args.model, args.seed).result()
        try:
            if args.compare:
                frames = thread.submit(compare, pair, args.compare).result()
                print(f"{args.compare}: {len(frames)} frames, imagined to the left, simulated to the right")
                if args.vlm:
                    _judged(args, frames, pair.imagined.task)
                return 0
            access = Access("127.0.0.1", args.port, False)
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(_serve(Page(pair, thread, access, args.verdicts), access, args))
        finally:
            thread.submit(pair.close).result()
    print(f"judgements, if there were any, are in {args.verdicts}")
    return 0


def _judged(args: argparse.Namespace, frames: list[dict[str, NDArray[np.uint8]]], task: str) -> None:
    """Print what a vision-language model makes of both films."""
    from vla_stack.evaluation.constraints.propose import Endpoint
    from vla_stack.world_model.vlm_judge import VOTES, judge

    for name in frames[0]:
        votes = judge(Endpoint(args.vlm, args.vlm_model), np.stack([both[name] for both in frames]), task)
        print(f"{name}: {votes} of {VOTES} say that it succeeded")


async def _serve(page: Page, access: Access, args: argparse.Namespace) -> None:
    runner = web.AppRunner(page.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", args.port).start()
    except OSError as e:
        raise UserError(f"port {args.port} cannot be opened ({e.strerror})", "give another --port") from None
    address = access.invite()
    keys = help_line("imagine", without=("pitch", "roll"))
    print(f"open {address}   (once; Ctrl-C ends)\nkeys: {keys}", flush=True)
    if not args.no_browser:
        webbrowser.open(address)
    await asyncio.Event().wait()
