"""Pointers of an image encoder: a token says where in the picture what the instruction asks for is."""

from __future__ import annotations

import torch
from small_vla import ROBOT, make_observations, make_policy, make_stats

from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.policies.vision import KEY, Pointers, around_most, window
from vla_stack.schema import PolicySpec


def test_a_token_tells_where_the_best_match_is_and_how_it_looks():
    pointers = Pointers(channels=4, width=6, count=2)
    with torch.no_grad():
        for layer in (pointers.match.keys, pointers.match.queries, pointers.token):
            layer.weight.zero_()
            layer.bias.zero_()
        pointers.match.keys.weight[0, 0] = pointers.match.keys.weight[1, 1] = 1.0
        pointers.match.queries.weight[0, 0] = pointers.match.queries.weight[KEY + 1, 1] = 1.0  # of either query
        pointers.token.weight[:, 1:] = torch.eye(6)
    features = torch.zeros(1, 3, 5, 4)
    features[0, 2, 1, 0] = features[0, 0, 4, 1] = 1.0  # row 2, column 1; row 0, column 4
    asked = 1e4 * torch.tensor([[1.0, 1.0, 0, 0, 0, 0]])
    tokens = pointers(features, asked)[0].detach()
    # Features without the first, right and down in [-1, 1], and how sure it is.
    assert torch.allclose(tokens[0], torch.tensor([0.0, 0, 0, -0.5, 1.0, 1.0]))
    assert torch.allclose(tokens[1], torch.tensor([1.0, 0, 0, 1.0, -1.0, 1.0]))


def test_a_second_thing_that_looks_alike_does_not_draw_the_place_to_itself():
    attention = torch.zeros(1, 1, 3 * 5)
    attention[..., 5 + 1], attention[..., 5 + 2], attention[..., 4], attention[..., 10] = 0.4, 0.2, 0.3, 0.1
    nearby = around_most(attention, 3, 5).view(3, 5)
    # Row 1, column 1 is the most likely; row 2, column 0 lies beside it diagonally, row 0, column 4 does not.
    expected = torch.zeros(3, 5)
    expected[1, 1], expected[1, 2], expected[2, 0] = 4 / 7, 2 / 7, 1 / 7
    torch.testing.assert_close(nearby, expected)


def test_a_policy_with_pointers_reads_them_and_learns_them():
    policy = make_policy(vision_pointers=3)
    pre, post = make_vla_pre_post_processors(policy.config, make_stats())
    spec = PolicySpec(ROBOT, 8)
    batch = ChunkPolicy(policy, pre, post, spec).preprocess(make_observations(2))
    images = policy.prefix.image_tokens(batch)
    assert images.shape[1] == 2 * (policy.config.tokens_per_camera + 3)
    policy.encode(batch).summary.sum().backward()
    for encoder in policy.prefix.vision.values():
        assert all(bool(p.grad.any()) for p in encoder.pointers.match.parameters() if p.ndim > 1)


def test_a_window_is_what_lies_around_a_place_and_nothing_beyond_the_border():
    height, width = 3, 5
    values = torch.arange(1.0, 16.0)  # 1 ... 5 in the first row
    centre, between, corner = (0.0, 0.0), (0.25, 0.0), (-1.0, -1.0)
    weights = window(torch.tensor([[centre, between, corner]]), height, width)
    seen = (weights @ values[:, None]).view(3, 3, 3)
    assert seen[0].tolist() == [[2, 3, 4], [7, 8, 9], [12, 13, 14]]
    assert seen[1].tolist() == [[2.5, 3.5, 4.5], [7.5, 8.5, 9.5], [12.5, 13.5, 14.5]]
    assert seen[2].tolist() == [[0, 0, 0], [0, 1, 2], [0, 6, 7]]
