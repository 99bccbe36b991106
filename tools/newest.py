"""Print the requirements of the project without their upper bounds, for `make test-newest`.

python tools/newest.py > requirements.txt
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("train", "robot", "hardware", "console", "viz", "openpi", "dev")  # of sim-extra, MuJoCo is held back


def without_upper_bound(text: str) -> str:
    """``lerobot[dataset]>=0.6.1`` of ``lerobot[dataset]==0.6.1``, ``numpy>=2.0`` of ``numpy<2.3,>=2.0``."""
    requirement = Requirement(text)
    lower = [s.version for s in requirement.specifier if s.operator in (">=", "==")]
    requirement.specifier = SpecifierSet(",".join(f">={version}" for version in lower))
    return str(requirement)


def requirements() -> list[str]:
    """Those of the base and of the extras, but for the extras' references to each other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + [text for extra in EXTRAS for text in extras[extra]]
    return sorted({without_upper_bound(text) for text in declared if Requirement(text).name != project["name"]})


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(requirements()))


if __name__ == "__main__":
    main()
