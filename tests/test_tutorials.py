"""The tutorials run from their first block to their last, shortened; their pages hold what a full run printed."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.fixture
def tutorials(load_tool, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")  # as for a script
    return load_tool("tutorials.py")


@pytest.mark.slow
@pytest.mark.timeout(600)  # of several processes, in real time
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs(page, tutorials, tmp_path):
    outputs = tutorials.run(page, tmp_path, short=True)
    assert len(outputs) >= 4
    made = [name for name in tutorials.PICTURE.findall(page.read_text()) if not (tmp_path / name).is_file()]
    assert not made, "pictures that the page shows and its blocks do not make"


def test_all_are_in_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    (pages,) = (entry["Tutorials"] for entry in nav if "Tutorials" in entry)
    assert sorted(pages) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_holds_a_run_in_full(page, tutorials):
    text = page.read_text()
    (minutes,) = [float(ran.split(":")[1].split()[0]) for ran in tutorials.RAN.findall(text)]
    assert 0 < minutes < 20  # of one core: ten minutes on two
    assert text.count("```text\n") >= 4
    assert "READY ipc" not in text  # of a shortened run
    pictures = [page.parent / name for name in tutorials.PICTURE.findall(text)]
    assert pictures and all(picture.stat().st_size < 150_000 for picture in pictures)


PAGE = """# A page

<!-- short: --nonsense -->
```bash
vla --list
```

```python
n = 2
```

between

```python
print(n + 1)
```

```text
4
```

the end
"""


def test_outputs_take_the_place_of_those_before(tutorials):
    written = tutorials.with_outputs(PAGE, ["tasks", "", "3"])
    assert "```bash\nvla --list\n```\n\n```text\ntasks\n```\n\n```python\nn = 2\n```\n\nbetween" in written
    assert written.endswith("print(n + 1)\n```\n\n```text\n3\n```\n\nthe end\n") and "4" not in written
    assert tutorials.with_outputs(written, ["tasks", "", "3"]) == written


def test_blocks_share_a_folder_and_their_names(tutorials, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        PAGE.replace("vla --list", "echo > there; cat there").replace("n = 2", "n = len(open('there').read())")
    )
    assert tutorials.run(page, tmp_path) == ["", "", "2"]


@pytest.mark.parametrize(("block", "short"), [("exit 3", False), ("vla no-verb", True), ("vla eval --nonsense", True)])
def test_a_block_that_fails_is_named(tutorials, tmp_path, block, short):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("vla --list", block))
    with pytest.raises(tutorials.Failure, match="page.md, block 1"):
        tutorials.run(page, tmp_path, short)


def test_what_nobody_reads_is_left_out(tutorials, tmp_path):
    lines = [f"\x1b[1mline {i}\x1b[0m" for i in range(40)]
    lines.append(f"loading {ROOT}/vla_stack/assets")
    text = "\n".join([" 10%|#  | 1/9\r100%|###| 9/9", "kept\rshown in the end", *lines, f"in {tmp_path}/data"])
    shown = tutorials.shown(text, tmp_path).splitlines()
    assert shown[0] == "shown in the end" and shown[1] == "line 0" and "..." in shown and len(shown) < 30
    assert shown[-2:] == ["loading .../vla_stack/assets", "in data"]
