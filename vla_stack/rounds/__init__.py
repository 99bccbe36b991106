"""Loops of roll out, intervene or score, aggregate, train and evaluate; each round a record on the disk."""
