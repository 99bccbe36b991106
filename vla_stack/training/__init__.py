"""Training: recipe in, LeRobot policy directory out. One loop for every method."""
