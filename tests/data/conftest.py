from pathlib import Path

import pytest
from toy_robot import make


@pytest.fixture(params=["video", "image"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make(tmp_path / "toy")
