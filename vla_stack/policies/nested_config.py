"""A configuration field that holds the configuration of any policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import draccus
from lerobot.configs import PreTrainedConfig

if TYPE_CHECKING:
    from lerobot.configs import PreTrainedConfig as AnyPolicy

    OptionalPolicy = AnyPolicy | None
else:

    class AnyPolicy:
        """Type of a field that holds the configuration of any policy.

        Were it ``PreTrainedConfig``, LeRobot's parser would unroll all policy types inside each other, this one inside
        itself, without end.
        """

    class OptionalPolicy:
        """Likewise, or None; the parser would write a union without the policy's type."""

    def _decode(raw, path):
        return None if raw is None else draccus.decode(PreTrainedConfig, raw)

    def _encode(config, _):
        return None if config is None else draccus.encode(config, PreTrainedConfig)

    for field in (AnyPolicy, OptionalPolicy):
        draccus.decode.register(field, _decode)
        draccus.encode.register(field, _encode)
