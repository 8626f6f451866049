"""Builds the objects of a run from its configuration and checks everything a user can get wrong."""
