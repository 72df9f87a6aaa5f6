"""Everything behind RESULTS.md. Nothing of the tool imports it."""
