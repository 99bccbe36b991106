"""Supervising a policy: take over, rewind, recover, correct, and what the frames are labelled."""

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect
from toy_console import Fingers, browser, drive, free_port, in_phase, measured, phase, until

from robot_drivers import make_driver
from vla_stack.console.access import Access
from vla_stack.console.door import opened
from vla_stack.console.gateway import About, Gateway
from vla_stack.console.robot import RobotConfig
from vla_stack.data.dataset import open_dataset
from vla_stack.data.labels import CONTROL_SOURCE, INTERVENTION, SEGMENT_INDEX, SEGMENT_TYPE
from vla_stack.intervention import Control
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import ACTION, SUCCESS
from vla_stack.verbs.console import running

pytestmark = pytest.mark.slow
FURTHEST_START = 0.02  # m to the right, where an episode may begin
TO_THE_RIGHT = 1  # dimension that the policy of this test moves: it drifts to positive y


class Watcher:
    """Every state that the node publishes, as another operator on the same channels sees it."""

    def __init__(self, endpoint: str) -> None:
        self.states: list[dict] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(endpoint,))
        self._thread.start()

    def _run(self, endpoint: str) -> None:
        client = OperatorClient(endpoint)
        while not self._end.is_set():
            client.poll(20)
            if client.state and (not self.states or self.states[-1] != client.state):
                self.states.append(client.state)
        client.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@contextlib.contextmanager
