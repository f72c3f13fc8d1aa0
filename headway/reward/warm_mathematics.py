"""Imported before workers are forked: what the first comparisons cost, sympy's caches included, is paid once."""

from headway.reward.mathematics import same_answer

for reference, answer in (
    ("x^2+2x", "x^2+3x"),
    ("\\frac{\\sqrt{3}}{2}", "0.5"),
    ("2\\pi", "\\pi+\\pi"),
    ("a/b", "b/a"),
):
    same_answer(reference, answer)
