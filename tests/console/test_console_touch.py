"""The operator's page under fingers: all of it on one screen at every size, and the dead-man's contract."""

import re
from pathlib import Path

import pytest
from acted_page import ActedPage
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from toy_console import browser, until

CHECKS = (Path(__file__).parent / "page_checks.js").read_text()
FIXED = "#stop, #deadman, .pad, .camera, #commands button, #who"
PLACES = f"[...document.querySelectorAll('{FIXED}')].map((e) => JSON.stringify(e.getBoundingClientRect()))"
FOCUS = "(e => [e.id || e.dataset.command, getComputedStyle(e).outlineStyle])(document.activeElement)"
ENDED = {"episode": 4, "outcome": "success", "frames": 120, "kept": True, "left_s": 3.2, "window_s": 5.0}


@pytest.fixture(scope="module")
def chromium():
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def phone(chromium):
    acted = ActedPage(chromium, 390, 844)
    yield acted
    acted.close()


@pytest.mark.parametrize(("width", "height"), [(360, 640), (844, 390), (1440, 900)])
def test_everything_to_drive_with_is_on_one_screen_and_stays_where_it_is(chromium, width, height):
    acted = ActedPage(chromium, width, height, "hg_dagger", touch=width < 1000)
    page = acted.page
    acted.show(phase="recovery", resumes="recovery")
    assert page.evaluate(CHECKS) == []
    before = page.evaluate(PLACES)
    recording = {**acted.state["recording"], "pending": ENDED, "error": "the disk is full: " + "x" * 60}
    acted.show(phase="hold", why="newest picture is 0.4 s old", lease="other", holder=3, recording=recording)
    expect(page.locator("#pending")).to_be_visible()
    expect(page.locator("#toast")).to_have_class("on")
    assert page.evaluate(PLACES) == before
    if width < 1000:
        page.locator("#more").tap()
        expect(page.locator("#panel")).to_be_visible()
    page.locator("#help-button").click()
    expect(page.locator("#help")).to_be_visible()
    said = len(acted.said)
    page.locator("#stop").click()  # nothing covers it
    page.wait_for_timeout(0)
    assert {"type": "estop"} in acted.said[said:]
    assert not [w for w in page.evaluate(CHECKS) if "contrast" in w or " x " in w or "name" in w]
    acted.close()


@pytest.mark.parametrize(("width", "height"), [(360, 640), (844, 390), (1440, 900)])
def test_axe_finds_nothing_serious(chromium, width, height):
    acted = ActedPage(chromium, width, height, "hg_dagger", touch=width < 1000)
    page, axe = acted.page, Axe()
    acted.show(phase="recovery", resumes="recovery")
    found = [*axe.run(page).response["violations"]]
    acted.show(phase="hold", why="newest picture is 0.4 s old", lease="other", holder=3)
    found += axe.run(page).response["violations"]
    if width < 1000:
        page.locator("#more").tap()
        expect(page.locator("#panel")).to_be_visible()
        found += axe.run(page).response["violations"]
    page.locator("#help-button").click()
    expect(page.locator("#help")).to_be_visible()
    found += axe.run(page).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert not serious, [(v["id"], v["help"], [n["html"] for n in v["nodes"]]) for v in serious]
    acted.close()


def test_tab_goes_through_the_buttons_in_their_order_and_shows_where_it_is(chromium):
    acted = ActedPage(chromium, 1440, 900, touch=False)
    acted.show(phase="recovery", resumes="recovery")
    seen = []
    for _ in range(4):
        acted.page.keyboard.press("Tab")
        seen.append(acted.page.evaluate(FOCUS))
    assert seen == [[name, "solid"] for name in ("stop", "lease", "rewind", "recovered")]
    acted.page.keyboard.press("Enter")  # means the button, not Start
    acted.page.wait_for_timeout(0)
    assert [m["name"] for m in acted.said if m["type"] == "event"] == ["recovered"]
    acted.close()


def test_a_pad_moves_nothing_without_the_dead_man_and_either_finger_stops(phone):
    phone.show(phase="recovery", resumes="recovery")
    hold, pad = phone.centre("#deadman"), phone.centre("#pad-left")
    right = (pad[0] + 60, pad[1])
    phone.fingers("touchStart", pad)
    phone.fingers("touchMove", right)
    assert (phone.hand()["engaged"], phone.hand()["velocity"]) == (False, None)
    phone.fingers("touchEnd")
    phone.fingers("touchStart", hold)
    phone.fingers("touchStart", hold, pad)
    assert phone.hand()["velocity"] == [0] * 5  # where a finger is put down is the middle
    phone.fingers("touchMove", hold, right)
    hand = phone.hand()
    assert hand["engaged"] and hand["velocity"][1] == pytest.approx(0.15) and hand["velocity"][0] == 0
    phone.lift(1, right)
    assert phone.hand()["velocity"] == [0] * 5
    phone.fingers("touchStart", hold, pad)
    phone.fingers("touchMove", hold, right)
    assert phone.hand()["velocity"][1] == pytest.approx(0.15)
    phone.lift(0, hold)
    assert not phone.hand()["engaged"]
    phone.fingers("touchEnd")
    phone.fingers("touchStart", hold)
    assert phone.hand()["engaged"]
    phone.fingers("touchCancel")  # the system takes the screen
    assert not phone.hand()["engaged"]


