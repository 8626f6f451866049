"""The parts of `python -m envs.check`: scripted episodes, and checks that judge them."""
