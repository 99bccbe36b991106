"""Constraints between the stages of a task: a small language in YAML, its costs, and what they say about an episode."""
