"""What a policy learns of a chunk whose first actions were executed before it came, and are no labels."""

import torch
from small_vla import make_batch, make_policy, make_stats

from vla_stack.methods.imitation.loss import loss
from vla_stack.policies.processor_vla import make_vla_pre_post_processors

GIVEN = torch.tensor([0, 1, 3])


def test_what_was_executed_meanwhile_is_given_clean_and_is_not_learnt(monkeypatch):
    policy = make_policy(max_delay=4)
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    batch = make_batch(3)
    steps = torch.arange(batch["action"].shape[1])
    batch["action_is_pad"] = steps < GIVEN[:, None]
    batch = pre(batch) | {"action_is_pad": batch["action_is_pad"]}
    seen, said = [], {}

    def velocity(context, actions, t, **how):
        seen.append((actions, t))
        return torch.where((steps < GIVEN[:, None])[..., None], said["of given"], torch.zeros_like(actions))

    monkeypatch.setattr(policy, "velocity", velocity)
    values = []
    for value in (0.0, 100.0):
        said["of given"] = value
        values.append(loss(policy, batch, torch.Generator().manual_seed(0), draws=1)[0].item())
    assert values[0] == values[1]  # whatever is said of what is given
    noisy, t = seen[0]
    for row, given in enumerate(GIVEN.tolist()):
        clean = t[row] == 0.0
        assert clean.sum() == given or given == 0  # where a label begins at once, it is drawn how many are given
        torch.testing.assert_close(noisy[row, clean], batch["action"][row, clean])
