"""The DQN searcher, against the exact one and the published figures."""
