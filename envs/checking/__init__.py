"""What `python -m envs.check` is made of: plays without a model, and checks that judge them."""
