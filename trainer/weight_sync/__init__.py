"""Brings new weights to the engine, and checks that they arrived."""
