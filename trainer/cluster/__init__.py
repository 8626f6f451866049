"""Learner ranks as Ray actors: `shares` splits a step, `worker` is one rank, `group` is all of them, as a `Trainer`."""