@pytest.mark.parametrize("loss", ["dispatchEvent(new Event('blur'))", "dispatchEvent(new Event('pagehide'))"])
def test_what_takes_the_page_away_takes_both_hands_until_they_are_put_down_anew(phone, loss):
    phone.show(phase="recovery", resumes="recovery")
    hold, pad = phone.centre("#deadman"), phone.centre("#pad-right")
    phone.fingers("touchStart", hold)
    phone.fingers("touchStart", hold, pad)
    phone.fingers("touchMove", hold, (pad[0], pad[1] - 60))
    assert phone.hand()["velocity"][2] == pytest.approx(0.15)  # up
    phone.page.evaluate(loss)
    assert not phone.hand()["engaged"]
    phone.fingers("touchMove", hold, (pad[0], pad[1] + 60))
    assert not phone.hand()["engaged"]
    phone.fingers("touchEnd")


def test_other_fingers_stop_and_command_while_one_holds_the_dead_man(phone):
    phone.show(phase="recovery", resumes="recovery")
    hold = phone.centre("#deadman")
    phone.fingers("touchStart", hold)
    assert phone.hand()["engaged"]
    said = len(phone.said)
    for selector in ("#commands [data-command=recovered]", "#stop"):
        phone.fingers("touchStart", hold, at := phone.centre(selector))
        phone.lift(1, at)
    assert phone.hand()["engaged"]
    kinds = [m.get("name", m["type"]) for m in phone.said[said:] if m["type"] in ("event", "estop", "own line")]
    assert sorted(kinds) == ["estop", "own line", "recovered"]
    phone.fingers("touchEnd")


KEY = "([type, options]) => document.body.dispatchEvent(new KeyboardEvent(type, {bubbles: true, ...options}))"
SPACE, UP = {"key": " ", "code": "Space"}, {"key": "q", "code": "KeyQ"}


@pytest.fixture
def press(chromium):
    """Sends keyboard events as browsers make them, and the page that gets them."""
    acted = ActedPage(chromium, 1440, 900, touch=False)
    acted.show(phase="recovery", resumes="recovery")

    def press(kind: str, *keys: dict) -> None:
        for key in keys:
            acted.page.evaluate(KEY, [f"key{kind}", key])

    yield press, acted
    acted.close()


def test_a_key_that_comes_up_under_another_name_is_let_go(press):
    press, acted = press
    press("down", SPACE, UP)
    assert acted.hand()["velocity"][2] == pytest.approx(0.15)
    press("up", {**UP, "key": "œ"})
    hand = acted.hand()
    assert hand["engaged"] and hand["velocity"] == [0] * 5
    press("up", {**SPACE, "key": "\u00a0"})
    assert not acted.hand()["engaged"]


@pytest.mark.parametrize(("key", "code", "sign"), [("<", "Comma", 1), (">", "Period", -1), (";", "Comma", 1)])
def test_a_key_that_shift_renames_turns_slowly(press, key, code, sign):
    press, acted = press
    shifted = {"key": key, "code": code, "shiftKey": True}
    press("down", SPACE, {"key": "Shift", "code": "ShiftLeft", "shiftKey": True}, shifted)
    assert acted.hand()["velocity"][3] == pytest.approx(sign * 0.3 * 0.15 * 6)
    press("up", shifted)
    assert acted.hand()["velocity"] == [0] * 5


@pytest.mark.parametrize(
    ("name", "flag"), [("Alt", "altKey"), ("AltGraph", "modifierAltGraph"), ("Meta", "metaKey"), ("Control", "ctrlKey")]
)
def test_a_modifier_lets_go_of_all_keys_until_they_are_pressed_anew(press, name, flag):
    press, acted = press
    modifier = {"key": name, "code": name}
    for kind, event in (("down", modifier), ("up", modifier), ("down", {"key": "w", flag: True})):
        press("down", SPACE, UP)
        assert acted.hand()["engaged"]
        press(kind, event)
        assert not acted.hand()["engaged"]
        press("down", {**SPACE, "repeat": True}, {**UP, "repeat": True})  # what is still held counts no more
        assert not acted.hand()["engaged"]
    said = len(acted.said)
    press("down", {"key": "Escape", "code": "Escape", flag: True})
    acted.page.wait_for_timeout(0)
    assert {"type": "estop"} in acted.said[said:]  # stopping is not for free hands alone


ALARM = "STOP IS NOT CONFIRMED: use the power switch"


