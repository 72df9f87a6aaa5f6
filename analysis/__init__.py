"""Figures, tables and a page of an update's tokens: python -m analysis."""
