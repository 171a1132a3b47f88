"""How large a difference must be before a claim about it is judged: each tolerance with the reason for its size.

They were set after the verdicts of an earlier run of the experiments had been seen, and before the run whose verdicts
docs/paper-notes.md shows. Whoever changes one after a run says so on that page.
"""

# Two-sided confidence of the interval of a mean over seeds (Student's t).
CONFIDENCE = 0.95

# Error of full-rank heads above which they have not trained, so that a comparison with them says nothing. Predicting zero
# errs by 1; the largest error that was published for full rank is 0.041, and laptop runs have a hundredth of the steps.
TRAINED_ERROR = 0.2

# Error of half rank over that of full rank. The published ratios are 13 to 63 where full rank has converged.
SEPARATION = 4.0
# The same with QK-norm in `training-speed`; the published ratio of the original form is 45.
SEPARATION_WITH_NORM = 30.0
# Error of the best low-rank model over that of the worst full-rank one, if it is no better; the published ratio is 0.92.
NO_BETTER = 0.9
# Error of half rank on the most points over that on the fewest. The published ratio is 90, from 4 to 256 points.
GROWTH_WITH_POINTS = 1.5

# Degrees between a learned form and the identity. Published medians are 168.5 to 179.6; a random form has 90.
ANGLE = 160.0
# Two quantities are "close": within this factor. Of the errors of a trained head and of softmax(-beta G) the published pair,
# 0.0153 and 0.0178, differs by 14 %.
CLOSE = 1.2
# Relative change of the scale of a head that a reader of the published figure could see.
VISIBLE_CHANGE = 0.05

# Steps until the two points of the circle are one, widest layer against narrowest: steps are whole numbers, so less than
# one of them is not visible in the published trajectories.
CIRCLE_STEPS = 1.0

# Residual after the last layer over the published one. The published curves are one draw of weights each, other text.
RESIDUAL = 2.0

# Residual with ALBERT's identity trick beside the published 0.2555, a fifth of it.
TRICK = 0.05

# Accuracy below the published one that still counts as reaching it, read from a figure with lines at tenths.
ACCURACY = 0.05
# Accuracy of a predictor beside the published reference line, which is drawn at a value of two digits.
REFERENCE = 0.02
# Accuracy that paths of length 1 have above every longer one, if longer paths are worse.
PATH_ACCURACY = 0.1
# Accuracy that all paths together may have above those through at most half of the layers.
ALL_PATHS = 0.02

# Rank over n beside the published 0.63, a value with two digits that is read from a figure.
CEILING = 0.05
# Numerical rank beside a count of monomials: a tenth of the count, or 1 where that is less.
POLYNOMIAL_RANK = 0.1

# "About the same head dimension": within this factor.
SAME_WIDTH = 2.0
# Accuracy that the widest heads have above the narrowest, if there is a saturation to find.
ACCURACY_RISES = 0.05

# Share of right answers, or of those of full rank, from which a width is enough. This limit and the next one were set before
# any verdict of `thin-keys` had been seen.
SOLVES = 0.99
# Accuracy of full-rank heads below which they have not trained, so that a share of it says nothing. Single runs of full rank
# with 400 steps had 0.967 or more.
TRAINED_ACCURACY = 0.9
