"""Cells of ``world_model.py`` that improve the shipped policy where it is weak.

It is told its task in words that it does not know, and begins where the arm was driven to. Arms: as it is; fine-tuned
on imagined episodes of its own that succeeded; on imagined ones in which it was told what it knows, recorded in those
words (relabelled); on as many of its own in the simulator, as a perfect world model would give them (simulated); on as
many demonstrations of the expert there, which begin and are told alike (real); on imagined episodes in which the best
of several chunks was carried out, as the judges say (planned) or as pessimistic critics do. Beside them every fine-
tuned arm goes on to see the same demonstrations of what the policy knows: imagined pictures alone would have it forget
what real ones look like. All are judged in the simulator, under the same conditions.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import claimed
from numpy.typing import NDArray
from world_policies import BATCH, EXECUTED, episodes, imagined, noisy, plan, shipped, simulated
from world_training import Settings, data, folders, trained

import sim
from vla_stack.cli import main as vla
from vla_stack.envs import EnvStep
from vla_stack.evaluation.constraints.propose import Endpoint
from vla_stack.methods import imagined_critics
from vla_stack.methods.imagined_critics import Critics
from vla_stack.methods.ravl import RavlRecipe
from vla_stack.methods.sac import SacRecipe
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.agents import ExpertAgent, PolicyAgent
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.rollout.engine import Engine
from vla_stack.rollout.plan import NO_COMMANDS, Decision, Episode, Plan, Query, Reply, Start
from vla_stack.schema import Observation
from vla_stack.training import checkpoint
from vla_stack.world_model.clips import encode_all, open_recording
from vla_stack.world_model.instructions import ask_paraphrases
from vla_stack.world_model.model import WorldModel
from vla_stack.world_model.rehearsal import Reword, Varied, as_it_is, in_other_words, record
from vla_stack.world_model.world_backend import WorldBackend

TESTED = 60_000  # seed of the first episode that a policy is judged on
PRACTISED = 80_000  # and of the first one that it learns from
TRIES = 4  # episodes imagined at most for one that is wanted
NOISE = 0.008  # m, on the chunks that are chosen from; a policy that imitates noise misses, so others have none
WORDS = "words.json"
CANDIDATES = 4  # chunks of which one is chosen
RAVL = RavlRecipe(
    SacRecipe(
        num_critics=10, subset=10, actor=(256, 256), critic=(256, 256), layer_norm=True, batch=128, temperature=0.05
    )
)


def improvement(settings: Settings, out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Successes in the simulator, and how many episodes the policy learned from."""
    model = trained(out, "improvement", arm, seed)[-1]
    result: dict[str, Any] = {"kept": 0}
    policy = shipped()
    if arm != "unchanged":
        root = out / f"improve-{arm}-{seed}"
        result |= practise(settings, out, model, root, arm, seed)
        if not result["kept"]:
            return result | {"successes": None, "why": "no imagined episode succeeded without a guard firing"}
        policy = load_policy(tune(settings, [root, known(settings, out)], out / "runs" / root.name, seed))
    tested = plan(simulated(model), Varied(PolicyAgent, words(out)), policy)
    successes = [e.success for e in episodes(policy, tested, range(TESTED, TESTED + settings.tested))]
    return result | {"successes": successes}


def practise(settings: Settings, out: Path, model: WorldModel, root: Path, arm: str, seed: int) -> dict[str, Any]:
    """The dataset of an arm: how many episodes it holds, of how many that were tried."""
    note = root.with_suffix(".json")
    if note.exists():
        return json.loads(note.read_text())
    shutil.rmtree(root, ignore_errors=True)  # of a run that was stopped on the way
    first, kept, tried = PRACTISED + seed * 10_000, 0, 0
    wanted = settings.improved
    if arm == "real" and (other := out / f"improve-imagined-{seed}.json").exists():
        wanted = json.loads(other.read_text())["kept"]  # as many demonstrations as there are imagined episodes
    rows = 1 if arm == "real" else min(BATCH, settings.improved)
    policy = None if arm == "real" else shipped()
    with Engine(practice(settings, out, model, arm, seed), rows) as engine:
        while kept < wanted and tried < TRIES * settings.improved:
            starts = [Start(first + tried + row) for row in range(rows)]
            found = sorted(engine.run(policy, starts), key=lambda e: e.seed)
            kept = record(root, model.robot, found, wanted, words(out))
            tried += rows
    result = {"kept": kept, "tried": tried}
    note.write_text(json.dumps(result))
    return result


