"""Images to prefix tokens.

The encoder is a strided CNN, conditioned on the instruction by FiLM (Perez et al. 2018), whose features are squeezed to
a few maps and read out by one linear layer. On a CPU it trains ten times faster than a vision transformer of equal
accuracy, and without normalisation layers 2.6 times faster than with them. Regressing the cube's position from all
frames before the grasp, 300 steps of 64 left 21 mm of error at the first frame with this readout and 110 mm, nothing
learnt, with a spatial softmax of the usual scale. Overlapping convolutions with channels (32, 64, 64) take a fifth more
of a training than patches with (64, 64), and succeeded no more often (``tools/reproduce/stems.py``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

PATCH = 4  # pixels
KEY = 32  # width of what a query and a place are compared by
WINDOW = 3  # places on a side of what a pointer's token is told of its surroundings


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
        pointers: Things of the instruction that are looked for, a token each beside ``tokens``.
        stem: ``overlapping``: each convolution but the last halves the resolution, the first one over 5x5 pixels;
            ``patches``: the first one takes patches of 4x4 pixels, which is one matrix product, the others keep the
            resolution.
        maps: Maps of the bottleneck.
        tokens: Tokens to emit.
        width: Width of tokens and of the instruction.
    """

    def __init__(
        self,
        size: tuple[int, int],
        channels: tuple[int, ...],
        maps: int,
        tokens: int,
        width: int,
        stem: str,
        pointers: int = 0,
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
        self.pointers = Pointers(channels[-1], width, pointers) if pointers else None
        self.width = width
        for conv in self.convs:  # without normalisation layers the initial scale has to carry through
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")

    def forward(self, images: Float[Tensor, "b 3 h w"], instruction: Float[Tensor, "b d"]) -> Float[Tensor, "b n d"]:
        x = F.relu(self.convs[0](images), inplace=True)
        for conv, film in zip(self.convs[1:], self.film, strict=True):
            scale, shift = film(instruction)[:, :, None, None].chunk(2, dim=1)
            x = F.relu(torch.addcmul(shift, conv(x), 1.0 + scale), inplace=True)
        features = x.permute(0, 2, 3, 1)
        maps = self.maps(features)  # a 1x1 convolution of channels-last features
        tokens = self.tokens(maps.flatten(1)).unflatten(1, (-1, self.width))
        return tokens if self.pointers is None else torch.cat((tokens, self.pointers(features, instruction)), 1)


class Pointers(nn.Module):
    """Where the things that an instruction names are in a picture: attention of the instruction to the features.

    A picture is looked through for what each of a few queries asks for, and a token says where that is, how it looks,
    and what is around it: how a thing lies decides how it is taken. A conditioned convolution can say the same, but
    learns each name anew; here a name is a vector that is compared with features.

    Args:
        channels: Of the features.
        width: Of tokens and of the instruction.
        count: P, how many queries the instruction makes.
    """

    def __init__(self, channels: int, width: int, count: int) -> None:
        super().__init__()
        self.match = Match(channels, width, count)
        self.token = nn.Linear(channels + 3, width)
        self.around = nn.Linear(WINDOW**2 * channels, width, bias=False)
        nn.init.zeros_(self.around.weight)

    def forward(self, features: Float[Tensor, "b h w c"], instruction: Float[Tensor, "b d"]) -> Float[Tensor, "b p d"]:
        height, width = features.shape[1:3]
        attention = self.match(features, instruction).softmax(-1)
        nearby = around_most(attention, height, width).to(features.dtype)
        down, right = (
            torch.linspace(-1.0, 1.0, n, device=features.device, dtype=features.dtype) for n in (height, width)
        )
        grid = torch.stack((right.repeat(height), down.repeat_interleave(width)), -1)  # [h * w, 2]
        flat, place = features.flatten(1, 2), nearby @ grid
        known = torch.cat((nearby @ flat, place, attention.amax(-1, keepdim=True).to(features.dtype)), -1)
        near = window(place, height, width).to(flat.dtype) @ flat  # [b, p * 9, c]
        around = near.view(*place.shape[:2], -1)
        return self.token(known) + self.around(around)  # type: ignore[no-any-return]


def around_most(attention: Float[Tensor, "b p n"], height: int, width: int) -> Float[Tensor, "b p n"]:
    """Attention to the place that has the most of it and to those beside it, n = height * width. What lies farther is
    often a second thing that looks like the first, and a mean over both is at neither."""
    place = torch.arange(height * width, device=attention.device)
    most = attention.argmax(-1, keepdim=True)
    down, right = place // width - most // width, place % width - most % width
    beside = (down.abs() <= WINDOW // 2) & (right.abs() <= WINDOW // 2)
    kept = torch.where(beside, attention, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def window(place: Float[Tensor, "b p 2"], height: int, width: int) -> Float[Tensor, "b m n"]:
    """Weights of an image's places, n = height * width, in each of the m = p * 9 points around given places.

    The points are one place apart, and bilinear between places; beyond the border there is nothing.

    Args:
        place: x to the right and y down, -1 to 1 from the first place to the last.
        height: Places from top to bottom.
        width: Places from left to right.
    """
    apart = torch.arange(WINDOW, device=place.device) - WINDOW // 2

    def along(x: Tensor, size: int) -> Tensor:  # [b, p, WINDOW, size]
        at = (0.5 * (x.float() + 1.0) * (size - 1))[..., None] + apart
        return (1.0 - (at[..., None] - torch.arange(size, device=place.device)).abs()).clamp(min=0.0)

    right, down = along(place[..., 0], width), along(place[..., 1], height)
    return (down[:, :, :, None, :, None] * right[:, :, None, :, None, :]).flatten(4).flatten(1, 3)


class Match(nn.Module):
    """How well each place of a picture is what each query asks for, logits; see :class:`Pointers`."""

    def __init__(self, channels: int, width: int, count: int) -> None:
        super().__init__()
        self.keys, self.queries = nn.Linear(channels, KEY), nn.Linear(width, count * KEY)

    def forward(self, features: Float[Tensor, "b h w c"], instruction: Float[Tensor, "b d"]) -> Float[Tensor, "b p n"]:
        queries = self.queries(instruction).unflatten(-1, (-1, KEY))
        return queries @ self.keys(features.flatten(1, 2)).transpose(1, 2) * KEY**-0.5
