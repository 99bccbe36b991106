"""Ctrl-World (arXiv:2510.10125): policies evaluated in a controllable model of what the cameras will see."""
