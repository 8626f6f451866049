"""Commands and configurations of other trainers become ours."""