def served(gateway: Gateway, port: int):
    """The gateway on a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    door = opened(gateway.app(), gateway.door, "127.0.0.1", port)
    asyncio.run_coroutine_threadsafe(door.__aenter__(), loop).result(60)
    yield
    asyncio.run_coroutine_threadsafe(door.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def policy_server():
    command = [sys.executable, str(Path(__file__).parent / "drifting_server.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().split()[1]
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def lane(policy_server, tmp_path_factory):
    """(page, watcher, root) of a console in mode rac."""
    folder = tmp_path_factory.mktemp("rac")
    root, port = folder / "data", free_port()
    config = RobotConfig(
        make_driver=partial(make_driver, "sim", task="pick", image_size=32, max_episode_steps=10**9),
        safety=SafetyConfig(),
        mode="rac",
        server=policy_server,
        endpoint=f"ipc://{folder}/operator",
        root=root,
        demos=root,
        seconds=600.0,
        quota=100,
    )
    access = Access("127.0.0.1", port, tls=False)
    with running(config) as robot, browser() as chromium:
        gateway = Gateway(OperatorClient(config.endpoint), About(robot.spec, robot.stages, "rac", root), access)
        watcher = Watcher(config.endpoint)
        with served(gateway, port):
            page = chromium.new_page(viewport={"width": 1440, "height": 900})
            page.goto(access.invite())
            in_phase(page, "reset")
            yield page, watcher, root
            page.close()
        watcher.close()


def start(page: Page) -> None:
    """Let the policy drive until it has moved the arm, so that it has a plan that goes on."""
    page.keyboard.press("Enter")
    in_phase(page, "auto")
    # An absolute place: a slow page may show the arm for the first time when it is as far right as it can be.
    until(page, lambda: measured(page, "tcp_y.pos") > FURTHEST_START + 0.02, "the policy moves the arm")


def decide(page: Page, key: str) -> None:
    """The episode has ended: keep it, or, asked twice, throw it away."""
    in_phase(page, "reset")
    page.keyboard.press(key)
    if key == "x":
        expect(page.locator("#pending")).to_have_attribute("data-kept", "false")
        page.keyboard.press(key)
    expect(page.locator("#pending")).to_be_hidden()


def last_succeeded(root: Path) -> bool:
    """Whether the newest recorded episode counts as a success."""
    return bool(open_dataset(root).columns[SUCCESS][-1])


def test_after_a_takeover_nothing_of_the_policy_is_left(lane):
    page, watcher, _ = lane
    start(page)
    page.keyboard.press("t")
    in_phase(page, "hold")
    seen = len(watcher.states)
    until(page, lambda: len(watcher.states) > seen + 15, "time passes")
    held = [s for s in watcher.states if s["phase"] == "hold" and s["tick"] >= 0]
    sent = np.array([s["action"] for s in held], np.float32)
    assert len(sent) > 5 and (sent == sent[0]).all()  # the plan had up to 16 steps to go, each of them to the right
    page.keyboard.press("Backspace")  # a false alarm, before any motion
    in_phase(page, "auto")
    page.keyboard.press("x")
    decide(page, "x")


def test_an_intervention_is_recovery_then_correction_and_ends_the_episode(lane):
    page, _, root = lane
    start(page)
    page.keyboard.press("t")
    in_phase(page, "hold")
    page.keyboard.press("c")  # there is no correction yet
    expect(page.locator("#toast")).to_have_class("on")
    before = measured(page, "tcp_y.pos")
    drive(page, ("ArrowLeft",), lambda: measured(page, "tcp_y.pos") < before - 0.02, "the operator moves the arm")
    drive(page, (), lambda: phase(page) == "recovery", "the operator recovers")
    page.keyboard.press("g")
    in_phase(page, "correction", "hold")
    height = measured(page, "tcp_z.pos")
    drive(page, ("a",), lambda: measured(page, "tcp_z.pos") < height - 0.02, "the arm goes down")
    drive(page, (), lambda: phase(page) == "correction", "the operator corrects")
    page.keyboard.press("h")  # hand back: not in this mode
    page.keyboard.press("c")
    page.keyboard.up(" ")
    decide(page, "k")
    expect(page.locator("#ratio-text")).to_have_text(re.compile(r"1 : \d"))
    assert not last_succeeded(root)  # a sub-task is not the task
    columns = open_dataset(root).columns
    kinds = columns[SEGMENT_TYPE]
    assert kinds[np.flatnonzero(np.diff(kinds, prepend=-1))].tolist() == [1, 2, 3]  # 1*(2+3+)+
    assert (columns[INTERVENTION] == (kinds >= 2)).all()
    assert (np.diff(columns[SEGMENT_INDEX]) >= 0).all()
    human = columns[CONTROL_SOURCE] == Control.HUMAN
    assert (human == columns[INTERVENTION]).all()
    drifts = np.diff(columns[ACTION][~human, TO_THE_RIGHT])
    assert drifts.sum() > 0 and (drifts > -0.01).all()  # a new plan begins where the arm was, behind its last command
    leads = np.diff(columns[ACTION][human, TO_THE_RIGHT])
    assert leads.sum() < 0 and (leads < 0.01).all()


def test_a_task_that_a_person_finishes_is_recorded_as_a_success(lane):
    page, _, root = lane
    start(page)
    page.keyboard.press("t")
    in_phase(page, "hold")
    drive(page, (), lambda: phase(page) == "recovery", "the operator recovers")
    page.keyboard.press("g")
    in_phase(page, "correction", "hold")
    height = measured(page, "tcp_z.pos")
    drive(page, ("a",), lambda: measured(page, "tcp_z.pos") < height - 0.02, "the arm goes down")
    expect(page.locator("#commands [data-command=success]")).to_be_enabled()
    page.keyboard.press("s")
    page.keyboard.up(" ")
    decide(page, "k")
    assert last_succeeded(root)


def test_rewind_goes_back_as_long_as_it_is_held(lane):
    page, watcher, _ = lane
    start(page)
    page.keyboard.press("t")
    in_phase(page, "hold")
    furthest = measured(page, "tcp_y.pos")
    drive(page, (), lambda: measured(page, "tcp_y.pos") < furthest - 0.01, "the arm goes back", dead_man="r")
    page.keyboard.up("r")
    in_phase(page, "hold")
    assert any(s.get("control_source") == Control.AUTO_REWIND for s in watcher.states)
    page.keyboard.press("x")
    decide(page, "x")


def test_a_success_of_the_policy_is_recorded_as_one(lane):
    page, _, root = lane
    start(page)
    page.keyboard.press("s")
    decide(page, "k")
    dataset = open_dataset(root)
    last = slice(dataset.episode_from[-1], dataset.episode_to[-1])
    assert set(dataset.columns[SEGMENT_TYPE][last].tolist()) == {1}
    assert last_succeeded(root)


def test_touch_alone_takes_over_recovers_corrects_and_keeps(lane):
    page, _, root = lane
    before = open_dataset(root).num_episodes
    page.locator("#lease").click()  # lets go of it
    expect(page.locator("body")).to_have_attribute("data-lease", "free")
    address = page.evaluate("fetch('/invite', {method: 'POST'}).then((a) => a.json()).then((a) => a.address)")
    context = page.context.browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    phone = context.new_page()
    phone.goto(address)
    in_phase(phone, "reset")
    fingers = Fingers(phone)
    fingers.tap("#commands [data-command=start]")
    in_phase(phone, "auto")
    until(phone, lambda: measured(phone, "tcp_y.pos") > FURTHEST_START + 0.02, "the policy moves the arm")
    fingers.tap("#commands [data-command=takeover]")
    in_phase(phone, "hold")
    y = measured(phone, "tcp_y.pos")
    fingers.push("#pad-left", (-60, 0), lambda: measured(phone, "tcp_y.pos") < y - 0.02, "the arm goes left")
    fingers.tap("#commands [data-command=recovered]")  # while the dead-man is held
    in_phase(phone, "correction", "hold")
    z = measured(phone, "tcp_z.pos")
    fingers.push("#pad-right", (0, 60), lambda: measured(phone, "tcp_z.pos") < z - 0.02, "the arm goes down")
    fingers.hold(False)
    fingers.tap("#commands [data-command=success]")
    in_phase(phone, "reset")
    fingers.tap("#pending [data-command=keep]")
    expect(phone.locator("#pending")).to_be_hidden()
    context.close()
    data = open_dataset(root)
    kinds = data.columns[SEGMENT_TYPE][data.episode_from[before] :]
    assert kinds[np.flatnonzero(np.diff(kinds, prepend=-1))].tolist() == [1, 2, 3]
    assert last_succeeded(root)
    expect(page.locator("body")).to_have_attribute("data-lease", "free")
