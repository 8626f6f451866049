"""The agent loop: streams, episodes, groups of episodes and the rules that every stream must keep."""
