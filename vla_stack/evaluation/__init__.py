"""Rollouts under a virtual clock, figures with intervals, and the report that shows them."""
