"""Faulty environments, one small class for each fault, with what `envs.check` must say of it; and sound odd ones."""
