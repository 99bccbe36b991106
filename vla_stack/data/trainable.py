"""RaC: what is trained on. Loss and architecture stay those of imitation; the composition of the data changes.

Hu et al., "RaC: Robot Learning for Long-Horizon Tasks by Scaling Recovery and Correction" (arXiv 2509.07953). Frames of
a person are trained on, recoveries included; what the policy did before a takeover is dropped; episodes that the policy
finished without help are kept. HG-DAgger (Kelly et al. 2019, arXiv 1810.02890) keeps the person's frames alone.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset
from vla_stack.data.labels import SEGMENT_TYPE
from vla_stack.errors import UserError
from vla_stack.intervention import Segment
from vla_stack.schema import SUCCESS

Trainable = Literal["rac", "hg_dagger", "no_recovery", "all", "succeeded"]
Preset = Literal["uniform", "iwr", "sirius", "balanced"]
PRE_INTERVENTION = 15  # steps before a takeover that Sirius calls so
SIRIUS_MASS = {"intervention": 0.5, "pre-intervention": 0.002}


def trainable(dataset: Dataset, mode: Trainable) -> NDArray[np.bool_] | None:
    """Which frames are trained on, bool [N]; None where the dataset has no labels: all of them.

    Args:
        dataset: An open dataset.
        mode: ``rac``: demonstrations, recoveries, corrections, and autonomous frames of episodes in which the policy
            succeeded alone. ``hg_dagger``: without the latter. ``no_recovery``: rac without recoveries, an ablation.
            ``all``: everything, for the weights of IWR and Sirius. ``succeeded``: episodes that succeeded, whoever
            acted, of any dataset that says so: filtered behaviour cloning.

    Raises:
        UserError: There is no such mode, or a dataset does not say what succeeded.
    """
    if mode not in get_args(Trainable):
        raise UserError(f"'data.interventions' is '{mode}'", f"choose one of {', '.join(get_args(Trainable))}")
    lengths = dataset.episode_to - dataset.episode_from
    if mode == "succeeded":
        if SUCCESS not in dataset.columns:
            raise UserError(f"{dataset.root} has no column '{SUCCESS}'", "leave 'data.interventions' as it is")
        won = np.logical_or.reduceat(dataset.columns[SUCCESS].ravel().astype(bool), dataset.episode_from)
        return np.repeat(won, lengths)
    if SEGMENT_TYPE not in dataset.columns:
        return None
    kind = dataset.columns[SEGMENT_TYPE]
    if mode == "all":
        return np.ones(len(kind), bool)
    human = np.isin(kind, (Segment.DEMO, Segment.RECOVERY, Segment.CORRECTION))
    if mode == "hg_dagger":
        return human
    if mode == "no_recovery":
        human &= kind != Segment.RECOVERY
    # Where nobody recorded success, nothing is known to have succeeded alone; what a person did is trained on anyway.
    success = dataset.columns.get(SUCCESS, np.zeros(len(kind), bool))
    alone = np.array(
        [
            success[b - 1] and (kind[a:b] == Segment.AUTONOMOUS).all()
            for a, b in zip(dataset.episode_from, dataset.episode_to, strict=True)
        ]
    )
    return human | np.repeat(alone, lengths)


def weights(
    dataset: Dataset, mask: NDArray[np.bool_], preset: Preset, within: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Sampling weight of each frame, float [N], 0 outside ``mask``.

    A class c of n_c frames with mass m_c gets w_c = m_c N / n_c each, where N counts the frames in ``mask``.

    Args:
        dataset: An open dataset with labels.
        mask: Frames that are drawn from, bool [N].
        preset: ``uniform``; ``iwr`` (Mandlekar et al. 2020, arXiv 2012.06733): interventions and the rest half each;
            ``sirius`` (Liu et al. 2022, arXiv 2211.08416): interventions half, the steps before them next to nothing,
            demonstrations as they are, autonomous frames the remainder; ``balanced``: recoveries and corrections a
            quarter each.
        within: Of frames of one class, how often they are drawn relative to each other, float [N]; None for equally.

    Raises:
        UserError: A class of the preset has no frame, or there is no such preset.
    """
    n, share = int(mask.sum()), np.ones(len(mask)) if within is None else within
    if preset == "uniform":
        return mask * share
    out = np.zeros(len(mask))
    for name, (mass, frames) in classes(dataset, mask, preset, n).items():
        if not frames.any():
            remedy = "set data.interventions=all" if preset == "sirius" else "set data.weights=uniform"
            raise UserError(f"{dataset.root}: weights '{preset}' need {name} frames, there are none", remedy)
        out[frames] = mass * n * share[frames] / share[frames].sum()
    return out


def classes(
    dataset: Dataset, mask: NDArray[np.bool_], preset: Preset, n: int
) -> dict[str, tuple[float, NDArray[np.bool_]]]:
    """Classes of a preset: name -> (mass, their frames bool [N])."""
    kind = dataset.columns[SEGMENT_TYPE]
    of = {s: mask & (kind == s) for s in Segment}
    human = of[Segment.RECOVERY] | of[Segment.CORRECTION]
    rest = of[Segment.DEMO] | of[Segment.AUTONOMOUS]
    if preset == "iwr":
        return {"intervention": (0.5, human), "other": (0.5, rest)}
    if preset == "balanced":
        quarter = {s.name.lower(): (0.25, of[s]) for s in (Segment.RECOVERY, Segment.CORRECTION)}
        return {"demonstration": (0.5, rest)} | quarter
    if preset == "sirius":
        before = of[Segment.AUTONOMOUS] & _before_takeover(dataset)
        demos = float(of[Segment.DEMO].sum()) / max(n, 1)
        remainder = 1.0 - demos - sum(SIRIUS_MASS.values())
        if remainder <= 0:
            message = f"{dataset.root}: {demos:.0%} of the frames are demonstrations, weights 'sirius' leave no mass"
            raise UserError(message + " for autonomous ones", "set data.weights=iwr")
        return {
            "intervention": (SIRIUS_MASS["intervention"], human),
            "pre-intervention": (SIRIUS_MASS["pre-intervention"], before),
            "demonstration": (demos, of[Segment.DEMO]),
            "autonomous": (remainder, of[Segment.AUTONOMOUS] & ~before),
        }
    raise UserError(f"'data.weights' is '{preset}'", f"choose one of {', '.join(get_args(Preset))}")


def _before_takeover(dataset: Dataset) -> NDArray[np.bool_]:
    """Frames at most ``PRE_INTERVENTION`` steps before a person took over in their episode, bool [N]."""
    kind = dataset.columns[SEGMENT_TYPE]
    out = np.zeros(len(kind), bool)
    takes_over = np.flatnonzero((kind[1:] >= Segment.RECOVERY) & (kind[:-1] == Segment.AUTONOMOUS)) + 1
    starts = dataset.episode_from[np.searchsorted(dataset.episode_from, takes_over, side="right") - 1]
    for frame, start in zip(takes_over, starts, strict=True):
        out[max(start, frame - PRE_INTERVENTION) : frame] = True
    return out
