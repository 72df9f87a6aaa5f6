"""Figures and tables of runs: python -m analysis."""
