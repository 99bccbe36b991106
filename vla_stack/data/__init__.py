"""Episodes on disk and training batches: recorder, repair, decoded-frame cache, loader, statistics.

Nothing here imports torch or lerobot; datasets are LeRobotDataset v3 directories that LeRobot's own loader opens.
"""
