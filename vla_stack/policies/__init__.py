"""Observation to action chunk: flow matching, the native VLA, adapters for other LeRobot policies."""
