"""TrueTurn under one name. Today it holds the command; the code lives in envs, agents and trainer."""
