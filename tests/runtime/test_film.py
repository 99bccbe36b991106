import cv2
import numpy as np
import pytest

from vla_stack.runtime import film
from vla_stack.schema import Observation


def observation(i: int) -> Observation:
    images = {"front": np.full((32, 32, 3), 8 * i, np.uint8), "wrist": np.full((480, 640, 3), (200, 30, 30), np.uint8)}
    return Observation(np.zeros(2, np.float32), images, "task", i)


@pytest.mark.parametrize("av_installed", [True, False])
def test_a_film_has_every_frame_with_the_cameras_side_by_side(av_installed, tmp_path, monkeypatch):
    if not av_installed:
        monkeypatch.setitem(__import__("sys").modules, "av", None)
    episode = film.Film()
    for i in range(12):
        episode.add(observation(i))
    assert episode.write(tmp_path / "films" / "0.mp4", rate_hz=10.0)
    video = cv2.VideoCapture(str(tmp_path / "films" / "0.mp4"))
    frames = []
    while (read := video.read())[0]:
        frames.append(read[1][..., ::-1].astype(int))
    assert len(frames) == 12 and video.get(cv2.CAP_PROP_FPS) == 10.0
    assert frames[0].shape == (240, 240 + 320, 3)
    assert abs(frames[10][120, 120] - 80).max() < 12
    assert abs(frames[10][120, 400] - (200, 30, 30)).max() < 12


def test_an_episode_without_pictures_leaves_no_file(tmp_path):
    assert not film.Film().write(tmp_path / "0.mp4", 10.0)
    assert list(tmp_path.iterdir()) == []
