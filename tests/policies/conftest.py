"""The small policy as fixtures."""

import pytest
from small_vla import make_policy, make_stats

from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors


@pytest.fixture(scope="module")
def policy() -> VlaPolicy:
    return make_policy()


@pytest.fixture(scope="module")
def processors(policy):
    return make_vla_pre_post_processors(policy.config, make_stats())


@pytest.fixture(scope="module")
def saved(policy, processors, tmp_path_factory):
    """Directory of the policy."""
    path = tmp_path_factory.mktemp("policy")
    for part in (policy, *processors):
        part.save_pretrained(path)
    return path
