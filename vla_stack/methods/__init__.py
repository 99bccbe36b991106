"""One paper, one file; each shows its whole loss on one screen."""
