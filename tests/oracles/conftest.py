"""Numbers of the authors' own code, and how far ours are from them.

Each ``*.safetensors`` here holds inputs and outputs of one reference; its metadata says of which repository, commit and
functions, and how the inputs were drawn. ``tools/reproduce/fidelity.py`` makes the table of docs/fidelity.md from what
these tests compare.
"""

import json
from pathlib import Path

import pytest
import safetensors
import torch

FOLDER = Path(__file__).parent


class Oracle(dict):
    """Tensors by name, and where they come from."""

    def __init__(self, name):
        with safetensors.safe_open(FOLDER / f"{name}.safetensors", "pt") as f:
            super().__init__({key: f.get_tensor(key) for key in f.keys()})
            self.source = f.metadata()

    def part(self, prefix):
        """Tensors whose names begin so, without it."""
        return {k.removeprefix(prefix): v for k, v in self.items() if k.startswith(prefix)}


@pytest.fixture(scope="session")
def oracle():
    return Oracle


@pytest.fixture
def agrees(record_property):
    """Hold ours against theirs, entry by entry, relative to their largest entry where that exceeds 1."""

    def compare(paper, what, ours, theirs, bound=1e-5):
        ours, theirs = (torch.as_tensor(x).detach().double().squeeze() for x in (ours, theirs))
        assert ours.shape == theirs.shape and ours.isfinite().all() and theirs.isfinite().all()
        difference = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)).item()
        record_property("agrees", json.dumps({"paper": paper, "what": what, "value": difference, "bound": bound}))
        assert difference <= bound, f"{what}: off by {difference:.2g}"

    return compare


@pytest.fixture
def departs(record_property):
    """Show by how much two ways differ, where the reference has a defect that ours leaves out."""

    def compare(paper, what, ours, theirs, least):
        difference = (torch.as_tensor(ours) - torch.as_tensor(theirs)).abs().max().item()
        record_property("departs", json.dumps({"paper": paper, "what": what, "value": difference, "bound": least}))
        assert difference >= least, f"{what}: {difference:.2g} apart, expected at least {least:g}"

    return compare
