"""A newcomer's way: `vla console`, the printed address, the keyboard, a demonstration that trains."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from playwright.sync_api import Page, expect
from toy_console import Fingers, browser, drive, frames, free_port, in_phase, measured, phase, pictures_come, until

from vla_stack.console.feed import PICTURES
from vla_stack.data.dataset import open_dataset
from vla_stack.data.labels import EPISODE_UID
from vla_stack.schema import ACTION, SUCCESS

CAMERAS = ("front", "wrist")
pytestmark = pytest.mark.slow


class Console:
    """A running `vla console` and the pages that have it open."""

    def __init__(self, root, chromium) -> None:
        self.root = root
        command = [sys.executable, "-m", "vla_stack.cli", "console", "--root", str(root), "--port", str(free_port())]
        command += ["--robot-arg", "image_size=32", "--robot-arg", "control_hz=10", "--seconds", "600"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
        self.context = chromium.new_context(viewport={"width": 1440, "height": 900})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.context.on("weberror", lambda e: self.errors.append(str(e.error)))
        self.page.goto(self.address())
        in_phase(self.page, "reset")

    def address(self) -> str:
        for line in self.process.stdout:
            if found := re.search(r"http://\S+token=\S+", line):
                return found[0]
        raise AssertionError("no address was printed")

    def another_page(self) -> Page:
        page = self.context.new_page()
        page.goto(self.page.url)
        in_phase(page, "reset", "hold", "teleop", "estop")
        return page

    def start(self) -> Page:
        """The page, with a demonstration begun and in control."""
        self.page.keyboard.press("Enter")
        in_phase(self.page, "hold")
        expect(self.page.locator("body")).to_have_attribute("data-lease", "you")
        return self.page

    def close(self) -> str:
        self.process.send_signal(signal.SIGINT)
        rest = self.process.stdout.read()
        assert self.process.wait(60) == 0
        return rest


@pytest.fixture(scope="module")
def console(tmp_path_factory):
    with browser() as chromium:
        console = Console(tmp_path_factory.mktemp("console") / "data", chromium)
        yield console
        console.context.close()
        console.process.kill()


@pytest.fixture(autouse=True)
def at_rest(request, console):
    """Each test begins and ends with nothing pressed, nothing running, nothing pending."""
    yield
    page = console.page
    if page.is_closed():
        return
    for key in (" ", "ArrowRight", "ArrowDown", "a", "d"):
        page.keyboard.up(key)
    if page.locator("body").get_attribute("data-phase") == "estop":
        page.keyboard.press("Enter")
        in_phase(page, "hold", "reset")
    if page.locator("body").get_attribute("data-phase") != "reset":
        page.keyboard.press("x")
        in_phase(page, "reset")
    if page.locator("#pending").is_visible():
        page.keyboard.press("x")
        page.keyboard.press("x")  # now
    expect(page.locator("#pending")).to_be_hidden()
    assert not console.errors


def move(page: Page, key: str, dim: str, change: float) -> None:
    """Hold the dead-man and a key until a dimension has changed by so much."""
    before = measured(page, dim)
    drive(page, (key,), lambda: (measured(page, dim) - before) * np.sign(change) > abs(change), f"{dim} moves {change}")


def engage(page: Page) -> None:
    drive(page, (), lambda: phase(page) == "teleop", "the operator drives")


def test_the_page_shows_the_robot(console):
    page = console.page
    pictures_come(page, CAMERAS)
    expect(page.locator("#instruction")).to_have_text(re.compile("pick up the .* cube"))
    expect(page.locator("#stages li")).to_have_text(["reached", "grasped", "lifted"])
    expect(page.locator("#m-rtt")).to_have_text(re.compile(r"\d+ ms"))
    assert page.locator("[data-camera='front'] .age").inner_text().endswith("ms")
    expect(page.locator("#m-stop")).to_have_text("own line")
    assert 0.2 < measured(page, "tcp_x.pos") < 0.7


def test_a_used_address_opens_nothing_more(console):
    stranger = console.context.browser.new_context()
    page = stranger.new_page()
    assert page.goto(console.page.url).status == 403
    stranger.close()


def test_the_keyboard_moves_the_arm_and_only_with_the_dead_man(console):
    page = console.start()
    picture = page.locator("[data-camera='front'] canvas")
    before = picture.screenshot()
    page.keyboard.down("ArrowRight")  # without the dead-man
    at, seen = measured(page, "tcp_y.pos"), frames(page, "front")
    until(page, lambda: frames(page, "front") > seen + 4, "time passes")
    assert measured(page, "tcp_y.pos") == pytest.approx(at, abs=0.002)
    page.keyboard.up("ArrowRight")
    move(page, "ArrowRight", "tcp_y.pos", 0.05)
    assert picture.screenshot() != before
    move(page, "ArrowLeft", "tcp_y.pos", -0.05)
    move(page, "d", "gripper.pos", -50)
    page.keyboard.up(" ")
    in_phase(page, "hold")


def test_what_loses_the_focus_stops(console):
    page = console.start()
    move(page, "ArrowDown", "tcp_x.pos", 0.03)
    engage(page)
    page.evaluate("dispatchEvent(new Event('blur'))")
    in_phase(page, "hold")
    at, seen = measured(page, "tcp_x.pos"), frames(page, "front")
    until(page, lambda: frames(page, "front") > seen + 5, "time passes")
    assert measured(page, "tcp_x.pos") == pytest.approx(at, abs=0.01)  # Space is held down all the while
    page.keyboard.up(" ")
    move(page, "ArrowUp", "tcp_x.pos", -0.02)  # a fresh press goes on


def test_without_new_pictures_nobody_drives(console):
    console.page.locator("#lease").click()
    expect(console.page.locator("body")).to_have_attribute("data-lease", "free")
    blind = console.context.new_page()
    sockets, held, show = [], [], [True]

    def relay(socket):
        sockets.append(socket)
        server = socket.connect_to_server()
        server.on_message(lambda m: socket.send(m) if isinstance(m, str) or show[0] else held.append(m))

    blind.route_web_socket(re.compile("/ws$"), relay)
    blind.goto(console.page.url)
    pictures_come(blind, CAMERAS)
    blind.keyboard.press("Enter")
    in_phase(blind, "hold")
    engage(blind)
    show[0] = False
    in_phase(blind, "hold")
    expect(blind.locator("[data-camera='front'] .age")).to_have_class(re.compile("stale"))
    blind.keyboard.up(" ")
    assert 0 < len(held) <= PICTURES  # what the page has not drawn is not followed by more
    show[0] = True
    for picture in held:
        sockets[-1].send(picture)
    pictures_come(blind, CAMERAS)
    engage(blind)
    blind.close()  # a page that goes takes its hand with it
    in_phase(console.page, "hold")
    expect(console.page.locator("body")).to_have_attribute("data-lease", "free")


def test_keep_discard_undo(console):
    page = console.page
    episodes = page.locator("#episodes")
    expect(episodes).to_have_text("0")
    console.start()
    move(page, "ArrowRight", "tcp_y.pos", 0.03)
    page.keyboard.up(" ")
    page.keyboard.press("s")
    in_phase(page, "reset")
    pending = page.locator("#pending")
    expect(pending).to_have_attribute("data-kept", "true")
    expect(episodes).to_have_text("1")
    page.keyboard.press("x")
    expect(pending).to_have_attribute("data-kept", "false")
    expect(episodes).to_have_text("0")
    page.keyboard.press("u")
    expect(pending).to_have_attribute("data-kept", "true")
    page.keyboard.press("k")
    expect(pending).to_be_hidden()
    expect(episodes).to_have_text("1")
    expect(page.locator("#heat-text")).to_have_text(re.compile(r"\d+ frames"))
    console.start()
    move(page, "ArrowRight", "tcp_y.pos", 0.03)
    page.keyboard.press("x")  # while it runs
    expect(pending).to_have_attribute("data-kept", "false")
    expect(episodes).to_have_text("1")


def test_touch_alone_records_a_demonstration_and_throws_it_away(console):
    console.page.locator("#lease").click()
    expect(console.page.locator("body")).to_have_attribute("data-lease", "free")
    invite = "fetch('/invite', {method: 'POST'}).then((a) => a.json()).then((a) => a.address)"
    address = console.page.evaluate(invite)
    context = console.context.browser.new_context(
        viewport={"width": 844, "height": 390}, has_touch=True, is_mobile=True
    )
    phone = context.new_page()
    phone.goto(address)
    in_phase(phone, "reset")
    fingers, before = Fingers(phone), int(phone.locator("#episodes").text_content())
    fingers.tap("#commands [data-command=start]")
    in_phase(phone, "hold")
    y = measured(phone, "tcp_y.pos")
    fingers.push("#pad-left", (60, 0), lambda: measured(phone, "tcp_y.pos") > y + 0.03, "the arm goes right")
    fingers.hold(False)
    in_phase(phone, "hold")
    fingers.tap("#commands [data-command=success]")
    in_phase(phone, "reset")
    expect(phone.locator("#pending")).to_have_attribute("data-kept", "true")
    expect(phone.locator("#episodes")).to_have_text(str(before + 1))
    fingers.tap("#pending [data-command=discard]")
    expect(phone.locator("#pending")).to_have_attribute("data-kept", "false")
    fingers.tap("#pending [data-command=discard]")  # now
    expect(phone.locator("#pending")).to_be_hidden()
    context.close()


def test_the_stop_button_stops_and_enter_goes_on(console):
    page = console.start()
    move(page, "ArrowDown", "tcp_x.pos", 0.02)
    page.keyboard.down("ArrowDown")
    page.keyboard.press("Escape")
    in_phase(page, "estop")
    at, seen = measured(page, "tcp_x.pos"), frames(page, "front")
    until(page, lambda: frames(page, "front") > seen + 5, "time passes")
    assert measured(page, "tcp_x.pos") == pytest.approx(at, abs=0.01)
    page.keyboard.up("ArrowDown")
    page.keyboard.up(" ")
    page.keyboard.press("Enter")
    in_phase(page, "hold")


def test_one_drives_and_others_watch_and_may_stop(console):
    first, second = console.start(), console.another_page()
    pictures_come(second, CAMERAS)
    expect(second.locator("body")).to_have_attribute("data-lease", "other")
    second.keyboard.down(" ")
    second.keyboard.press("s")
    expect(second.locator("#toast")).to_have_class("on")
    in_phase(first, "hold")
    second.keyboard.up(" ")
    second.locator("#lease").click()  # asks
    expect(first.locator("#lease")).to_have_text(re.compile("Hand over to console"))
    first.locator("#lease").click()
    expect(second.locator("body")).to_have_attribute("data-lease", "you")
    expect(first.locator("body")).to_have_attribute("data-lease", "other")
    engage(second)
    first.keyboard.press("Escape")  # whoever sees it going wrong
    in_phase(second, "estop")
    second.keyboard.up(" ")
    second.close()
    expect(first.locator("body")).to_have_attribute("data-lease", "free")


def test_what_was_recorded_opens_and_is_what_was_done(console):
    """Ends the console: the tests above drive it, those below look at what it left."""
    console.page.close()
    assert "1 episodes" in console.close() and not console.errors
    dataset = open_dataset(console.root)
    assert dataset.num_episodes == 1 and len(np.unique(dataset.columns[EPISODE_UID])) == 1
    assert dataset.columns[SUCCESS].tolist() == [False] * (dataset.num_frames - 1) + [True]
    sent = dataset.columns[ACTION]
    assert (np.diff(sent[:, 1]) >= -1e-6).all() and sent[-1, 1] - sent[0, 1] > 0.02  # to the right, and no way else
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    theirs = LeRobotDataset("console/test", root=console.root)
    assert theirs.num_episodes == 1 and theirs.num_frames == dataset.num_frames
    np.testing.assert_array_equal(theirs[0][ACTION].numpy(), sent[0])
    assert theirs[0]["observation.images.front"].shape == (3, 32, 32)


@pytest.mark.timeout(900)  # a command starts in ten seconds on an idle machine, in minutes on a crowded one
def test_what_was_recorded_trains_with_the_stock_command(console, tmp_path):
    command = [
        os.path.join(os.path.dirname(sys.executable), "lerobot-train"),
        *("--dataset.repo_id=console/test", f"--dataset.root={console.root}"),
        *("--policy.type=act", "--policy.pretrained_backbone_weights=null", "--policy.chunk_size=8"),
        *("--policy.n_action_steps=8", "--policy.dim_model=32", "--policy.n_heads=2", "--policy.dim_feedforward=32"),
        *("--policy.push_to_hub=false", "--policy.device=cpu", "--num_workers=0", "--env_eval_freq=0"),
        *("--steps=2", "--batch_size=2", "--log_freq=1", "--save_freq=2", f"--output_dir={tmp_path / 'run'}"),
    ]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"step:\d+ .*?loss:(\S+)", done.stdout + done.stderr)]
    assert len(losses) == 2 and np.isfinite(losses).all()
    assert (tmp_path / "run/checkpoints/000002/pretrained_model/model.safetensors").is_file()
