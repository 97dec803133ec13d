"""Whether a mathematical expression equals the right one, by math-verify: runs in a confined child and nowhere else.

The library parses LaTeX into sympy, which can take any time and memory (integer towers ran for over 40 s in spite of
its own deadline, measured with 0.9.0), and it was not written to read what an adversary wrote. So a zygote imports it
once, and every answer gets a fork of its own, behind the walls of `sandbox/`, that is killed (`math_judge.py`).

This file is imported by the zygote: the standard library alone, and math-verify inside the function.
"""

SAME, DIFFERENT, UNPARSABLE, BAD_GOLD = "ok", "wrong_value", "unparsable", "bad_gold"


def compare(gold: str, answer: str) -> str:
    """SAME, DIFFERENT, or which of the two (LaTeX or plain text, without dollar signs) does not parse."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    readers = [LatexExtractionConfig(), ExprExtractionConfig()]
    # 0: no deadlines of its own, which are alarms; the process has one from outside
    parsed_gold = parse(f"${gold}$", readers, parsing_timeout=0)
    if not parsed_gold:
        return BAD_GOLD
    parsed = parse(f"${answer}$", readers, parsing_timeout=0)
    if not parsed:
        return UNPARSABLE
    return SAME if verify(parsed_gold, parsed, timeout_seconds=0) else DIFFERENT
