"""Agents whose loops nobody here wrote, as environments."""
