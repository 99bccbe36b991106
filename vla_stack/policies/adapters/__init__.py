"""LeRobot's SmolVLA, pi0 and pi0.5 as :class:`~vla_stack.policies.contract.FlowPolicy`.

Each is a subclass of LeRobot's policy with the same configuration and the same weights, so that a directory written by
one is read by the other. What is new is how the action chunk is computed from the cached prefix: any chunk length,
one time an action token, several chunks end to end, and a cache that nothing writes to.
"""
