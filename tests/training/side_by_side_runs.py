"""``vla train`` in two processes of this machine, as torchrun starts them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

from vla_stack.cli import main


def with_torchrun(*args: str, **how: Any) -> None:
    """``vla train`` in two processes as torchrun starts them, without paying for two more imports of torch."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vla_stack.training.loop", "vla_stack.policies.modeling_vla"])
    processes = [context.Process(target=rank_main, args=(rank, port, args), kwargs=how) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]


def rank_main(
    rank: int, port: int, args: tuple[str, ...], alike: bool = False, large: int = 1 << 20, count: str = ""
) -> None:
    """A process of several.

    Args:
        rank: Which.
        port: Where they meet.
        args: Of ``vla train``.
        alike: All have the same batches and noise, as one process alone.
        large: Weights of a large layer.
        count: File for the bytes that this process holds in the end, and those that were estimated.
    """
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in here.items()}}
    from vla_stack.training import loop, memory, placement

    placement.LARGE = large
    if alike:
        made = placement.Sharded.__init__

        def as_the_first(self: Any, device: str) -> None:
            made(self, device)
            self.rank = 0

        placement.Sharded.__init__ = as_the_first  # type: ignore[method-assign]
    if count and rank == 0:
        ran = loop.Trainer.run

        def counted(self: Any, *given: Any) -> Any:
            said = memory.estimate(self.policy, self.recipe, self.placement.shards)
            outcome = ran(self, *given)
            slots = [v for p in self.parameters for v in self.optimizer.state[p].values()]
            shards = sum(placement.here(p).nbytes for p in self.parameters)
            frozen = sum(p.nbytes for p in self.policy.parameters() if not p.requires_grad)
            buffers = sum(b.nbytes for b in self.policy.buffers())
            layers = sorted(sum(p.nbytes for p in m.parameters()) for m in placement.large_layers(self.policy))
            small = sum(p.nbytes for p in self.parameters) - sum(layers)
            whole = small + sum(layers[-2:])
            found = {
                "parameters": shards + frozen + buffers + whole,
                "optimizer": sum(placement.here(v).nbytes for v in slots),
                "average": sum(a.nbytes for a in self.ema._average),
            }
            said = {name: getattr(said, name) for name in found}
            Path(count).write_text(json.dumps({"counted": found, "said": said}))
            return outcome

        loop.Trainer.run = counted  # type: ignore[method-assign]
    sys.exit(main(["train", *args]))