def practice(settings: Settings, out: Path, model: WorldModel, arm: str, seed: int) -> Plan:
    """Where, and who acts in, the episodes that an arm learns from."""
    folder = folders(out, "improvement", arm, seed)[-1]
    if arm == "real":
        return plan(simulated(model), Varied(partial(ExpertAgent, make=sim.make_expert, noise=0.0), words(out)), None)
    if arm == "simulated":
        return plan(simulated(model), Varied(PolicyAgent, words(out)), shipped())
    if arm in ("imagined", "relabelled"):
        reword = as_it_is if arm == "relabelled" else words(out)
        return plan(imagined(folder), Varied(PolicyAgent, reword), shipped())
    if arm == "critics":
        critics = pessimists(settings, out, model.cpu(), seed)
        return plan(imagined(folder, "cpu"), Varied(partial(ChoosingAgent, critics=critics), words(out)), shipped())
    return plan(imagined(folder), Varied(ChoosingAgent, words(out)), shipped())


def ask_words(settings: Settings, out: Path, endpoint: Endpoint) -> None:
    """Have a language model write the paraphrases of the task's instructions, once."""
    path, info = out / WORDS, sim.TASKS[settings.task]
    if not path.exists():
        named = zip(info.instructions, info.variants, strict=True)
        path.write_text(json.dumps({t: ask_paraphrases(endpoint, t, tuple(v.values())) for t, v in named}))


def words(out: Path) -> Reword:
    """What policies are given instead of an instruction."""
    path = out / WORDS
    return partial(in_other_words, given=json.loads(path.read_text()) if path.exists() else None)


class ChoosingAgent:
    """Carries out the best of several noisy chunks of the policy, and of the critics' own where there are critics.

    Args:
        episode: Of a world model.
        critics: Say what a chunk is worth; without, the world model's judges do.
    """

    def __init__(self, episode: Episode, critics: Critics | None = None) -> None:
        self._row, self._seed, self._critics = episode.env, episode.start.seed, critics
        self._chunk: NDArray[np.float32] = NO_COMMANDS

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        if not len(self._chunk):
            drawn = []
            for c in range(CANDIDATES):
                seed = (self._seed * 1000 + k) * CANDIDATES + c
                chunk, _ = yield Query(observation, seed)
                drawn.append(noisy(chunk[None], NOISE, [seed]))
            self._chunk = self._best(np.concatenate(drawn), k)
        command, self._chunk = self._chunk[0], self._chunk[1:]
        return Decision(command, ahead=self._chunk)

    def result(self) -> None: ...

    def _best(self, chunks: NDArray[np.float32], k: int) -> NDArray[np.float32]:
        world: WorldBackend = self._row.backend
        if self._critics is not None:
            own = world.propose(self._row.index, self._critics)
            chunks = np.concatenate([chunks[:, :EXECUTED], own[None]])
        return chunks[world.choose(self._row.index, chunks, self._seed * 1000 + k, critics=self._critics)][:EXECUTED]


def pessimists(settings: Settings, out: Path, model: WorldModel, seed: int) -> Critics:
    """Critics trained on imagined chunks."""
    recording = open_recording(data(settings, out))
    latents = encode_all(model.vae, recording, model.bank.device)
    critics, log = imagined_critics.train(model, recording, latents, RAVL, settings.critics, seed)
    (out / f"critics-{seed}.json").write_text(json.dumps(log))
    return critics


def known(settings: Settings, out: Path) -> Path:
    """Demonstrations such as the shipped policy was trained on."""
    root = out / "known"
    with claimed(out / "locks" / root.name, wait=True):
        if not (finished := out / "known.finished").exists():
            collect(CollectConfig(settings.task, noise=0.3), root, settings.known, image_mode="image")
            finished.touch()
    return root


def tune(settings: Settings, roots: Sequence[Path], folder: Path, seed: int) -> Path:
    """The shipped policy, fine-tuned on datasets."""
    policy = resolve_policy("shipped")
    last = checkpoint.path(folder / "checkpoints", settings.tuning)
    if not last.exists():
        command = ["train", "--resume", str(folder)]
        if not (folder / "recipe.yaml").exists():
            command = [
                "train",
                str(policy / "recipe.yaml"),
                f"policy.pretrained={policy}",
                f"data.root=[{','.join(map(str, roots))}]",
                f"output_dir={folder}",
                f"method.steps={settings.tuning}",
                "method.save_every=50",
                "method.batch_size=16",
                "method.optimizer.lr=1e-4",
                f"seed={seed}",
                "threads=1",
                "precision=auto",
            ]
        if vla(command) or not last.exists():
            sys.exit(1)  # a signal; it continues next time
    return last / checkpoint.PRETRAINED
