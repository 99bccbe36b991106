"""One key map for console, teleop and imagine: no key means two things, and the docs show what there is."""

from pathlib import Path

import pytest

from vla_stack import key_map
from vla_stack.key_map import COMMANDS, DEAD_MAN, FINE, HELP, MOTIONS, REWIND

DOCS = Path(__file__).resolve().parent.parent / "docs/console.md"


@pytest.mark.parametrize("verb", ["console", "teleop", "imagine"])
def test_no_key_means_two_things(verb):
    said = [key for name, (key, _) in key_map.commands(verb).items() if name != "rearm"]  # Start, where stopped
    keys = [DEAD_MAN, FINE, REWIND, HELP, *MOTIONS, *said]
    assert len(set(keys)) == len(keys)
    assert DEAD_MAN == " " and "hold Space" in key_map.help_line(verb)


def test_every_axis_goes_both_ways():
    ways = {(m.axis, m.sign) for m in MOTIONS.values()}
    assert len(ways) == len(MOTIONS) and {(axis, -sign) for axis, sign in ways} == ways


def test_pages_get_the_whole_map():
    script = key_map.as_script()
    assert all(f'"{key}"' in script for key in [*MOTIONS, *(key for key, _ in COMMANDS.values())])


def test_the_docs_show_the_map():
    assert key_map.as_markdown() in DOCS.read_text()
