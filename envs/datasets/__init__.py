"""Rows of any source become checked samples."""