def test_a_stop_that_nobody_confirms_is_said_to_be_one(press):
    _, acted = press
    page, toast = acted.page, acted.page.locator("#toast")
    expect(page.locator("#m-stop")).to_have_text("own line")
    page.clock.install(time=0)
    page.clock.pause_at(1)  # from here on the page's timers run when the test says so, and it dials nobody again
    page.keyboard.press("Escape")
    expect(toast).to_have_text("Stopped")
    acted.stop_error = "the robot node did not confirm the stop"
    page.keyboard.press("Escape")
    expect(toast).to_have_text(ALARM)
    acted.stop_error = ""
    page.keyboard.press("Escape")
    expect(toast).to_have_text("Stopped")

    acted.stop_error = None  # the connections are open and nothing gets through
    page.evaluate("document.getElementById('toast').textContent = ''")
    page.keyboard.press("Escape")
    page.clock.run_for(900)
    page.keyboard.press("Escape")  # who presses again waits no longer
    expect(toast).to_have_text("")
    page.clock.run_for(200)
    expect(toast).to_have_text(ALARM)
    expect(toast).to_have_class("on alarm")
    acted.stop_error = ""  # late
    acted.answer_stop()
    expect(toast).to_have_text("Stopped")
    expect(toast).to_have_class("on")
    page.clock.run_for(2000)
    expect(toast).to_have_text("Stopped")

    acted.cut()
    page.keyboard.press("Escape")
    expect(toast).to_have_text(ALARM)  # at once


PAD = "(value) => (navigator.getGamepads = () => [{connected: true, axes: [], buttons: Array(9).fill({value})}])"


def test_the_gamepad_s_stop_goes_by_its_own_line_where_the_gateway_is_gone(press):
    _, acted = press
    page = acted.page
    expect(page.locator("#m-stop")).to_have_text("own line")
    page.clock.install(time=0)
    page.clock.pause_at(1)  # it dials nobody again
    acted.cut(stop_line=False)
    said = len(acted.said)
    page.evaluate(PAD, 1)
    until(page, lambda: {"type": "own line", "what": "stop"} in acted.said[said:], "a stop")


def test_an_error_of_the_recording_is_said_once_and_over_no_alarm(press):
    _, acted = press
    page, toast = acted.page, acted.page.locator("#toast")
    full = {**acted.state["recording"], "error": "the disk is full"}
    acted.stop_error = "the robot node did not confirm the stop"
    page.keyboard.press("Escape")
    expect(toast).to_have_text(ALARM)
    acted.show(recording=full)
    expect(toast).to_have_text(ALARM)
    expect(page.locator("#recording-error")).to_have_text("the disk is full")
    acted.stop_error = ""
    page.keyboard.press("Escape")
    expect(toast).to_have_text("Stopped")
    acted.show()
    expect(toast).to_have_text("the disk is full")
    page.keyboard.press("Escape")
    expect(toast).to_have_text("Stopped")
    acted.show()
    expect(toast).to_have_text("Stopped")
    acted.show(recording={**full, "error": ""})
    expect(page.locator("#recording-error")).to_be_hidden()
    acted.show(recording=full)
    expect(toast).to_have_text("the disk is full")  # again


def test_a_reading_that_is_missing_is_shown_as_missing_and_lost_frames_as_drops(press):
    _, acted = press
    shown, mark = acted.page.locator("[data-dim='tcp_y.pos']"), acted.page.locator("#joints .track").nth(1).locator("i")
    expect(shown).to_have_text("0.100 m")
    acted.show(state=[0.4, None, 0.2, 0.3, 1.0], action=[0.4, None, 0.2, 0.3, 1.0], in_dist_score=None)
    expect(shown).to_have_text("–")
    expect(mark).to_be_hidden()
    expect(acted.page.locator("#m-drops")).to_have_text("0")
    acted.show(state=[0.4, 0.1, 0.2, 0.3, 1.0], drops=2, recording={**acted.state["recording"], "lost_frames": 3})
    expect(acted.page.locator("#m-drops")).to_have_text("5")
    expect(shown).to_have_text("0.100 m")
    expect(mark).to_be_visible()


def test_a_stop_before_the_start_leaves_the_ended_episode_to_be_discarded_and_nothing_else(press):
    _, acted = press
    discard = acted.page.locator("#commands [data-command=discard]")
    acted.show(phase="estop", resumes="reset")
    expect(discard).to_be_disabled()
    acted.show(recording={**acted.state["recording"], "pending": ENDED})
    expect(discard).to_be_enabled()
    acted.show(resumes="recovery", recording={**acted.state["recording"], "pending": None})
    expect(discard).to_be_enabled()


def test_more_lets_go_of_what_it_covers(phone):
    phone.show(phase="recovery", resumes="recovery")
    hold = phone.centre("#deadman")
    phone.fingers("touchStart", hold)
    assert phone.hand()["engaged"]
    phone.page.evaluate("document.getElementById('more').click()")
    assert not phone.hand()["engaged"]
    phone.fingers("touchEnd")
    phone.page.locator("#more").tap()
    expect(phone.page.locator("#more")).to_have_text(re.compile("More"))
