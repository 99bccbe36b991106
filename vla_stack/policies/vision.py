"""Images to prefix tokens.

The encoder is a strided CNN, conditioned on the instruction by FiLM (Perez et al. 2018), whose features are squeezed to
a few maps and read out by one linear layer. On a CPU it trains ten times faster than a vision transformer of equal
accuracy, and without normalisation layers 2.6 times faster than with them. Regressing the cube's position from all
frames before the grasp, 300 steps of 64 left 21 mm of error at the first frame with this readout and 110 mm, nothing
learnt, with a spatial softmax of the usual scale. Patches with channels (64, 64) in place of overlapping convolutions
with (32, 64, 64): after 200 steps of 64 on 180 episodes of `pick` a held-out flow loss of 0.397 against 0.401, and 365
against 453 ms of one thread a step of the whole training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

PATCH = 4  # pixels


def to_float(images: Shaped[Tensor, "b _ _ _"]) -> Float[Tensor, "b 3 h w"]:
    """Images as float in [-1, 1], channels-last in memory.

    Args:
        images: uint8 ``[b, h, w, 3]`` as recorded, or float ``[b, 3, h, w]`` in [0, 1] as LeRobot's tools pass them.
    """
    if images.dtype == torch.uint8:
        return images.permute(0, 3, 1, 2).float().div(127.5).sub(1.0)
    return images.contiguous(memory_format=torch.channels_last).mul(2.0).sub(1.0)


class ImageEncoder(nn.Module):
    """One camera's image and the instruction to a few tokens.

    Args:
        size: Height and width of the image, pixels.
        channels: Output channels of the convolutions.
        stem: ``overlapping``: each convolution but the last halves the resolution, the first one over 5x5 pixels;
            ``patches``: the first one takes patches of 4x4 pixels, which is one matrix product, the others keep the
            resolution.
        maps: Maps of the bottleneck.
        tokens: Tokens to emit.
        width: Width of tokens and of the instruction.
    """

    def __init__(
        self, size: tuple[int, int], channels: tuple[int, ...], maps: int, tokens: int, width: int, stem: str
    ) -> None:
        super().__init__()
        last, patches = len(channels) - 1, stem == "patches"
        layers = [(3, 1, 1) if patches or n == last else (3, 2, 1) for n in range(len(channels))]
        layers[0] = (PATCH, PATCH, 0) if patches else (5, layers[0][1], 2)
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, kernel, stride, padding)
            for i, o, (kernel, stride, padding) in zip((3, *channels), channels, layers, strict=False)
        )
        self.film = nn.ModuleList(nn.Linear(width, 2 * c) for c in channels[1:])
        self.maps = nn.Linear(channels[-1], maps)
        height, breadth = (s // PATCH if patches else -(-s // 2**last) for s in size)
        self.tokens = nn.Linear(maps * height * breadth, tokens * width)
        self.width = width
        for conv in self.convs:  # without normalisation layers the initial scale has to carry through
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")

    def forward(self, images: Float[Tensor, "b 3 h w"], instruction: Float[Tensor, "b d"]) -> Float[Tensor, "b n d"]:
        x = F.relu(self.convs[0](images), inplace=True)
        for conv, film in zip(self.convs[1:], self.film, strict=True):
            scale, shift = film(instruction)[:, :, None, None].chunk(2, dim=1)
            x = F.relu(torch.addcmul(shift, conv(x), 1.0 + scale), inplace=True)
        maps = self.maps(x.permute(0, 2, 3, 1))  # a 1x1 convolution of channels-last features
        return self.tokens(maps.flatten(1)).unflatten(1, (-1, self.width))
