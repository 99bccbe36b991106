"""A configuration field that holds the configuration of any policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import draccus
from lerobot.configs import PreTrainedConfig

if TYPE_CHECKING:
    from lerobot.configs import PreTrainedConfig as AnyPolicy
else:

    class AnyPolicy:
        """Type of a field that holds the configuration of any policy.

        Were it ``PreTrainedConfig``, LeRobot's parser would unroll all policy types inside each other, this one inside
        itself, without end.
        """

    draccus.decode.register(AnyPolicy, lambda raw, path: draccus.decode(PreTrainedConfig, raw))
    draccus.encode.register(AnyPolicy, lambda config, _: draccus.encode(config, PreTrainedConfig))
