"""A comparison of policies on common starts: what is known so far, who plays on, what it says, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vla_stack.errors import UserError
from vla_stack.evaluation.provenance import provenance
from vla_stack.evaluation.ranking import bradley_terry, ranks
from vla_stack.evaluation.sequential import PairedTest, Verdict, paired_test
from vla_stack.statistics import holm, success_interval

Pair = tuple[str, str]
Play = Callable[["Comparison", str, Sequence[int]], None]


@dataclass
class Comparison:
    """Policies, and which starts each has had.

    Attributes:
        names: Policies, at least two.
        margin: Difference of success that would matter.
        alpha: Chance that any verdict is wrong, over all pairs and looks.
        about: Settings that have to be the same where a comparison is continued.
        outcomes: Name -> start -> success.
    """

    names: tuple[str, ...]
    margin: float = 0.1
    alpha: float = 0.05
    about: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, dict[int, bool]] = field(default_factory=dict)

    def note(self, name: str, start: int, success: bool) -> None:
        """Keep the outcome of one start."""
        self.outcomes.setdefault(name, {})[start] = success

    def missing(self, name: str, starts: Sequence[int]) -> list[int]:
        """Those of ``starts`` that a policy has not had."""
        return [start for start in starts if start not in self.outcomes.get(name, {})]

    def tests(self) -> dict[Pair, PairedTest]:
        """Every pair on the starts that both had, in order, up to the first that one of them lacks: which episodes are
        there when a comparison is interrupted depends on how long they took."""
        known = sorted(set().union(*self.outcomes.values()))
        found = {}
        for pair in combinations(self.names, 2):
            rows = [[self.outcomes.get(name, {}).get(start) for name in pair] for start in known]
            whole = next((i for i, row in enumerate(rows) if None in row), len(rows))
            both = np.array(rows[:whole], bool).reshape(-1, 2)
            found[pair] = paired_test(both[:, 0], both[:, 1], self.margin, self.alpha / self.pairs)
        return found

    @property
    def pairs(self) -> int:
        return len(self.names) * (len(self.names) - 1) // 2

    def verdicts(self, tests: dict[Pair, PairedTest]) -> dict[Pair, Verdict]:
        """What each pair comes to. A wrong policy is called better in any of them with probability ``alpha`` at most
        (Holm), and different ones the same likewise; of two policies only one of these can be wrong.
        """
        better = holm([t.p for t in tests.values()])
        same = holm([t.same_p for t in tests.values()])
        said: dict[Pair, Verdict] = {}
        for (pair, test), p, same_p in zip(tests.items(), better, same, strict=True):
            said[pair] = test.leader if p <= self.alpha else "same" if same_p <= self.alpha else "open"
        return said

    def playing(self) -> list[str]:
        """Policies that some pair still waits for, in the order of ``names``."""
        waiting = [pair for pair, verdict in self.verdicts(self.tests()).items() if verdict == "open"]
        return [name for name in self.names if any(name in pair for pair in waiting)]

    def run(self, play: Play, starts: Sequence[int], block: int, on_block: Callable[[int], None]) -> None:
        """Play blocks of starts until every pair is decided or the starts are used up.

        Args:
            play: Plays one policy on some starts and notes the outcomes here.
            starts: All that may be used, in order; those known already are not played again.
            block: Starts between looks.
            on_block: Called with the number of starts used, after each block.
        """
        for first in range(0, len(starts), block):
            if not (playing := self.playing()):
                return
            some = starts[first : first + block]
            for name in playing:
                if missing := self.missing(name, some):
                    play(self, name, missing)
            on_block(first + len(some))

    def to_json(self) -> dict[str, Any]:
        """Everything that is known, and what follows from it."""
        tests = self.tests()
        verdicts = self.verdicts(tests)
        adjusted = dict(zip(tests, holm([t.p for t in tests.values()]), strict=True))
        place = ranks(self.names, verdicts)
        strengths = dict(zip(self.names, bradley_terry(self._table()), strict=True)) if self.outcomes else {}
        policies = {}
        for name in self.names:
            known = self.outcomes.get(name, {})
            interval = success_interval(sum(known.values()), len(known))
            policies[name] = {
                "episodes": len(known),
                "successes": sum(known.values()),
                "interval": [interval.low, interval.high],
                "ranks": list(place[name]),
                "strength": asdict(strengths[name]) if strengths else None,
            }
        return {
            "about": self.about,
            "margin": self.margin,
            "alpha": self.alpha,
            "policies": policies,
            "pairs": [
                asdict(test)
                | {"first": a, "second": b, "starts": test.starts, "difference": test.difference}
                | {"p_adjusted": adjusted[a, b], "verdict": verdicts[a, b]}
                for (a, b), test in tests.items()
            ],
            "outcomes": {name: {str(s): int(v) for s, v in sorted(o.items())} for name, o in self.outcomes.items()},
        }

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".json.tmp")
        partial.write_text(json.dumps(provenance() | self.to_json(), indent=1) + "\n")
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        """Take over what a file knows, if it is there.

        Raises:
            UserError: It is of another comparison, or malformed.
        """
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            settings = {"margin": found["margin"], "alpha": found["alpha"], "about": found["about"]}
            outcomes = {n: {int(s): bool(v) for s, v in o.items()} for n, o in found["outcomes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path}: not a comparison ({e!r})", "remove it, or give another --out") from e
        own = json.loads(json.dumps({"margin": self.margin, "alpha": self.alpha, "about": self.about}))
        if settings != own:
            asked, known = own["about"], settings["about"]
            differs = [k for k in asked | known if k not in known or k not in asked or asked[k] != known[k]]
            differs += [k for k in ("margin", "alpha") if own[k] != settings[k]]
            what = f"with another {', '.join(differs)}"
            if "policies" in differs:  # under the same names, for instance behind the same ports
                what = f"of other policies (then {_versions(known)}; now {_versions(asked)})"
            raise UserError(
                f"{path}: of a comparison {what}, which is not continued",
                "give another --out to begin a new one, or remove that file",
            )
        self.outcomes = outcomes

    def _table(self) -> np.ndarray:
        known = sorted(set().union(*self.outcomes.values()))
        return np.array([[self.outcomes.get(n, {}).get(s, np.nan) for n in self.names] for s in known], float)


def _versions(about: dict[str, Any]) -> str:
    """Which policies a comparison is of, for a person."""
    found = about.get("policies")
    return ", ".join(f"{n} {v[:12] or 'without version'}" for n, v in found.items()) if found else "unknown"


def sentences(comparison: Comparison) -> list[str]:
    """What a comparison says, one line a pair, and one a policy where there are more than two."""
    found = comparison.to_json()
    lines = [_pair(p, found["policies"], comparison) for p in found["pairs"]]
    if len(comparison.names) > 2:
        order = sorted(found["policies"].items(), key=lambda item: -item[1]["strength"]["value"])
        lines += ["", "rank    strength (log odds), 95 %    success    policy"]
        for name, policy in order:
            low, high = policy["ranks"]
            s, rank = policy["strength"], f"{low}" if low == high else f"{low}–{high}"
            lines.append(
                f"{rank:<8}{s['value']:>+5.2f} [{s['low']:+.2f}, {s['high']:+.2f}]"
                f"{policy['successes']:>13}/{policy['episodes']:<8}{name}"
            )
    return lines


def _pair(p: dict[str, Any], policies: dict[str, Any], comparison: Comparison) -> str:
    a, b, n = p["first"], p["second"], p["starts"]
    won = {"first": p["losses"], "second": p["wins"]}
    about = comparison.about
    where = f" in {about['env']}" if "env" in about else f" on {about['robot']}" if "robot" in about else ""
    counts = f"over {n} common starts{where}, {a} alone won {won['first']}, {b} alone won {won['second']}"
    coverage = f"{100 * (1 - comparison.alpha / comparison.pairs):.3g} %"
    points = f"{100 * p['difference']:+.0f} points [{100 * p['low']:+.0f}, {100 * p['high']:+.0f}], {coverage}"
    many = " (Holm, all pairs)" if comparison.pairs > 1 else ""
    match p["verdict"]:
        case "open":
            return f"not enough to tell {a} from {b}: {counts}; {b} minus {a} {points}"
        case "same":
            return f"no difference larger than {100 * p['margin']:.0f} points between {a} and {b}: {counts}; {points}"
        case leader:
            p_text = f"p = {p['p_adjusted']:.2g}" if p["p_adjusted"] >= 1e-4 else "p < 0.0001"
            return f"{p[leader]} better, {p_text}{many}: {counts}; {b} minus {a} {points}"
