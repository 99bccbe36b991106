"""The robot's half of the loop: clock, action timeline, executor, safety envelope, control process, robot node."""
