"""12. A reward that can be fooled

`reward` pays for the right number anywhere in the text, so that a policy soon counts from 1 to
100. Repair it: 1.0 if the completion has exactly one <answer> ... </answer>, and it holds the
number and nothing else but spaces; else 0.0. Only the digits 0 to 9 are digits.
"""


def reward(completion, answer):
    """completion: text; answer: a whole number -> 1.0 or 0.0. Never raises."""
    return float(str(answer) in completion)
