"""Which tasks the generalist learns."""

NAMING = ("pick_any", "place_relation", "press", "shelf", "slot", "sort_one")  # whose sentence chooses
TASKS = ("pick", "place", "obstacle", "push", "stack", "drawer", *NAMING)
