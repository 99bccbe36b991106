"""Ctrl-World (arXiv:2510.10125): policies evaluated and improved in a controllable model of what the cameras will see."""
