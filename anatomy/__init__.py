"""One update taken apart: python -m anatomy. Nothing of the tool imports it."""
