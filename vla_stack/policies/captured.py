"""One CUDA graph a chunk: everything between the preprocessed batch and the normalised chunk, replayed by one call.

A chunk of a VLA is thousands of small operations, and a GPU waits for Python between them. A captured graph has no
Python in it: inputs are copied into the buffers that it was captured with, and its output is copied out. One is
captured for each set of shapes. New weights are another policy with graphs of its own, as a server loads them: what
``for_inference`` has computed of a policy's weights would not follow if others were copied into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from vla_stack.policies.flow import ActionPrefix
from vla_stack.schema import ACTION_DIM_IS_PAD

WARM_UP_RUNS = 3  # before a capture: what allocates, chooses kernels or compiles must have done so

type Run = Callable[[], Tensor]
type Capture = Callable[[Run], tuple[Tensor, Callable[[], None]]]


class Sampler(Protocol):
    """How a chunk is sampled, ``predict_action_chunk`` of a flow policy."""

    def __call__(self, batch: dict[str, Any], noise: Tensor, prefix: ActionPrefix | None = None) -> Tensor: ...


def cuda_graph(run: Run) -> tuple[Tensor, Callable[[], None]]:
    """What ``run`` returns, as a buffer that each call of the second result fills anew; on the current device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # torch's own is of the device that first captured one
        out = run()
    return out, graph.replay


class CapturedSampler:
    """A sampler whose every call is one graph.

    Args:
        sample: What is captured. It must read nothing but tensors of its arguments and weights, and never wait for the
            device.
        capture: How.
    """

    def __init__(self, sample: Sampler, capture: Capture = cuda_graph) -> None:
        self._sample, self._capture = sample, capture
        self._graphs: dict[tuple[Any, ...], tuple[dict[str, Tensor], Tensor, Callable[[], None]]] = {}

    def __call__(
        self, batch: Mapping[str, Any], noise: Float[Tensor, "b h a"], prefix: ActionPrefix | None = None
    ) -> Float[Tensor, "b h a"]:
        """A chunk that no later call changes."""
        inputs = tensors_read(batch) | {"noise": noise}
        if prefix is not None:
            inputs |= {"prefix.actions": prefix.actions, "prefix.mask": prefix.mask}
        shapes = tuple((name, value.shape, value.dtype) for name, value in sorted(inputs.items()))
        with current(noise.device):
            if shapes not in self._graphs:
                self._graphs[shapes] = self._captured(inputs)
            buffers, out, replay = self._graphs[shapes]
            for name, value in inputs.items():
                buffers[name].copy_(value, non_blocking=True)
            replay()
            return out.clone()

    def _captured(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Callable[[], None]]:
        buffers = {name: value.to(inputs["noise"].device, copy=True) for name, value in inputs.items()}

        def run() -> Tensor:
            batch = {name: value for name, value in buffers.items() if name not in ("noise", *_PREFIX)}
            given = [buffers[name] for name in _PREFIX if name in buffers]
            return self._sample(batch, buffers["noise"], ActionPrefix(*given) if given else None)

        return buffers, *self._capture(run)


_PREFIX = ("prefix.actions", "prefix.mask")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: streams and graphs are made on that, which need not be where the policy lies."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def tensors_read(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a policy reads of a batch, without texts, e.g. the instruction: its tokens are among the tensors."""
    names = (name for name in batch if name.startswith("observation.") or name == ACTION_DIM_IS_PAD)
    return {name: batch[name] for name in names if isinstance(batch[name], Tensor)}
