"""Off-policy reinforcement learning around a frozen flow policy, by what it sees: EXPO, DSRL, RLPD."""
