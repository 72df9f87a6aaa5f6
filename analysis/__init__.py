"""Figures, tables and the anatomy of updates: python -m analysis."""
