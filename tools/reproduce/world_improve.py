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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import claimed
from numpy.typing import NDArray
from world_policies import BATCH, EXECUTED, imagined_env, noisy, shipped, simulated_env
from world_training import Settings, data, trained

import sim
from vla_stack.cli import main as vla
from vla_stack.evaluation.constraints.propose import Endpoint
from vla_stack.methods import imagined_critics
from vla_stack.methods.imagined_critics import Critics
from vla_stack.methods.ravl import RavlRecipe
from vla_stack.methods.sac import SacRecipe
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.shipped import resolve_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.schema import Observation
from vla_stack.training import checkpoint
from vla_stack.world_model.clips import encode_all, open_recording
from vla_stack.world_model.dreams import Dreams
from vla_stack.world_model.instructions import ask_paraphrases
from vla_stack.world_model.model import WorldModel
from vla_stack.world_model.rehearsal import DRIVE, Act, Tell, as_it_is, in_other_words, record, roll

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
    if arm == "critics":
        model = model.cpu()  # where they learn
    result: dict[str, Any] = {"kept": 0}
    policy = shipped()
    if arm != "unchanged":
        root = out / f"improve-{arm}-{seed}"
        result |= practise(settings, out, model, root, arm, seed)
        if not result["kept"]:
            return result | {"successes": None, "why": "no imagined episode succeeded without a guard firing"}
        policy = load_policy(tune(settings, [root, known(settings, out)], out / "runs" / root.name, seed))
    successes: list[bool] = []
    for i in range(0, settings.tested, BATCH):
        seeds = range(TESTED + i, TESTED + min(i + BATCH, settings.tested))
        env = simulated_env(model, len(seeds))
        successes += [e.success for e in roll(env, follow(policy), seeds, words(out), DRIVE)]
        env.close()
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
    critics = pessimists(settings, out, model, seed) if arm == "critics" else None
    rows = 1 if arm == "real" else min(BATCH, settings.improved)
    while kept < wanted and tried < TRIES * settings.improved:
        seeds = range(first + tried, first + tried + rows)
        env = (simulated_env if arm in ("real", "simulated") else imagined_env)(model, rows)
        if arm == "real":
            act = demonstrate(env.backend.envs[0])
        elif arm in ("imagined", "simulated", "relabelled"):
            act = follow(shipped())
        else:
            act = consider(env.backend, shipped(), critics, seeds)
        tell = as_it_is if arm == "relabelled" else words(out)
        kept = record(root, model.robot, roll(env, act, seeds, tell, DRIVE), wanted, words(out))
        tried += rows
        env.close()
    result = {"kept": kept, "tried": tried}
    note.write_text(json.dumps(result))
    return result


def ask_words(settings: Settings, out: Path, endpoint: Endpoint) -> None:
    """Have a language model write the paraphrases of the task's instructions, once."""
    path, info = out / WORDS, sim.TASKS[settings.task]
    if not path.exists():
        named = zip(info.instructions, info.variants, strict=True)
        path.write_text(json.dumps({t: ask_paraphrases(endpoint, t, tuple(v.values())) for t, v in named}))


def words(out: Path) -> Tell:
    """What policies are told instead of an instruction."""
    path = out / WORDS
    return partial(in_other_words, given=json.loads(path.read_text()) if path.exists() else None)


def follow(policy: ChunkPolicy) -> Act:
    """A policy."""

    def act(observations: Sequence[Observation], seeds: NDArray[np.int64], k: int) -> NDArray[np.float32]:
        return policy.infer(observations, [int(s) * 1000 + k for s in seeds]).actions[:, :EXECUTED]

    return act


def demonstrate(env: Any) -> Act:
    """The expert of one simulated arm, a control step at a time."""
    expert = sim.make_expert(env)
    return lambda observations, seeds, k: expert.act()[None, None]


def consider(dreams: Dreams, policy: ChunkPolicy, critics: Critics | None, all_seeds: Sequence[int]) -> Act:
    """The best of several noisy chunks of a policy, and of the critics' own where there are critics."""
    rows = {seed: row for row, seed in enumerate(all_seeds)}

    def act(observations: Sequence[Observation], seeds: NDArray[np.int64], k: int) -> NDArray[np.float32]:
        drawn = []
        for c in range(CANDIDATES):
            words = [(int(s) * 1000 + k) * CANDIDATES + c for s in seeds]
            chunks = policy.infer(observations, words).actions
            drawn.append(noisy(chunks, NOISE, np.array(words), k))
        chosen = []
        for i, seed in enumerate(seeds):
            row, options = rows[int(seed)], np.stack([chunks[i] for chunks in drawn])
            if critics is not None:
                options = np.concatenate([options[:, :EXECUTED], dreams.propose(row, critics)[None]])
            chosen.append(options[dreams.choose(row, options, int(seed) * 1000 + k, critics=critics)][:EXECUTED])
        return np.stack(chosen)

    return act


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
